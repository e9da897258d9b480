"""Workers connect to each other through the launcher: real processes, real sockets."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PRELUDE = """
import os, signal, socket, sys, threading
from hvdlite_wire.store_requests import StoreRequest
from hvdlite.rendezvous.store_client import StoreClient
rank, size = int(os.environ["HVDLITE_RANK"]), int(os.environ["HVDLITE_SIZE"])
store = StoreClient.from_url(os.environ["HVDLITE_STORE"])
def all_are_here(what):
    store.set({b"%b %d" % (what, rank): b""})
    store.get([b"%b %d" % (what, other) for other in range(size)], 120)
"""


def _python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def _ended_well(job) -> str:
    exit_code, out, err = job.ended()
    assert exit_code == 0, err.decode()
    job.assert_gone()
    return out.decode()


def test_a_program_that_a_rank_starts_is_refused_its_place_at_once_and_the_ranks_go_on(launch, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import subprocess, sys, torch, hvdlite as hvd\n"
        "hvd.init()\n"
        "again = subprocess.run([sys.executable, *sys.argv], stderr=subprocess.PIPE, text=True, timeout=60)\n"
        "assert 'was started by a rank of the job' in again.stderr, again.stderr\n"
        "print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())\n"
    )
    out = _ended_well(launch("-np", "2", sys.executable, str(program)))
    assert sorted(out.splitlines()) == ["[0]<stdout>:2.0", "[1]<stdout>:2.0"]


COUNTS_REQUESTS = """
import threading
import hvdlite as hvd
from hvdlite.rendezvous.store_client import StoreClient
from hvdlite_wire.store_requests import StoreRequest
ask, asked = StoreClient.request, []
def request(self, what, *rest):
    # A wait for late ranks is asked again from time to time, and other threads have requests of their own.
    if what is not StoreRequest.WAIT and threading.current_thread() is threading.main_thread():
        asked.append(what)
    return ask(self, what, *rest)
StoreClient.request = request
hvd.init()
print("asked", len(asked), flush=True)
"""


def test_a_rank_asks_the_store_no_more_often_where_there_are_more_ranks(launch):
    counts = {}
    for size in (2, 4, 8):
        out = _ended_well(launch("-np", f"{size}", *_python(COUNTS_REQUESTS)))
        found = re.findall(r"asked (\d+)", out)
        assert len(found) == size
        counts[size] = set(map(int, found))
    assert counts[2] == counts[4] == counts[8]
    assert max(counts[2]) < 20


@pytest.mark.night
def test_eight_ranks_meet_again_and_again(launch):
    program = (
        "import torch, hvdlite as hvd\n"
        "torch.set_num_threads(1)\n"
        "for _ in range(3):\n"
        "    hvd.init()\n"
        "    total = hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum)\n"
        "    hvd.shutdown()\n"
        "print(total.item())"
    )
    out = _ended_well(launch("-np", "8", *_python(program)))
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:28.0" for rank in range(8)]


def test_verbose_tells_who_is_connected(launch):
    job = launch("--verbose", "-np", "2", *_python("import hvdlite as hvd; hvd.init()"))
    exit_code, _, err = job.ended()
    assert exit_code == 0
    assert all(f"hvdlite-run: rank {rank} is connected\n" in err.decode() for rank in range(2))


def test_a_rank_that_never_comes_to_init_is_named_at_once(launch):
    program = (
        "import os, hvdlite as hvd\nif os.environ['HVDLITE_RANK'] != '1':\n    hvd.init(timeout_s=300)\nprint('over')"
    )
    job = launch("-np", "3", *_python(program))
    exit_code, out, err = job.ended()
    assert exit_code == 1
    assert out == b"[1]<stdout>:over\n"
    report = err.decode().partition("hvdlite-run: ")[2]
    assert report.startswith("rank 1 ended with exit code 0 without calling hvd.init(), in which rank")
    job.assert_gone()


@pytest.mark.night
def test_a_rank_that_comes_too_late_is_waited_for_as_long_as_was_said(launch):
    program = PRELUDE + (
        "import hvdlite as hvd\n"
        "if rank == 0:\n"
        "    try:\n"
        "        hvd.init(timeout_s=0.5)\n"
        "    except hvd.CommunicationError as error:\n"
        "        print(error)\n"
        "all_are_here(b'end')\n"
        "os._exit(0)"
    )
    out = _ended_well(launch("-np", "2", *_python(program)))
    assert "hvd.init() failed on rank 0 (localhost): another rank did not call it within 0.5 s" in out
    assert "timed out after 0.5 s: no answer from the store about init0/" in out


def test_a_worker_that_is_killed_while_it_waits_for_a_key_is_the_cause_and_leaves_nothing(launch):
    program = PRELUDE + (
        "threading.Thread(target=store.get, args=([b'never'],), daemon=True).start()\n"
        "all_are_here(b'wait')\n"
        "if rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.get([b'never'])"
    )
    job = launch("-np", "3", *_python(program))
    exit_code, _, err = job.ended()
    assert exit_code == 137
    assert err.startswith(b"hvdlite-run: rank 1 on localhost")
    job.assert_gone()


@pytest.mark.night
def test_garbage_on_the_socket_disturbs_nobody(launch):
    program = PRELUDE + (
        "for garbage in (b'GET / HTTP/1.1', bytes(9), os.urandom(1 << 16), b'\\x01' * 5):\n"
        "    with socket.socket(socket.AF_UNIX) as bad:\n"
        "        bad.connect(os.environ['HVDLITE_STORE'].removeprefix('unix://'))\n"
        "        try:\n"
        "            bad.sendall(garbage)\n"
        "        except OSError:\n"
        "            pass\n"
        "all_are_here(b'end')\n"
        "print(store.request(StoreRequest.COUNT)[0].decode())"
    )
    out = _ended_well(launch("-np", "3", *_python(program)))
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:3" for rank in range(3)]


@pytest.mark.night
def test_fifty_megabytes_reach_every_worker_and_come_back(launch):
    program = PRELUDE + (
        "if rank == 0:\n"
        "    store.set_large(b'down', bytes(range(256)) * (50 << 12))\n"
        "data = store.get_large(b'down', 120)\n"
        "store.set_large(b'up %d' % rank, data[:10 << 20])\n"
        "print(len(store.get_large(b'up %d' % (size - 1 - rank), 120)), data == bytes(range(256)) * (50 << 12))"
    )
    out = _ended_well(launch("-np", "2", *_python(program)))
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:{10 << 20} True" for rank in range(2)]


def test_neither_launcher_nor_agent_listens_for_the_network(launch):
    program = PRELUDE + (
        "import psutil\n"
        "all_are_here(b'end')\n"
        "agent = psutil.Process(os.getppid())\n"
        "for process in (agent, agent.parent()):\n"
        "    print([c for c in process.net_connections('inet') if c.status == psutil.CONN_LISTEN])"
    )
    assert _ended_well(launch("-np", "1", *_python(program))) == "[0]<stdout>:[]\n" * 2


@pytest.mark.night
def test_a_long_name_of_the_temporary_directory_is_no_obstacle(launch, tmp_path):
    long = tmp_path / ("d" * 150)
    long.mkdir()
    program = PRELUDE + "all_are_here(b'end')\nprint(os.environ['HVDLITE_JOB_DIR'])"
    out = _ended_well(launch("-np", "2", *_python(program), env={"TMPDIR": str(long)}))
    (directory,) = {line.partition(":")[2] for line in out.splitlines()}
    assert directory.startswith("/tmp/hvdlite-")
    assert not Path(directory).exists()
    assert list(long.iterdir()) == []
