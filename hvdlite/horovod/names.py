"""
What has another form under Horovod's names: `init`, `broadcast_optimizer_state`, `run`, helpers, and data loaders.

    init, broadcast_optimizer_state, HorovodBasics    in place of those of `hvdlite.torch`
    run                                               `hvdlite.run` with Horovod's arguments
    env, split_list, gpu_available, …                 the helpers of `horovod.common.util`
    BaseDataLoader, AsyncDataLoaderMixin              the base classes of `horovod.data`

`finder` has the table of the modules in which programs find them.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import hvdlite
from hvdlite import torch as hvd
from hvdlite.environment import CheckParameters, read_environment
from hvdlite.outside_graphs import keep_outside_graphs

Item = TypeVar("Item")
Returned = TypeVar("Returned")

# How long the thread of a loader waits for room before it looks whether it has been closed.
_LOOKS_EACH_S = 0.1


def init(
    comm: Any = None,
    process_sets: Iterable[hvd.ProcessSet] | str | None = None,
    *,
    timeout_s: float | None = None,
    check_parameters: CheckParameters | None = None,
) -> None:
    """Does what `hvdlite.torch.init` does; ranks with different parameters at the first step are warned of.

    There they are an error. Programs that ran with Horovod may take a step before they broadcast parameters, as to make
    an optimizer's state. Unless ``check_parameters`` is given, or ``HVDLITE_CHECK_PARAMETERS`` is set.
    """
    if check_parameters is None and read_environment(os.environ).check_parameters is True:
        check_parameters = "warn"
    hvd.init(comm, process_sets, timeout_s=timeout_s, check_parameters=check_parameters)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: nn.Module | None = None,
    *,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> None:
    """Does what `hvdlite.torch.broadcast_optimizer_state` does, and leaves gradients of zeros as Horovod does.

    A rank whose optimizer has no state gets them for parameters that have no gradient. Those of the sparse embeddings
    of ``model`` are sparse. Horovod also takes a step with them; here none is taken, which would change parameters.
    """
    has_no_state = not getattr(optimizer, "state", True)
    hvd.broadcast_optimizer_state(optimizer, root_rank, model, process_set=process_set)
    if not has_no_state:
        return
    embeddings = [each for each in (model.modules() if model is not None else ()) if isinstance(each, nn.Embedding)]
    sparse = {id(each.weight) for each in embeddings if each.sparse}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None:
                param.grad = _sparse_zeros(param) if id(param) in sparse else torch.zeros_like(param)


class HorovodBasics:
    """Horovod's class with `init`, `rank`, `size` and so on as methods; each is the function of `hvdlite.torch`."""

    def __init__(self, *_: object) -> None:
        """Ignores Horovod's arguments, which locate its compiled library; hvdlite has none."""

    init = staticmethod(init)

    def __getattr__(self, name: str) -> Any:
        return getattr(hvd, name)


def _sparse_zeros(param: Tensor) -> Tensor:
    """Returns a gradient of an embedding without a row."""
    no_rows = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(
        no_rows, values, param.shape, dtype=param.dtype, device=param.device, check_invariants=False
    )


def run(
    func: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,  # no effect: hvdlite always sends CPU tensors between hosts over gloo
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Returned]:
    """Calls `hvdlite.run` with Horovod's arguments, in Horovod's order; returns the return values by rank.

    An argument without meaning here prints a line on stderr. If no number of workers is given, there is one, or one for
    each slot of ``hosts`` or ``hostfile``; with ``min_num_proc`` or ``host_discovery_script`` their number may change.
    """
    workers = _one_of("num_proc", num_proc, "np", np)
    least = _one_of("min_num_proc", min_num_proc, "min_np", min_np)
    most = _one_of("max_num_proc", max_num_proc, "max_np", max_np)
    if executable not in (None, sys.executable):
        raise ValueError(
            f"horovod.run(executable={executable!r}): workers run in the calling program's Python, "
            f"{sys.executable}: run that program with the other one"
        )
    if disable_cache is not None:
        _say_without_meaning("disable_cache", "hvdlite caches nothing between jobs")
    if use_mpi or mpi_args:
        _say_without_meaning("use_mpi" if use_mpi else "mpi_args", "workers are started over ssh, without MPI")
    if all(given is None for given in (workers, least, hosts, hostfile, host_discovery_script)):
        workers = 1
    interfaces = network_interfaces if network_interfaces is not None else network_interface
    return hvdlite.run(
        func,
        args,
        kwargs,
        np=workers,
        min_np=least,
        max_np=most,
        hosts=hosts,
        hostfile=hostfile,
        host_discovery_script=host_discovery_script,
        slots=slots,
        reset_limit=reset_limit,
        blacklist_cooldown_range=None if cooldown_range is None else list(cooldown_range),
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        output_filename=output_filename,
        verbose=None if verbose is None else bool(verbose),
        network_interface=interfaces if interfaces is None or isinstance(interfaces, str) else ",".join(interfaces),
        # Each worker finds the shim on its own host, where the path may differ from that in this environment.
        horovod=True,
    )


