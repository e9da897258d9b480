"""A user's compression gets gradients and nothing else, and its errors are raised on every rank."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from models import Branches, Plain, batches, build, sgd, train_rank
from ranks import ENGINES, attempt_ranks, run_ranks, set_of
from torch import Tensor, nn
from training import wrap_numbered
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group
from hvdlite.torch import Compression as HorovodCompression

SIZES = [1, 2, 3, 4]
engines = pytest.mark.parametrize("engine", list(ENGINES))


class Int8:
    """A compression as programs write it for Horovod: the scale belongs to the tensor."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        scale = tensor.abs().max() / 63
        return (tensor / scale).round().to(torch.int8), (scale, tensor.dtype)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        scale, dtype = ctx
        return tensor.to(dtype) * scale


class Int8OfHvdlite:
    """The same compression with hvdlite's interface, with one scale for all that it is given."""

    def __init__(self) -> None:
        self._scales: dict[int, Tensor] = {}

    def compress(self, buffer: Tensor) -> Tensor:
        wire, (scale, _) = Int8.compress(buffer)
        self._scales[id(wire)] = scale
        return wire

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        torch.mul(wire, self._scales.pop(id(wire)), out=out)


class Sees:
    """Notes what one rank's compression is given; it sends the tensor itself, or a copy in another dtype."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.seen: list[Tensor] = []
        self._dtype = dtype

    def compress(self, buffer: Tensor) -> Tensor:
        self.seen.append(buffer.clone())
        return buffer if self._dtype is None else buffer.to(self._dtype)

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        if self._dtype is None:
            assert wire is out
        else:
            out.copy_(wire)

    def __repr__(self) -> str:
        return "Sees"


class SeesEach(HorovodCompression.none):
    """The same with Horovod's interface."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.seen: list[Tensor] = []
        self._dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self.seen.append(tensor.clone())
        return (tensor if self._dtype is None else tensor.to(self._dtype)), tensor.dtype

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)

    def __repr__(self) -> str:
        return "SeesEach"


def average(where: Any, values: list[Tensor], compression: Any, **options: Any) -> list[Tensor]:
    """Returns the averages that the optimizer computes of this rank's gradients ``values``, in two steps."""
    params = [nn.Parameter(torch.zeros_like(value)) for value in values]
    optimizer = wrap_numbered(where, params, compression, **options)
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(params, values)
        optimizer.synchronize()
    found = [param.grad.clone() for param in params]
    optimizer.close()
    return found


def under_horovod(compression: Any, terms: list[Tensor], rank: int) -> Tensor:
    """Computes what Horovod does: compress, sum, divide in the wire's dtype, decompress with the rank's own context."""
    packed = [compression.compress(term) for term in terms]
    wires = [wire for wire, _ in packed]
    total = sum(wire.long() for wire in wires)
    return compression.decompress(
        torch.div(total, len(terms), rounding_mode="trunc").to(wires[0].dtype), packed[rank][1]
    )


def plain_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An SGD that also accepts sparse gradients."""
    return torch.optim.SGD(params, lr=0.1)


SHAPES = [(3, 5), (7,), (2, 3, 1), (1,)]


def gradients_of(rank: int) -> list[Tensor]:
    """Makes gradients of very different magnitudes, all far below 1."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) * 10.0**-place for place, shape in enumerate(SHAPES, start=2)]


@engines
@pytest.mark.parametrize("size", SIZES)
def test_a_quantiser_in_horovods_manner_gives_what_it_gives_under_horovod(size, engine):
    def rank(group: Group) -> list[list[Tensor]]:
        small = {"bucket_cap_mb": 1e-5}
        mine = gradients_of(group.rank)
        return [average(set_of(group), mine, Int8, **options) for options in ({}, small, {"groups": 2})]

    for number, found in enumerate(run_ranks(size, rank, engine=engine)):
        for got, place in itertools.product(found, range(len(SHAPES))):
            expected = under_horovod(Int8, [gradients_of(other)[place] for other in range(size)], number)
            assert torch.equal(got[place], expected)
            # A single element might sum to zero over the ranks.
            assert got[place].any() or place == SHAPES.index((1,)), "a small gradient is no zero"


