"""Which failures a job is started anew after, how often, on which hosts, and what is said of it."""

import os
from dataclasses import replace

import pytest
from hvdlite_launcher.agents.wait_for_agents import UnreachableError
from hvdlite_launcher.job import attempts
from hvdlite_launcher.plan.hosts import Host
from hvdlite_launcher.plan.job_spec import JobSpec, RestartSpec
from hvdlite_launcher.plan.worker_environment import WorkerEnvironment
from hvdlite_launcher.store.server import Store
from hvdlite_launcher.workers.failure_message import JobOutcome

JOB = JobSpec(
    hosts=(Host("a", 2), Host("b", 2)),
    size=None,
    command=("true",),
    cwd="/",
    environment=WorkerEnvironment({"HERE": "1"}, {"THERE": "1"}),
    grace_s=30,
    start_timeout_s=60,
    restart=RestartSpec(max_restarts=3, min_np=1),
)
FAILED = JobOutcome(3, "rank 1 on a (pid 42) failed first, with exit code 3. The end of its stderr:\n    oh", rank=1)
LOST = JobOutcome(1, "lost b: the connection has ended. Its workers were killed", lost_host="b")
WELL = JobOutcome()


class Launches:
    """Takes the place of `launch`: each call ends as the next of the script says."""

    def __init__(self, *endings: JobOutcome | UnreachableError) -> None:
        self._endings = list(endings)
        self.jobs: list[JobSpec] = []
        self.stores: list[Store | None] = []

    def __call__(self, job: JobSpec, store: Store | None = None) -> JobOutcome:
        self.jobs.append(job)
        self.stores.append(store)
        ending = self._endings.pop(0)
        if isinstance(ending, UnreachableError):
            raise ending
        return ending

    @property
    def hosts(self) -> list[list[str]]:
        return [[host.label for host in job.hosts] for job in self.jobs]


@pytest.fixture
def _own_input():
    """Gives standard input back that `run_attempts` has closed."""
    kept = os.dup(0)
    yield
    os.dup2(kept, 0)
    os.close(kept)


@pytest.fixture
def run(monkeypatch, _own_input):
    """Runs a job of which `launch` ends as is said; returns the outcome and what was launched."""

    def run(job: JobSpec, *endings: JobOutcome | UnreachableError) -> tuple[JobOutcome, Launches]:
        launches = Launches(*endings)
        monkeypatch.setattr(attempts, "launch", launches)
        return attempts.run_attempts(job), launches

    return run


def test_a_job_is_launched_once_unless_it_may_be_restarted(run, capsys):
    plain = replace(JOB, restart=None)
    outcome, launches = run(plain, FAILED)
    assert (outcome, launches.jobs) == (FAILED, [plain])
    assert capsys.readouterr().err == ""


def test_after_a_failure_the_same_job_is_started_anew_and_one_line_says_why(run, capsys):
    outcome, launches = run(JOB, FAILED, WELL)
    assert outcome == WELL
    assert launches.hosts == [["a", "b"], ["a", "b"]]
    assert capsys.readouterr().err == (
        "hvdlite-run: restart 1 of 3 (--max-restarts): rank 1 on a (pid 42) failed first, with exit code 3; "
        "now 4 workers on a, b\n"
    )


def test_workers_are_told_how_often_and_files_of_earlier_attempts_stay(run):
    _, launches = run(replace(JOB, record_dir="logs", report_dir="reports"), FAILED, FAILED, WELL)
    for number, job in enumerate(launches.jobs):
        counts = {"TORCHELASTIC_RESTART_COUNT": str(number), "TORCHELASTIC_MAX_RESTARTS": "3"}
        assert job.environment == WorkerEnvironment({"HERE": "1", **counts}, {"THERE": "1", **counts})
    assert [job.record_dir for job in launches.jobs] == ["logs", "logs/restart.1", "logs/restart.2"]
    assert [job.report_dir for job in launches.jobs] == ["reports", "reports/restart.1", "reports/restart.2"]


def test_the_last_attempts_outcome_is_the_jobs(run):
    last = replace(FAILED, exit_code=7)
    outcome, launches = run(JOB, FAILED, FAILED, FAILED, last)
    assert outcome == last
    assert len(launches.jobs) == 4
    assert len(run(replace(JOB, restart=RestartSpec(max_restarts=0, min_np=1)), FAILED)[1].jobs) == 1


@pytest.mark.parametrize(
    "ending",
    [
        WELL,
        JobOutcome(130, hasty=True),
        replace(FAILED, hasty=True),
        JobOutcome(127, "no such command"),
        JobOutcome(1, "cannot write to stdout: No space left on device"),
    ],
)
def test_nothing_follows_where_it_went_well_was_ended_by_the_user_or_would_fail_again(run, ending):
    outcome, launches = run(JOB, ending)
    assert outcome == ending
    assert len(launches.jobs) == 1


def test_a_lost_host_is_left_out_and_the_ranks_become_fewer(run, capsys):
    _, launches = run(replace(JOB, size=3), LOST, FAILED, WELL)
    assert launches.hosts == [["a", "b"], ["a"], ["a"]]
    assert [job.size for job in launches.jobs] == [3, 2, 2]
    assert "lost b: the connection has ended; now 2 workers on a\n" in capsys.readouterr().err


def test_this_machine_is_never_left_out(run):
    here = replace(JOB, hosts=(Host("localhost", 2, is_here=True),))
    assert run(here, replace(LOST, lost_host="localhost"), WELL)[1].hosts == [["localhost"]] * 2


def test_with_too_few_slots_left_nothing_follows_and_that_is_said(run, capsys):
    outcome, launches = run(replace(JOB, size=4, restart=RestartSpec(3, min_np=4)), LOST)
    assert outcome == LOST
    assert len(launches.jobs) == 1
    assert capsys.readouterr().err == (
        "hvdlite-run: no restart: the hosts that are left (a) have 2 slots for at least 4 workers (--min-np)\n"
    )


def test_a_host_that_cannot_be_reached_any_more_is_left_out_without_a_further_restart(run, capsys):
    one = replace(JOB, restart=RestartSpec(1, min_np=1))
    outcome, launches = run(one, FAILED, UnreachableError("b: no answer", ["b"]), WELL)
    assert outcome == WELL
    assert launches.hosts == [["a", "b"], ["a", "b"], ["a"]]
    assert "restart 1 of 1 (--max-restarts): b cannot be reached; now 2 workers on a\n" in capsys.readouterr().err


def test_a_host_that_cannot_be_reached_at_first_is_an_error(run):
    with pytest.raises(UnreachableError, match="b: no answer"):
        run(JOB, UnreachableError("b: no answer", ["b"]))


@pytest.mark.usefixtures("_own_input")
def test_each_attempt_has_a_store_of_its_own(monkeypatch):
    launches, made = Launches(FAILED, WELL), []
    monkeypatch.setattr(attempts, "launch", launches)

    def new_store() -> Store:
        made.append(Store())
        return made[-1]

    attempts.run_attempts(JOB, new_store)
    assert launches.stores == made
    assert len({id(store) for store in made}) == 2


def test_standard_input_is_the_first_attempts(run, tmp_path):
    with (tmp_path / "input").open("w+") as file:
        file.write("typed")
        file.seek(0)
        os.dup2(file.fileno(), 0)
        run(JOB, FAILED, WELL)
        assert os.read(0, 10) == b""
