"""State that is neither a parameter nor a buffer, saved as tensors under plain keys."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn

from ..errors import Words, expected

# Of a queue: the tensors, and the numbers in the order in which one more tensor has them.
ROWS = ("logits", "targets", "iid_mask", "sample_weight")
ARGUMENTS = ("capacity", "num_classes", "keep", "multi_hot", "ignore_index")
NUMBERS = (*ARGUMENTS, "num_enqueued", "fill", "pointer", "has_weights", "is_double", "checksum", "contents")

_EARLIER = "_extra_state"  # the key of earlier versions


def as_saved(value: float | Sequence[float] | None, kind: type | None = None) -> Tensor:
    """Return numbers as the state has them, in 64 bits on the CPU; None is -1."""
    # torch.device("meta") does not apply to an array.
    numbers = torch.from_numpy(numpy.asarray(-1 if value is None else value, kind))
    return numbers.to(torch.float64 if numbers.is_floating_point() else torch.int64)


def from_saved(state: Mapping[str, Any], name: str, shape: tuple[int, ...] = (), kind: type = int) -> Any:
    """Return the numbers under a key of ``state``, or raise ValueError if :func:`as_saved` does not return such."""
    value, dtype = state[f"saved_{name}"], torch.int64 if kind is int else torch.float64
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (shape, dtype):
        got = Words(f"{value.dtype} {tuple(value.shape)}") if isinstance(value, Tensor) else value
        fix = "The state is damaged, or was changed, as by half(): load another."
        raise ValueError(expected(f"{name} of the saved state", f"a tensor of {dtype} {shape}", got, fix))
    return value.tolist()


def with_names(weights: Mapping[str, float]) -> list[float]:
    """Return the weights by sorted names, after a hash of the names."""
    return [float(zlib.crc32(repr(sorted(weights)).encode())), *[float(weights[name]) for name in sorted(weights)]]


class SavedState(nn.Module):
    """Base of the modules whose ``state_dict`` has copies of what changes during training, as tensors.

    A subclass names its keys, and defines :meth:`_saved` and :meth:`_read_saved`. All modules inside read their state
    before any of them changes, so nothing changes if one is damaged. Each changes after those inside it.
    """

    _saved_names: ClassVar[tuple[str, ...]] = ()
    _optional_names: ClassVar[tuple[str, ...]] = ()  # of these a key that is missing stands for the constructor's value
    has_temperature = True  # False where ``saved_temperature`` is no key

    _arrived: Mapping[str, Any] = {}  # of a state that is assigned key by key
    _read: Mapping[str, Any] = {}  # what is assigned when the modules inside have changed

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls._saved_names:
            setattr(cls, name, _entry(name))

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(SavedState._change)

    def _saved(self) -> dict[str, Tensor]:
        """Return the state, copies in tensors of fixed shape; nothing if there is nothing to remember."""
        raise NotImplementedError

    def _read_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes, by name, that ``state`` sets, which may lack keys; or raise ValueError."""
        raise NotImplementedError

    def _of_earlier_version(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dict of any module that earlier versions saved under ``_extra_state`` with the keys of today."""
        values = dict(state)
        if values.keys() & {*ROWS}:  # of a queue
            if values.keys() >= {*NUMBERS}:
                values |= {"keep": values["keep"] == "negatives", "contents": int(values["contents"], 16) - 2**63}
                values["numbers"] = [int(values[name] or 0) for name in NUMBERS]
            values = {name: values[name] for name in (*ROWS, "numbers") if name in values}
        elif "weights" in values:
            values["weights"] = with_names(values["weights"])
        elif "epoch" in values and values.get("temperature", -1) < 0:  # there is none, or it is automatic
            values.pop("temperature", None)
        return {f"saved_{n}": v if isinstance(v, Tensor) else as_saved(v) for n, v in values.items()}

    def _state_in(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        earlier = state_dict.get(prefix + _EARLIER)
        state = self._of_earlier_version(earlier) if isinstance(earlier, Mapping) else {}
        known = [name for name in self._saved_names if name != "saved_temperature" or self.has_temperature]
        return state | {name: state_dict[prefix + name] for name in known if prefix + name in state_dict}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: tensor for name, tensor in self._saved().items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *lists: Any
    ) -> None:
        # Outer modules load first, so each reads those inside, and itself last.
        for name, module in reversed([*self.named_modules(prefix=prefix[:-1])]):
            if isinstance(module, SavedState):
                state = module._state_in(state_dict, f"{name}.".lstrip("."))
                read = module._read_saved(state)
        self._read = read
        # torch gets the keys that remain, and reports them if they are unexpected. The dict is a copy.
        for key in [*state] + ([_EARLIER] if state.keys() <= {*self._saved_names} else []):
            state_dict.pop(prefix + key, None)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *lists)
        required = [name for name in self._saved_names if name not in {*state, *self._optional_names}]
        missing += [prefix + name for name in required if strict and hasattr(self, name)]

    def _change(self, *_: object) -> None:
        for path, value in self._read.items():
            *owner, name = path.split(".")
            nn.Module.__setattr__(self.get_submodule(".".join(owner)), name, value)  # it was checked when it was read
        self._read = {}

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers, and the state where this module alone is asked, as torch.distributed.checkpoint does.

        What it finds here gets the names in a wrapped model, and the values of rank 0 in a broadcast. DDP asks the
        whole model, which finds the buffers of the modules inside without this method.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        yield from () if recurse else self._saved().items()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; a key of the state that is assigned as one is loaded when all have arrived.

        ``from_pretrained`` of transformers does not call ``load_state_dict``. It assigns each tensor as a parameter.
        """
        if name not in self._saved_names or param is None:
            return super().register_parameter(name, param)
        self._arrived = {**self._arrived, name: param.detach()}
        if self._arrived.keys() >= self._saved().keys():
            self._read, self._arrived = self._read_saved(self._arrived), {}
            self._change()


def _entry(name: str) -> property:
    """Return the attribute of a key, which frameworks look up by its name, as torch.distributed.checkpoint does."""

    def get(module: SavedState) -> nn.Parameter:
        if name not in (state := module._saved()):
            raise AttributeError(name)
        return nn.Parameter(state[name], requires_grad=False)

    # transformers assigns memory without values to a key that a checkpoint lacks.
    return property(get, lambda module, value: None)