@engines
@pytest.mark.parametrize("size", SIZES)
def test_one_in_hvdlites_manner_sees_the_buckets_gradients_alone(size, engine):
    def rank(group: Group) -> list[Tensor]:
        return average(set_of(group), gradients_of(group.rank), Int8OfHvdlite())

    def flat(number: int) -> Tensor:
        return torch.cat([each.flatten() for each in reversed(gradients_of(number))])

    for number, found in enumerate(run_ranks(size, rank, engine=engine)):
        got = torch.cat([each.flatten() for each in reversed(found)])
        assert torch.equal(got, under_horovod(Int8, [flat(other) for other in range(size)], number))


@engines
@pytest.mark.parametrize("size", SIZES)
def test_operations_give_each_tensor_alone_in_its_shape(size, engine):
    def rank(number: int) -> None:
        everybodys = [gradients_of(other) for other in range(size)]
        mine = everybodys[number]
        kept = [tensor.clone() for tensor in mine]
        results = [hvd.allreduce(tensor, name=f"{i}", compression=Int8) for i, tensor in enumerate(mine)]
        results += hvd.grouped_allreduce(mine, name="group", compression=Int8)
        results += hvd.grouped_allreduce(mine, name="ours", compression=Int8OfHvdlite())
        for number_of_result, got in enumerate(results):
            terms = [each[number_of_result % len(SHAPES)] for each in everybodys]
            assert torch.equal(got, under_horovod(Int8, terms, number))
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(mine, kept, strict=True))
        for kind in (Sees, SeesEach):
            compression = kind()
            hvd.allreduce(mine[0], name="a", compression=compression)
            hvd.grouped_allreduce(mine, name="b", compression=compression)
            assert [tuple(each.shape) for each in compression.seen] == [SHAPES[0], *SHAPES]
            assert all(torch.equal(a, b) for a, b in zip(compression.seen, [mine[0], *mine], strict=True))

    run_worlds(size, rank, engine=engine)


