"""Lookups in the table of warning codes: severity, what a suspect run still tells, and the generated reference."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Final

from benchctl.records.schema import ResultWarning
from benchctl.records.warnings import WARNING_TABLE, Severity, WarningCode

WARNING_CODES: Final[dict[str, WarningCode]] = dict(chain.from_iterable(t.items() for t in WARNING_TABLE.values()))
SUSPECT_CODES: Final = frozenset(code for code, entry in WARNING_CODES.items() if entry.severity == "suspect")
"""Codes that make a run suspect."""
CLIENT_SUSPECT_CODES: Final = frozenset(code for code, entry in WARNING_CODES.items() if entry.limits_client_times)
"""Codes that make a run suspect only in what the client timed."""
LIGHTER_LOAD_CODES: Final = frozenset(code for code, entry in WARNING_CODES.items() if entry.has_lighter_load)
"""Codes that say that the server met fewer requests at once than planned."""
CHECK_FAILED: Final = "check-failed"
"""Code of a run whose records contradict each other."""
_RANKS: Final[dict[Severity, int]] = {"suspect": 0, "warning": 1, "note": 2}


def severity_of(code: str) -> Severity:
    """Return the severity of a code; ``warning`` for one that an older or newer benchctl wrote."""
    entry = WARNING_CODES.get(code)
    return "warning" if entry is None else entry.severity


def by_severity(warnings: Iterable[ResultWarning]) -> tuple[ResultWarning, ...]:
    """Sort warnings: those that make a run suspect, other warnings, notes; equal ones keep their order."""
    return tuple(sorted(warnings, key=lambda warning: _RANKS[severity_of(warning.code)]))


def warnings_of(messages: Mapping[str, str | None]) -> tuple[ResultWarning, ...]:
    """The warnings by code that have a message, in order."""
    return tuple(ResultWarning(code=code, message=text) for code, text in messages.items() if text is not None)
