"""The result of inspecting one part of a machine."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One part of the machine that was inspected.

    ``finding`` is for people; ``facts`` are for programs, with units in their names and None for unknown values.
    ``remedy`` is the command that fixes a problem, or a sentence if no command does; None without a problem.
    ``is_missing`` says that the part is absent, which matters if ``is_needed``.
    """

    topic: str
    name: str
    finding: str
    _: KW_ONLY
    remedy: str | None = None
    is_missing: bool = False
    is_needed: bool = False
    facts: Mapping[str, str | int | float | bool | tuple[str, ...] | None] = field(default_factory=dict)

    @property
    def state(self) -> Literal["ok", "warning", "missing"]:
        """``missing`` for an absent part, ``warning`` for a problem that distorts numbers or will cause errors."""
        if self.is_missing:
            return "missing"
        return "ok" if self.remedy is None else "warning"

    @property
    def is_obstacle(self) -> bool:
        """True when a needed part is missing."""
        return self.is_missing and self.is_needed
