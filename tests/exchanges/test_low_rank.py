"""PowerSGD between hosts: the averages of DDP's own hook, equal bits on all ranks, and what is kept of each step."""

from __future__ import annotations

import copy
import zlib
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_bucket import FakeBucket
from fake_hosts import PLACES, on
from ranks import counting
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as ddps
from training import wrap

import hvdlite as hvd
from hvdlite.comm.group import Group
from hvdlite.compression.approximations import orthonormal, products, times_matrix

everywhere = pytest.mark.parametrize("place", PLACES)

# Two matrices, a vector, a convolution's filters, a matrix that is too small, and a number.
SHAPES = [(40, 30), (30,), (24, 4, 3, 3), (20, 25), (3, 4), ()]
COMPRESSED = ["p0", "p2", "p3"]


def gradient(rank: int, step: int, number: int, shape: tuple[int, ...] = ()) -> Tensor:
    seed = 10000 * rank + 100 * step + number
    return torch.randn(shape or SHAPES[number], generator=torch.Generator().manual_seed(seed))


class Job:
    """A rank's parameters and their optimizer, which has a bucket for each parameter if ``cap`` is 0."""

    def __init__(
        self, group: Group, *, cap: float | None = None, like: Job | None = None, dtype: Any = None, **options: Any
    ) -> None:
        self.rank = group.rank
        self.params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        if like is not None:
            for param, other in zip(self.params, like.params, strict=True):
                param.data.copy_(other.data)
        form = hvd.Compression.powersgd(**{"rank": 2, "start_step": 0, "min_ratio": 1.5, **options})
        named = [(f"p{number}", param) for number, param in enumerate(self.params)]
        self.optimizer = wrap(group, self.params, named, lr=0.1, momentum=0.9, compression=form, bucket_cap_mb=cap)

    def average(self, step: int, without: tuple[int, ...] = ()) -> list[Tensor]:
        """Returns the averages of a step's gradients, and takes the step."""
        self.optimizer.zero_grad()
        for number, param in enumerate(self.params):
            if number not in without:
                param.grad = gradient(self.rank, step, number).to(param.dtype)
        self.optimizer.synchronize()
        averages = [None if param.grad is None else param.grad.clone() for param in self.params]
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        return averages

    @property
    def state(self) -> Any:
        return self.optimizer.state_dict()["hvdlite"]["exchange"]

    def kept(self, name: str) -> Tensor:
        """What this rank has kept of a gradient."""
        shape = SHAPES[int(name[1:])]
        total = torch.zeros(shape).view(-1)
        for start, _, values in self.state["residuals"].get(name, {}).values():
            total[start : start + len(values)] += values
        return total.view(shape)


@pytest.mark.night(but=6)
@pytest.mark.slow(but=2)
@everywhere
@pytest.mark.parametrize("cap", [None, 0.001])
def test_all_ranks_get_equal_bits_and_what_was_not_sent_is_kept(place, cap):
    def rank(group: Group) -> Any:
        job = Job(group, cap=cap)
        return [(job.average(step), {name: job.kept(name) for name in COMPRESSED}) for step in range(5)]

    ranks = on(place, rank)
    size = len(ranks)
    sums = {name: torch.zeros(SHAPES[int(name[1:])]) for name in COMPRESSED}
    for step in range(5):
        averages, _ = ranks[0][step]
        for other in ranks[1:]:
            for mine, theirs in zip(averages, other[step][0], strict=True):
                assert torch.equal(mine, theirs)
        for number, average in enumerate(averages):
            total = sum(gradient(each, step, number) for each in range(size))
            name = f"p{number}"
            if name not in COMPRESSED:
                assert torch.allclose(average, total / size, atol=1e-6)
                continue
            assert torch.linalg.matrix_rank(average.view(average.shape[0], -1)) == 2
            sums[name] += total - average * size
            assert torch.allclose(sums[name], sum(each[step][1][name] for each in ranks), atol=1e-4)