@engines
@pytest.mark.parametrize("size", [1, 2, 3])
def test_neither_flags_nor_gaps_are_seen_whatever_the_model(size, engine):
    class Some(Branches):
        """A model with a channels-last convolution, and an embedding with sparse gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
            self.table = nn.Embedding(5, 6, sparse=True)

        def forward(self, x: Tensor, part: int) -> Tensor:
            image = x.reshape(len(x), 2, 1, 3).expand(-1, -1, 2, -1)
            words = self.table(torch.arange(len(x)) % 5)
            return super().forward(x + words, part) + self.conv(image).flatten(1).sum(1, keepdim=True)

    model, (x, y) = build(Some), batches(2, 1, 4 * size)

    def rank(group: Group) -> tuple[Any, ...]:
        models, seen = [], []
        for compression in (hvd.Compression.none, Sees(), SeesEach()):
            options = {"sparse_as_dense": True, "compression": compression}
            models.append(train_rank(group, model, plain_sgd, x, y, **options))
            seen.append(getattr(compression, "seen", []))
        return models, seen

    outcomes = run_ranks(size, rank, engine=engine)
    for (plain, flat, each), (_, flats, eaches) in outcomes:
        for params in zip(plain.parameters(), flat.parameters(), each.parameters(), strict=True):
            for other in params[1:]:
                torch.testing.assert_close(other, params[0], rtol=0, atol=1e-12)
                assert (params[0].grad is None) == (other.grad is None)
        # Frozen parameters are sent once they are no longer frozen.
        shapes = [tuple(param.shape) for param in model.parameters() if param.requires_grad]
        assert sorted(tuple(tensor.shape) for tensor in eaches) == sorted(shapes * 2)
        assert sum(tensor.numel() for tensor in flats) == 2 * sum(torch.Size(shape).numel() for shape in shapes)


def test_a_convolution_and_complex_gradients_keep_their_layout_and_come_back():
    compression = [SeesEach(), Sees()]
    value = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
    turned = torch.complex(torch.randn(3), torch.randn(3))

    def rank(group: Group) -> None:
        for each in compression:
            for got, expected in zip(average(set_of(group), [value, turned], each), [value, turned], strict=True):
                assert torch.equal(got, expected)
                assert got.stride() == expected.stride()

    run_ranks(1, rank)
    assert [(tuple(each.shape), each.dtype) for each in compression[0].seen[:2]] == [
        ((3,), torch.complex64), ((2, 3, 2, 2), torch.float32),
    ]  # fmt: skip
    assert [(each.dim(), each.dtype) for each in compression[1].seen[:2]] == [(1, torch.float32)] * 2


class Constant(HorovodCompression.none):
    """Sends the same values and returns them, whatever it is given."""

    def __init__(self, wire: Tensor) -> None:
        self._wire = wire

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return self._wire.clone(), None

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor

    def __repr__(self) -> str:
        return f"Constant({self._wire.dtype})"


@engines
@pytest.mark.parametrize("kind", ["gradients", "allreduce", "grouped_allreduce", "reducescatter"])
def test_the_wires_dtype_says_how_an_average_is_made(kind, engine):
    # Large enough to wrap round, or to overflow, in a sum in their own dtype; -5, 5: rounding towards zero.
    wires = [
        torch.tensor([120, -5, 5], dtype=torch.int8),
        torch.tensor([30000, -5, 5], dtype=torch.int16),
        torch.tensor([2**30, -5, 5], dtype=torch.int32),
        torch.tensor([60000.0, 1.0, 2.0], dtype=torch.float16),
        torch.tensor([0.1, 1e-40, 3.0]),
    ]

    def rank(number: int) -> None:
        for wire in wires:
            compression = Constant(wire if number < 2 else torch.zeros_like(wire))
            tensor = torch.ones(3, dtype=torch.float64)
            if kind == "gradients":
                (got,) = average(hvd.global_process_set, [tensor], compression)
            elif kind == "reducescatter":
                got = hvd.allgather(hvd.reducescatter(tensor, compression=compression))
            elif kind == "allreduce":
                got = hvd.allreduce(tensor, compression=compression)
            else:
                (got,) = hvd.grouped_allreduce([tensor], compression=compression)
            if wire.dtype is torch.float16:
                torch.testing.assert_close(got, wire.double() * 2 / 3, rtol=2e-3, atol=0)
            elif wire.is_floating_point():
                assert torch.equal(got, ((wire + wire) / 3).double())
            else:
                assert torch.equal(got, torch.div(wire.long() * 2, 3, rounding_mode="trunc").double())

    run_worlds(3, rank, engine=engine)


@pytest.mark.parametrize("kind", [Sees, SeesEach])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_every_op_its_gradient_and_other_dtypes_go_through_it(kind, dtype):
    ops = [op for op in hvd.ReduceOp if op is not hvd.Adasum]

    def rank(number: int) -> None:
        for op in ops:
            found = []
            for compression in (hvd.Compression.none, kind(dtype)):
                mine = torch.tensor([1.0 + number, 5.0 - number], requires_grad=True)
                got = hvd.allreduce(mine, op=op, compression=compression, name=op.name)
                got.sum().backward()
                found += [got.detach(), mine.grad]
            assert torch.equal(found[0], found[2])
            assert torch.equal(found[1], found[3])
        whole = hvd.allreduce(torch.tensor([3 + number, -4]), compression=kind(), name="whole")
        assert whole.tolist() == [3, -4]
        turned = torch.complex(torch.ones(2), torch.full((2,), 2.0 * number))
        for scattered in (False, True):
            operation = hvd.reducescatter if scattered else hvd.allreduce
            got = operation(turned, compression=kind(), name="turned")
            assert got.tolist() == [1 + 1j] * (1 if scattered else 2)
        assert hvd.allreduce(torch.ones(0), compression=kind(), name="empty").shape == (0,)
        assert hvd.allreduce(torch.tensor(2.0 * number), compression=kind(), name="scalar").item() == 1.0

    run_worlds(2, rank)


def test_factors_are_the_wires():
    def rank(number: int) -> None:
        wire = torch.tensor([7, -7], dtype=torch.int32) * (number + 1)
        got = hvd.allreduce(
            torch.ones(2), compression=Constant(wire), op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5
        )
        # 3 + 7, times 1.5.
        assert got.tolist() == [15.0, -15.0]
        (got,) = average(hvd.global_process_set, [torch.ones(2)], Constant(wire * 10), gradient_predivide_factor=2.0)
        # 35 + 70, halved, and doubled.
        assert got.tolist() == [104.0, -104.0]
        (got,) = average(hvd.global_process_set, [torch.ones(2)], Constant(wire), op=hvd.Sum)
        assert got.tolist() == [21.0, -21.0]

    run_worlds(2, rank)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_ranks_rows_of_what_is_scattered_come_from_the_wires(engine):
    def rank(number: int) -> None:
        everybodys = [torch.randn(5, 2, generator=torch.Generator().manual_seed(other)) for other in range(2)]
        whole = under_horovod(Int8, everybodys, number)
        mine = whole[:3] if number == 0 else whole[3:]
        for got in (
            hvd.reducescatter(everybodys[number], compression=Int8, name="one"),
            *hvd.grouped_reducescatter([everybodys[number]] * 2, compression=Int8, name="group"),
            hvd.reducescatter(everybodys[number], compression=Int8OfHvdlite2(), name="ours"),
        ):
            assert torch.equal(got, mine)
        seen = Sees()
        got = hvd.reducescatter(everybodys[number], compression=seen, op=hvd.Sum, name="itself")
        assert torch.equal(got, sum(everybodys)[:3] if number == 0 else sum(everybodys)[3:])

    run_worlds(2, rank, engine=engine)


class Int8OfHvdlite2(Int8OfHvdlite):
    """A compression that can also decompress parts of the wire that it made."""

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        ((_, scale),) = self._scales.items()
        torch.mul(wire, scale, out=out)


def test_a_step_on_arrival_has_the_ordinary_steps_bits():
    model, (x, y) = build(Plain), batches(3, 2, 8)

    def rank(group: Group) -> list[list[Tensor]]:
        return [
            [*train_rank(group, model, sgd, x, y, compression=Int8, step_on_arrival=arrival).parameters()]
            for arrival in (False, True)
        ]

    for ordinary, on_arrival in run_ranks(2, rank):
        assert all(torch.equal(a, b) for a, b in zip(ordinary, on_arrival, strict=True))


@pytest.mark.parametrize("compression", [Int8, Int8OfHvdlite()])
@pytest.mark.parametrize("average_over", ["all", "active"])
def test_who_sits_out_gives_nothing_though_its_wire_would_be_no_number(compression, average_over):
    def rank(number: int) -> list[float]:
        param = nn.Parameter(torch.zeros(3))
        optimizer = wrap_numbered(hvd.global_process_set, [param], Int8OfHvdlite() if compression is not Int8 else Int8)
        seen = []
        for _ in range(2 if number == 0 else 0):
            optimizer.zero_grad()
            (param * torch.tensor([63.0, 21.0, -42.0])).sum().backward()
            optimizer.step()
            seen.append(param.grad.tolist())
        hvd.join(average=average_over)
        return seen

    seen, _ = run_worlds(2, rank)
    assert seen == [[63.0, 21.0, -42.0] if average_over == "active" else [31.0, 10.0, -21.0]] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_adasum_gives_each_parameters_delta_alone(size):
    def rank(group: Group) -> None:
        model, (x, y) = build(Plain), batches(2, 1, 12)
        compression = SeesEach()
        expected = train_rank(group, model, sgd, x, y, op=hvd.Adasum)
        got = train_rank(group, model, sgd, x, y, op=hvd.Adasum, compression=compression)
        for a, b in zip(got.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        shapes = sorted(tuple(param.shape) for param in model.parameters())
        assert sorted(tuple(each.shape) for each in compression.seen) == sorted(shapes * 2)

    run_ranks(size, rank)


# -- what goes wrong


class Faulty(HorovodCompression.none):
    """A compression with Horovod's interface that returns what it is told to, on the ranks where it is to."""

    def __init__(self, compress: Any = None, decompress: Any = None) -> None:
        self._compress, self._decompress = compress, decompress

    def compress(self, tensor: Tensor) -> Any:
        return (tensor.clone(), None) if self._compress is None else self._compress(tensor)

    def decompress(self, tensor: Tensor, ctx: Any) -> Any:
        return tensor if self._decompress is None else self._decompress(tensor)

    def __repr__(self) -> str:
        return "Faulty"


