"""Pairs of arms to compare, with their one ratio of each metric, and the metrics that decide between them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, TypeAlias

from benchctl.analysis.experiment.columns import TIME_COLUMNS
from benchctl.analysis.experiment.experiment import Arm, Experiment, cell_key
from benchctl.analysis.metrics.steady import MIN_REQUESTS
from benchctl.analysis.metrics.table import OF_STEPS, SERVER_RECORDED, STEADY
from benchctl.analysis.statistics.estimate import (
    UNORDERED,
    BlockDesign,
    Estimator,
    SideRatio,
    side_ratio,
    unpaired_ratio,
)
from benchctl.analysis.validity.answers import Check, differing_counts
from benchctl.errors import NotComparableError, RecordError, UsageError
from benchctl.interop.foreign_readers import exists
from benchctl.profile.model import Profile, VariantSettings, Workload
from benchctl.profile.planning import arms, variant_settings
from benchctl.profile.settings import load_part, load_points, server_part, under_load
from benchctl.records.directory import arm_label, cell_name
from benchctl.records.loaded import LoadedResults, LoadedRun
from benchctl.records.schema import Cell, ResultWarning
from benchctl.units import in_a_row

Pairing: TypeAlias = Literal["interleaved", "same-plan", "unpaired"]
"""``interleaved``: blocks of one experiment. ``same-plan``: two experiments in the same order, not interleaved."""


@dataclass(frozen=True, slots=True)
class Side:
    """A result directory, or one variant of it."""

    path: Path
    variant: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.variant is None else f"{self.path}:{self.variant}"


@dataclass(frozen=True, eq=False, kw_only=True)
class ArmPair:
    """Two arms to compare, with all that a comparison takes of them: values, positions, ratios.

    Invariant: when paired, the runs of both sides are in the order of ``blocks``.
    """

    label: str
    a: Arm
    b: Arm
    sides: tuple[Experiment, Experiment]
    """The experiments of the arms: the same one where both are of one directory."""
    pairing: Pairing
    confidence: float
    """Of every interval."""
    estimator: Estimator

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks in which the runs of both arms are usable."""
        return tuple(sorted(self.a.runs.keys() & self.b.runs.keys()))

    @cached_property
    def a_runs(self) -> tuple[LoadedRun, ...]:
        return self._runs(self.a)

    @cached_property
    def b_runs(self) -> tuple[LoadedRun, ...]:
        return self._runs(self.b)

    def _runs(self, arm: Arm) -> tuple[LoadedRun, ...]:
        blocks = sorted(arm.runs) if self.pairing == "unpaired" else self.blocks
        return tuple(arm.runs[block] for block in blocks)

    @property
    def is_ordered(self) -> bool:
        """Both sides ran inside the same blocks, in different positions."""
        return self.pairing == "interleaved" and self.a.key != self.b.key

    @cached_property
    def design(self) -> BlockDesign:
        """The blocks; positions count only where both sides ran inside the same ones."""
        if self.pairing == "unpaired":
            return UNORDERED
        if not self.is_ordered:
            return BlockDesign(self.blocks)
        a, b = ([run.record.position for run in side] for side in (self.a_runs, self.b_runs))
        apart = tuple(later - earlier for earlier, later in zip(a, b, strict=True))
        return BlockDesign(self.blocks, apart, tuple(map(self.sides[0].offset, self.a_runs)))

    @property
    def runs(self) -> tuple[LoadedRun, ...]:
        """The runs of both sides."""
        return (*self.a_runs, *self.b_runs)

    def values(
        self, column: str, *, of_few: bool = False
    ) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        """The numbers of each side that count, run by run."""
        a = tuple(self.sides[0].counted(run, column, of_few=of_few) for run in self.a_runs)
        return a, tuple(self.sides[1].counted(run, column, of_few=of_few) for run in self.b_runs)

    def ratio(self, column: str, *, of_few: bool = False) -> SideRatio | None:
        """The one ratio of a metric or another column; None where no block knows it on both sides.

        More than two arms share the effect of the position, two estimate their own with their ratio.
        """
        arms = self.a.key, self.b.key, self.blocks, self.sides[1]
        key, experiment = (*arms, column, of_few, self.confidence, self.estimator), self.sides[0]
        if key in experiment.ratios:
            return experiment.ratios[key]
        a, b = self.values(column, of_few=of_few)
        if self.pairing == "unpaired":
            ratio = unpaired_ratio(a, b, self.confidence)
        else:
            is_pooled = self.is_ordered and experiment.is_pooled(self.a.cell)
            slope = experiment.position_slope(column, self.a.cell, of_few=of_few) if is_pooled else None
            is_adjusted = slope is not None if is_pooled else self.is_ordered and column in TIME_COLUMNS
            design = replace(self.design, slope=slope) if is_adjusted else BlockDesign(self.blocks)
            ratio = side_ratio(a, b, design, self.confidence, self.estimator)
        experiment.ratios[key] = ratio
        return ratio

    def prompt_differences(self) -> tuple[ResultWarning, ...]:
        """A warning where the two sides count the same prompts differently."""
        return differing_counts(self.a_runs, self.b_runs, (self.a.label, self.b.label))

    def checks(self) -> Iterator[tuple[LoadedRun, Check]]:
        """The checks of every run of both sides."""
        yield from ((run, check) for run in self.a_runs for check in self.sides[0].checks(run))
        yield from ((run, check) for run in self.b_runs for check in self.sides[1].checks(run))