@pytest.mark.parametrize("rank_of_products", [1, 2, 4])
@pytest.mark.parametrize("place", ["2 hosts", "3 hosts"])
def test_the_averages_are_those_of_ddps_hook(place, rank_of_products):
    """With the same first Q, and a start in step 2, the first that DDP's hook can have."""
    store = dist.HashStore()
    numbers = [number for number, shape in enumerate(SHAPES) if shape]

    def rank(group: Group) -> None:
        gloo = dist.ProcessGroupGloo(store, group.rank, group.size, timedelta(seconds=60))
        state = ddps.PowerSGDState(gloo, rank_of_products, 2, min_compression_rate=1.5, random_seed=3)
        job = Job(group, rank=rank_of_products, start_step=2, dtype=torch.float64)
        q, flat = {}, []
        for number in numbers:
            rows, cols = SHAPES[number][0], torch.Size(SHAPES[number][1:]).numel()
            if len(SHAPES[number]) > 1 and (rows + cols) * rank_of_products * 1.5 < rows * cols:
                first = gradient(0, 99, number, (cols, rank_of_products)).double()
                q[f"p{number}"] = first.t().contiguous()
                flat.append((rows * rank_of_products, first.view(-1)))
        # Given so, since the hook draws its own from the generator that all threads share.
        state.p_memory_dict[0] = torch.empty(sum(numel for numel, _ in flat), dtype=torch.float64)
        state.q_memory_dict[0] = torch.cat([first for _, first in flat])
        steps = {f"p{number}": 0 for number in range(len(SHAPES))}
        exchanged = {"codec": repr(job.optimizer._compression), "residuals": {}, "q": q, "steps": steps}
        job.optimizer.load_state_dict({**job.optimizer.state_dict(), "hvdlite": {"exchange": exchanged}})
        for step in range(8):
            bucket = FakeBucket([gradient(group.rank, step, number).double() for number in numbers])
            ddps.powerSGD_hook(state, bucket).wait()
            averages = job.average(step)
            for number, theirs in zip(numbers, bucket.gradients(), strict=True):
                mine = averages[number]
                assert torch.allclose(mine, theirs, atol=1e-5), (step, number, (mine - theirs).abs().max())

    on(place, rank)


@pytest.mark.slow
@everywhere
def test_ten_steps_a_checkpoint_and_ten_more_equal_twenty(place):
    def rank(group: Group) -> None:
        straight = Job(group, start_step=3)
        for step in range(10):
            straight.average(step)
        again = Job(group, start_step=3, like=straight)
        again.optimizer.load_state_dict(copy.deepcopy(straight.optimizer.state_dict()))
        bare = Job(group, start_step=0, like=straight)
        for step in range(10, 20):
            straight.average(step)
            again.average(step)
            bare.average(step)
        for left, right, other in zip(straight.params, again.params, bare.params, strict=True):
            assert torch.equal(left, right)
            assert other.dim() < 2 or left.numel() == 12 or not torch.equal(left, other)

    on(place, rank)


@pytest.mark.slow(but=1)
@everywhere
def test_a_consolidated_state_goes_on_at_any_number_of_ranks(place):
    saved: list[Any] = []
    parts: list[Tensor] = []

    def rank(group: Group) -> None:
        job = Job(group, start_step=1)
        for step in range(4):
            job.average(step)
        parts.append(job.kept("p0"))
        local = {name: q.clone() for name, q in job.state["q"].items()}
        job.optimizer.consolidate_state_dict()
        if group.rank == 0:
            saved.append(copy.deepcopy(job.optimizer.state_dict()))
        for name, q in local.items():
            assert job.state["q"][name].tolist() == q.tolist()

    size = len(on(place, rank))
    state = saved[0]["hvdlite"]["exchange"]
    assert set(state["q"]) == set(COMPRESSED)
    assert set(state["steps"].values()) == {4}
    assert torch.allclose(state["residuals"]["p0"]["mean"][2].view(40, 30), sum(parts) / size, atol=1e-6)

    def elsewhere(group: Group) -> Any:
        job = Job(group, start_step=1)
        job.optimizer.load_state_dict(copy.deepcopy(saved[0]))
        averages = job.average(4)
        return averages, job.kept("p0")

    for other in PLACES:
        shares = on(other, elsewhere)
        ranks = len(shares)
        total = shares[0][0][0] + sum(kept for _, kept in shares) / ranks
        expected = sum(gradient(each, 4, 0) for each in range(ranks)) / ranks + sum(parts) / size
        assert torch.allclose(total, expected, atol=1e-4)


