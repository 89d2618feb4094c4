"""What looking at a machine finds: one value for each thing looked at."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

CheckState: TypeAlias = Literal["ok", "warning", "missing"]
Fact: TypeAlias = str | int | float | bool | tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    ``finding`` is for people; ``facts`` are for machines, with units in their names and None for what is unknown.
    ``remedy``, where something is not as it should be, is the command that helps, or a sentence where none does.
    ``is_missing`` where a thing is not there, which matters where ``is_needed``.
    """

    topic: str
    name: str
    finding: str
    remedy: str | None = None
    is_missing: bool = False
    is_needed: bool = False
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_missing and self.remedy is None:
            raise ValueError(f"{self.topic} {self.name} is missing: say what brings it")

    @property
    def state(self) -> CheckState:
        """``warning`` for what works but puts numbers in doubt or will stand in the way."""
        if self.is_missing:
            return "missing"
        return "ok" if self.remedy is None else "warning"

    @property
    def is_obstacle(self) -> bool:
        """Whether what was asked for cannot be measured here."""
        return self.is_missing and self.is_needed


def obstacles(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The checks that stand in the way."""
    return tuple(check for check in checks if check.is_obstacle)