def parse_side(text: str) -> Side:
    """The side of ``DIR`` or ``DIR:variant``; an existing directory may itself have a colon
    in its name.
    """
    path, colon, variant = text.rpartition(":")
    if not colon or (exists(Path(text)) and Path(text).is_dir()):
        return Side(Path(text))
    if not path or not variant:
        raise UsageError(
            f"{text!r} is not a side to compare; write DIR or DIR:variant, for example results/x:baseline"
        )
    return Side(Path(path), variant)


def arms_of(experiment: Experiment, variant: str | None = None) -> tuple[Arm, ...]:
    """The arms of the plan, or those of one variant: the baseline first, then by variant and factor values.

    Raises RecordError where a run that is marked done is damaged, because its numbers would be those of a part, and
    UsageError for a variant that the plan does not have.
    """
    damage = [message for run in experiment.results.runs for message in run.damage]
    if damage:
        lines = "\n".join(f"  {message}" for message in damage)
        raise RecordError(f"a run that is marked done cannot be read whole:\n{lines}")
    arms = tuple(arm for arm in experiment.arms if variant in (None, arm.variant))
    if not arms and variant is not None:
        variants = ", ".join(dict.fromkeys(arm.variant for arm in experiment.arms))
        raise UsageError(f"{experiment.path} has no variant {variant!r}; it has {variants}")
    return arms


def match_cells(
    a: Experiment,
    a_side: Side,
    b: Experiment,
    b_side: Side,
    confidence: float = 0.95,
    estimator: Estimator | None = None,
) -> tuple[ArmPair, ...]:
    """Pairs of arms to compare; a variant named on one side holds for both. Without ``estimator`` the profile's.

    With two variants, each cell of B is paired with the same cell of A, or with the only one that A has; with none,
    every arm with its namesake.
    """
    a_variant, b_variant = a_side.variant or b_side.variant, b_side.variant or a_side.variant
    a_arms = arms_of(a, a_variant)
    b_arms = arms_of(b, b_variant)
    pairing = pairing_of(a.results, b.results)
    if a_variant == b_variant:
        a_by_key = {arm.key: arm for arm in a_arms}
        pairs = [(a_by_key[arm.key], arm) for arm in b_arms if arm.key in a_by_key]
    else:
        of_a, of_b = ({cell_key(server_part(arm.cell)) for arm in arms} for arms in (a_arms, b_arms))
        pairs = [
            (left, right)
            for right in b_arms
            for left in a_arms
            if _is_pair(left.cell, right.cell, len(of_a) == 1 or (len(of_b) == 1 and not server_part(right.cell)))
        ]
    if not pairs:
        labels = " against ".join(" | ".join(arm.label for arm in arms) for arms in (a_arms, b_arms))
        raise NotComparableError(
            f"{a_side} and {b_side} share no cell: {labels}. Compare variants of one directory (DIR:baseline "
            "DIR:guided), or directories of the same sweep"
        )
    is_whole = a_variant is None
    return tuple(
        ArmPair(
            label=right.label if is_whole else cell_name(right.cell) or cell_name(left.cell) or right.variant,
            a=left,
            b=right,
            sides=(a, b),
            pairing=pairing,
            confidence=confidence,
            estimator=estimator or a.estimator,
        )
        for left, right in pairs
    )


