"""Starts a worker with the same command as a new process and as a copy of a fork server, and prints both outcomes.

    python both_starts.py CWD COMMAND [ARGUMENT ...]

It is a program of its own, as it adopts orphans. On stdout it writes JSON: ``new`` and ``forked``, each with
``stdout``, ``stderr`` and ``returncode``; ``forked`` is None if the fork server has refused the worker.
"""

from __future__ import annotations

import json
import os
import selectors
import sys

from hvdlite_launcher.host.forked_workers import ForkedWorkers
from hvdlite_launcher.host.worker_processes import Worker, command_of, common_environment, start_workers
from hvdlite_launcher.plan.python_command import parse_python
from hvdlite_launcher.plan.worker_environment import elastic_environment
from hvdlite_launcher.protocol.messages import StartJob
from hvdlite_launcher.system import process_tree

OWN = elastic_environment(5, "here", 1)


def outcome(worker: Worker) -> dict[str, object]:
    with selectors.DefaultSelector() as selector:
        texts = dict.fromkeys(worker.pipes, b"")
        for stream, pipe in worker.pipes.items():
            selector.register(pipe, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                texts[key.data] += data
                if not data:
                    selector.unregister(key.fileobj)
    _, status = os.waitpid(worker.process.pid, 0)
    worker.process.returncode = os.waitstatus_to_exitcode(status)
    return {**{name: text.decode() for name, text in texts.items()}, "returncode": worker.process.returncode}


def forked(job: StartJob, job_dir: str) -> dict[str, object] | None:
    environment = common_environment(job, job_dir, "lo")
    command = parse_python(command_of(job), environment)
    if command is None:
        return None
    selector, started, refused, now_s = selectors.DefaultSelector(), [], [], [0.0]
    workers = ForkedWorkers(selector, started.append, lambda: now_s[0])
    workers.start_soon(command, job.cwd, environment)
    now_s[0] += workers.time_left_s() or 0
    workers.tick()

    def react() -> None:
        for key, _ in selector.select():
            key.data()

    while not workers.is_ready and selector.get_map():
        react()
    if not workers.ask(5, {**environment, **OWN}, refused.append):
        return None
    while not started and not refused:
        react()
    return outcome(started[0]) if started else None


def main(cwd: str, *command: str) -> None:
    process_tree.adopt_orphans()
    environment = {**os.environ, "TMPDIR": cwd}
    job = StartJob("t", command, cwd, environment, False, (), False, False, True, 2, {})
    (worker,) = start_workers(job, {5: OWN}, common_environment(job, cwd, "lo"))
    print(json.dumps({"new": outcome(worker), "forked": forked(job, cwd)}))
    process_tree.kill_descendants()


if __name__ == "__main__":
    main(*sys.argv[1:])