@pytest.mark.night(but=6)
@pytest.mark.slow(but=2)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@everywhere
def test_what_is_not_finite_reaches_every_rank_and_leaves_no_trace(place, bad):
    def rank(group: Group) -> None:
        jobs = [Job(group), Job(group)]
        for step in range(2):
            for job in jobs:
                job.average(step)
        jobs[0].optimizer.zero_grad()
        for number, param in enumerate(jobs[0].params):
            param.grad = gradient(group.rank, 9, number)
        if group.rank == 0:
            jobs[0].params[0].grad[3, 4] = bad
        jobs[0].optimizer.synchronize()
        assert not jobs[0].params[0].grad.isfinite().any()
        for name in COMPRESSED[:1]:
            assert torch.equal(jobs[0].kept(name), jobs[1].kept(name))
            for own, other in zip(*(job.state["q"].get(name, torch.zeros(1)) for job in jobs), strict=True):
                assert torch.equal(own, other)

    on(place, rank)


def test_an_infinity_in_a_bias_is_one_of_its_bucket():
    # GradScaler skips the step of the matrices too, so that what the exchange would leave of them is lost.
    def rank(group: Group) -> None:
        job = Job(group)
        job.average(0)
        before, q = ({name: get(name) for name in COMPRESSED} for get in (job.kept, job.state["q"].get))
        assert all(each.any() for each in before.values())
        job.optimizer.zero_grad()
        for number, param in enumerate(job.params):
            param.grad = gradient(group.rank, 1, number)
        if group.rank == 0:
            job.params[1].grad[3] = float("inf")
        job.optimizer.synchronize()
        for number, param in enumerate(job.params):
            assert bool(param.grad.isfinite().all()) == (f"p{number}" not in (*COMPRESSED, "p1"))
        for name in COMPRESSED:
            assert torch.equal(job.kept(name), before[name])
            assert torch.equal(job.state["q"][name], q[name])

    on("2 hosts", rank)


@everywhere
def test_a_matrix_that_no_rank_of_a_host_has_is_zeros_and_keeps_its_residual(place):
    hosts = PLACES[place]

    def rank(group: Group) -> Any:
        job = Job(group)
        job.average(0)
        before = job.kept("p0")
        q = job.state["q"].get("p0")
        averages = job.average(1, without=(0,))
        assert averages[0] is None
        assert torch.equal(job.kept("p0"), before)
        if q is not None:
            assert torch.equal(job.state["q"]["p0"], q)
        # Now the first host has one.
        averages = job.average(2, without=() if hosts[group.rank] == "a" else (0,))
        return before, averages[0], job.kept("p0")

    ranks = on(place, rank)
    having = [number for number, host in enumerate(hosts) if host == "a"]
    size = len(hosts)
    total = sum(before for before, _, _ in ranks) + sum(gradient(number, 2, 0) for number in having)
    assert torch.allclose(total, ranks[0][1] * size + sum(after for _, _, after in ranks), atol=1e-4)


def outer_product(host: str) -> Tensor:
    """Returns a host's gradient of p0: of rank 1, so that products hold it whole. b's is twice that of a."""
    return torch.outer(torch.linspace(1, 2, 40), torch.linspace(-1, 1, 30)) * (ord(host) - ord("a") + 1)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("is_consolidated", [False, True])