def baseline_pairs(experiment: Experiment, confidence: float = 0.95) -> tuple[ArmPair, ...]:
    """Every other arm against the baseline, as far as an unfinished or damaged directory has them.

    A baseline that was swept itself is compared in the same cell, one that was not with every cell of its load.
    """
    name = experiment.results.manifest.baseline
    baselines = [arm for arm in experiment.arms if arm.variant == name]
    return tuple(
        pair_in(experiment, baseline, arm, confidence)
        for arm in experiment.arms
        if arm.variant != name
        for baseline in baselines
        if is_reference(baseline.cell, arm.cell) and arm.runs.keys() & baseline.runs.keys()
    )


def is_reference(a: Cell, b: Cell) -> bool:
    """True where an arm in cell ``a`` is what one in ``b`` is compared with: its load is the same, and its server
    is in the same cell or was not swept.
    """
    return _is_pair(a, b, not server_part(a))


def pair_in(experiment: Experiment, a: Arm, b: Arm, confidence: float) -> ArmPair:
    """Two arms of one directory."""
    return ArmPair(
        label=b.label,
        a=a,
        b=b,
        sides=(experiment, experiment),
        pairing="interleaved",
        confidence=confidence,
        estimator=experiment.estimator,
    )


def unmatched_arms(a: LoadedResults, b: LoadedResults, pairs: Sequence[ArmPair]) -> tuple[str, ...]:
    """Labels of arms of the compared variants without a counterpart."""
    labels = []
    for results, paired in ((a, [pair.a for pair in pairs]), (b, [pair.b for pair in pairs])):
        variants, matched = {arm.variant for arm in paired}, {arm.key for arm in paired}
        for planned in results.plan.runs:
            key = planned.variant, cell_key(planned.cell)
            if planned.variant in variants and key not in matched:
                labels.append(f"{arm_label(planned.variant, planned.cell)} of {results.path}")
    return tuple(dict.fromkeys(labels))


def pairing_of(a: LoadedResults, b: LoadedResults) -> Pairing:
    """The correspondence of blocks of two directories; a copy of a directory is the same experiment."""
    if a.manifest == b.manifest and a.plan == b.plan:
        return "interleaved"
    same_plan = a.manifest.seed == b.manifest.seed and a.plan == b.plan
    return "same-plan" if same_plan else "unpaired"


def _is_pair(a: Cell, b: Cell, is_any_server: bool) -> bool:
    """True for cells with the same load, and the same server unless any will do."""
    return cell_key(load_part(a)) == cell_key(load_part(b)) and (is_any_server or cell_key(a) == cell_key(b))


_LOST_RECORDS: Final = frozenset(
    {"steps-missing", "steps-damaged", "gpu-sampler-failed", "host-sampler-failed", "prometheus-sampler-failed"}
)
"""Warnings of runs whose records should be there: what these lack is lost, not unrecorded."""


