"""A training step on one process: what a run may change, and the same step on an unwrapped copy of the model, alone."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import math
import os
import random
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

from ..distributed.group import ONLY, is_initialized
from ..distributed.torch_private import collectives_by_group
from ..errors import Words, expected
from ..gradients import discard_gradients_
from ..gradients.parameters import is_dtensor
from ..gradients.torch_private import fsdp_modules
from ..gradients.wrappers import find_sync

Step = Callable[[nn.Module, Any], Any]
Gradients = dict[str, Tensor | None]

_COMPILED = {"_orig_mod", "_checkpoint_wrapped_module"}  # the names that wrappers other than DDP add to a parameter's
_OF_EVERY_MODULE = vars(nn.Module()).keys()


class State:
    """What a step may change: the model, modules outside it, optimizers, schedulers, scalers, and the random states.

    Args:
        step: the modules that its code names, and all that are called in a run, are put back too.
        model: the model that is trained.
        losses: further modules.
    """

    def __init__(self, step: Step, model: nn.Module, losses: Sequence[nn.Module]) -> None:
        self.model, self.is_optimized = model, False
        self.lowest = torch.float64  # the dtype of the lowest precision that a parameter has or a module returned
        self.outside: dict[nn.Module, tuple[dict[str, Any], list[Any]]] = {}  # state, gradients
        self._inside: set[nn.Module] = set()
        self._attributes: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[Tensor, Tensor]] = []
        self._sync, self._random = find_sync(model), _random_states()
        parameters = set(model.parameters())
        self._grads = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters]
        self._values += [(p, p.detach().clone()) for p in parameters if is_dtensor(p)]
        self._stepped: dict[int, tuple[Optimizer, Any]] = {}
        self.is_alone = False
        self.optimizers = []
        for found in _instances(Optimizer, torch.amp.GradScaler, LRScheduler):
            if not isinstance(found, Optimizer):
                self._keep_attributes(found)
            elif any(parameters & set(group["params"]) for group in found.param_groups):
                self.optimizers.append(found)
        self._options = [(optimizer, list(map(dict, optimizer.param_groups))) for optimizer in self.optimizers]
        for parameter in parameters:
            self._lower(parameter)
        self.keep(model)
        for module in (*losses, *_modules_named_in(step)):
            self._watch(module)

    def keep(self, module: nn.Module, parameters: dict[nn.Parameter, Tensor] | None = None) -> None:
        """Put back a module, and plain parameters from a copy of them that exists anyway."""
        self._inside.update(module.modules())
        for inner in module.modules():
            self._keep_attributes(inner)
        self._values += [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        self._values += [(p, value) for p, value in (parameters or {}).items() if not is_dtensor(p)]

    def _keep_attributes(self, owner: Any) -> None:
        """Put back numbers, tensors, and containers of them, such as a queue in an attribute."""
        names = {"training", *(() if isinstance(owner, DDP) else vars(owner).keys() - _OF_EVERY_MODULE)}
        held = {name: value for name in names if _is_data(value := getattr(owner, name, owner))}
        self._attributes.append((owner, held, copy.deepcopy(held)))

    def _lower(self, tensor: object) -> None:
        if (
            not torch.compiler.is_compiling()
            and isinstance(tensor, Tensor)
            and (tensor.is_floating_point() or tensor.is_complex())
        ):
            self.lowest = max(self.lowest, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)

    def _watch(self, module: nn.Module, *_: object) -> None:
        if torch.compiler.is_compiling() or module in self._inside or self._inside & set(module.modules()):
            return
        grads = [(parameter, parameter.grad) for parameter in module.parameters()]
        self.outside[module] = copy.deepcopy(module.state_dict()), grads
        self.keep(module)

    def _watch_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        self.is_optimized = True
        if not self.is_alone and id(optimizer) not in self._stepped:
            self._stepped[id(optimizer)] = optimizer, optimizer.state
            copies = {parameter: copy.deepcopy(values) for parameter, values in optimizer.state.items()}
            optimizer.state = defaultdict(dict, copies)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Watch what is called inside, and put everything back at the end."""
        handles = [
            register_module_forward_pre_hook(self._watch),
            register_module_forward_hook(lambda module, args, output: self._lower(output)),
            register_optimizer_step_pre_hook(self._watch_optimizer),
        ]
        try:
            with self._sync.restored():
                yield
        except BaseException:
            self._sync.forget_forwards()
            raise
        finally:
            for handle in handles:
                handle.remove()
            self.rewind()
            discard_gradients_(self.model)
            with torch.no_grad():
                for parameter, grad, values in self._grads:
                    parameter.grad = grad if grad is None or values is None else grad.copy_(values)
            for _, grads in self.outside.values():
                for parameter, grad in grads:
                    parameter.grad = grad

    def rewind(self, seed: int | None = None) -> None:
        """Put back everything but the gradients of the model; with ``seed``, draw other random numbers from now on."""
        with torch.no_grad():
            for tensor, value in self._values:
                if not torch.equal(_local(tensor), _local(value)):
                    self.is_optimized |= isinstance(tensor, nn.Parameter)
                    tensor.copy_(value)
            for optimizer, state in self._stepped.values():
                optimizer.state = state
            self._stepped.clear()
            for optimizer, groups in self._options:
                for group, options in zip(optimizer.param_groups, groups):
                    group.update(options)  # such as the learning rate
            for module, (state, grads) in self.outside.items():
                module.load_state_dict(state)
                for parameter, _ in grads:
                    parameter.grad = None
            for owner, held, copies in self._attributes:
                for name, value in copy.deepcopy(copies).items():
                    value = held[name].copy_(value) if isinstance(value, Tensor) else value
                    setattr(owner, name, value) if name == "training" else vars(owner).update({name: value})
        for set_state, random_state in self._random:
            set_state(random_state)
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.manual_seed(seed)

    def parameters_outside(self) -> dict[str, nn.Parameter]:
        """Return the parameters of modules outside the model, by the class of the module and their names."""
        named: dict[str, nn.Parameter] = {}
        for module in self.outside:
            for name, parameter in module.named_parameters(type(module).__name__):
                named[f"{name} ({len(named)})" if name in named else name] = parameter
        return named


