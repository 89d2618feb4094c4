"""Which warnings make a run suspect, and the order in which a reader needs warnings.

What decided comes first, and what says least of the numbers last.
"""

from collections.abc import Iterable
from typing import Final

from benchctl.analysis.validity.check import CHECK_FAILED
from benchctl.analysis.validity.client_guard import CLIENT_DOUBTS
from benchctl.records.record import ResultWarning

DECIDING_WARNINGS: Final = CLIENT_DOUBTS | {
    CHECK_FAILED,
    "failed-requests",
    "steps-damaged",
    "steps-missing",
    "warmup-failed",
}
"""Codes of the warnings that make a run suspect; its others only say what else is known of it."""
_OF_THE_SURROUNDINGS: Final = frozenset(
    {"gpu-sampler-missing", "dataset-substituted", "steps-unknown", "server-coalescing"}
)
"""Codes of what is known to be absent or otherwise, and casts no doubt on what was measured."""


def by_severity(warnings: Iterable[ResultWarning]) -> tuple[ResultWarning, ...]:
    """What makes a run suspect, then other doubts, then remarks; each in the order in which it was found."""
    return tuple(sorted(warnings, key=lambda warning: _rank(warning.code)))


def _rank(code: str) -> int:
    if code in DECIDING_WARNINGS:
        return 0
    return 2 if code in _OF_THE_SURROUNDINGS else 1
