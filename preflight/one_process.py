"""A training step on one process: what a run may change, and the same step on an unwrapped copy of the model, alone."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ..accumulation.replay_state import accelerators_in_use, restore_rng, save_rng
from ..distributed.group import ONLY, is_initialized
from ..distributed.torch_private import collectives_by_group, watch_collectives
from ..errors import RankError, Words, expected
from ..gradients import discard_gradients_
from ..gradients.parameters import is_dtensor, variables_of
from ..gradients.torch_private import fsdp_modules, reset_reducer
from ..gradients.wrappers import find_sync

Step = Callable[[nn.Module, Any], Any]
Gradients = dict[str, Tensor | None]

_ADDED = "_orig_mod", "_checkpoint_wrapped_module"  # what wrappers add to the names of parameters
_DROPOUTS = {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}


class _Optimizes(BaseException):
    """The step calls an optimizer, or unscales the gradients for one: they are complete."""


class State:
    """What a step may change: the model, modules outside it, options of optimizers, scalers, and random states."""

    def __init__(self, step: Step, model: nn.Module, losses: Sequence[nn.Module], *, disable_dropout: bool) -> None:
        self.step, self.model, self.is_optimized = step, model, False
        self.lowest = torch.float64  # the dtype of the lowest precision that a parameter has or a module returned
        self.values: list[tuple[Tensor, Tensor]] = []  # tensors, and what they held
        self._attributes: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []  # of whom, values, copies
        self._inside: set[nn.Module] = set()
        self._outside: dict[nn.Module, dict[str, Any]] = {}  # modules that the step uses too, and their state
        self._grads: list[tuple[nn.Parameter, Tensor | None, Tensor | None]] = []  # of parameters, and copies
        self._sync, self._disable_dropout = find_sync(model), disable_dropout
        self._random = random.getstate(), np.random.get_state(), save_rng(accelerators_in_use(model))  # noqa: NPY002
        kinds = Optimizer, torch.amp.GradScaler, LRScheduler
        kept = [owner for owner in gc.get_objects() if issubclass(type(owner), kinds)]
        self.is_scaled = any(isinstance(owner, torch.amp.GradScaler) and owner.is_enabled() for owner in kept)
        for owner in kept:
            for attributes in owner.param_groups if isinstance(owner, Optimizer) else [vars(owner)]:
                self._keep_data(attributes, attributes.keys() - {"params"})
        self.keep(model)
        for module in (*losses, *variables_of(step).values()):
            if isinstance(module, nn.Module):
                self._watch(module)

    def run(self, model: nn.Module, batch: Any) -> float | None:
        """Run the step until it optimizes, and return the loss."""
        with _NoDropout(model) if self._disable_dropout else nullcontext():
            try:
                value = self.step(model, batch)
            except _Optimizes:
                self.is_optimized, value = True, None
            except RankError:
                raise
            except Exception as error:  # raised on all ranks later: others may wait in a collective of the step
                warnings.warn(f"verify_step: {type(error).__name__} in the step: {error}", stacklevel=2)
                raise
        value = value.detach().double().mean().item() if isinstance(value, Tensor) else value
        return float(value) if isinstance(value, (int, float)) else None

    def keep(self, module: nn.Module) -> None:
        """Put back the gradients and buffers of a module, its mode, and data in attributes, such as a queue."""
        grads = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._grads += [(parameter, g, None if g is None else g.detach().clone()) for parameter, g in grads]
        self._inside.update(module.modules())
        for inner in module.modules():
            own = vars(inner)
            self._keep_data(own, ["training"] if isinstance(inner, DDP) else own.keys() - _OF_EVERY_MODULE)
        self.values += [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def _keep_data(self, attributes: dict[str, Any], names: Iterable[str]) -> None:
        held = {name: attributes[name] for name in names if _is_data(attributes.get(name, attributes))}
        self._attributes.append((attributes, held, copy.deepcopy(held)))

    def lower(self, tensor: object) -> None:
        """Note the precision of a parameter, or of what a module returned."""
        if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            self.lowest = max(self.lowest, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)

    def _watch(self, module: nn.Module) -> None:
        if module not in self._inside and not self._inside & set(module.modules()):
            self._outside[module] = copy.deepcopy(module.state_dict())
            self.keep(module)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Watch what is called inside, stop at optimizers, and put everything back at the end."""

        def optimizes(*args: object, **kwargs: object) -> None:
            raise _Optimizes

        def watch(module: nn.Module, args: object) -> None:
            if not torch.compiler.is_compiling():
                self._watch(module)

        def lower(module: nn.Module, args: object, output: object) -> None:
            if not torch.compiler.is_compiling():
                self.lower(output)

        with ExitStack() as stack:
            stack.callback(self._put_back)
            stack.enter_context(self._sync.restored())
            discard_gradients_(self.model)
            stack.callback(register_module_forward_pre_hook(watch).remove)
            stack.callback(register_module_forward_hook(lower).remove)
            stack.callback(register_optimizer_step_pre_hook(optimizes).remove)
            for name in ("unscale_", "step"):
                _replace(stack, torch.amp.GradScaler, name, optimizes)
            yield

    def _put_back(self) -> None:
        self.rewind()
        discard_gradients_(self.model)
        for ddp in self._sync.ddp:
            reset_reducer(ddp)
        for parameter, grad, values in self._grads:
            parameter.grad = grad
            if grad is not None and values is not None:
                grad.detach().copy_(values)

    def rewind(self, seed: int | None = None) -> None:
        """Put back everything but the gradients of the model; with ``seed``, draw other random numbers from now on."""
        for tensor, value in self.values:
            tensor.detach().copy_(value)
        for module, state in self._outside.items():
            module.load_state_dict(state)
            module.zero_grad(set_to_none=True)
        for attributes, held, copies in self._attributes:
            for name, value in copy.deepcopy(copies).items():
                attributes[name] = held[name].copy_(value) if isinstance(value, Tensor) else value
        of_python, of_numpy, of_torch = self._random
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        restore_rng(of_torch)
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.manual_seed(seed)

    def parameters_outside(self) -> dict[str, nn.Parameter]:
        """Return the parameters of modules outside the model, by the class of the module and their names."""
        named: dict[str, nn.Parameter] = {}
        for module in self._outside:
            for name, parameter in module.named_parameters(type(module).__name__):
                named[f"{name} ({len(named)})" if name in named else name] = parameter
        return named


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _is_data(value: object) -> bool:
    """Return True for numbers, texts, tensors without a graph, and containers of them."""
    if isinstance(value, Tensor):
        return not value.requires_grad
    if isinstance(value, (dict, list, tuple, set, deque)):
        return all(map(_is_data, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (int, float, str, Enum, np.ndarray))


def whole(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that may be sharded; collective if it is."""
    detached = tensor.detach()
    return detached.full_tensor() if is_dtensor(detached) else detached


class _NoDropout(TorchFunctionMode):
    """Inside, every dropout returns its input; that of layers with one inside is 0, until the state is put back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for module in model.modules():
            if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
                module.dropout = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").rstrip("_") in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {}))


def _with_switches(module: nn.Module, wrapper: type, /, **others: Any) -> nn.Module:
    """Give ``module`` the methods that a wrapper adds, for a step that switches them; they do nothing."""

    def switch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return nullcontext()

    kind = type(module)
    others |= {name: switch for name in vars(wrapper) if not name.startswith("_")}
    added = {name: value for name, value in others.items() if not hasattr(module, name)}
    module.__class__ = type(kind.__name__, (kind,), added)
    return module


def _copied(model: nn.Module, group: ProcessGroup | None) -> nn.Module:
    """Return a copy without wrappers, which communicates over ``group``, if at all."""
    modules = list(model.modules())
    what, fix = "a model that can be copied", "Pass build_model=, a function that makes it without wrappers."
    if fsdp_modules(modules) or any(map(is_dtensor, model.parameters())):
        raise ValueError(expected("model", what, Words("one with sharded parameters"), fix))
    memo: dict[int, Any] = {id(other): group for other in collectives_by_group()}
    for value in (value for module in modules for value in vars(module).values()):
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach()  # an activation that a forward has kept
    try:
        for module in reversed(modules):
            if isinstance(module, DDP):
                inner = copy.deepcopy(module.module, memo)
                memo[id(module)] = _with_switches(inner, DDP, module=property(lambda self: self))
            elif "_orig_mod" in dict(module.named_children()):
                memo[id(module)] = copy.deepcopy(module.get_submodule("_orig_mod"), memo)
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(expected("model", what, Words(f"{type(error).__name__}: {error}"), fix)) from error


class Reference:
    """The step on one process: a copy of the model without wrappers, and a process group of this rank alone."""

    def __init__(self, state: State, build_model: Callable[[], nn.Module] | None) -> None:
        self.state = state
        self._group = dist.new_group([dist.get_rank()], use_local_synchronization=True) if is_initialized() else None
        self._model = _copied(state.model, self._group) if build_model is None else build_model()
        if not isinstance(self._model, nn.Module):
            raise TypeError(expected("build_model", "a function that returns an nn.Module", self._model))
        if wrapped := fsdp_modules(state.model.modules()):
            _with_switches(self._model, type(wrapped[0]).__mro__[1])
        own = {
            ".".join(part for part in name.split(".") if part not in _ADDED): parameter
            for name, parameter in self._model.named_parameters()
        }
        self.parameters, self.sources = own, dict(zip(own, state.model.parameters()))
        shapes = [parameter.shape for parameter in state.model.parameters()]
        if shapes != [parameter.shape for parameter in own.values()]:
            got = Words(f"one with parameters {', '.join(f'{n} {tuple(p.shape)}' for n, p in [*own.items()][:4])}")
            raise ValueError(expected("build_model", "the model that is trained, without wrappers", got))
        for name, source in self.sources.items():
            values, parameter = whole(source), self.parameters[name].requires_grad_(source.requires_grad)
            parameter.data = torch.empty_like(values)
            state.lower(source)
            kept: Tensor = source.detach().clone() if is_dtensor(source) else parameter.detach()
            state.values.append((source, kept))
        state.keep(self._model)
        self._load()

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _load(self) -> None:
        """Give the copy the parameters and the buffers of the model."""
        for name, source in self.sources.items():
            self.parameters[name].detach().copy_(whole(source))
        for buffer, other in zip(self._model.buffers(), self.state.model.buffers()):
            buffer.data = other.detach().clone()

    def run(self, batch: Any, seed: int | None = None) -> tuple[float | None, Gradients]:
        """Return the loss and the gradients of the step with ``batch`` alone, with other random numbers for a seed."""
        self.state.rewind(seed)
        self._model.zero_grad(set_to_none=True)
        try:
            with self._alone(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = self.state.run(self._model, batch)
        finally:
            self._load()
        gradients = take_gradients(self.parameters | self.state.parameters_outside())
        lengths = [float(grad.norm()) for grad in gradients.values() if grad is not None]
        if not lengths or not math.isfinite(sum(lengths)):
            got = Words("one that gives NaN or infinite ones" if lengths else "one that gives none")
            fix = "Call the model it is given, not another variable, and backward before any optimizer or zero_grad."
            if lengths:
                scale = ", or lower the scale of the GradScaler" * self.state.is_scaled
                fix = f"Look for NaN in the loss of all rows{scale}."
            raise ValueError(expected("step", "a step that gives the model gradients", got, fix))
        return value, gradients

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._group is None:
            yield
            return
        before = collectives_by_group()
        with ExitStack() as stack:
            stack.callback(ONLY.reset, ONLY.set(self._group))
            _replace(stack, dist.group, "WORLD", self._group)
            for name in ("all_gather", "all_gather_into_tensor"):
                for module in (dist, dist.distributed_c10d):
                    _replace(stack, module, name, _over_one(getattr(module, name)))
            stack.enter_context(watch_collectives(self._check_group))
            try:
                yield
            finally:
                for group, number in collectives_by_group().items():
                    if number != before.get(group, number):
                        self._check_group(group)

    def _check_group(self, group: ProcessGroup) -> None:
        """Raise ValueError for a group that is not that of this process alone."""
        if group is not self._group:
            what = "a step that communicates over the default group, or by functions of this package"
            got = Words(f"a step with a group of its own, ranks {dist.get_process_group_ranks(group)}")
            fix = (
                "On one process that group does not exist. Let the step use no wrapped model but the one that it is "
                "given, and pass no group, or ask for dist.group.WORLD each time."
            )
            raise ValueError(expected("step", what, got, fix))


def _over_one(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gather of torch whose output keeps the gradient of the rows, as if nothing were gathered."""

    @functools.wraps(gather)
    def call(*args: Any, **kwargs: Any) -> Any:
        work = gather(*args, **kwargs)
        output, rows, *_ = inspect.signature(gather).bind(*args, **kwargs).arguments.values()
        output = output[0] if isinstance(output, list) else output
        output.copy_(rows.view_as(output))
        return work

    return call


def take_gradients(parameters: dict[str, nn.Parameter]) -> Gradients:
    """Return the gradients of ``parameters``, dense and real; the parameters have none afterwards."""
    gradients: Gradients = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            grad, parameter.grad = parameter.grad, None
            grad = grad.to_dense() if grad is not None and grad.layout != torch.strided else grad
            gradients[name] = torch.view_as_real(grad) if grad is not None and grad.is_complex() else grad
    return gradients