@pytest.mark.parametrize("place", ["2 hosts", "3 hosts", "3 hosts of 2"])
def test_averages_are_exact_where_hosts_use_a_matrix_by_turns(place, is_consolidated):
    """The sums of these gradients are matrices of rank 1, so that products hold them, and nothing is left to add."""
    hosts = PLACES[place]
    # In some steps one host, in some all of them, in some none.
    turns = ["b"] * 12 + [hosts] + ["a"] * 6 + [hosts, "", "b", hosts, "a"]

    def rank(group: Group) -> Any:
        job, steps = Job(group), []
        for step, using in enumerate(turns):
            if is_consolidated and step == 10:
                job.optimizer.consolidate_state_dict()
                state = copy.deepcopy(job.optimizer.state_dict())
                job = Job(group)
                job.optimizer.load_state_dict(state)
            job.optimizer.zero_grad()
            if hosts[group.rank] in using:
                job.params[0].grad = outer_product(hosts[group.rank])
            job.optimizer.synchronize()
            average = job.params[0].grad
            steps.append((None if average is None else average.clone(), job.kept("p0")))
        return steps

    ranks = on(place, rank)
    for step, using in enumerate(turns):
        for average, kept in (each[step] for each in ranks):
            assert (average is None) == (not using)
            if average is not None:
                truth = sum(outer_product(host) for host in hosts if host in using) / len(hosts)
                assert torch.allclose(average, truth, rtol=1e-4, atol=1e-4), (step, (average - truth).abs().max())
            assert torch.allclose(kept, torch.zeros(()), atol=1e-3), (step, kept.abs().max())


@pytest.mark.parametrize("place", ["2 hosts", "3 hosts"])
def test_what_a_host_keeps_is_of_its_own_gradients_and_goes_on_without_the_others(place):
    """As after the others are lost: what was sent of one host's gradients has no part in what another one keeps."""
    hosts = PLACES[place]
    saved: list[Any] = []

    def rank(group: Group) -> None:
        job = Job(group)
        for _ in range(20):
            job.optimizer.zero_grad()
            job.params[0].grad = outer_product(hosts[group.rank])
            job.optimizer.step()
        if group.rank == 0:
            saved.append(copy.deepcopy(job.optimizer.state_dict()))

    def with_others(group: Group) -> Tensor:
        job = Job(group)
        if group.rank == 0:
            job.optimizer.load_state_dict(copy.deepcopy(saved[0]))
        job.params[0].grad = outer_product("c")
        job.optimizer.synchronize()
        return job.params[0].grad

    on(place, rank)
    for average in on(place, with_others):
        assert torch.allclose(average, outer_product("c"), rtol=1e-4, atol=1e-4), average - outer_product("c")


@pytest.mark.parametrize("place", ["2 hosts", "2 hosts of 2"])
def test_two_hosts_get_the_bits_of_the_steps_in_one_process(place):
    hosts = PLACES[place]

    def rank(group: Group) -> list[Tensor]:
        job = Job(group)
        return [job.average(step)[0] for step in range(4)]

    ranks = on(place, rank)
    residuals = {host: torch.zeros(40, 30) for host in "ab"}
    generator = torch.Generator().manual_seed(zlib.crc32(b"p0"))
    q = torch.randn(2, 30, generator=generator)
    for step in range(4):
        sums = {}
        for host in "ab":
            first, *others = [gradient(number, step, 0) for number, name in enumerate(hosts) if name == host]
            sums[host] = sum(others, first) + residuals[host]
        (basis,) = orthonormal([q])
        p = sum(basis @ total.t() for total in sums.values())
        (p,) = orthonormal([p])
        parts = {host: p @ total for host, total in sums.items()}
        q = sum(parts.values())
        whole = p[0].unsqueeze(1) * q[0] + p[1].unsqueeze(1) * q[1]
        residuals = sums
        for row in range(2):
            residuals = {
                host: torch.addcmul(left, p[row].unsqueeze(1), parts[host][row], value=-1)
                for host, left in residuals.items()
            }
        for each in ranks:
            assert torch.equal(each[step], whole / len(hosts))