def _one_of(name: str, value: int | None, old_name: str, old_value: int | None) -> int | None:
    if value is not None and old_value is not None:
        raise ValueError(f"horovod.run(): {name} and {old_name} are the same argument: pass only {name}")
    return old_value if value is None else value


def _say_without_meaning(argument: str, why: str) -> None:
    print(f"hvdlite: horovod.run({argument}=...) has no effect: {why}", file=sys.stderr)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hvdlite supports this framework: only PyTorch."""
    return ext_base_name in ("torch", "pytorch")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hvdlite supports this framework, and PyTorch finds a GPU."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def _built(answer: Callable[[], object]) -> Callable[..., bool]:
    """Returns a function that takes Horovod's ``verbose``, and says what a function of `hvdlite.torch` says."""
    return lambda verbose=False: bool(answer())


mpi_built = _built(hvd.mpi_built)
gloo_built = _built(hvd.gloo_built)
nccl_built = _built(hvd.nccl_built)
ddl_built = _built(hvd.ddl_built)
ccl_built = _built(hvd.ccl_built)
cuda_built = _built(hvd.cuda_built)
rocm_built = _built(hvd.rocm_built)


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """A context with these environment variables; those that are None are not set in it."""
    earlier = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(earlier)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version ``ver`` is ``target`` or later; what follows three numbers with dots does not count."""
    found, wanted = (re.match(r"(\d+)\.(\d+)\.(\d+)", each) for each in (ver, target))
    if found is None or wanted is None:
        raise ValueError(f"version {ver!r} or {target!r} does not begin with three numbers, as 1.2.3 does")
    return [int(each) for each in found.groups()] >= [int(each) for each in wanted.groups()]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether this number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Splits a list into ``parts`` parts; the first ones have one item more where the lengths differ.

    Empty parts are left out.
    """
    count, longer = divmod(len(items), parts)
    bounds = [number * count + min(number, longer) for number in range(parts + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds) if start < stop]


def is_iterable(value: object) -> bool:
    """Whether `iter` accepts the value."""
    try:
        iter(value)  # type: ignore[call-overload]  # any value, to find out
    except TypeError:
        return False
    return True


class HorovodVersionMismatchError(ImportError):
    """Never raised: Horovod raises it where its compiled extension is of another framework's version."""


class BaseDataLoader:
    """Iterates over batches. A subclass has ``__len__``, the number of batches, and ``_iterate``."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yields the batches of one epoch."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Returns what the program gets of a batch; called on the thread that iterates."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Calls ``_iterate`` of a loader on a thread, which keeps up to so many batches ready, also of the next epoch.

    To be placed before the loader: ``class AsyncLoader(AsyncDataLoaderMixin, Loader)``. An iteration that is broken off
    goes on in the next one. An exception of ``_iterate`` is raised in the iteration that comes to it, and in all later
    ones. `close_async_loader` ends the thread.
    """

    _process_batch: Any
    _iterate: Any

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        """With ``async_loader_queue_size=0`` nothing is read ahead. All other arguments are the loader's."""
        self.async_loader_queue_size = async_loader_queue_size
        super().__init__(*args, **kwargs)
        self._closing = threading.Event()
        self._ready: queue.Queue[list[Any]] = queue.Queue(max(0, async_loader_queue_size))
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def close_async_loader(self) -> None:
        """Ends the thread, and drops what it has read. It waits for the batch that is being read."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="hvdlite AsyncDataLoader", daemon=True)
            self._thread.start()
        # A list of one batch, or an empty one at the end of an epoch.
        while batches := self._next():
            yield self._process_batch(*batches)

    def _next(self) -> list[Any]:
        assert self._thread is not None, "it has been started"
        while not self._closing.is_set():
            was_alive = self._thread.is_alive()
            try:
                return self._ready.get(timeout=_LOOKS_EACH_S)
            except queue.Empty:
                if not was_alive and self._error is not None:
                    raise self._error from None
        raise RuntimeError("this loader has been closed by close_async_loader()")

    def _read(self) -> None:
        try:
            while not self._closing.is_set():
                for batch in self._iterate():
                    if not self._put([batch]):
                        return
                if not self._put([]):
                    return
        except BaseException as error:  # noqa: BLE001 - whatever the program's loader raises; the program gets it
            self._error = error

    def _put(self, batches: list[Any]) -> bool:
        """Returns False if the loader has been closed meanwhile."""
        while not self._closing.is_set():
            try:
                self._ready.put(batches, timeout=_LOOKS_EACH_S)
            except queue.Full:
                continue
            return True
        return False


keep_outside_graphs(globals())
