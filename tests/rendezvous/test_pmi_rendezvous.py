"""How ranks of other launchers find each other: each way by itself, against a simulated other end."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from hvdlite_wire.linux import ELSEWHERE, interface_with
from hypothesis import given
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.rendezvous import launchers, line_exchange
from hvdlite.rendezvous.host_address import own_address
from hvdlite.rendezvous.launchers import MPICH, OPENMPI, SLURM, Launcher, launcher_named
from hvdlite.rendezvous.line_exchange import (
    ask_local_rank_0,
    exchange_by_pmi,
    finalize_pmi,
    give_to_local_ranks,
    open_connection,
)
from hvdlite.rendezvous.placement import Placement
from hvdlite.rendezvous.process_state import ProcessState
from hvdlite.rendezvous.rank0_stores import PmiConnection, hosts_of_job, port_of_job, rendezvous_by_pmi

SRUN = launcher_named(SLURM)
STEP = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}


class HydraScript:
    """The launcher's end of a PMI-1 connection: records the requests and answers as Hydra does."""

    def __init__(self, answers: dict[str, str] | None = None) -> None:
        self.asked: list[str] = []
        self.answers = {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_1_0_vm",
            "put": "cmd=put_result rc=0 msg=success",
            "barrier_in": "cmd=barrier_out",
            "get": "cmd=get_result rc=0 msg=success value=10.0.0.1/4000",
            "finalize": "cmd=finalize_ack",
            **(answers or {}),
        }
        self._mine, self.theirs = socket.socketpair()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._mine, self._mine.makefile("rw") as lines:
            for line in lines:
                self.asked.append(line.rstrip("\n"))
                answer = self.answers[line.split()[0].removeprefix("cmd=")]
                if answer == "hang up":
                    return
                if answer:
                    # In pieces, as a stream may deliver it.
                    for piece in (answer[:7], answer[7:] + "\n"):
                        lines.write(piece)
                        lines.flush()


def test_a_rank_puts_its_address_waits_for_all_and_gets_rank_0s():
    hydra = HydraScript()
    connection = open_connection(str(hydra.theirs.fileno()))
    assert exchange_by_pmi(connection, "k", "10.0.0.1/4000", 60) == "10.0.0.1/4000"
    assert [line.split()[0] for line in hydra.asked] == [
        "cmd=init", "cmd=get_my_kvsname", "cmd=put", "cmd=barrier_in", "cmd=get",
    ]  # fmt: skip
    assert hydra.asked[2] == "cmd=put kvsname=kvs_1_0_vm key=k value=10.0.0.1/4000"
    finalize_pmi(connection)
    os.close(connection)
    assert hydra.asked[-1] == "cmd=finalize"


def test_the_others_put_nothing():
    hydra = HydraScript()
    assert exchange_by_pmi(hydra.theirs.fileno(), "k", None, 60) == "10.0.0.1/4000"
    assert not any("put" in line for line in hydra.asked)


@pytest.mark.parametrize(
    ("command", "answer", "said"),
    [
        ("get", "cmd=get_result rc=-1 msg=key_not_found value=unknown", "answered 'cmd=get_result rc=-1"),
        ("get_my_kvsname", "what?", "answered 'what\\?'"),
        ("barrier_in", "hang up", "closed PMI_FD="),
        ("barrier_in", "", "another rank did not call it in time"),
    ],
)
def test_a_launcher_that_answers_otherwise_is_an_error_that_says_how(command, answer, said):
    hydra = HydraScript({command: answer})
    with pytest.raises(hvd.CommunicationError, match=said):
        exchange_by_pmi(hydra.theirs.fileno(), "k", "v", 0.1 if not answer else 60)


def test_telling_a_launcher_that_is_gone_of_the_end_is_no_error():
    mine, theirs = socket.socketpair()
    mine.close()
    with theirs:
        finalize_pmi(theirs.fileno())


@pytest.mark.parametrize("inherited", ["", "x", "-1", "99999", "9" * 30, "/dev/null"])
def test_a_pmi_rank_without_a_connection_is_told_what_to_set(inherited):
    with open("/dev/null") as no_socket, pytest.raises(hvd.LaunchEnvironmentError, match=r"PMI_FD=.*MASTER_ADDR"):
        open_connection(str(no_socket.fileno()) if inherited == "/dev/null" else inherited)


