"""`hvdlite.torch` has what `horovod.torch` has, and it works as Horovod's documentation says it does."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from horovod_names import NOT_THERE, TORCH
from training import take_steps
from worlds import run_worlds

import hvdlite
import hvdlite.torch as hvd
from hvdlite.torch import check_comm


def test_every_name_of_horovods_is_there_but_for_those_that_are_said_not_to_be():
    missing = {name for name in TORCH if not hasattr(hvd, name)}
    assert missing == NOT_THERE
    assert set(TORCH) - missing == set(hvd.__all__) - {"run"}
    assert hvd.__all__ == sorted(hvd.__all__)


def test_import_torch_is_pytorch_everywhere_in_the_package():
    assert hvd.torch is torch if hasattr(hvd, "torch") else hvd.dist is torch.distributed
    assert hvdlite.comm.group.torch is torch
    assert hvdlite.torch is hvd


def test_elastic_is_the_same_package_under_both_names():
    assert hvd.elastic is hvdlite.elastic
    with pytest.raises(AttributeError, match="no attribute 'elastick'"):
        _ = hvd.elastick


def test_what_goes_wrong_between_ranks_is_caught_under_horovods_name():
    for error in (hvdlite.MismatchError, hvdlite.PeerLostError, hvdlite.CommunicationError):
        assert issubclass(error, hvd.HorovodInternalError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(hvdlite.GradientError, AssertionError)
    with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)"):
        hvd.rank()


# -- init(comm)


class Communicator:
    """The part of mpi4py's communicators that init() uses."""

    def __init__(self, size: int) -> None:
        self.size = size

    def Get_size(self) -> int:  # noqa: N802  # mpi4py's name
        return self.size


@pytest.mark.parametrize("comm", [None, [], [0, 1, 2], (0, 1, 2), Communicator(3)])
def test_a_communicator_of_all_ranks_is_accepted(comm):
    check_comm(comm, 3)


@pytest.mark.parametrize("comm", [[0, 2], [1, 0, 2], ["a"], 7, Communicator(1)])
def test_any_other_communicator_is_an_error_that_names_the_way_out(comm):
    with pytest.raises(ValueError, match=r"not all ranks of the job, 0 to 2 in this order.*mpirun.*ProcessSet"):
        check_comm(comm, 3)


def test_init_takes_a_communicator_by_place_and_is_not_done_where_it_is_wrong():
    with pytest.raises(ValueError, match=r"comm=\[0, 1\]"):
        hvd.init([0, 1])
    assert not hvd.is_initialized()
    hvd.init([0])
    assert (hvd.rank(), hvd.size()) == (0, 1)
    hvd.init([0, 1])  # it is initialised: as in Horovod, nothing more is done


# -- compression


class Halved:
    """A compression as programs write their own for Horovod; only the context that `decompress` gets makes it right."""

    @staticmethod
    def compress(tensor):
        return tensor.double() / 2, (tensor.dtype, 2)

    @staticmethod
    def decompress(tensor, ctx):
        dtype, factor = ctx
        return (tensor * factor).to(dtype)


class HalvedObject(hvd.Compression.none):
    compress = staticmethod(Halved.compress)
    decompress = staticmethod(Halved.decompress)


def trained(compression, size: int = 2) -> torch.Tensor:
    """Returns a model's weights after three steps on ranks that have different data."""

    def train(rank: int) -> torch.Tensor:
        model = torch.nn.Linear(6, 3, bias=False)
        torch.nn.init.constant_(model.weight, 0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
        data = torch.arange(12.0).view(2, 6).sin() * (rank + 1)
        take_steps(optimizer, lambda _: model(data).square().mean(), range(3))
        return model.weight.detach().clone()

    weights = run_worlds(size, train)
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    return weights[0]


def test_horovods_compressions_are_hvdlites_own():
    assert torch.equal(trained(hvd.Compression.none), trained(hvdlite.Compression.none))
    assert torch.equal(trained(hvd.Compression.fp16), trained(hvdlite.Compression.fp16))
    assert torch.equal(trained(hvd.Compression.bf16), trained(hvdlite.Compression.bf16))


def test_a_tensor_of_ones_own_travels_through_either_kind_of_compression():
    def reduce(rank: int) -> list[torch.Tensor]:
        tensor = torch.full((3,), 1.5) * (rank + 1)
        kinds = (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16, hvdlite.Compression.fp16, Halved)
        return [hvd.allreduce(tensor, name="tensor", compression=kind) for kind in kinds]

    for results in run_worlds(2, reduce):
        for result in results:
            assert result.dtype == torch.float32
            torch.testing.assert_close(result, torch.full((3,), 2.25))


@pytest.mark.parametrize("own", [Halved, HalvedObject, HalvedObject()])
def test_a_compression_of_ones_own_in_horovods_manner_is_served(own):
    torch.testing.assert_close(trained(own), trained(hvdlite.Compression.none))


def test_a_compressed_tensor_comes_with_what_it_takes_to_get_it_back():
    for compression, dtype in [(hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)]:
        wire, ctx = compression.compress(torch.tensor([1.5, 2.0]))
        assert (wire.dtype, ctx) == (dtype, torch.float32)
        assert torch.equal(compression.decompress(wire, ctx), torch.tensor([1.5, 2.0]))
        numbers = torch.tensor([1, 2])
        assert compression.compress(numbers)[0] is numbers


def test_a_compression_that_gives_no_pair_is_named():
    class Alone:
        @staticmethod
        def compress(tensor):
            return tensor

        @staticmethod
        def decompress(tensor, ctx):
            return tensor

    with pytest.raises(TypeError, match=r"Alone: compress\(tensor\) returned Tensor, not \(tensor, ctx\)"):
        trained(Alone, size=1)


# -- the optimizer's older arguments


def test_the_arguments_of_the_optimizer_have_horovods_places():
    assert list(inspect.signature(hvd.DistributedOptimizer).parameters)[:10] == [
        "optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
        "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense", "process_set",
    ]  # fmt: skip


def test_a_number_of_groups_under_its_older_name_is_served_with_a_warning():
    def wrap(_: int, **groups: int) -> list[list[str]]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **groups)._groups.shared

    with pytest.warns(DeprecationWarning, match="Parameter `num_groups` has been replaced by `groups`"):
        older = run_worlds(1, lambda rank: wrap(rank, num_groups=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_worlds(1, lambda rank: wrap(rank, groups=2)) == older
        assert run_worlds(1, lambda rank: wrap(rank, num_groups=0)) == [[]]
    with pytest.warns(DeprecationWarning, match="Parameter `num_groups` has been replaced by `groups`"):
        # As in Horovod, the newer one counts.
        assert run_worlds(1, lambda rank: wrap(rank, num_groups=1, groups=2)) == older


def test_an_optimizers_state_is_broadcast_with_horovods_third_argument():
    def share(rank: int) -> float:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
        hvd.broadcast_optimizer_state(optimizer, 0, model)
        return optimizer.param_groups[0]["lr"]

    assert run_worlds(2, share) == [0.1, 0.1]
