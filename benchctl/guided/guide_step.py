"""Counts of guidance in one step, some of which only the device knows at first.

The step itself does not wait for them: they reach the host by a copy of their own, and the log asks whether they
have arrived.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideStep:
    """Counts of guidance in one step, by the names of step records."""

    guided_rows: int = 0
    candidates: int = 0
    """Of the guided rows."""
    value_prefill_tokens: int = 0
    value_extend_tokens: int = 0
    fused: bool | None = None
    """True if prefixes were extended and candidates scored in one forward pass; None if nothing was scored."""


class Arriving:
    """Whole numbers on their way from the device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        self._numbers = numbers

    @property
    def is_here(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> list[int]:
        """The numbers; waits for them if necessary."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers


class PendingStep:
    """Counts of a step, some of which the device may still be computing."""

    def __init__(self, counted: GuideStep, counts: Arriving | None = None) -> None:
        """``counts`` are guided rows and their candidates."""
        self._counted, self._counts = counted, counts

    @property
    def is_known(self) -> bool:
        return self._counts is None or self._counts.is_here

    @property
    def step(self) -> GuideStep:
        """The counts; waits for the device if necessary."""
        if self._counts is None:
            return self._counted
        guided, candidates = self._counts.read()
        return replace(self._counted, guided_rows=guided, candidates=candidates)

    def fields(self) -> Mapping[str, int | bool | None]:
        return asdict(self.step)