def test_the_connection_is_ours_when_mpi_closes_its_own():
    hydra = HydraScript()
    connection = open_connection(str(hydra.theirs.fileno()))
    hydra.theirs.close()
    assert exchange_by_pmi(connection, "k", None, 60) == "10.0.0.1/4000"
    os.close(connection)


def test_each_pmi_fd_has_one_connection_and_the_last_launcher_is_told_when_there_is_another():
    first, second, process = HydraScript(), HydraScript(), ProcessState()

    def connection(hydra: HydraScript) -> PmiConnection:
        inherited = str(hydra.theirs.fileno())
        return process.keep("PMI", inherited, lambda: PmiConnection(inherited), PmiConnection.close)

    kept = connection(first)
    assert connection(first) is kept
    assert exchange_by_pmi(connection(second).fd, "k", None, 60) == "10.0.0.1/4000"
    assert first.asked == ["cmd=init pmi_version=1 pmi_subversion=1", "cmd=finalize"]
    connection(second).close()
    assert second.asked[-1] == "cmd=finalize"


def test_all_neighbours_get_rank_0s_text_in_whatever_order_they_come():
    name = f"test/{os.getpid()}/{os.urandom(4).hex()}"
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask_local_rank_0, name, rank, 60) for rank in (1, 2, 3)]
        give_to_local_ranks(name, "127.0.0.1/5", 4, 60)
        assert [future.result() for future in asked] == ["127.0.0.1/5"] * 3
        give_to_local_ranks(name, "the name is free again", 1, 60)


def test_a_neighbour_that_does_not_come_is_named():
    for patience_s in (0.2, 2.0, 20.0):  # on a busy machine rank 1 may come later than the first
        name = f"test/{os.getpid()}/{os.urandom(4).hex()}"
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ask_local_rank_0, name, 1, patience_s)
            with pytest.raises(hvd.CommunicationError, match="on this host did not call it within") as caught:
                give_to_local_ranks(name, "x", 4, patience_s)
        if "rank 1, 2, 3" not in str(caught.value):
            break
    assert "rank 2, 3 on this host did not call it within" in str(caught.value)
    with pytest.raises(hvd.CommunicationError, match="rank 0 on this host did not call it within"):
        ask_local_rank_0(name, 1, 0.05)


def test_a_second_rank_0_of_a_job_is_an_error():
    name = f"test/{os.getpid()}/{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(b"\0hvdlite/" + name.encode())
        with pytest.raises(hvd.CommunicationError, match="two processes are its rank 0"):
            give_to_local_ranks(name, "x", 2, 1)


def met(launcher: str, environ: dict[str, str]) -> list[bytes]:
    """Returns what two ranks of one host read from each other in their common store."""

    def rank(number: int) -> tuple[bytes, object]:
        placement = Placement(number, 2, "0", "vm", number, launcher=launcher, one_host=True)
        store, _ = rendezvous_by_pmi(placement, environ, ProcessState(), timedelta(seconds=30))
        store.set(f"from {number}", b"hello")
        return store.get(f"from {1 - number}"), store  # rank 0's process serves the other

    with ThreadPoolExecutor(2) as pool:
        return [heard for heard, _ in pool.map(rank, (0, 1))]


def test_ranks_of_one_slurm_node_share_a_store_on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    assert met(SLURM, {**STEP, "SLURM_JOB_ID": f"{os.getpid()}{os.urandom(2).hex()}"}) == [b"hello"] * 2
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"


def test_ranks_of_a_new_launcher_meet_on_one_host_by_the_id_that_its_entry_names(monkeypatch):
    flux = Launcher("Flux", ("FLUX_TASK_RANK",), "FLUX_TASK_RANK", "FLUX_JOB_SIZE", job_id=("FLUX_JOB_ID",))
    monkeypatch.setattr(launchers, "LAUNCHERS", (*launchers.LAUNCHERS, flux))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    assert met("Flux", {"FLUX_JOB_ID": f"{os.getpid()}{os.urandom(2).hex()}"}) == [b"hello"] * 2


def test_loopback_has_an_interface_and_is_no_address_for_others():
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("192.0.2.250") is None
    assert own_address(["127.0.0.1", "::1"]) is None
    own = own_address(ELSEWHERE)
    assert own is None or interface_with(own) not in {None, "lo"}


