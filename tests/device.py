"""A strict simulated accelerator: a device type of torch whose tensors compute on CPU memory.

It is torch's private-use backend under the name ``sim``: ``tensor.to("sim")``, ``torch.zeros(3, device="sim")`` and
autograd with its own thread for the device work as on a real one. The values are those of the CPU, bit for bit. It is
strict: an operator that meets tensors of two devices raises, and so do ``numpy()`` and, inside :func:`no_float64`,
float64. And it counts what a step would cost on an accelerator::

    with count() as counts:
        loss(logits, targets).backward()
    counts.waits, counts.launches, counts.bytes

A *wait* is where the host stops until the device has caught up: it reads a value (``item``, ``bool``, ``tolist``, a
copy to the CPU), asks for a size that depends on values (``nonzero``, ``unique``, a bool index, ``bincount``,
``repeat_interleave`` without ``output_size``), or copies to the device with ``non_blocking=False``. A *launch* is a
kernel; an operator that runs several, such as a sort, counts as several. Views and allocations are free. *Bytes* are
those of all inputs and outputs. Operators of this package are seen through. A collective is one launch.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import backend_registration

# Views, allocations and questions about metadata: no kernel.
_FREE = "_has_compatible_shallow_copy_type _local_scalar_dense _reshape_alias _unsafe_view alias as_strided detach "
_FREE += "diagonal empty empty_like empty_strided expand is_pinned is_same_size lift_fresh new_empty new_empty_strided "
_FREE += (
    "permute record_stream select set_ slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze view"
)
# Kernels of the operators that run several on CUDA. The number may grow with the size; these are the least.
_LAUNCHES = {"_unique2": 8, "unique_consecutive": 8, "unique_dim": 8, "masked_select": 4, "bincount": 4, "nonzero": 4}
_LAUNCHES |= {"sort": 4, "argsort": 4, "topk": 4, "kthvalue": 4, "median": 4, "randperm": 4, "repeat_interleave": 3}
_LAUNCHES |= {"nonzero_static": 4}  # sums of blocks, their sums, places, padding
_LAUNCHES |= dict.fromkeys(["constant_pad_nd", "masked_fill", "index_add", "scatter", "scatter_add", "index_copy"], 2)
_LAUNCHES |= dict.fromkeys(["slice_backward", "select_backward"], 2)
_LAUNCHES |= {"cumsum": 2, "cumprod": 2, "cummax": 2, "cummin": 2, "logcumsumexp": 2}
_WAITS = {"_local_scalar_dense": 1, "nonzero": 1, "masked_select": 1, "equal": 1, "repeat_interleave": 1}
_WAITS |= {"_unique2": 2, "unique_consecutive": 2, "unique_dim": 2, "bincount": 2, "histc": 2}
_NOT_DETERMINISTIC = {"cumsum", "bincount", "histc", "median", "nanmedian", "scatter_reduce"}  # of floats
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
_SORTED_SUM = 6  # kernels of index_put with accumulate=True, which sorts the indices
_COPY = torch.ops.aten.copy_.default
_ROOT = str(Path(__file__).resolve().parents[1])


class Counts:
    """How much was counted, and on which lines of the package; ``backward`` stands for autograd's own operators."""

    def __init__(self) -> None:
        self.waits = self.launches = self.bytes = 0
        self.waited: Counter[tuple[str, str]] = Counter()  # by operator and line
        self.launched: Counter[tuple[str, str]] = Counter()

    def add_waits(self, name: str, number: int) -> None:
        """Add ``number`` waits of the operator ``name``."""
        self.waits += number
        self.waited[name, _line()] += number

    def __repr__(self) -> str:
        return f"Counts(waits={self.waits}, launches={self.launches}, bytes={self.bytes})"

    def report(self, most: int = 20) -> str:
        """Return the lines that wait, and those that launch most."""
        lines = [repr(self)]
        for kind, found in (("waits", self.waited), ("launches", self.launched)):
            lines += [f"  {number:4d} {kind}: {op} at {line}" for (op, line), number in found.most_common(most)]
        return "\n".join(lines)


class Warner(Counts):
    """Warns about each wait, as CUDA does in ``torch.cuda.set_sync_debug_mode("warn")``."""

    def add_waits(self, name: str, number: int) -> None:
        for _ in range(number):
            warnings.warn(f"called a synchronizing {DEVICE.type} operation: {name}", stacklevel=2)


