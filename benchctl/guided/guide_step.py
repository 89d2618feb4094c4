"""What guidance did in one step: counts, of which a device may be the first to know.

Nobody waits for them in the step itself: they come to the host by a copy of their own, and whoever writes them down
asks whether they are there.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideStep:
    """What guidance did in one step, in the words of step records."""

    guided_rows: int = 0
    candidates: int = 0
    """Of the guided rows."""
    value_prefill_tokens: int = 0
    value_extend_tokens: int = 0
    fused: bool | None = None
    """Whether prefixes were extended and candidates scored in one forward; None where nothing was scored."""


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
        """Waits for them if need be."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers


class PendingStep:
    """What guidance did in a step, some of which the device may still be counting."""

    def __init__(self, told: GuideStep, counts: Arriving | None = None) -> None:
        """``counts`` are guided rows and their candidates."""
        self._told, self._counts = told, counts

    @property
    def is_known(self) -> bool:
        return self._counts is None or self._counts.is_here

    @property
    def step(self) -> GuideStep:
        """Waits for the device if need be."""
        if self._counts is None:
            return self._told
        guided, candidates = self._counts.read()
        return replace(self._told, guided_rows=guided, candidates=candidates)

    def fields(self) -> Mapping[str, int | bool | None]:
        """``step`` by the names of its fields."""
        return asdict(self.step)
