"""An experiment before it is measured: looks of a stopping rule, noise of the machine, power and the blocks it
takes.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import stdev
from typing import Final

from benchctl.analysis.compare.metric import roles_of
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.ladder import num_looks_of
from benchctl.analysis.experiment.pairing import ArmPair, Side, deciding_in_plan, match_cells, unrecorded_text
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.statistics.decide import (
    ASSUMED_LOG_SD,
    MAX_BLOCKS_NEEDED,
    Margins,
    blocks_to_detect,
    margins_of,
    minimum_detectable_effect,
)
from benchctl.analysis.statistics.estimate import DEFAULT_ESTIMATOR, MIN_PAIRED_BLOCKS, Estimator
from benchctl.analysis.validity.machines import Machine, gpu_names, machines_of, machines_text
from benchctl.errors import NotComparableError, UsageError
from benchctl.formats import percentage
from benchctl.profile.load import NOT_MEASURED
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.loaded import LoadedResults
from benchctl.records.noise import MetricNoise, NoiseFloor
from benchctl.records.record import StoppingRecord
from benchctl.records.schema import SCHEMA_VERSION

ALPHA: Final = 0.05


def stopping_rule(profile: Profile) -> StoppingRecord | None:
    """The rule of a profile, before any look; None where the number of blocks is fixed."""
    if profile.stopping is None:
        return None
    looks = look_blocks(profile.blocks, profile.stopping.looks)
    return StoppingRecord(
        precision_frac=profile.stopping.precision, confidence=1 - ALPHA / len(looks), look_blocks=looks
    )


def look_blocks(most: int, num_looks: int) -> tuple[int, ...]:
    """Numbers of blocks after which there is a look: evenly spaced from 6 to ``most``.

    Invariants: strictly increasing, the last is ``most``, at most ``num_looks`` of them.
    """
    from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS  # noqa: PLC0415 - numpy

    first = min(MIN_PAIRED_BLOCKS, most)
    if num_looks == 1:
        return (most,)
    apart = (most - first) / (num_looks - 1)
    return tuple(sorted({first + math.floor(i * apart + 0.5) for i in range(num_looks)}))


_BLOCKS_OF_A_FLOOR: Final = 8


def noise_of_experiment(experiment: Experiment) -> NoiseFloor:
    """The noise of every metric with a better direction, from an A/A experiment.

    Raises NotComparableError where the variants are not all the same or several machines measured, UsageError below
    six usable blocks.
    """
    profile, results = experiment.profile, experiment.results
    if not is_repeated_baseline(profile):
        raise NotComparableError(
            f"{results.path} is not an A/A experiment: its variants differ in servers or requests. "
            "'benchctl run NAME --aa' measures one"
        )
    baseline = Side(results.path, results.manifest.baseline)
    others = [Side(results.path, name) for name in profile.variants if name != profile.baseline]
    pairs = [match_cells(experiment, baseline, experiment, other)[0] for other in others]
    fewest = min(len(pair.blocks) for pair in pairs)
    if fewest < MIN_PAIRED_BLOCKS:
        raise UsageError(
            f"{results.path} has {fewest} usable blocks: a noise floor needs at least {MIN_PAIRED_BLOCKS}. "
            "Measure it again with more --blocks"
        )
    machine = _only_machine(results)
    confidence = 1 - ALPHA / num_looks_of(results.manifest, results.manifest)
    noise_of_pairs = [_noise_of_pair(pair, confidence) for pair in pairs]
    return NoiseFloor(
        schema_version=SCHEMA_VERSION,
        measured_at=results.manifest.created_at,
        source=str(results.path.resolve()),
        host=machine.hostname,
        gpus=gpu_names([machine]),
        engine=profile.engine.kind,
        engine_sha256=engine_sha256(profile),
        engine_version=engine_version(results),
        model=profile.model,
        request_set_sha256=results.manifest.request_set_sha256,
        metrics={
            name: max(
                (noise[name] for noise in noise_of_pairs if name in noise), key=lambda noise: noise.floor_frac
            )
            for name in {name: None for noise in noise_of_pairs for name in noise}
        },
    )


def _only_machine(results: LoadedResults) -> Machine:
    """The machine that measured; that of a simulator, whose noise is its own, may be any of several."""
    machines = machines_of(results)
    if len(machines) > 1 and results.manifest.engine != "sim":
        raise NotComparableError(
            f"{results.path} was measured on {machines_text(machines)}: a noise floor is that of one machine. "
            "Measure the A/A experiment on one"
        )
    return machines[0]


def is_repeated_baseline(profile: Profile) -> bool:
    """True for an A/A experiment: every variant is the baseline under another name."""
    baseline = _settings(profile, profile.baseline)
    others = [variant for variant, cell in arms(profile) if variant != profile.baseline or cell]
    return bool(others) and not profile.sweep and all(_settings(profile, name) == baseline for name in others)


def repeated_baseline(profile: Profile) -> Profile:
    """The A/A experiment of ``profile``: its baseline against itself, with the same server, model and workload.

    It has as many blocks, and at least eight, because a floor from few blocks is large.
    """
    again = "again" if profile.baseline != "again" else "again-2"
    baseline = profile.variants[profile.baseline]
    return profile.model_copy(
        update={
            "name": f"{profile.name}-aa",
            "description": f"The noise of {profile.name}: {profile.baseline} against itself",
            "blocks": max(profile.blocks, _BLOCKS_OF_A_FLOOR),
            "stopping": None,
            "variants": {profile.baseline: baseline, again: baseline},
            "sweep": {},
            "cells": (),
            "sweep_baseline": False,
            "allowed_differences": (),
            "comparison": profile.comparison.model_copy(update={"estimator": DEFAULT_ESTIMATOR}),
        }
    )


def engine_sha256(profile: Profile) -> str:
    """Hash of the baseline's server options: noise belongs to a server, not to a name."""
    options = variant_settings(profile, profile.baseline, {}).server.model_dump(
        mode="json", exclude=set(NOT_MEASURED)
    )
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


def engine_version(results: LoadedResults) -> str | None:
    """The version that all servers reported; None where one did not, or they differ."""
    versions = {run.record.engine_version for run in results.runs}
    return versions.pop() if len(versions) == 1 else None


def _settings(profile: Profile, variant: str) -> dict[str, object]:
    return variant_settings(profile, variant, {}).model_dump(exclude={"variant"})


def _noise_of_pair(pair: ArmPair, confidence: float) -> dict[str, MetricNoise]:
    noise_by_metric = {}
    for name, metric in METRICS.items():
        if metric.direction == "none" or metric.is_exact:
            continue
        ratio = pair.ratio(name, confidence)
        if ratio is not None and ratio.estimate.num_blocks >= MIN_PAIRED_BLOCKS:
            low, high = ratio.estimate.log_interval or (0.0, 0.0)
            noise_by_metric[name] = MetricNoise(
                log_sd=stdev(ratio.log_ratios),
                num_blocks=len(ratio.log_ratios),
                floor_frac=math.expm1(max(abs(low), abs(high))),
            )
    return noise_by_metric


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
