"""Alterations of result files since they were measured, as warnings and as a refusal.

Machine-state gates: conditions that a run must meet to be compared.
Usability of runs: which of them count, and for what, in every table, chart and comparison.
A remark on the secrets that were replaced in what servers wrote.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchctl.analysis.metrics.latency import measured
from benchctl.analysis.metrics.run import load_window_ns
from benchctl.errors import AlteredError
from benchctl.profile.model import Gate
from benchctl.records.integrity import AlterationKind, Verification
from benchctl.records.loaded import DAMAGED_LINE, LoadedResults, LoadedRun
from benchctl.records.record import RunRecord
from benchctl.records.schema import FOREIGN_GPU_PROCESS, ResultWarning
from benchctl.records.warning_codes import (
    CHECK_FAILED,
    CLIENT_SUSPECT_CODES,
    LIGHTER_LOAD_CODES,
    SUSPECT_CODES,
    warnings_of,
)

_NUM_NAMED: Final = 4
"""Number of files that a warning names; a refusal names all."""
_MEANING: Final[dict[AlterationKind, str]] = {
    "altered-file": "not what was recorded",
    "missing-file": "files that were recorded are not there",
}


def require_intact(
    verified: Mapping[Path, Verification], differences: Sequence[object], *, allow_altered: bool
) -> tuple[ResultWarning, ...]:
    """Warnings about alterations in the directories of two sides since they were measured.

    Raises AlteredError if they affect numbers, unless ``allow_altered``; it names every file, and the undeclared
    ``differences`` of the sides.
    """
    refused = [f"{path}/{each}" for path, side in verified.items() for each in side.alterations if each.decides]
    if refused and not allow_altered:
        listed = "".join(f"  {line}\n" for line in refused)
        if differences:
            listed += "and the two sides differ in more than the declared factor:\n"
            listed += "".join(f"  {difference}\n" for difference in differences)
        raise AlteredError(
            f"what is compared is not what was measured:\n{listed}"
            "Restore these files from a copy, or measure again; --allow-altered compares them as they are"
        )
    return tuple(warning for path, side in verified.items() for warning in alteration_warnings(path, side))


def alteration_warnings(path: Path, verified: Verification) -> tuple[ResultWarning, ...]:
    """One warning for each kind of alteration, with the first files."""
    by_kind: dict[AlterationKind, list[str]] = {}
    for alteration in verified.alterations:
        by_kind.setdefault(alteration.kind, []).append(str(alteration))
    warnings = []
    for kind, texts in by_kind.items():
        more = len(texts) - _NUM_NAMED
        others = f"; and {more} more, which 'benchctl verify' lists" if more > 0 else ""
        message = f"{_MEANING[kind]}: {'; '.join(texts[:_NUM_NAMED])}{others}"
        warnings.append(ResultWarning(code=kind, message=message, where=str(path)))
    return tuple(warnings)


THROTTLING: Final = frozenset({"hw-slowdown", "hw-thermal", "hw-power-brake", "sw-thermal"})
"""Clock reasons of a device that was slowed down, as named in ``GpuSample.throttle_reasons``."""


def violated_gates(run: LoadedRun, gates: Sequence[Gate]) -> tuple[str, ...]:
    """The ``gates`` that the run did not pass, with the observations, in order. Missing records violate no gate."""
    observed = _observations(run)
    return tuple(f"gate {gate}: {observed[gate]}" for gate in gates if observed[gate] is not None)


def clock_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """Warnings about lowered device clocks during the load, whatever the gates."""
    capped = "the power limit held the clocks of a GPU down during the load, as is normal on busy devices"
    is_capped = "sw-power-cap" in _clock_reasons(run)
    throttled = _observations(run)["throttling"]
    return warnings_of({"gpu-throttled": throttled, "gpu-power-capped": capped if is_capped else None})


def _clock_reasons(run: LoadedRun) -> frozenset[str]:
    """Clock reasons of all devices during the load."""
    window = load_window_ns(run)
    during = (sample for sample in run.gpu if window is not None and window[0] <= sample.t_ns <= window[1])
    return frozenset(reason for sample in during for reason in sample.throttle_reasons or ())


def _observations(run: LoadedRun) -> Mapping[Gate, str | None]:
    """The reason why a run does not pass each gate; None where it does."""
    slowing = ", ".join(sorted(THROTTLING & _clock_reasons(run)))
    foreign = [warning.message for warning in run.record.warnings if warning.code == FOREIGN_GPU_PROCESS]
    requests = measured(run.requests)
    num_failed = sum(request.error is not None for request in requests)
    return {
        "throttling": f"a GPU slowed itself down during the load ({slowing})" if slowing else None,
        "foreign-gpu-process": "; ".join(foreign) or None,
        "failed-requests": f"{num_failed} of {len(requests)} requests failed" if num_failed else None,
    }


@dataclass(frozen=True, slots=True)
class Usability:
    """The parts of a run that count. ``excluded`` is the reason why none does, ``client_excluded`` why the client's
    times do not; None if they count.
    """

    excluded: str | None = None
    client_excluded: str | None = None

    @property
    def is_usable(self) -> bool:
        """True where the run has a place in tables and comparisons, also in one that it makes invalid."""
        return self.excluded is None


def usability_of(run: LoadedRun, gates: Sequence[Gate], *, allow_suspect: bool = False) -> Usability:
    """Decide which parts of a run count; with ``allow_suspect`` all of a suspect run that can be read completely.

    Failed checks do not exclude a run, whatever the gates: it keeps its block, so that nobody overlooks it, and
    makes its comparison invalid. So do failed requests, unless they are a gate themselves.
    """
    record = run.record
    if record.state == "failed" and record.failure is not None:
        return Usability(f"failed ({record.failure.cause}): {record.failure.message}")
    if record.state not in {"done", "suspect"}:
        return Usability(record.state)
    if run.is_damaged:
        return Usability(f"damaged: {'; '.join(run.damage)}")
    decided, has_failing = decisive_warnings(record), any(request.error for request in measured(run.requests))
    codes = {warning.code for warning in decided}
    if CHECK_FAILED in codes:
        return Usability()
    if (not has_failing or "failed-requests" in gates) and (violated := violated_gates(run, gates)):
        return Usability("; ".join(violated))
    if record.state == "done" or (has_failing and not codes & CLIENT_SUSPECT_CODES):
        return Usability()
    if damage := [warning.message for warning in run.warnings if warning.code == DAMAGED_LINE]:
        return Usability(f"suspect, and cannot be read completely: {'; '.join(damage)}")
    if allow_suspect:
        return Usability()
    why = "; ".join(f"{warning.code}: {warning.message}" for warning in decided) or "no reason recorded"
    if codes and codes <= CLIENT_SUSPECT_CODES and not has_failing:
        lighter = "the server met a lighter load than planned, so its step times are those of smaller batches"
        return Usability(client_excluded=f"{why} ({lighter})" if codes & LIGHTER_LOAD_CODES else why)
    return Usability(f"suspect: {why} (--allow-suspect counts it)")


def decisive_warnings(record: RunRecord) -> tuple[ResultWarning, ...]:
    """The warnings that made a run suspect; all of its warnings if none of them has that severity."""
    decided = tuple(warning for warning in record.warnings if warning.code in SUSPECT_CODES)
    return decided or tuple(record.warnings)


def redaction_warnings(results: LoadedResults) -> tuple[ResultWarning, ...]:
    """One note on all runs together; none where nothing was replaced."""
    counts = sum((Counter(run.record.redactions) for run in results.runs), Counter[str]())
    if not counts:
        return ()
    kinds = [f"{label} once" if count == 1 else f"{label} {count} times" for label, count in counts.most_common()]
    secrets = "a secret was" if counts.total() == 1 else f"{counts.total()} secrets were"
    message = f"{secrets} replaced in what the servers wrote: {', '.join(kinds)}"
    return (ResultWarning(code="secrets-redacted", message=message),)
