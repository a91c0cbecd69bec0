"""State that is neither a parameter nor a buffer, saved as tensors under plain keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn

from ..errors import expected

_EARLIER = "_extra_state"  # the key of earlier versions


def as_saved(value: float | Sequence[float] | None) -> Tensor:
    """Return numbers as the state has them, in 64 bits on the CPU; None is -1."""
    # torch.tensor would be on the meta device under torch.device("meta").
    numbers = torch.from_numpy(numpy.asarray(-1 if value is None else value))
    return numbers.to(torch.float64 if numbers.is_floating_point() else torch.int64)


def from_saved(state: Mapping[str, Any], name: str, shape: tuple[int, ...] = ()) -> Any:
    """Return the numbers under a key of ``state``, or raise ValueError if it has another shape."""
    value = state[f"saved_{name}"]
    if not isinstance(value, Tensor) or value.shape != shape:
        fix = "The state is damaged, or was changed: load another."
        raise ValueError(expected(f"{name} of the saved state", f"a tensor of shape {shape}", value, fix))
    return value.tolist()


class SavedState(nn.Module):
    """Base of the modules whose ``state_dict`` has copies of what changes during training, as tensors.

    A subclass names the keys that it reads in ``_saved_names``, and defines :meth:`_saved`, :meth:`_check_saved` and
    :meth:`_load_saved`. Nothing changes if the state of a module inside is damaged.
    """

    _saved_names: ClassVar[tuple[str, ...]] = ()
    _optional_names: ClassVar[tuple[str, ...]] = ()  # without its key the constructor's value is restored

    _arrived: Mapping[str, Any] = {}  # what has been assigned so far of a state that comes key by key

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls._saved_names:
            setattr(cls, name, _entry(name))

    def _saved(self) -> dict[str, Tensor]:
        """Return the state, copies in tensors of fixed shape; nothing if there is nothing to remember."""
        raise NotImplementedError

    def _check_saved(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless :meth:`_load_saved` can load ``state``, which may lack keys."""
        raise NotImplementedError

    def _load_saved(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`_saved` returned; called after :meth:`_check_saved`."""
        raise NotImplementedError

    def _of_earlier_version(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dict that earlier versions saved under ``_extra_state`` in the form of :meth:`_saved`."""
        return {f"saved_{name}": as_saved(value) for name, value in state.items()}

    def _known(self) -> tuple[str, ...]:
        """Return the names that this module can load now."""
        return self._saved_names

    def _state_in(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        earlier = state_dict.get(prefix + _EARLIER)
        state = self._of_earlier_version(earlier) if isinstance(earlier, Mapping) else {}
        return state | {name: state_dict[prefix + name] for name in self._known() if prefix + name in state_dict}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: tensor for name, tensor in self._saved().items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *lists: list[str],
    ) -> None:
        # Outer modules load first, so they check those inside before any of them changes.
        for name, module in self.named_modules(prefix=prefix[:-1]):
            if isinstance(module, SavedState):
                module._check_saved(module._state_in(state_dict, f"{name}." if name else ""))
        state = self._state_in(state_dict, prefix)
        # torch gets the keys that remain, and reports them if they are unexpected. The dict is a copy.
        for name in (*self._known(), *([] if state.keys() - {*self._known()} else [_EARLIER])):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *lists)
        if strict and not state.keys() >= {*self._saved_names}:
            required = self._saved().keys() - state.keys() - {*self._optional_names}
            missing_keys += [prefix + name for name in self._saved_names if name in required]
        self._load_saved(state)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; a key of the state that is assigned as one is loaded when all have arrived.

        ``from_pretrained`` of transformers does not call ``load_state_dict``. It assigns each tensor as a parameter.
        """
        if name not in self._saved_names or param is None:
            return super().register_parameter(name, param)
        arrived = {**self._arrived, name: param.detach()}
        is_complete = arrived.keys() >= self._saved().keys()
        self._arrived = {} if is_complete else arrived
        if is_complete:
            self._check_saved(arrived)
            self._load_saved(arrived)


def _entry(name: str) -> property:
    """Return the attribute of a key, which frameworks look up by its name, as torch.distributed.checkpoint does."""

    def get(module: SavedState) -> nn.Parameter:
        if name not in (state := module._saved()):
            raise AttributeError(name)
        return nn.Parameter(state[name], requires_grad=False)

    # If a checkpoint lacks the key, transformers assigns uninitialised memory: ignore it.
    return property(get, lambda module, value: None)
