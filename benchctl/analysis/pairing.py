"""Which runs stand against which: sides, arms, cells and blocks.

An arm is one variant in one cell, with its runs by block. Two arms of one experiment are paired by recorded
block; arms of two experiments by block index only when both followed the same plan, and otherwise not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from benchctl.analysis.client_guard import CLIENT_DOUBTS
from benchctl.analysis.gates import violated_gates
from benchctl.analysis.reconcile import CHECK_FAILED, profile_of
from benchctl.analysis.request_timing import measured
from benchctl.errors import NotComparableError, RecordError, UsageError
from benchctl.profile.model import Gate
from benchctl.records.directory import (
    DAMAGED_LINE,
    LoadedResults,
    LoadedRun,
    arm_label,
    cell_name,
    cell_order,
)
from benchctl.records.run import Cell

Pairing: TypeAlias = Literal["interleaved", "same-plan", "unpaired"]
"""``interleaved``: blocks of one experiment. ``same-plan``: two experiments in the same order, not interleaved."""


@dataclass(frozen=True, slots=True)
class Side:
    """A result directory, or one variant of it."""

    path: Path
    variant: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.variant is None else f"{self.path}:{self.variant}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One variant in one cell: the usable run of each block, and why the others are not usable."""

    variant: str
    cell: Cell
    runs: dict[int, LoadedRun]
    excluded: dict[int, str]

    @property
    def key(self) -> tuple[str, str]:
        return self.variant, _cell_key(self.cell)

    @property
    def label(self) -> str:
        return arm_label(self.variant, self.cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPair:
    """Two arms that are compared. Invariant: when paired, both sequences of runs belong to ``blocks`` in order."""

    label: str
    a: Arm
    b: Arm
    pairing: Pairing

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of which both runs are usable."""
        return tuple(sorted(self.a.runs.keys() & self.b.runs.keys()))

    @property
    def a_runs(self) -> tuple[LoadedRun, ...]:
        return self._runs(self.a)

    @property
    def b_runs(self) -> tuple[LoadedRun, ...]:
        return self._runs(self.b)

    def _runs(self, arm: Arm) -> tuple[LoadedRun, ...]:
        blocks = sorted(arm.runs) if self.pairing == "unpaired" else self.blocks
        return tuple(arm.runs[block] for block in blocks)


def parse_side(text: str) -> Side:
    """``DIR`` or ``DIR:variant``. A directory whose own name holds a colon is taken as it is."""
    path, colon, variant = text.rpartition(":")
    if not colon or Path(text).is_dir():
        return Side(Path(text))
    if not path or not variant:
        raise UsageError(
            f"{text!r} names no side to compare; write DIR or DIR:variant, for example results/x:baseline"
        )
    return Side(Path(path), variant)


def arms_of(results: LoadedResults, *, allow_suspect: bool = False) -> tuple[Arm, ...]:
    """Every arm of the plan: the baseline first, then by variant and factor values.

    Suspect runs that would be left out count where ``allow_suspect``. Raises RecordError when a run that says
    ``done`` is damaged, because its numbers would be those of a part, and when the profile cannot be read.
    """
    _refuse_damage(results)
    gates = profile_of(results).gates
    begun = {run.record.run_id: run for run in results.runs}
    arms: dict[tuple[str, str], Arm] = {}
    for planned in results.plan.runs:
        fresh = Arm(variant=planned.variant, cell=planned.cell, runs={}, excluded={})
        arm = arms.setdefault(fresh.key, fresh)
        run = begun.get(planned.run_id)
        reason = "not begun" if run is None else _unusable(run, gates, allow_suspect=allow_suspect)
        if run is None or reason is not None:
            arm.excluded[planned.block] = f"{planned.run_id}: {reason}"
        else:
            arm.runs[planned.block] = run
    baseline = results.manifest.baseline
    return tuple(
        sorted(arms.values(), key=lambda arm: (arm.variant != baseline, arm.variant, cell_order(arm.cell)))
    )


def _refuse_damage(results: LoadedResults) -> None:
    damage = [message for run in results.runs for message in run.damage]
    if damage:
        listed = "\n".join(f"  {message}" for message in damage)
        raise RecordError(f"a run that is marked done cannot be read whole:\n{listed}")


def _unusable(run: LoadedRun, gates: Sequence[Gate], *, allow_suspect: bool) -> str | None:
    """Why a run cannot be compared: it did not end, is suspect, or violates a gate that was declared.

    Failed requests and failed checks do not exclude it: they make its cell incomplete or invalid, which is told and
    which no gate of the machine hides. Where failed requests are a gate themselves, they do exclude it.
    """
    record = run.record
    if record.state == "failed" and record.failure is not None:
        return f"failed ({record.failure.cause}): {record.failure.message}"
    if record.state not in {"done", "suspect"}:
        return record.state
    is_told = _contradicts_itself(run) or (_has_failures(run) and "failed-requests" not in gates)
    if not is_told and (violated := violated_gates(run, gates)):
        return "; ".join(map(str, violated))
    return _unusable_suspect(run, allow_suspect=allow_suspect) if record.state == "suspect" else None


def _contradicts_itself(run: LoadedRun) -> bool:
    return any(warning.code == CHECK_FAILED for warning in run.record.warnings)


def _has_failures(run: LoadedRun) -> bool:
    return any(request.error is not None for request in measured(run.requests))


def _unusable_suspect(run: LoadedRun, *, allow_suspect: bool) -> str | None:
    codes = {warning.code for warning in run.record.warnings}
    is_late = not codes.isdisjoint(CLIENT_DOUBTS)
    if _contradicts_itself(run) or (not is_late and _has_failures(run)):
        return None
    if not allow_suspect:
        why = "; ".join(warning.message for warning in run.record.warnings) or "no reason recorded"
        return f"suspect: {why} (--allow-suspect counts it)"
    damage = [warning.message for warning in run.warnings if warning.code == DAMAGED_LINE]
    return f"suspect, and cannot be read whole: {'; '.join(damage)}" if damage else None


def match_cells(
    a: LoadedResults, a_side: Side, b: LoadedResults, b_side: Side, *, allow_suspect: bool = False
) -> tuple[CellPair, ...]:
    """The cells to compare; suspect runs count only where ``allow_suspect``.

    With a variant on both sides, each cell of B meets the same cell of A or, where A has but one, that one. With
    none, every arm meets its namesake. A variant named on one side holds for both.
    """
    a_variant, b_variant = a_side.variant or b_side.variant, b_side.variant or a_side.variant
    a_arms = _arms_of_variant(a, a_variant, allow_suspect=allow_suspect)
    b_arms = _arms_of_variant(b, b_variant, allow_suspect=allow_suspect)
    pairing = pairing_of(a, b)
    if a_variant == b_variant:
        known = {arm.key: arm for arm in a_arms}
        pairs = [(known[arm.key], arm) for arm in b_arms if arm.key in known]
    else:
        pairs = [(left, right) for right in b_arms for left in a_arms if _meets(left, a_arms, right, b_arms)]
    if not pairs:
        raise NotComparableError(
            f"{a_side} and {b_side} share no cell: {_labels(a_arms)} against {_labels(b_arms)}. "
            "Compare variants of one directory (DIR:baseline DIR:guided), or directories of the same sweep"
        )
    is_whole = a_variant is None
    return tuple(
        CellPair(
            label=right.label if is_whole else cell_name(right.cell) or cell_name(left.cell) or right.variant,
            a=left,
            b=right,
            pairing=pairing,
        )
        for left, right in pairs
    )


def unmatched_arms(a: LoadedResults, b: LoadedResults, pairs: Sequence[CellPair]) -> tuple[str, ...]:
    """Arms of the compared variants that found no counterpart."""
    found = []
    for results, arms in ((a, [pair.a for pair in pairs]), (b, [pair.b for pair in pairs])):
        variants, matched = {arm.variant for arm in arms}, {arm.key for arm in arms}
        for planned in results.plan.runs:
            arm = Arm(variant=planned.variant, cell=planned.cell, runs={}, excluded={})
            if arm.variant in variants and arm.key not in matched:
                found.append(f"{arm.label} of {results.path}")
    return tuple(dict.fromkeys(found))


def pairing_of(a: LoadedResults, b: LoadedResults) -> Pairing:
    """How blocks of two directories correspond. A copy of a directory is the same experiment."""
    if a.manifest == b.manifest and a.plan == b.plan:
        return "interleaved"
    same_plan = a.manifest.seed == b.manifest.seed and a.plan == b.plan
    return "same-plan" if same_plan else "unpaired"


def _meets(left: Arm, a_arms: Sequence[Arm], right: Arm, b_arms: Sequence[Arm]) -> bool:
    if _cell_key(left.cell) == _cell_key(right.cell):
        return True
    return len(a_arms) == 1 or (len(b_arms) == 1 and not right.cell)


def _arms_of_variant(results: LoadedResults, variant: str | None, *, allow_suspect: bool) -> tuple[Arm, ...]:
    arms = arms_of(results, allow_suspect=allow_suspect)
    if variant is None:
        return arms
    chosen = tuple(arm for arm in arms if arm.variant == variant)
    if not chosen:
        known = ", ".join(dict.fromkeys(arm.variant for arm in arms))
        raise UsageError(f"{results.path} has no variant {variant!r}; it has {known}")
    return chosen


def _cell_key(cell: Cell) -> str:
    return cell_name(dict(sorted(cell.items())))


def _labels(arms: Sequence[Arm]) -> str:
    return " | ".join(arm.label for arm in arms)