class FaultyOfHvdlite:
    def __init__(self, compress: Any = None, decompress: Any = None) -> None:
        self._compress, self._decompress = compress, decompress

    def compress(self, buffer: Tensor) -> Any:
        return buffer.clone() if self._compress is None else self._compress(buffer)

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        if self._decompress is None:
            out.copy_(wire)
        else:
            self._decompress(out)

    def __repr__(self) -> str:
        return "Faulty"


def raising(tensor: Tensor) -> Any:
    raise ZeroDivisionError("of its own")


def quantized(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


FAULTS = {
    "none": (Faulty(lambda t: None), TypeError, r"compress\(tensor\) returned None, not \(tensor, ctx\)"),
    "str": (Faulty(lambda t: "x"), TypeError, r"compress\(tensor\) returned str, not"),
    "alone": (Faulty(lambda t: t), TypeError, r"compress\(tensor\) returned Tensor, not"),
    "three": (Faulty(lambda t: (t, 1, 2)), TypeError, r"returned \(Tensor, int, int\), not"),
    "no tensor": (Faulty(lambda t: ([1.0], None)), TypeError, r"returned \(list, NoneType\), not"),
    "sparse": (Faulty(lambda t: (t.to_sparse(), None)), ValueError, "returned a torch.sparse_coo tensor"),
    "quantized": (Faulty(lambda t: (quantized(t), None)), ValueError, "returned a quantized tensor"),
    "meta": (Faulty(lambda t: (t.to("meta"), None)), ValueError, "returned a tensor on meta for .*, which is on cpu"),
    "float8": (Faulty(lambda t: (t.to(torch.float8_e5m2), None)), ValueError, "is not supported"),
    "raises": (Faulty(raising), ValueError, r"compress\(tensor\) raised ZeroDivisionError for .*: of its own"),
    "back none": (Faulty(None, lambda t: None), TypeError, r"decompress\(tensor, ctx\) returned None, not a tensor"),
    "back shape": (Faulty(None, lambda t: t[:1]), ValueError, r"returned a tensor of shape \(1,\) for .*\(3,\)"),
    "back sparse": (Faulty(None, lambda t: t.to_sparse()), ValueError, "returned a torch.sparse_coo tensor"),
    "back raises": (Faulty(None, raising), ValueError, r"decompress\(tensor, ctx\) raised ZeroDivisionError"),
    "ours none": (FaultyOfHvdlite(lambda t: None), TypeError, r"compress\(buffer\) returned None, not a tensor"),
    "ours pair": (FaultyOfHvdlite(lambda t: (t, 1)), TypeError, r"returned \(Tensor, int\), not a tensor"),
    "ours sparse": (FaultyOfHvdlite(lambda t: t.to_sparse()), ValueError, "returned a torch.sparse_coo tensor"),
    "ours raises": (FaultyOfHvdlite(raising), ValueError, r"compress\(buffer\) raised ZeroDivisionError"),
    "ours back": (FaultyOfHvdlite(None, raising), ValueError, r"decompress\(wire, out\) raised ZeroDivisionError"),
}  # fmt: skip


def use(kind: str, compression: Any) -> Any:
    """Uses a compression, and then a valid one, whose results must be right."""
    if kind == "allreduce":
        return hvd.allreduce(torch.ones(3), name="loss", compression=compression)
    if kind == "grouped_allreduce":
        return hvd.grouped_allreduce([torch.ones(3), torch.ones(3)], name="loss", compression=compression)
    if kind == "reducescatter":
        return hvd.reducescatter(torch.ones(3), name="loss", compression=compression)
    options = {"op": hvd.Adasum} if kind == "adasum" else {"bucket_cap_mb": 1e-6}
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = wrap_numbered(hvd.global_process_set, params, compression, **options)
    try:
        sum(param.sum() for param in params).backward()
        return optimizer.step()
    finally:
        optimizer.close()


KINDS = ["allreduce", "grouped_allreduce", "reducescatter", "optimizer", "adasum"]


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_a_compression_gives_wrongly_is_one_error_with_its_name_on_every_rank(fault):
    compression, error, words = FAULTS[fault]

    def rank(number: int) -> None:
        for kind in KINDS:
            if (kind, fault) == ("reducescatter", "back shape"):
                # The wire of a rank with one row is right.
                continue
            with pytest.raises(error, match=words) as raised:
                use(kind, compression)
            assert type(raised.value) is error
            assert "compression=Faulty" in str(raised.value)
            caused = "raises" in fault or fault == "ours back"
            assert caused == isinstance(raised.value.__cause__, ZeroDivisionError)
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]

    run_worlds(2, rank)


