"""Pairs of arms to compare, from two sides.

Two arms of one experiment are paired by recorded block; arms of two experiments by block index where both followed
the same plan, and otherwise not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from benchctl.analysis.experiment.arms import Arm, cell_key
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.errors import NotComparableError, RecordError, UsageError
from benchctl.interop.readers.files import exists
from benchctl.records.archive.opening import is_archive
from benchctl.records.directory import arm_label, cell_name
from benchctl.records.loaded import LoadedResults, LoadedRun

Pairing: TypeAlias = Literal["interleaved", "same-plan", "unpaired"]
"""``interleaved``: blocks of one experiment. ``same-plan``: two experiments in the same order, not interleaved."""


@dataclass(frozen=True, slots=True)
class Side:
    """A result directory or an archive of one, or one variant of it."""

    path: Path
    variant: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.variant is None else f"{self.path}:{self.variant}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPair:
    """Two arms to compare. Invariant: when paired, both sequences of runs are in the order of ``blocks``."""

    label: str
    a: Arm
    b: Arm
    pairing: Pairing

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks in which the runs of both arms are usable."""
        return tuple(sorted(self.a.runs.keys() & self.b.runs.keys()))

    @property
    def a_runs(self) -> tuple[LoadedRun, ...]:
        return self._runs(self.a)

    @property
    def b_runs(self) -> tuple[LoadedRun, ...]:
        return self._runs(self.b)

    @property
    def is_ordered(self) -> bool:
        """Both sides ran inside the same blocks, in different positions."""
        return self.pairing == "interleaved" and self.a.key != self.b.key

    def _runs(self, arm: Arm) -> tuple[LoadedRun, ...]:
        blocks = sorted(arm.runs) if self.pairing == "unpaired" else self.blocks
        return tuple(arm.runs[block] for block in blocks)


def parse_side(text: str) -> Side:
    """The side of ``DIR`` or ``DIR:variant``; an existing directory, or an archive of one, may itself have a colon
    in its name.
    """
    path, colon, variant = text.rpartition(":")
    if not colon or (exists(Path(text)) and Path(text).is_dir()) or is_archive(Path(text)):
        return Side(Path(text))
    if not path or not variant:
        raise UsageError(
            f"{text!r} is not a side to compare; write DIR or DIR:variant, for example results/x:baseline"
        )
    return Side(Path(path), variant)


def arms_of(experiment: Experiment) -> tuple[Arm, ...]:
    """Every arm of the plan: the baseline first, then by variant and factor values.

    Raises RecordError where a run that is marked done is damaged, because its numbers would be those of a part.
    """
    damage = [message for run in experiment.results.runs for message in run.damage]
    if damage:
        lines = "\n".join(f"  {message}" for message in damage)
        raise RecordError(f"a run that is marked done cannot be read whole:\n{lines}")
    return experiment.arms


def match_cells(a: Experiment, a_side: Side, b: Experiment, b_side: Side) -> tuple[CellPair, ...]:
    """Pairs of arms to compare; a variant named on one side holds for both.

    With two variants, each cell of B is paired with the same cell of A, or with the only one that A has; with none,
    every arm with its namesake.
    """
    a_variant, b_variant = a_side.variant or b_side.variant, b_side.variant or a_side.variant
    a_arms = _arms_of_variant(a, a_variant)
    b_arms = _arms_of_variant(b, b_variant)
    pairing = pairing_of(a.results, b.results)
    if a_variant == b_variant:
        a_by_key = {arm.key: arm for arm in a_arms}
        pairs = [(a_by_key[arm.key], arm) for arm in b_arms if arm.key in a_by_key]
    else:
        pairs = [(left, right) for right in b_arms for left in a_arms if _is_pair(left, a_arms, right, b_arms)]
    if not pairs:
        labels = " against ".join(" | ".join(arm.label for arm in arms) for arms in (a_arms, b_arms))
        raise NotComparableError(
            f"{a_side} and {b_side} share no cell: {labels}. Compare variants of one directory (DIR:baseline "
            "DIR:guided), or directories of the same sweep"
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
    """Every other arm against the baseline, as far as an unfinished or damaged directory has them.

    A baseline that was swept itself is compared in the same cell, one that was not with every cell.
    """
    name = experiment.results.manifest.baseline
    baselines = [arm for arm in experiment.arms if arm.variant == name]
    return tuple(
        CellPair(label=arm.label, a=baseline, b=arm, pairing="interleaved")
        for arm in experiment.arms
        if arm.variant != name
        for baseline in baselines
        if (cell_key(baseline.cell) == cell_key(arm.cell) or not baseline.cell)
        and arm.runs.keys() & baseline.runs.keys()
    )


def unmatched_arms(a: LoadedResults, b: LoadedResults, pairs: Sequence[CellPair]) -> tuple[str, ...]:
    """Labels of arms of the compared variants without a counterpart."""
    labels = []
    for results, arms in ((a, [pair.a for pair in pairs]), (b, [pair.b for pair in pairs])):
        variants, matched = {arm.variant for arm in arms}, {arm.key for arm in arms}
        for planned in results.plan.runs:
            key = planned.variant, cell_key(planned.cell)
            if planned.variant in variants and key not in matched:
                labels.append(f"{arm_label(planned.variant, planned.cell)} of {results.source}")
    return tuple(dict.fromkeys(labels))


def pairing_of(a: LoadedResults, b: LoadedResults) -> Pairing:
    """The correspondence of blocks of two directories; a copy of a directory is the same experiment."""
    if a.manifest == b.manifest and a.plan == b.plan:
        return "interleaved"
    same_plan = a.manifest.seed == b.manifest.seed and a.plan == b.plan
    return "same-plan" if same_plan else "unpaired"


def _is_pair(left: Arm, a_arms: Sequence[Arm], right: Arm, b_arms: Sequence[Arm]) -> bool:
    if cell_key(left.cell) == cell_key(right.cell):
        return True
    return len(a_arms) == 1 or (len(b_arms) == 1 and not right.cell)


def _arms_of_variant(experiment: Experiment, variant: str | None) -> tuple[Arm, ...]:
    arms = arms_of(experiment)
    if variant is None:
        return arms
    of_variant = tuple(arm for arm in arms if arm.variant == variant)
    if not of_variant:
        variants = ", ".join(dict.fromkeys(arm.variant for arm in arms))
        raise UsageError(f"{experiment.source} has no variant {variant!r}; it has {variants}")
    return of_variant