def _instances(*kinds: type) -> list[Any]:
    """Return all objects of these classes and their subclasses; each refers to its class."""
    classes: set[type] = set()
    more = {*kinds}
    while more:
        classes |= more
        more = set().union(*(type.__subclasses__(kind) for kind in more)) - classes
    return [found for found in gc.get_referrers(*classes) if type(found) in classes]


def _is_data(value: object) -> bool:
    """Return True for numbers, texts, tensors without a graph, and containers of them."""
    if isinstance(value, Tensor):
        return not value.requires_grad
    if isinstance(value, (dict, list, tuple, set, deque)):
        return all(map(_is_data, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (int, float, str, Enum, np.ndarray))


def _local(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.to_local() if is_dtensor(detached) else detached


def whole(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that may be sharded; collective if it is."""
    detached = tensor.detach()
    return detached.full_tensor() if is_dtensor(detached) else detached


def _modules_named_in(step: Step) -> Iterator[nn.Module]:
    """Yield the modules that the code of ``step`` refers to."""
    function: Any = inspect.unwrap(step)
    values: list[Any] = []
    while isinstance(function, functools.partial):
        values += [*function.args, *function.keywords.values()]
        function = function.func
    function = getattr(function, "__func__", function)
    values += list(getattr(getattr(step, "__self__", None), "__dict__", {}).values())
    if inspect.isfunction(function):
        named = inspect.getclosurevars(function)
        values += [*named.nonlocals.values(), *named.globals.values(), *(function.__defaults__ or ())]
    yield from (value for value in values if isinstance(value, nn.Module))


def _random_states() -> list[tuple[Callable[[Any], None], Any]]:
    """Return what puts the states of the random generators back, and these states."""
    device = torch.accelerator.current_accelerator()
    modules = [torch, *([] if device is None else [torch.get_device_module(device)])]
    states = [(module.set_rng_state, module.get_rng_state()) for module in modules]
    return [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state()), *states]  # noqa: NPY002


class NoDropout(TorchFunctionMode):
    """Inside, every dropout returns its input; that of layers with one inside is 0, until the state is put back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for module in model.modules():
            if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
                module.dropout = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").rstrip("_")
        if name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"):
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args = args if len(args) < 5 else (*args[:4], 0.0, *args[5:])
            kwargs |= {"dropout_p": 0.0} if len(args) < 5 else {}
        return func(*args, **kwargs)


class _OneProcess(nn.Module):
    """Stands in for DDP on one process."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.require_backward_grad_sync = module, True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the module inside has, for a step that unwraps what is an instance of DDP."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


def plain_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without those that wrappers add."""
    wrapped = {f"{name}." if name else "" for name, m in model.named_modules() if isinstance(m, DDP | _OneProcess)}
    found = {}
    for name, parameter in model.named_parameters():
        kept, path = [], ""
        for part in name.split("."):
            if part not in _COMPILED and not (part == "module" and path in wrapped):
                kept.append(part)
            path += f"{part}."
        found[".".join(kept)] = parameter
    return found


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
                memo[id(module)] = _OneProcess(copy.deepcopy(module.module, memo))
            elif "_orig_mod" in dict(module.named_children()):
                memo[id(module)] = copy.deepcopy(module.get_submodule("_orig_mod"), memo)
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(expected("model", what, Words(f"{type(error).__name__}: {error}"), fix)) from error


def _no_switch(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Stand in for a method of FSDP2, on one process."""


class Reference:
    """The step on one process: a copy of the model without wrappers, and a process group of this rank alone.

    Args:
        run: runs the step with a model and a batch, and returns the loss.
        state: of the step.
        build_model: makes the model without wrappers; None to copy the one that is trained.
    """

    def __init__(
        self, run: Callable[[nn.Module, Any], Any], state: State, build_model: Callable[[], nn.Module] | None
    ) -> None:
        self._run, self._state = run, state
        self._group = dist.new_group([dist.get_rank()], use_local_synchronization=True) if is_initialized() else None
        self._model = _copied(state.model, self._group) if build_model is None else build_model()
        if not isinstance(self._model, nn.Module):
            raise TypeError(expected("build_model", "a function that returns an nn.Module", self._model))
        if wrapped := fsdp_modules(state.model.modules()):
            names = [name for name in dir(type(wrapped[0]).__mro__[1]) if not hasattr(nn.Module, name)]
            kind = type(self._model)
            self._model.__class__ = type(kind.__name__, (kind,), {n: _no_switch for n in names if not hasattr(kind, n)})
        self.parameters = plain_names(self._model)
        self._load(is_first=True)
        sources = self._sources()
        state.keep(self._model, {source: self.parameters[name].detach() for name, source in sources.items()})
        self._by_source = {id(source): self.parameters[name] for name, source in sources.items()}

    def close(self) -> None:
        """Destroy the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _load(self, *, is_first: bool = False) -> None:
        """Give the copy the full parameters of the model, in the memory that it has after the first time."""
        for name, source in self._sources().items():
            parameter = self.parameters[name]
            values = whole(source)
            if is_first:
                parameter.data = torch.empty_like(values)
                parameter.requires_grad_(source.requires_grad)
            parameter.detach().copy_(values)

    def _sources(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the model that is trained, which the copy has too."""
        own, sources = self.parameters, plain_names(self._state.model)
        differ = {name for name in sources.keys() & own.keys() if sources[name].shape != own[name].shape}
        if names := sorted(differ | (sources.keys() ^ own.keys())):
            got = Words(f"one that differs in {', '.join(names[:4])}")
            raise ValueError(expected("build_model", "the model that is trained, without wrappers", got))
        return sources

    def run(self, batch: Any, seed: int | None = None) -> tuple[float | None, Gradients]:
        """Return the loss and the gradients of the step with ``batch`` alone, with other random numbers for a seed."""
        self._state.rewind(seed)
        for buffer, source in zip(self._model.buffers(), self._state.model.buffers()):
            buffer.data = source.detach().clone()
        self._model.zero_grad(set_to_none=True)
        try:
            before, failure = collectives_by_group(), None
            try:
                with self._alone(), _gathers_with_gradient(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    value = self._run(self._model, batch)
            except Exception as error:
                failure = error
            self._check_groups(before, failure)
            if failure is not None:
                raise failure
            gradients = take_gradients(self.parameters | self._state.parameters_outside())
            lengths = [float(grad.norm()) for grad in gradients.values() if grad is not None]
            if not lengths or not math.isfinite(sum(lengths)):
                got = Words("one that gives infinite ones" if lengths else "one that gives none")
                fix = (
                    "Call the model that the step is given, not another variable, and backward; no zero_grad after it."
                )
                fix = "Lower the scale of the GradScaler." if lengths else fix
                raise ValueError(expected("step", "a step that gives the model gradients", got, fix))
            return value, gradients
        finally:
            self._load()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, this process is the only one, and optimizers have the parameters of the copy."""
        optimizers = [(optimizer, optimizer.state) for optimizer in self._state.optimizers]
        held = [(group, group["params"]) for optimizer, _ in optimizers for group in optimizer.param_groups]
        variables = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
        world = dist.group.WORLD if is_initialized() else None
        token = ONLY.set(self._group)
        self._state.is_alone = True
        try:
            for optimizer, _ in optimizers:
                optimizer.state = defaultdict(dict)
            for group, parameters in held:
                group["params"] = [self._by_source.get(id(parameter), parameter) for parameter in parameters]
            if world is not None:
                dist.group.WORLD = self._group
                os.environ.update({"RANK": "0", "WORLD_SIZE": "1"})
            yield
        finally:
            self._state.is_alone = False
            ONLY.reset(token)
            if world is not None:
                dist.group.WORLD = world
                for name, value in variables.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})
            for optimizer, kept in optimizers:
                optimizer.state = kept
            for group, parameters in held:
                group["params"] = parameters

    def _check_groups(self, before: dict[ProcessGroup, int], error: Exception | None) -> None:
        """Raise ValueError if the step has communicated over a group that is not that of this process alone."""
        after = collectives_by_group()
        others = [group for group, number in after.items() if number != before.get(group, number)]
        if others := [group for group in others if group is not self._group]:
            what = "a step that communicates over the default group, or by functions of this package"
            got = Words(f"a step with a group of its own, ranks {dist.get_process_group_ranks(others[0])}")
            fix = (
                "On one process that group does not exist. Let the step ask for dist.group.WORLD each time, or pass no "
                "group, and use no wrapped model but the one that it is given."
            )
            raise ValueError(expected("step", what, got, fix)) from error


@contextmanager
def _gathers_with_gradient() -> Iterator[None]:
    """Inside, torch's gathers return the rows of one process with their gradient, as if nothing were gathered."""

    def over_one(gather: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(gather)
        def call(*args: Any, **kwargs: Any) -> Any:
            work = gather(*args, **kwargs)
            output, rows, *_ = inspect.signature(gather).bind(*args, **kwargs).arguments.values()
            output = output[0] if isinstance(output, list) else output
            output.copy_(rows.view_as(output))
            return work

        return call

    with ExitStack() as stack:
        for name in ("all_gather", "all_gather_into_tensor") if is_initialized() else ():
            for module in (dist, dist.distributed_c10d):
                gather = getattr(module, name)
                stack.callback(setattr, module, name, gather)
                setattr(module, name, over_one(gather))
        yield


def take_gradients(parameters: dict[str, nn.Parameter]) -> Gradients:
    """Return the gradients of ``parameters``, dense and real; the parameters have none afterwards."""
    gradients: Gradients = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            grad, parameter.grad = parameter.grad, None
            grad = grad.to_dense() if grad is not None and grad.layout != torch.strided else grad
            gradients[name] = torch.view_as_real(grad) if grad is not None and grad.is_complex() else grad
    return gradients