def deciding_between(primary: Sequence[str], pair: ArmPair) -> tuple[str, ...]:
    """The metrics that decide between two measured arms: those of ``primary`` that their servers record, within the
    steady windows of the loads where the profile says so.
    """
    a, b = pair.sides
    unrecorded = unrecorded_metrics(a, pair.a_runs) | unrecorded_metrics(b, pair.b_runs)
    runs = [*((a, run) for run in pair.a_runs), *((b, run) for run in pair.b_runs)]
    return in_window(
        [name for name in primary if name not in unrecorded],
        a.profile_or_none,
        lambda name: bool(runs) and all(side.metrics(run).get(name) is not None for side, run in runs),
    )


def deciding_among(experiment: Experiment, pairs: Iterable[ArmPair]) -> tuple[str, ...]:
    """The metrics that decide between some of these pairs; without pairs those that would with another arm."""
    primary = () if experiment.profile_or_none is None else experiment.profile.primary_metrics
    return tuple(dict.fromkeys(name for pair in pairs for name in deciding_between(primary, pair))) or primary


def in_window(names: Sequence[str], profile: Profile | None, has_window: Callable[[str], bool]) -> tuple[str, ...]:
    """Each metric, or in its place that of the steady window; ``has_window`` tells whether all runs know that."""
    window = "auto" if profile is None else profile.comparison.window
    decisive = {
        name: STEADY[name]
        for name in names
        if name in STEADY and (window == "steady" or (window == "auto" and has_window(STEADY[name])))
    }
    return tuple(dict.fromkeys(decisive.get(name, name) for name in names))


def undecided(primary: Sequence[str], deciding: Sequence[str]) -> tuple[str, ...]:
    """The metrics of ``primary`` that are not among those that decide, neither whole nor in the steady window."""
    return tuple(name for name in primary if name not in deciding and STEADY.get(name) not in deciding)


def deciding_in_plan(
    primary: Sequence[str], profile: Profile, has_steps: Callable[[VariantSettings], bool]
) -> tuple[str, ...]:
    """The metrics that will decide between some pair of arms of a profile that is yet to be measured, as
    ``deciding_between`` has them, on an engine of which ``has_steps`` tells where it records steps.

    A window counts where every load point has one.
    """
    has_window = all(_has_window(under_load(profile, point).workload) for point in load_points(profile))
    has_step_log = [(name, has_steps(variant_settings(profile, name, cell))) for name, cell in arms(profile)]
    baseline = any(steps for name, steps in has_step_log if name == profile.baseline)
    others = any(steps for name, steps in has_step_log if name != profile.baseline)
    recorded = [name for name in primary if name not in OF_STEPS or (baseline and others)]
    return in_window(recorded, profile, lambda _name: has_window)


def _has_window(workload: Workload) -> bool:
    """True where enough requests of a load will have ended before the last is sent for a steady window: all but two
    for each slot of a closed loop, and nine in ten of an open one.
    """
    arrival, num_requests = workload.arrival, workload.num_prompts
    num_ended = {True: 0.9 * num_requests, False: num_requests - 2 * (arrival.max_concurrency or num_requests)}
    return num_ended[arrival.is_open_loop] >= MIN_REQUESTS


def unrecorded_text(unrecorded: Sequence[str], deciding: Sequence[str]) -> str:
    """``step_ms is not recorded by this server; tpot_ms and wall_s decide``."""
    verb = "is" if len(unrecorded) == 1 else "are"
    missing = f"{in_a_row(unrecorded)} {verb} not recorded by this server"
    if not deciding:
        return f"{missing}, and no other primary metric is left; name one with --metrics, such as wall_s"
    return f"{missing}; {in_a_row(deciding)} {'decides' if len(deciding) == 1 else 'decide'}"


def unrecorded_metrics(experiment: Experiment, runs: Sequence[LoadedRun]) -> frozenset[str]:
    """The metrics that the server of these runs does not record: no run has them, and none lost its records.

    Only metrics from the server's own records are among them. One that the client measures is never unrecorded.
    """
    if not runs or any(warning.code in _LOST_RECORDS for run in runs for warning in run.record.warnings):
        return frozenset()
    recorded = {name for run in runs for name, value in experiment.metrics(run).items() if value is not None}
    return SERVER_RECORDED - recorded