@given(st.integers(0, 10**8), st.integers(0, 10**4))
def test_a_steps_port_is_one_that_programs_may_have_and_linux_does_not_give_out(job, step):
    assert 12000 <= port_of_job(SRUN, {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) < 32000


def test_a_port_that_slurm_reserved_comes_first():
    assert port_of_job(SRUN, {**STEP, "SLURM_STEP_RESV_PORTS": "17000-17002"}) == 17000
    assert port_of_job(SRUN, STEP) != port_of_job(SRUN, {**STEP, "SLURM_STEP_ID": "1"})


def test_a_slurm_rank_0_that_is_not_on_the_first_node_is_told_what_to_set():
    with pytest.raises(hvd.LaunchEnvironmentError, match="not on n1, the first host"):
        rendezvous_by_pmi(Placement(0, 2, "1", "n2", 0, launcher=SLURM), STEP, ProcessState(), timedelta(seconds=1))


@pytest.mark.parametrize(("launcher", "said"), [(OPENMPI, "neither PMIX_RANK"), (MPICH, "PMI_FD=''")])
def test_a_launcher_that_gives_no_way_to_meet_is_named(launcher, said):
    with pytest.raises(hvd.LaunchEnvironmentError, match=f"{said}.*MASTER_ADDR"):
        rendezvous_by_pmi(Placement(0, 2, "a", "a", 0, launcher=launcher), {}, ProcessState(), timedelta(seconds=1))


def test_an_error_of_pmix_is_not_taken_for_a_rank_that_is_late(monkeypatch):
    monkeypatch.setattr(line_exchange, "_libpmix", lambda environ: SimpleNamespace())
    with pytest.raises(AttributeError, match="PMIx_Init"):
        line_exchange.exchange_by_pmix({}, "k", "v", 60)


def expanded(nodelist: str) -> list[str]:
    return hosts_of_job(SRUN, {"SLURM_STEP_NODELIST": nodelist})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("vm", ["vm"]),
        ("a,b", ["a", "b"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("n[08-10]-ib,login", ["n08-ib", "n09-ib", "n10-ib", "login"]),
        ("r[1-2]n[0,2]", ["r1n0", "r1n2", "r2n0", "r2n2"]),
        ("a-1.example.org,b[5]", ["a-1.example.org", "b5"]),
    ],
)
def test_a_list_of_hosts_is_expanded_in_order(text, hosts):
    assert expanded(text) == hosts


@pytest.mark.parametrize("text", ["", ",", "a,", ",a", "a,,b", "n[", "n]", "n[]", "n[1-]", "n[2-1]", "n[a]", "n[[1]]",
                                  "n[1-99999999999]", "n[1-2000]x[1-2000]", "n[" + "9" * 5000 + "]"])  # fmt: skip
def test_what_is_no_list_is_named(text):
    with pytest.raises(hvd.LaunchEnvironmentError, match=r"SLURM_STEP_NODELIST=.* is not a list of hosts such as"):
        expanded(text)


def test_a_list_that_is_missing_is_named():
    with pytest.raises(hvd.LaunchEnvironmentError, match="SLURM_STEP_NODELIST='' is not a list of hosts such as"):
        hosts_of_job(SRUN, {})


ranges = st.tuples(st.integers(0, 200), st.integers(0, 20), st.integers(1, 4))
names = st.text("abcxyz-.", min_size=1, max_size=5)


@given(st.lists(st.tuples(names, st.lists(ranges, max_size=3)), min_size=1, max_size=4))
def test_what_is_written_in_ranges_comes_out_as_the_hosts_it_stands_for(items):
    written, hosts = [], []
    for name, spans in items:
        if not spans:
            written.append(name)
            hosts.append(name)
            continue
        texts = [f"{first:0{width}}-{first + more:0{width}}" for first, more, width in spans]
        written.append(f"{name}[{','.join(texts)}]")
        hosts += [f"{name}{n:0{max(width, len(str(first)))}}" for first, more, width in spans
                  for n in range(first, first + more + 1)]  # fmt: skip
    assert expanded(",".join(written)) == hosts


@given(st.text("n019[],- ", max_size=30) | st.text(max_size=30))
def test_any_text_is_a_list_of_hosts_or_one_error(text):
    try:
        assert all(expanded(text))
    except hvd.LaunchEnvironmentError:
        return
