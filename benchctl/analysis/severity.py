"""Warnings in the order in which a reader needs them: what decided first, what says least of the numbers last."""

from collections.abc import Iterable
from typing import Final

from benchctl.analysis.doubts import RUN_DOUBTS
from benchctl.records.run import ResultWarning

_OF_THE_SURROUNDINGS: Final = frozenset(
    {"gpu-sampler-missing", "dataset-substituted", "steps-unknown", "server-coalescing"}
)
"""Codes of what is known to be absent or otherwise, and casts no doubt on what was measured."""


def by_severity(warnings: Iterable[ResultWarning]) -> tuple[ResultWarning, ...]:
    """What makes a run suspect, then other doubts, then remarks; each in the order in which it was found."""
    return tuple(sorted(warnings, key=lambda warning: _rank(warning.code)))


def _rank(code: str) -> int:
    if code in RUN_DOUBTS:
        return 0
    return 2 if code in _OF_THE_SURROUNDINGS else 1
