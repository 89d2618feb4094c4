"""Lookups in the table of warning codes: severity, what a suspect run still tells, and the generated reference."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from benchctl.records.schema import ResultWarning
from benchctl.records.warnings import CHECKS, FINDINGS, WARNING_TABLE, Severity, WarningCode

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


def warnings_reference() -> str:
    """Return ``docs/reference/warnings.md``: every code with severity, meaning and remedy."""
    return "\n".join(_reference_lines()) + "\n"


def _reference_lines() -> Iterator[str]:
    yield "# Warnings, checks and findings"
    yield ""
    yield "<!-- Generated from benchctl/records/warning_table.py; do not edit. -->"
    yield ""
    yield "Each warning has a code, which is stable, and a message, which names the numbers. Severities:"
    yield ""
    yield "- **suspect**: the run does not count as done. Where only the client's times are affected, what the"
    yield "  server measured (steps, tokens) still counts; `--allow-suspect` counts all of it."
    yield "- **warning**: limits what may be concluded."
    yield "- **note**: for information; the measurement is unaffected."
    for topic, entries in WARNING_TABLE.items():
        yield from ("", f"## {topic}", "", "| code | severity | meaning | what to do |", "|---|---|---|---|")
        for code, entry in entries.items():
            severity = f"{entry.severity}, client times only" if entry.limits_client_times else entry.severity
            yield f"| `{code}` | {severity} | {entry.meaning} | {entry.remedy} |"
    yield from ("", "## Reconciliation checks", "")
    yield "Each check compares two independent records of a run. A fatal one that fails makes the run suspect"
    yield "(`check-failed`); any other that fails is a warning of a comparison."
    yield from ("", "| check | holds when |", "|---|---|")
    yield from (f"| `{name}` | {meaning} |" for name, meaning in CHECKS.items())
    yield from ("", "## Findings", "")
    yield "Conclusions that the numbers support, in the findings list of a report."
    yield from ("", "| code | meaning |", "|---|---|")
    yield from (f"| `{code}` | {meaning} |" for code, meaning in FINDINGS.items())
