"""Usability of runs: which of them count, and for what, in every table, chart and comparison.

A run counts if it ended as planned, passes the gates of its profile and can be read completely. Warnings exclude
only what they affect: if the client was late or short of processor time, its times do not count, while steps,
sections and tokens, which the server measured, do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchctl.analysis.metrics.request_timing import measured
from benchctl.analysis.validity.gates import violated_gates
from benchctl.profile.model import Gate
from benchctl.records.loaded import DAMAGED_LINE, LoadedRun
from benchctl.records.record import ResultWarning
from benchctl.records.run import RunRecord
from benchctl.records.warning_codes import CHECK_FAILED, CLIENT_SUSPECT_CODES, LIGHTER_LOAD_CODES, SUSPECT_CODES


@dataclass(frozen=True, slots=True)
class Usability:
    """The parts of a run that count. ``excluded`` is the reason why none does, ``client_excluded`` why the client's
    times do not; None if they count. ``label`` qualifies server times that count nevertheless.
    """

    excluded: str | None = None
    client_excluded: str | None = None
    label: str | None = None

    @property
    def is_usable(self) -> bool:
        return self.excluded is None


def usability_of(run: LoadedRun, gates: Sequence[Gate], *, allow_suspect: bool = False) -> Usability:
    """Decide which parts of a run count; with ``allow_suspect`` all of a suspect run that can be read completely.

    Failed requests and failed checks do not exclude a run: they make its cell incomplete or invalid, whatever the
    gates. If failed requests are a gate themselves, they do exclude it.
    """
    record = run.record
    if record.state == "failed" and record.failure is not None:
        return Usability(f"failed ({record.failure.cause}): {record.failure.message}")
    if record.state not in {"done", "suspect"}:
        return Usability(record.state)
    if run.is_damaged:
        return Usability(f"damaged: {'; '.join(run.damage)}")
    decides_otherwise = _contradicts_itself(run) or (_has_failures(run) and "failed-requests" not in gates)
    if not decides_otherwise and (violated := violated_gates(run, gates)):
        return Usability("; ".join(map(str, violated)))
    return _of_suspect(run, allow_suspect=allow_suspect) if record.state == "suspect" else Usability()


def decisive_warnings(record: RunRecord) -> tuple[ResultWarning, ...]:
    """The warnings that made a run suspect; all of its warnings if none of them has that severity."""
    decided = tuple(warning for warning in record.warnings if warning.code in SUSPECT_CODES)
    return decided or tuple(record.warnings)


def _of_suspect(run: LoadedRun, *, allow_suspect: bool) -> Usability:
    decided = decisive_warnings(run.record)
    is_client_alone = bool(decided) and all(warning.code in CLIENT_SUSPECT_CODES for warning in decided)
    is_late = any(warning.code in CLIENT_SUSPECT_CODES for warning in decided)
    if _contradicts_itself(run) or (not is_late and _has_failures(run)):
        return Usability()
    damage = [warning.message for warning in run.warnings if warning.code == DAMAGED_LINE]
    if damage:
        return Usability(f"suspect, and cannot be read completely: {'; '.join(damage)}")
    if allow_suspect:
        return Usability()
    why = "; ".join(f"{warning.code}: {warning.message}" for warning in decided) or "no reason recorded"
    if is_client_alone and not _has_failures(run):
        is_lighter = any(warning.code in LIGHTER_LOAD_CODES for warning in decided)
        label = "the server met a lighter load than planned, so its step times are those of smaller batches"
        return Usability(client_excluded=why, label=label if is_lighter else None)
    return Usability(f"suspect: {why} (--allow-suspect counts it)")


def _contradicts_itself(run: LoadedRun) -> bool:
    return any(warning.code == CHECK_FAILED for warning in run.record.warnings)


def _has_failures(run: LoadedRun) -> bool:
    return any(request.error is not None for request in measured(run.requests))