_counting: list[Counts] = []  # of all threads: a backward runs in autograd's thread for the device
_refused: list[torch.dtype] = []


@contextmanager
def count() -> Iterator[Counts]:
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Raise if the host waits for ``device`` inside: on the simulated device, which counts, and on CUDA."""
    try:
        if device.type == "cuda":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it may miss some
                torch.cuda.set_sync_debug_mode("error")
        with count() as counts:
            yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert counts.waits == 0, counts.report()


@contextmanager
def no_float64() -> Iterator[None]:
    """Let the device refuse float64, as MPS does."""
    _refused.append(torch.float64)
    try:
        yield
    finally:
        _refused.pop()


@contextmanager
def deterministic() -> Iterator[None]:
    """Turn torch.use_deterministic_algorithms on; the device then raises where CUDA has no such algorithm."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class SimulatedTensor(torch.Tensor):
    """A tensor on the device. Its memory is ``inner``, a tensor on the CPU."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SimulatedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"{self.inner!r} on {DEVICE}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.Tensor.to, (self.detach().cpu(), DEVICE)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute ``func`` on the memory of its tensors; raise where a device would, and count."""
    if func.namespace not in ("aten", "c10d"):  # an operator written in Python: look inside
        return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    name, draws, is_mutable, is_composite = _traits(func)
    if is_composite:  # autograd takes it apart, but not where it is off, as inside the operators of the package
        return func.decompose(*args, **kwargs)
    tensors = [*_tensors((args, tuple(kwargs.values())))]
    ours = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, SimulatedTensor)}
    if len(ours) < len(tensors) and name not in ("_to_copy", "copy_", "set_") and func.namespace == "aten":
        _refuse_mixed(func, name, args, tensors)
    if torch.are_deterministic_algorithms_enabled() and name in _NOT_DETERMINISTIC and tensors[0].is_floating_point():
        raise RuntimeError(f"{name} does not have a deterministic implementation, at {_line()}")
    is_pinned = kwargs.pop("pin_memory", None)  # torch cannot pin memory for a device written in Python
    inner = _each(_memory, args), {key: _each(_memory, value) for key, value in kwargs.items()}
    with _own_random_state() if draws else nullcontext():
        result = func(*inner[0], **inner[1])
    if is_pinned:
        result.is_pinned_here = True
    for counts in _counting:
        _add(counts, name, args, kwargs, tensors, result)

    target = kwargs.get("device") or next((arg for arg in args if isinstance(arg, torch.device)), None)
    is_host = target.type != DEVICE.type if target is not None else not ours and len(tensors) > 0
    known = {id(tensor): tensor for tensor in tensors} | ours if is_mutable else {}  # in place: the same tensors

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or is_host:
            return leaf
        if leaf.dtype in _refused:
            raise TypeError(f"{func}: {DEVICE} has no {leaf.dtype}, at {_line()}")
        return known[id(leaf)] if id(leaf) in known else SimulatedTensor(leaf)

    return _each(wrap, result)


