"""Gloo's sockets are found and touched from outside; where they cannot be, that is told with what is lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import resource
import select
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ports import lets_in, listening_ports

from hvdlite.comm import gloo_sockets
from hvdlite.comm.gloo_sockets import Connections, copy_of, drop_packets
from hvdlite.comm.torch_engine import allow_collectives
from hvdlite.errors import CommunicationError, lack_of

NOT_FOUND = (
    rf"^hvdlite does not find the socket on which gloo of torch {re.escape(torch.__version__)} listens, in "
    "/proc/self/fdinfo: so it cannot .* Mount /proc"
)


TOO_MANY = lack_of(OSError(errno.EMFILE, ""))

PATIENCE = timedelta(seconds=60)


@pytest.fixture
def on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def probed_every_second(monkeypatch):
    monkeypatch.setattr(gloo_sockets, "PROBE_EVERY_S", 1)
    monkeypatch.setattr(gloo_sockets, "_SHORTEST_S", 2)


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def pair(request, probed_every_second):
    address = "127.0.0.1" if request.param == socket.AF_INET else "::1"
    one, other = tcp_pair(address, request.param)
    with one, other:
        yield one, other, address


def tcp_pair(address: str = "127.0.0.1", family: int = socket.AF_INET) -> tuple[socket.socket, socket.socket]:
    with socket.create_server((address, 0), family=family) as server:
        one = socket.create_connection(server.getsockname()[:2])
        other, _ = server.accept()
    return one, other


def connections_of(*sockets: socket.socket) -> Connections:
    connections = Connections()
    connections.inodes = {os.fstat(each.fileno()).st_ino for each in sockets}
    connections.probe()
    return connections


def until_silent(group: Connections) -> dict[str, float]:
    while not (silences := group.silences()):
        time.sleep(0.1)
    return silences


def test_it_knows_its_own_addresses_and_an_idle_connection_is_not_silent_since_the_kernel_is_asked(pair):
    one, _, address = pair
    group = connections_of(one)
    assert group.addresses == (address,)
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:
        assert group.silences() == {}
        time.sleep(0.2)


def test_a_connection_over_which_nothing_comes_is_silent(pair):
    one, other, address = pair
    group = connections_of(one)
    # As where the network drops the probes.
    drop_packets(other)
    silences = until_silent(group)
    assert silences.keys() == {address}
    assert 2 <= silences[address] < 60
    give_up_at_s = time.monotonic() + 60
    while True:  # after a pause of this process it is silent again
        other.sendall(b"data")
        assert one.recv(4) == b"data"
        if not group.silences():
            break
        assert time.monotonic() < give_up_at_s


def test_connections_that_are_closed_or_a_parent_s_have_no_silence(pair):
    one, other, _ = pair
    connections = connections_of(one)
    drop_packets(other)
    until_silent(connections)
    pid, connections._pid = connections._pid, 1
    assert connections.silences() == {}
    connections._pid = pid
    one.close()
    assert connections.silences() == {}


def test_a_device_is_told_from_those_that_other_threads_make_and_close_in_the_same_moment(monkeypatch):
    create, kept = dist.ProcessGroupGloo.create_device, []
    # Their file descriptors are free again when the new ones are created.
    closed = [create(interface="lo") for _ in range(3)]

    def create_between_others(**arguments):
        monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create)
        closed.clear()
        own = create(**arguments)
        kept.extend(create(interface="lo") for _ in range(3))
        return own

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create_between_others)
    connections = Connections()
    own = gloo_sockets._make_device("lo", connections)
    ((loop, listener),) = connections.loops.items()
    assert gloo_sockets._listeners()[listener] == loop
    del own
    assert listener not in gloo_sockets._listeners()


def test_what_has_the_number_of_a_loop_that_is_closed_stays_open():
    before = gloo_sockets._listeners().keys()
    ports = listening_ports().keys()
    device = dist.ProcessGroupGloo.create_device(interface="lo")
    ((listener, loop),) = [(inode, loop) for inode, loop in gloo_sockets._listeners().items() if inode not in before]
    (port,) = listening_ports().keys() - ports
    with gloo_sockets.while_connecting() as connections:
        # As if a group that could not be created had a listener with this descriptor.
        connections.loops[loop] = listener - 1
    assert lets_in(port, 30)
    del device


def test_a_socket_that_another_thread_opens_while_connections_are_cut_stays_open(monkeypatch):
    own, _other = tcp_pair()
    strange, its_peer = tcp_pair()
    number, inode, see = own.fileno(), os.fstat(own.fileno()).st_ino, os.stat

    def seen(path, *arguments, **options):
        found = see(path, *arguments, **options)
        if path == f"/proc/self/fd/{number}" and found.st_ino == inode:
            os.dup2(strange.fileno(), number)  # the connection is closed meanwhile, and another has its number
        return found

    connections = Connections()
    connections.inodes = {inode}
    monkeypatch.setattr(gloo_sockets.os, "stat", seen)
    connections.end_waits()
    its_peer.sendall(b"still open")
    assert strange.recv(100) == b"still open"


def make_devices() -> None:
    gloo_sockets.make_devices(Connections())


def open_one() -> None:
    """Opens a group of one rank with devices that torch makes, as `hvd.init` does."""
    with gloo_sockets.while_connecting():
        _group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, PATIENCE)


@pytest.mark.parametrize("use", [make_devices, gloo_sockets.own_addresses])
def test_a_torch_whose_gloo_listens_in_another_way_is_named_with_what_is_lost(on_loopback, monkeypatch, use):
    monkeypatch.setattr(gloo_sockets, "_sockets_of", lambda loop: iter(()))
    with pytest.raises(CommunicationError, match=NOT_FOUND):
        use()


def test_the_group_that_all_jobs_have_is_opened_with_a_warning_there(on_loopback, monkeypatch, caplog):
    """A job on one host needs no other group of gloo's."""
    monkeypatch.setattr(gloo_sockets, "_sockets_of", lambda loop: iter(()))
    open_one()
    (record,) = caplog.records
    assert re.match(NOT_FOUND, record.getMessage())


