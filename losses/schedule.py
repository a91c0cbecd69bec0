"""When a warm-up ends, how much the main loss weighs, and how its temperature decays."""

from __future__ import annotations

from torch import nn

from ..errors import check_between, check_count, check_positive, expected, warn


class Schedule(nn.Module):
    """Base of the wrapper: the position in the schedule, in epochs or in steps, and what follows from it."""

    def __init__(self) -> None:
        super().__init__()
        self._epoch: int | None = None  # None until on_train_epoch_start is called
        self._step: int | None = None  # None until on_train_batch_start is called
        self._switch_step: int | None = None
        self._warned: set[str] = set()

    def _set_lengths(
        self, warmup_epochs: int, blend_epochs: int, warmup_steps: int | None, blend_steps: int | None
    ) -> None:
        check_count("warmup_epochs", warmup_epochs, 0)
        check_count("blend_epochs", blend_epochs, 0)
        if warmup_steps is not None:
            check_count("warmup_steps", warmup_steps, 0)
            if warmup_epochs > 0:
                raise ValueError(
                    expected("warmup_steps", "None with warmup_epochs > 0", warmup_steps, "Give one of them.")
                )
        if blend_steps is not None:
            check_count("blend_steps", blend_steps, 0)
            if warmup_steps is None:
                raise ValueError(
                    expected("blend_steps", "None without warmup_steps", blend_steps, "Give both in steps.")
                )
        if blend_epochs > 0 and (blend_steps is not None or warmup_steps is not None):
            raise ValueError(expected("blend_epochs", "0 with a warm-up in steps", blend_epochs, "Use blend_steps."))
        self.warmup_epochs, self.blend_epochs = warmup_epochs, blend_epochs
        self.warmup_steps, self.blend_steps = warmup_steps, blend_steps

    def _set_weights(
        self, final_main_weight: float, temp_start: float | None, temp_end: float | None, temp_decay_steps: int
    ) -> None:
        check_between("final_main_weight", final_main_weight, 0, 1, above=True)
        check_count("temp_decay_steps", temp_decay_steps, 1)
        given = {"temp_start": temp_start, "temp_end": temp_end}
        for name, value in given.items():
            if value is not None:
                check_positive(name, value)
        for name, value in given.items():
            if value is None and (temp_start is not None or temp_end is not None):
                raise ValueError(expected(name, "a number with the other temperature", value, "Give both or neither."))
        self.temp_start, self.temp_end = temp_start, temp_end
        self.temp_decay_steps, self.final_main_weight = temp_decay_steps, final_main_weight

    @property
    def _lengths(self) -> tuple[int, int, int]:
        """The current step or epoch, and the lengths of warm-up and blend in the same unit."""
        if self.warmup_steps is not None:
            return self._step or 0, self.warmup_steps, self.blend_steps or 0
        return self._epoch or 0, self.warmup_epochs, self.blend_epochs

    @property
    def in_warmup(self) -> bool:
        """True while only ``warmup_loss`` is used."""
        now, warmup, _ = self._lengths
        return now < warmup

    @property
    def in_blend(self) -> bool:
        """True between the warm-up and the full weight of ``main_loss``."""
        now, warmup, blend = self._lengths
        return warmup <= now < warmup + blend

    @property
    def main_weight(self) -> float:
        """The weight of ``main_loss`` now: 0 in the warm-up, rising in the blend, ``final_main_weight`` after it."""
        now, warmup, blend = self._lengths
        if now < warmup:
            return 0.0
        return min(1.0, (now - warmup + 1) / (blend + 1)) * self.final_main_weight

    def _warn_of_missing_calls(self, weight: float) -> None:
        _, warmup, blend = self._lengths
        in_steps = self.warmup_steps is not None
        hook = "on_train_batch_start" if in_steps else "on_train_epoch_start"
        argument, unit = ("global_step", "step") if in_steps else ("epoch", "epoch")
        if (self._step if in_steps else self._epoch) is None and warmup + blend > 0:
            self._warn_once(
                f"{hook}({argument}) was never called, so the {'warm-up' if weight == 0 else 'blend'} never ends. "
                f"Call it at the start of every {unit}."
            )
        elif weight > 0 and self._switch_step is None and self.temp_start is not None:
            when, which = (" after the warm-up", "that of main_loss") if warmup else ("", "temp_start")
            self._warn_once(
                f"on_train_batch_start(global_step) was never called{when}, so the temperature stays {which}. Call it "
                "in every step."
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(f"LossWarmupWrapper: {text}")
