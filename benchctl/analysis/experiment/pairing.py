"""Which runs stand against which: sides, arms, cells and blocks.

An arm is one variant in one cell, with its runs by block. Two arms of one experiment are paired by recorded
block; arms of two experiments by block index only when both followed the same plan, and otherwise not at all.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from benchctl.analysis.experiment.experiment import Experiment
from benchctl.errors import NotComparableError, RecordError, UsageError
from benchctl.records.directory import arm_label, cell_name, cell_order
from benchctl.records.loaded import LoadedResults, LoadedRun
from benchctl.records.record import Cell

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
    """One variant in one cell: the usable run of each block, and why the others are not usable.

    ``client_excluded`` says of usable runs why nothing counts that the client timed. ``positions`` are those of the
    plan.
    """

    variant: str
    cell: Cell
    runs: dict[int, LoadedRun]
    excluded: dict[int, str]
    client_excluded: dict[int, str]
    positions: dict[int, int]

    def only(self, blocks: Collection[int]) -> "Arm":
        """The arm in some of its blocks."""
        return replace(self, runs={block: run for block, run in self.runs.items() if block in blocks})

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

    @property
    def is_ordered(self) -> bool:
        """Both sides ran inside the same blocks, so that positions in the block tell them apart."""
        return self.pairing == "interleaved" and self.a.key != self.b.key

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


def arms_of(experiment: Experiment) -> tuple[Arm, ...]:
    """Every arm of the plan: the baseline first, then by variant and factor values.

    Raises RecordError when a run that says ``done`` is damaged, because its numbers would be those of a part.
    """
    _refuse_damage(experiment.results)
    return readable_arms(experiment)


def readable_arms(experiment: Experiment) -> tuple[Arm, ...]:
    """Every arm of the plan as ``arms_of``; damaged runs are excluded like others that do not count."""
    results = experiment.results
    begun = {run.record.run_id: run for run in results.runs}
    arms: dict[tuple[str, str], Arm] = {}
    for planned in results.plan.runs:
        fresh = Arm(
            variant=planned.variant, cell=planned.cell, runs={}, excluded={}, client_excluded={}, positions={}
        )
        arm = arms.setdefault(fresh.key, fresh)
        run = begun.get(planned.run_id)
        if run is None:
            arm.excluded[planned.block] = f"{planned.run_id}: not begun"
            continue
        usability = experiment.usability(run)
        if usability.excluded is not None:
            arm.excluded[planned.block] = f"{planned.run_id}: {usability.excluded}"
            continue
        arm.runs[planned.block] = run
        arm.positions[planned.block] = planned.position
        if usability.client_excluded is not None:
            label = "" if usability.label is None else f" ({usability.label})"
            arm.client_excluded[planned.block] = f"{planned.run_id}: {usability.client_excluded}{label}"
    baseline = results.manifest.baseline
    return tuple(
        sorted(arms.values(), key=lambda arm: (arm.variant != baseline, arm.variant, cell_order(arm.cell)))
    )


def _refuse_damage(results: LoadedResults) -> None:
    damage = [message for run in results.runs for message in run.damage]
    if damage:
        listed = "\n".join(f"  {message}" for message in damage)
        raise RecordError(f"a run that is marked done cannot be read whole:\n{listed}")


def match_cells(a: Experiment, a_side: Side, b: Experiment, b_side: Side) -> tuple[CellPair, ...]:
    """The cells to compare.

    With a variant on both sides, each cell of B meets the same cell of A or, where A has but one, that one. With
    none, every arm meets its namesake. A variant named on one side holds for both.
    """
    a_variant, b_variant = a_side.variant or b_side.variant, b_side.variant or a_side.variant
    a_arms = _arms_of_variant(a, a_variant)
    b_arms = _arms_of_variant(b, b_variant)
    pairing = pairing_of(a.results, b.results)
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


def baseline_pairs(experiment: Experiment) -> tuple[CellPair, ...]:
    """Every arm against the baseline of its block, as far as an unfinished or damaged directory has them."""
    baseline, *others = readable_arms(experiment) or (None,)
    if baseline is None or baseline.variant != experiment.results.manifest.baseline:
        return ()
    return tuple(
        CellPair(label=arm.label, a=baseline, b=arm, pairing="interleaved")
        for arm in others
        if arm.runs.keys() & baseline.runs.keys()
    )


def unmatched_arms(a: LoadedResults, b: LoadedResults, pairs: Sequence[CellPair]) -> tuple[str, ...]:
    """Arms of the compared variants that found no counterpart."""
    found = []
    for results, arms in ((a, [pair.a for pair in pairs]), (b, [pair.b for pair in pairs])):
        variants, matched = {arm.variant for arm in arms}, {arm.key for arm in arms}
        for planned in results.plan.runs:
            key = planned.variant, _cell_key(planned.cell)
            if planned.variant in variants and key not in matched:
                found.append(f"{arm_label(planned.variant, planned.cell)} of {results.path}")
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


def _arms_of_variant(experiment: Experiment, variant: str | None) -> tuple[Arm, ...]:
    arms = arms_of(experiment)
    if variant is None:
        return arms
    chosen = tuple(arm for arm in arms if arm.variant == variant)
    if not chosen:
        known = ", ".join(dict.fromkeys(arm.variant for arm in arms))
        raise UsageError(f"{experiment.path} has no variant {variant!r}; it has {known}")
    return chosen


def _cell_key(cell: Cell) -> str:
    return cell_name(dict(sorted(cell.items())))


def _labels(arms: Sequence[Arm]) -> str:
    return " | ".join(arm.label for arm in arms)