@pytest.mark.parametrize("use", [make_devices, open_one, gloo_sockets.own_addresses])
def test_a_system_without_proc_is_named_with_what_is_lost(on_loopback, monkeypatch, use):
    def list_nothing(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(gloo_sockets.os, "listdir", list_nothing)
    with pytest.raises(CommunicationError, match=NOT_FOUND):
        use()


@pytest.mark.parametrize("free", range(6))
@pytest.mark.parametrize("use", [make_devices, gloo_sockets.own_addresses])
def test_a_process_with_too_many_open_files_is_told_so(on_loopback, use, free):
    before, kept = resource.getrlimit(resource.RLIMIT_NOFILE), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
        with contextlib.suppress(OSError):
            while True:
                kept.append(os.dup(0))
        for _ in range(free):
            os.close(kept.pop())
        why: str | None = "it is enough"
        try:
            use()
        except (OSError, RuntimeError) as error:
            why = lack_of(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in kept:
            os.close(each)
    # With fewer files than these something failed; a group that goes only now may have closed some meanwhile.
    assert why in (TOO_MANY, "it is enough")


@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
@pytest.mark.parametrize("interfaces", ["lo", "lo,lo"])
def test_the_default_group_is_found_on_all_interfaces_and_in_torchs_debug_mode(monkeypatch, level, interfaces):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        with gloo_sockets.while_connecting() as connections:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # As hvd.init does next.
        allow_collectives(dist.group.WORLD, PATIENCE)
        devices = len(interfaces.split(","))
        assert connections.devices == devices
        assert len(connections.loops) == devices * (1 if level == dist.DebugLevel.OFF else 2)
    finally:
        dist.set_debug_level(before)
        dist.destroy_process_group()


def test_where_a_server_of_the_program_begins_to_listen_meanwhile_its_port_stays_open(on_loopback, caplog):
    async def run():
        with gloo_sockets.while_connecting() as connections:
            _group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, PATIENCE)
            server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        async with server:
            assert lets_in(server.sockets[0].getsockname()[1], 30)
        return connections

    assert asyncio.run(run()).loops == {}
    assert "its port stays open to connections of other programs" in caplog.text


def test_what_a_program_watches_that_is_no_tcp_socket_is_none_of_gloos(tmp_path):
    before = gloo_sockets._listeners().keys()
    with socket.socket(socket.AF_UNIX) as listener, select.epoll() as loop:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        loop.register(listener, select.EPOLLIN)
        assert gloo_sockets._listeners(before) == {}
        assert copy_of(listener.fileno(), None) is None