def test_nothing_is_compressed_before_the_start_and_then_only_two_thin_matrices_are_sent():
    def rank(group: Group) -> list[int]:
        job = Job(group, start_step=2)
        counts = []
        for step in range(4):
            seen = len(group.engine.calls)
            job.average(step)
            counts.append(sum(numel for name, numel in group.engine.calls[seen:] if name == "allreduce"))
        return counts

    whole = sum(torch.Size(shape).numel() for shape in SHAPES)
    thin = 2 * (40 + 30) + 2 * (24 + 36) + 2 * (20 + 25)
    rest = 30 + 12 + 1
    # Besides: counts, the comparison of steps, and the gaps between gradients.
    few = 100
    for _, uncompressed, *compressed in on("2 hosts", rank, make_wrapper=counting):
        assert whole <= uncompressed <= whole + few
        assert all(thin + rest <= each <= thin + rest + few for each in compressed)


def test_ranks_whose_state_differs_begin_anew_together():
    def rank(group: Group) -> Any:
        job = Job(group, start_step=2)
        for step in range(4):
            job.average(step)
        state = copy.deepcopy(job.optimizer.state_dict())
        job.average(4)
        if group.rank == 0:
            job.optimizer.load_state_dict(state)
        averages = [job.average(step) for step in range(5, 8)]
        newcomer = Job(group, start_step=2)
        if group.rank == 0:
            newcomer.optimizer.load_state_dict(state)
        averages += [newcomer.average(step) for step in range(8, 10)]
        return averages, newcomer.state["steps"]["p0"]

    (first, steps), *others = on("3 hosts", rank)
    assert steps == 6
    for other, other_steps in others:
        assert other_steps == 6
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


def test_rows_are_made_orthonormal_and_dependent_ones_zero():
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rows[2] = rows[0] * 3 - rows[1]
    short = torch.tensor([[3.0, 4.0]])
    made, other, empty = orthonormal([rows, short, torch.zeros(2, 7)])
    assert torch.allclose(made @ made.t(), torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0])), atol=1e-6)
    assert torch.allclose(other, torch.tensor([[0.6, 0.8]]))
    assert not empty.any()


def test_rows_that_nearly_depend_on_each_other_are_made_orthonormal():
    rows = torch.randn(5, 700, generator=torch.Generator().manual_seed(1))
    rows[3] = rows[0] - rows[1] + 1e-4 * rows[3]
    rows[4] = 1e20 * rows[4]
    (found,) = orthonormal([rows])
    found = found.double()
    torch.testing.assert_close(found @ found.t(), torch.eye(5, dtype=torch.float64), rtol=0.0, atol=1e-6)
    # Each is in the span of the rows up to its own.
    expected = torch.linalg.qr(rows.double().t()).Q.t()
    torch.testing.assert_close((found @ expected.t()).abs(), torch.eye(5, dtype=torch.float64), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (1000, 700), (3, 40000)])
def test_a_thin_matrix_times_a_matrix_is_the_product(shape, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        p, matrix = torch.randn(4, shape[0]), torch.randn(shape)
        torch.testing.assert_close(times_matrix(p, matrix), (p.double() @ matrix.double()).float(), rtol=0.0, atol=1e-3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (100, 700), (3, 40000)])
def test_a_product_in_pieces_is_the_product(shape):
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, length, generator=generator) for length in shape)
    made = torch.cat([piece.clone() for piece in products(p, q)])
    assert torch.allclose(made, p.t() @ q, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank=0 is not a whole number of at least 1"),
        ({"rank": 1.5}, "rank=1.5 is not a whole number"),
        ({"start_step": -1}, "start_step=-1 is not a number of steps"),
        ({"min_ratio": 0}, "min_ratio=0 is not a positive number"),
    ],
)
def test_bad_settings_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        hvd.Compression.powersgd(**options)
