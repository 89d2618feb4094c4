"""One comparison of two accounts of the same thing, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CHECK_FAILED: Final = "check-failed"
"""Code of the warning that two accounts of one run contradict each other: its numbers are invalid."""


@dataclass(frozen=True, slots=True)
class Check:
    """One reconciliation. A fatal one that fails makes the measurement invalid; the others cast doubt on it."""

    name: str
    ok: bool | None
    detail: str
    is_fatal: bool = False


def abbreviate_names(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