@functools.cache
def _traits(func: Any) -> tuple[str, bool, bool, bool]:
    """Return the name of an operator, and whether it draws random numbers, writes into its arguments, calls others."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return func.__name__.split(".")[0], draws, func._schema.is_mutable, is_composite


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` of each leaf of its lists and tuples."""
    if isinstance(value, (list, tuple)):
        return type(value)(_each(function, leaf) for leaf in value)
    return function(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        for leaf in value:
            yield from _tensors(leaf)
    elif isinstance(value, torch.Tensor):
        yield value


def _memory(leaf: Any) -> Any:
    if isinstance(leaf, SimulatedTensor):
        return leaf.inner
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == DEVICE.type else leaf


def _refuse_mixed(func: Any, name: str, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
    """Raise as CUDA does: the host may give scalars and indices, no other tensors."""
    if name in _INDEXED:
        tensors = [args[0], *args[2:3]]
    strangers = [one for one in tensors if isinstance(one, torch.Tensor) and not isinstance(one, SimulatedTensor)]
    if any(one.ndim for one in strangers):
        raise RuntimeError(f"{func}: expected all tensors on one device, found {DEVICE} and cpu, at {_line()}")


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Draw random numbers from the generator of the device."""
    kept = torch.get_rng_state()
    torch.set_rng_state(Backend.random_state)
    try:
        yield
    finally:
        Backend.random_state = torch.get_rng_state()
        torch.set_rng_state(kept)


def _add(counts: Counts, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor], result: Any) -> None:
    waits, launches = _WAITS.get(name, 0), 0 if name in _FREE.split() else _LAUNCHES.get(name, 1)
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        waits = 0
    elif name in _INDEXED:
        indices = [index for index in args[1] if index is not None]
        masks = sum(index.dtype in (torch.bool, torch.uint8) for index in indices)
        copied = sum(not isinstance(index, SimulatedTensor) for index in indices)
        waits, launches = masks + copied, 1 + 4 * masks + copied
        if name != "index" and (kwargs.get("accumulate") or (len(args) > 3 and args[3])):
            launches += _SORTED_SUM
    elif name in ("copy_", "_to_copy"):
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
        is_free = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if source.device.type != target.type:  # memory of the host that is not pinned may only be copied from
            waits = 0 if is_free and (target.type == DEVICE.type or hasattr(args[0], "is_pinned_here")) else 1
    if waits:
        counts.add_waits(name, waits)
    results = [*_tensors(result)]
    if results and all(tensor.numel() == 0 for tensor in results):
        launches = 0  # nothing to compute
    if launches:
        counts.launches += launches
        counts.launched[name, _line()] += launches
        counts.bytes += sum(_bytes_of(tensor) for tensor in (*tensors, *results))


def _bytes_of(tensor: torch.Tensor) -> int:
    number = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride()):
        number *= size if stride else 1
    return number


def _line() -> str:
    """Return the innermost line of the package that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_ROOT) and "site-packages" not in file and "/tests/" not in file[len(_ROOT) :]:
            return f"{file[len(_ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"


class Backend(backend_registration._DummyBackendModule):
    """The module ``torch.sim``: one device, with a generator of its own."""

    random_state = torch.Generator().manual_seed(0).get_state()

    def manual_seed_all(self, seed: int) -> None:
        Backend.random_state = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return Backend.random_state.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        Backend.random_state = state.clone()

    def current_stream(self, device: Any = None) -> Backend:
        return self  # the only stream; torch.distributed.checkpoint copies on it

    def stream(self, stream: Backend) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        for counts in _counting:
            if not isinstance(counts, Warner):  # CUDA warns about hidden waits alone
                counts.add_waits("synchronize", 1)

    def get_sync_debug_mode(self) -> int:
        return int(any(isinstance(counts, Warner) for counts in _counting))

    def set_sync_debug_mode(self, mode: int | str) -> None:
        _counting[:] = [counts for counts in _counting if not isinstance(counts, Warner)]
        if mode in (1, "warn"):
            _counting.append(Warner())


# torch's autograd serves one accelerator in a process: where there is CUDA, the tests of losses run on that.
IS_SIMULATED = not torch.cuda.is_available()
only_simulated = pytest.mark.skipif(not IS_SIMULATED, reason="counts on the simulated device, which CUDA stands for")
DEVICE = torch.device("cuda", 0)
if IS_SIMULATED:
    backend_registration._setup_privateuseone_for_python_backend("sim", Backend())
    DEVICE = torch.device("sim", 0)
    # torch makes these from an empty tensor that it resizes, of which the shape of a SimulatedTensor knows nothing.
    _SIZED = torch.library.Library("aten", "IMPL")
    for _name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace"):
        _func = getattr(getattr(torch.ops.aten, _name.partition(".")[0]), _name.partition(".")[2] or "default")
        _SIZED.impl(_name, functools.partial(_run, _func), "PrivateUse1")
    # Two operators are not computed by the class of their arguments: an allocation, which has no tensor among them, and
    # the copy inside torch.tensor, which turns the classes of tensors off.
    _LIBRARIES = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _LIBRARIES[0].fallback(_run, "PrivateUse1")
    _LIBRARIES[1].impl("_copy_from", lambda source, to, is_free=False: _run(_COPY, to, source, is_free), "PrivateUse1")


def init_process_group(is_mixed: bool = False, **options: Any) -> None:
    """Make a default group like one of NCCL, which serves the device alone; over gloo, on the memory of the tensors.

    ``is_mixed``: like ``cpu:gloo,cuda:nccl``, which serves the host too.
    """

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("simccl", create, devices=[DEVICE.type])
    dist.init_process_group(f"{'cpu:gloo,' if is_mixed else ''}{DEVICE.type}:simccl", **options)
    world = dist.group.WORLD
    assert world is not None
    if not is_mixed:
        backend = world._get_backend(DEVICE)
        world._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)  # for the memory