@engines
@pytest.mark.parametrize("fault", ["none", "raises", "back none", "ours raises", "ours back"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_others_get_an_error_that_names_the_rank_and_all_go_on(fault, kind, engine):
    compression, error, _ = FAULTS[fault]
    sound = FaultyOfHvdlite() if "ours" in fault else Faulty()

    def rank(number: int) -> str:
        with pytest.raises((error, hvd.CommunicationError)) as raised:
            use(kind, compression if number == 1 else sound)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3.0, 3.0]
        if number == 1:
            assert type(raised.value) is error
        else:
            assert type(raised.value) is hvd.CommunicationError
        return str(raised.value)

    first, own, last = run_worlds(3, rank, engine=engine)
    for told in (first, last):
        assert "because of an error on rank 1 (node1): " in told
        assert own in told


@engines
@pytest.mark.parametrize("kind", KINDS)
def test_wires_of_other_sizes_or_dtypes_on_ranks_are_an_error_on_all(kind, engine):
    def cut(tensor: Tensor) -> tuple[Tensor, None]:
        return (torch.cat([tensor, tensor[:1]]) if kind not in ("reducescatter", "adasum") else tensor.double()), None

    def rank(number: int) -> None:
        # 1, 2 and 3 on three ranks: their mean is the value of one of them.
        compression = Faulty([lambda t: (t.clone(), None), cut, lambda t: (t.half(), None)][number])
        with pytest.raises(hvd.MismatchError, match="same dtype and size on every rank"):
            use(kind, compression)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3.0, 3.0]

    run_worlds(3, rank, engine=engine)


