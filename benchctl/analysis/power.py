"""The power of an experiment before it is measured: minimum detectable effects, and the blocks that they take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.compare.metric import roles_of
from benchctl.analysis.experiment.pairing import deciding_in_plan, unrecorded_text
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.planning.noise_floor import is_repeated_baseline
from benchctl.analysis.planning.stopping_rule import stopping_rule
from benchctl.analysis.statistics.decide import (
    ASSUMED_LOG_SD,
    MAX_BLOCKS_NEEDED,
    Margins,
    blocks_to_detect,
    margins_of,
    minimum_detectable_effect,
)
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS, Estimator
from benchctl.formats import percentage
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms
from benchctl.records.noise import NoiseFloor

DEFAULT_MARGIN: Final = 0.01
"""The default threshold of ``compare``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPower:
    """The power of one primary metric."""

    name: str
    log_sd: float
    is_assumed: bool
    """No A/A experiment measured its scatter."""
    margins: Margins
    """The default threshold, and the noise floor for a change where that is larger."""
    minimum_detectable_effect: float | None
    """Change, as a fraction, that gets its verdict with a power of 0.8; None below six blocks."""
    blocks_needed: int | None
    """Blocks that detect a change of twice the margin with a power of 0.8; None: more than a thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentPower:
    """The power of an experiment."""

    num_blocks: int
    """The maximum where a rule may end the experiment early."""
    num_tests: int
    """Deciding metrics times cells of the variant that has the most."""
    metrics: tuple[MetricPower, ...]
    noise: NoiseFloor | None
    unrecorded: tuple[str, ...] = ()
    """Primary metrics that the engine does not record: they decide nothing."""
    measures_noise: bool = False
    """An A/A experiment, which measures the noise and assumes none."""

    @property
    def is_screening(self) -> bool:
        return self.num_blocks < MIN_PAIRED_BLOCKS


def estimate_power(
    profile: Profile,
    noise: NoiseFloor | None,
    has_steps: Callable[[VariantSettings], bool] = lambda _settings: True,
) -> ExperimentPower | None:
    """The power of ``profile`` on a machine with the scatter of ``noise``; None where it compares nothing.

    ``has_steps`` tells for which settings the engine records steps: metrics that it does not record decide nothing.
    """
    cells = [variant for variant, _ in arms(profile) if variant != profile.baseline]
    roles = roles_of(profile.primary_metrics, is_forced=profile.stop != "natural")
    primary = [name for name, role in roles.items() if role == "deciding" and name in METRICS]
    if not cells or not primary:
        return None
    deciding = deciding_in_plan(primary, profile, has_steps)
    names = deciding.names
    num_tests = len(names) * max(cells.count(variant) for variant in set(cells))
    rule = stopping_rule(profile)
    num_looks = 1 if rule is None else len(rule.look_blocks)
    return ExperimentPower(
        num_blocks=profile.blocks,
        num_tests=num_tests,
        metrics=tuple(
            _metric(name, noise, profile.blocks, num_tests * num_looks, profile.comparison.estimator)
            for name in names
        ),
        unrecorded=deciding.unrecorded,
        noise=noise,
        measures_noise=is_repeated_baseline(profile),
    )


def _metric(
    name: str, noise: NoiseFloor | None, num_blocks: int, num_tests: int, estimator: Estimator
) -> MetricPower:
    """A correction for looks divides alpha as one for tests does, so both are in ``num_tests``."""
    of_metric = None if noise is None else noise.metrics.get(name)
    log_sd = ASSUMED_LOG_SD if of_metric is None else of_metric.log_sd
    margins = margins_of(DEFAULT_MARGIN, 0.0 if of_metric is None else of_metric.floor_frac)
    return MetricPower(
        name=name,
        log_sd=log_sd,
        is_assumed=of_metric is None,
        margins=margins,
        minimum_detectable_effect=minimum_detectable_effect(
            log_sd, num_blocks, num_tests=num_tests, margin_frac=margins.change_frac, estimator=estimator
        ),
        blocks_needed=blocks_to_detect(margins.change_frac, log_sd, num_tests=num_tests, estimator=estimator),
    )


def power_lines(power: ExperimentPower) -> tuple[str, ...]:
    """The minimum detectable effect of each metric, and the blocks that the most demanding one takes."""
    unrecorded = (
        () if not power.unrecorded else (unrecorded_text(power.unrecorded, [m.name for m in power.metrics]),)
    )
    if power.is_screening:
        number = "1 block gives" if power.num_blocks == 1 else f"{power.num_blocks} blocks give"
        return (f"a screening: {number} no verdict; at least {MIN_PAIRED_BLOCKS} are needed", *unrecorded)
    return unrecorded if not power.metrics else (*_power_lines(power), *unrecorded)


def _power_lines(power: ExperimentPower) -> tuple[str, str]:
    tests = "one test" if power.num_tests == 1 else f"{power.num_tests} corrected tests"
    names_by_effect: dict[str, list[str]] = {}
    for metric in power.metrics:
        if metric.minimum_detectable_effect is not None:
            effect = f"±{percentage(metric.minimum_detectable_effect, 2)}"
            names_by_effect.setdefault(effect, []).append(metric.name)
    effects = "; ".join(f"{effect} in {', '.join(names)}" for effect, names in names_by_effect.items())
    conditions = f"with {power.num_blocks} blocks, {tests} and {_scatter(power)}"
    worst = max(power.metrics, key=lambda m: MAX_BLOCKS_NEEDED + 1 if m.blocks_needed is None else m.blocks_needed)
    number = f"more than {MAX_BLOCKS_NEEDED}" if worst.blocks_needed is None else f"about {worst.blocks_needed}"
    margin = "noise floor" if worst.margins.is_noise_floor else "margin"
    needed = (
        f"to detect a change of twice the {margin} ({percentage(worst.margins.change_frac, 2)}) in {worst.name} "
        f"with the same power takes {number} blocks"
    )
    return f"{conditions}, a change of {effects} is detected with a power of 80%", needed


def _scatter(power: ExperimentPower) -> str:
    measured = [m for m in power.metrics if not m.is_assumed]
    if power.noise is None or not measured:
        why = "this experiment measures it" if power.measures_noise else "no A/A on file"
        return f"a scatter of {percentage(ASSUMED_LOG_SD, 2)} between blocks (assumed: {why})"
    scatters = sorted({f"{m.log_sd * 100:.2g}" for m in measured}, key=float)
    reach = scatters[0] if len(scatters) == 1 else f"{scatters[0]} to {scatters[-1]}"
    unknown = ", ".join(m.name for m in power.metrics if m.is_assumed)
    assumed = f"; {percentage(ASSUMED_LOG_SD, 2)} assumed for {unknown}" if unknown else ""
    return f"a scatter of {reach}% between blocks (A/A of {power.noise.measured_at[:10]} on this machine{assumed})"