@engines
@pytest.mark.parametrize("when", ["compress", "decompress"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_training_goes_on_after_an_error_that_the_program_takes(length, when, engine):
    """The error is raised on one rank, in the second step, at the first, the second or the last of three buckets."""

    def rank(number: int) -> list[list[float]]:
        step = 0

        def fault(tensor: Tensor) -> Tensor:
            return raising(tensor) if (number, step, len(tensor)) == (1, 1, length) else tensor.clone()

        compression = Faulty(lambda t: (fault(t), None)) if when == "compress" else Faulty(None, fault)
        params = [nn.Parameter(torch.zeros(each)) for each in (1, 2, 3)]
        optimizer = wrap_numbered(hvd.global_process_set, params, compression, bucket_cap_mb=1e-6)
        for step in range(3):
            optimizer.zero_grad()
            sum((param * (number + 1.0)).sum() for param in params).backward()
            if step == 1:
                with pytest.raises((ValueError, hvd.CommunicationError), match=f"gradient of 'p{length - 1}'"):
                    optimizer.step()
            else:
                optimizer.step()
        return [param.tolist() for param in params]

    assert run_worlds(2, rank, engine=engine) == [[[-3.0], [-3.0] * 2, [-3.0] * 3]] * 2


def test_autotune_measures_with_it_or_says_what_is_wrong_with_it():
    def rank(group: Group) -> None:
        params = [nn.Parameter(torch.zeros(3))]
        optimizer = wrap_numbered(set_of(group), params, Int8OfHvdlite(), autotune=True)
        optimizer.step()
        optimizer.close()
        fault = Faulty(None, raising) if group.rank else Faulty()
        with pytest.raises((ValueError, hvd.CommunicationError), match=r"rank 1|ZeroDivisionError"):
            wrap_numbered(set_of(group), params, fault, autotune=True).step()

    run_ranks(2, rank)


def test_a_rank_that_waits_elsewhere_between_backward_and_step_is_waited_for():
    """A compression that must know that all ranks have come does not wait for them in backward."""
    met = threading.Barrier(2)

    def rank(group: Group) -> Tensor:
        used = nn.Parameter(torch.zeros(3))
        unused = nn.Parameter(torch.zeros(3))
        optimizer = wrap_numbered(set_of(group), [used, unused], Int8, bucket_cap_mb=1e-6)
        (used.sum() if group.rank else used.sum() + unused.sum()).backward()
        met.wait(60)
        optimizer.step()
        return used.detach()

    # A compression of zeros divides by zero, and its warning does not matter here.
    outcomes = attempt_ranks(2, rank)
    assert all(torch.equal(outcome, torch.full((3,), -1.0)) for outcome in outcomes)


def test_a_stranger_on_one_rank_alone_is_told_of():
    def rank(number: int) -> None:
        hvd.allreduce(torch.ones(3), name="loss", compression=Faulty() if number else hvd.Compression.none)

    for outcome in attempt_worlds(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "Faulty" in str(outcome)
