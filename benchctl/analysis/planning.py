"""The noise of a machine, from an A/A experiment; and, before an experiment, the power that it has in such noise,
and what a precision costs.

The noise floor of a metric is the largest change that identical servers could not rule out: the end of their
interval that is farther from 0, which includes the bias of the set-up. A change below it cannot be distinguished
from none.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import stdev

import msgspec

from benchctl.analysis.compare.decide import (
    ASSUMED_LOG_SD,
    ROBUST_WIDTH,
    Margins,
    blocks_to_detect,
    margins_of,
    minimum_detectable_effect,
)
from benchctl.analysis.compare.metric import roles_of
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.looks import looked_confidence
from benchctl.analysis.experiment.pairing import (
    ArmPair,
    Side,
    baseline_pairs,
    deciding_in_plan,
    match_cells,
    undecided,
    unrecorded_text,
)
from benchctl.analysis.experiment.scatter import costs_of, scatter_by_metric
from benchctl.analysis.metrics.table import METRICS, STEADY
from benchctl.analysis.statistics.components import (
    MAX_BLOCKS_NEEDED,
    Components,
    Costs,
    cheapest_design,
    design_of,
    loads_for_least_cost,
)
from benchctl.analysis.statistics.estimate import DEFAULT_ESTIMATOR, MIN_PAIRED_BLOCKS
from benchctl.analysis.validity.machines import gpu_names, machines_of, machines_text
from benchctl.errors import NotComparableError, UsageError
from benchctl.profile.choices import DEFAULT_THRESHOLD
from benchctl.profile.engine_table import is_virtual
from benchctl.profile.files import display_path
from benchctl.profile.load import engine_sha256
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import ALPHA, arms, is_repeated_baseline, servers, stopping_rule
from benchctl.profile.settings import is_load_factor, load_points
from benchctl.records.record import LoadsChoice
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.records.stores import MetricNoise, NoiseFloor
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import count_of, duration, percentage


def noise_of_experiment(experiment: Experiment) -> NoiseFloor:
    """The noise of every metric with a better direction, from an A/A experiment.

    Raises NotComparableError where the variants are not all the same or several machines measured, UsageError below
    six usable blocks.
    """
    profile, results, manifest = experiment.profile, experiment.results, experiment.results.manifest
    if not is_repeated_baseline(profile):
        raise NotComparableError(
            f"{results.path} is not an A/A experiment: its variants differ in servers or requests. "
            "'benchctl run NAME --aa' measures one"
        )
    baseline = Side(results.path, manifest.baseline)
    others = [Side(results.path, name) for name in profile.variants if name != profile.baseline]
    confidence = looked_confidence(results, results, 1 - ALPHA)
    pairs = [match_cells(experiment, baseline, experiment, other, confidence)[0] for other in others]
    fewest = min(len(pair.blocks) for pair in pairs)
    if fewest < MIN_PAIRED_BLOCKS:
        raise UsageError(
            f"{results.path} has {fewest} usable blocks: a noise floor needs at least {MIN_PAIRED_BLOCKS}. "
            "Measure it again with more --blocks"
        )
    machines = machines_of(results)
    if len(machines) > 1 and not is_virtual(manifest.engine):  # the noise of a simulator is its own on any machine
        raise NotComparableError(
            f"{results.path} was measured on {machines_text(machines)}: a noise floor is that of one machine. "
            "Measure the A/A experiment on one"
        )
    return _noise_of_pairs(experiment, pairs)


def sound_noise(experiment: Experiment) -> NoiseFloor:
    """The noise of an A/A experiment.

    Raises NotComparableError if one of its runs is not done, or if it is another experiment, and UsageError below
    six blocks.
    """
    results = experiment.results
    noise = noise_of_experiment(experiment)
    states = {run.record.run_id: run.record.state for run in results.runs}
    unsound = [run.run_id for run in results.plan.runs if states.get(run.run_id) != "done"]
    if unsound:
        raise NotComparableError(
            f"{len(unsound)} of {len(results.plan.runs)} runs of {results.path} are not done, {unsound[0]} first "
            f"({states.get(unsound[0], 'not begun')}): a floor from the other runs would be too low. "
            f"Measure them with 'benchctl run --resume {results.path}'"
        )
    return noise


def scatter_of_experiment(experiment: Experiment) -> NoiseFloor:
    """The scatter of the blocks of any experiment about its changes; these tell nothing about a floor, which is 0.

    Raises RecordError where the profile cannot be read.
    """
    noise = _noise_of_pairs(experiment, baseline_pairs(experiment))
    of_metrics = {name: msgspec.structs.replace(each, floor_frac=0.0) for name, each in noise.metrics.items()}
    return msgspec.structs.replace(noise, metrics=of_metrics)


def _noise_of_pairs(experiment: Experiment, pairs: Iterable[ArmPair]) -> NoiseFloor:
    """The noise of every metric: that of the pair with the largest floor."""
    profile, results, machines = experiment.profile, experiment.results, machines_of(experiment.results)
    metrics: dict[str, MetricNoise] = {}
    for pair in pairs:
        for name, noise in _noise_of_pair(pair):
            if name not in metrics or noise.floor_frac > metrics[name].floor_frac:
                metrics[name] = noise
    versions = {run.record.engine_version for run in results.runs}
    scatter = scatter_by_metric(experiment, metrics)
    costs = costs_of(experiment) if scatter else None
    for name, each in scatter.items():
        metrics[name] = msgspec.structs.replace(
            metrics[name], **{part: _with_ends(getattr(each, part)) for part in ("between", "within", "drift")}
        )
    return NoiseFloor(
        schema_version=SCHEMA_VERSION,
        measured_at=results.manifest.created_at,
        source=str(results.path.resolve()),
        host=machines[0].hostname,
        gpus=gpu_names(machines[:1]),
        engine=profile.engine.kind,
        engine_sha256=engine_sha256(profile),
        engine_version=versions.pop() if len(versions) == 1 else None,
        model=profile.model,
        request_set_sha256=results.manifest.request_set_sha256,
        metrics=metrics,
        num_loads=max((round(each.evidence.num_loads) for each in scatter.values()), default=1),
        start_s=None if costs is None else costs.starts_s,
        load_s=None if costs is None else costs.load_s,
    )


def _with_ends(estimate: Estimate) -> tuple[float, float, float]:
    return estimate.value, estimate.low or 0.0, estimate.high or 0.0


def _noise_of_pair(pair: ArmPair) -> Iterator[tuple[str, MetricNoise]]:
    for name, metric in METRICS.items():
        ratio = None if metric.direction == "none" or metric.is_exact else pair.ratio(name)
        if ratio is not None and ratio.estimate.num_blocks >= MIN_PAIRED_BLOCKS:
            farther_end, logs = max(map(abs, ratio.estimate.log_interval or (0.0,))), ratio.log_ratios
            yield (
                name,
                MetricNoise(log_sd=stdev(logs), num_blocks=len(logs), floor_frac=math.expm1(farther_end)),
            )


def choose_loads(experiment: Experiment, num_blocks: int) -> LoadsChoice | None:
    """The number of loads per server for the other blocks of ``num_blocks``, from those that were measured.

    None where they do not tell the scatter of any primary metric. Where no server is launched, a start is free.
    """
    scatter = scatter_by_metric(experiment)
    if not scatter:
        return None
    num_pilot = 1 + max(run.block for run in experiment.results.plan.runs)
    costs = costs_of(experiment) or Costs(0.0, 1.0)
    number = loads_for_least_cost([each.evidence for each in scatter.values()], costs, num_pilot, num_blocks)
    scatters = "; ".join(
        f"{name} scatters by {percentage(each.between.value, 2)} between servers, "
        f"{percentage(each.within.value, 2)} between the loads of one"
        for name, each in scatter.items()
    )
    starts, load = (f"{seconds:.3g} s" for seconds in costs)
    return LoadsChoice(
        from_block=num_pilot,
        num_loads=number,
        scatter={name: (each.between.value, each.within.value) for name, each in scatter.items()},
        start_s=costs.starts_s,
        load_s=costs.load_s,
        reason=f"{scatters}; a start costs {starts}, a load {load}; cheapest: {count_of(number, 'load')} each",
    )


def precision_of(experiment: Experiment, scatter: Mapping[str, Components]) -> str | None:
    """The price of the declared precision of a measured experiment with this scatter: see ``precision_text``."""
    profile = experiment.profile_or_none
    costs = costs_of(experiment) if scatter else None
    if profile is None or costs is None:
        return None
    parts = {name: (each.between.value, each.within.value) for name, each in scatter.items()}
    choice = experiment.results.manifest.loads
    num_loads = max(round(each.evidence.num_loads) for each in scatter.values())
    return precision_text(profile, parts, costs, num_loads if choice is None else choice.num_loads)


def precision_on_file(noise: NoiseFloor, profile: Profile | None = None) -> str | None:
    """The price of the declared precision by the noise on file; without ``profile`` that of two arms by default."""
    if noise.start_s is None or noise.load_s is None:
        return None
    primary = Profile.model_fields["primary_metrics"].default if profile is None else profile.primary_metrics
    parts = {
        name: (each.between[0], each.within[0])
        for name in primary
        if (each := noise.metrics.get(name)) is not None and each.between is not None and each.within is not None
    }
    return precision_text(profile, parts, Costs(noise.start_s, noise.load_s), noise.num_loads)


def precision_text(
    profile: Profile | None, scatter: Mapping[str, tuple[float, float]], costs: Costs, num_loads: int
) -> str | None:
    """``±1% in step_ms: 9 blocks of 4 loads, 11 min; with 1 load 31 blocks, 27 min``; None without a scatter.

    The cheapest design for the metric that takes most of it, beside that of one load, or, where one load is the
    cheapest, beside ``num_loads``. The precision is that of the stopping rule, else the threshold: half the
    interval of 95 %. ``scatter`` is that between servers and that between loads, by metric; ``costs`` are of one
    server.
    """
    frac, estimator, num_arms = DEFAULT_THRESHOLD, DEFAULT_ESTIMATOR, 2
    if profile is not None:
        declared = None if profile.stopping is None else profile.stopping.precision
        frac = profile.comparison.threshold if declared is None else declared
        estimator, num_arms = profile.comparison.estimator, len(servers(profile))
    width, of_block = ROBUST_WIDTH if estimator == "robust" else 1.0, costs.of_block(num_arms)
    designs = [
        (math.inf if design is None else design.seconds, name, design)
        for name, parts in scatter.items()
        for design in [cheapest_design(frac, *parts, of_block, width)]
    ]
    if not designs or not frac:
        return None
    _, name, design = max(designs, key=itemgetter(0))
    if design is None:
        return f"±{percentage(frac)} in {name}: more than {MAX_BLOCKS_NEEDED} blocks, whatever the number of loads"
    text = f"{count_of(design.num_blocks, 'block')} of {count_of(design.num_loads, 'load')}"
    text = f"±{percentage(frac)} in {name}: {text}, {duration(design.seconds)}"
    other = 1 if design.num_loads > 1 else num_loads
    if other == design.num_loads:
        return text
    beside = design_of(other, frac, *scatter[name], of_block, width)
    blocks = f"more than {MAX_BLOCKS_NEEDED} blocks"
    if beside is not None:
        blocks = f"{count_of(beside.num_blocks, 'block')}, {duration(beside.seconds)}"
    return f"{text}; with {count_of(other, 'load')} {blocks}"


def repeated_baseline(profile: Profile) -> Profile:
    """The A/A experiment of ``profile``: its baseline against itself, with the same server, model and workload.

    It has as many blocks, and at least eight, because a floor from few blocks is large.
    """
    again = "again" if profile.baseline != "again" else "again-2"
    baseline = profile.variants[profile.baseline]
    points = load_points(profile) if profile.cells else ()
    return profile.model_copy(
        update={
            "name": f"{profile.name}-aa",
            "description": f"The noise of {profile.name}: {profile.baseline} against itself",
            "blocks": max(profile.blocks, 8),
            "stopping": None,
            "variants": {profile.baseline: baseline, again: baseline},
            "sweep": {factor: values for factor, values in profile.sweep.items() if is_load_factor(factor)},
            "cells": tuple(point for point in points if point),
            "sweep_baseline": False,
            "allowed_differences": (),
            "comparison": profile.comparison.model_copy(update={"estimator": DEFAULT_ESTIMATOR}),
        }
    )


def power_lines(
    profile: Profile,
    noise: NoiseFloor | None,
    has_steps: Callable[[VariantSettings], bool] = lambda _settings: True,
) -> tuple[str, ...]:
    """The changes that ``profile`` detects on a machine with that ``noise``, in words; none where it has one arm.

    The minimum detectable effect of each metric, and the blocks that the most demanding one takes. ``has_steps``
    tells for which settings the engine records steps: metrics that it does not record decide nothing.
    """
    noise = None if noise is None else _with_loads(noise, profile.num_loads)
    others = Counter(variant for variant, _ in arms(profile) if variant != profile.baseline)
    roles = roles_of(profile.primary_metrics, is_forced=profile.stop != "natural")
    primary = [name for name, role in roles.items() if role == "deciding" and name in METRICS]
    if not others or not primary:
        return ()
    deciding = deciding_in_plan(primary, profile, has_steps)
    missing = undecided(primary, deciding)
    unrecorded = [unrecorded_text(missing, deciding)] if missing else []
    if profile.blocks < MIN_PAIRED_BLOCKS:
        number = "1 block gives" if profile.blocks == 1 else f"{profile.blocks} blocks give"
        return (f"a screening: {number} no verdict; at least {MIN_PAIRED_BLOCKS} are needed", *unrecorded)
    if not deciding:
        return tuple(unrecorded)
    rule, num_tests = stopping_rule(profile), len(deciding) * max(others.values())
    # a correction for looks divides alpha as one for tests does; a change that is there is found by the last one
    num_corrected = num_tests if rule is None else num_tests * ALPHA / (1 - rule.last_confidence)
    estimator, noise_of = profile.comparison.estimator, {} if noise is None else noise.metrics
    noise_of = {STEADY[name]: noise_of[name] for name in noise_of.keys() & STEADY.keys()} | noise_of
    names_by_effect: dict[str, list[str]] = {}
    needs: list[tuple[int, str, Margins]] = []
    for name in deciding:
        log_sd = noise_of[name].log_sd if name in noise_of else ASSUMED_LOG_SD
        margins = margins_of(profile.comparison.threshold, noise_of[name].floor_frac if name in noise_of else 0.0)
        effect_frac = minimum_detectable_effect(
            log_sd, profile.blocks, num_tests=num_corrected, margin_frac=margins.change_frac, estimator=estimator
        )
        names_by_effect.setdefault(f"±{percentage(effect_frac, 2)}", []).append(name)
        blocks = blocks_to_detect(margins.change_frac, log_sd, num_tests=num_corrected, estimator=estimator)
        needs.append((blocks or MAX_BLOCKS_NEEDED + 1, name, margins))
    most, name, margins = max(needs, key=itemgetter(0))
    number = f"about {most}" if most <= MAX_BLOCKS_NEEDED else f"more than {MAX_BLOCKS_NEEDED}"
    margin = "noise floor" if margins.is_noise_floor else "margin"
    corrected = "" if num_tests == 1 else f", corrected for {num_tests} tests"
    effects = "; ".join(f"{effect} in {', '.join(names)}" for effect, names in names_by_effect.items())
    return (
        f"{profile.blocks} blocks detect a change of {effects} in 4 of 5 experiments (power 80%{corrected})",
        _scatter_text(profile, deciding, noise),
        f"a change of {percentage(2 * margins.change_frac, 2)} (twice the {margin}) in {name}: {number} blocks",
        *unrecorded,
    )


def _with_loads(noise: NoiseFloor, num_loads: int) -> NoiseFloor:
    """The noise with the scatter that blocks of so many loads per server have, by that of servers and loads."""
    of_others = {
        name: msgspec.structs.replace(
            each, log_sd=math.sqrt(2 * (each.between[0] ** 2 + each.within[0] ** 2 / num_loads))
        )
        for name, each in noise.metrics.items()
        if num_loads != noise.num_loads and each.between is not None and each.within is not None
    }
    return msgspec.structs.replace(noise, metrics=noise.metrics | of_others)


def _scatter_text(profile: Profile, names: Sequence[str], noise: NoiseFloor | None) -> str:
    of_metrics = {} if noise is None else noise.metrics
    ends = sorted({f"{of_metrics[name].log_sd * 100:.2g}" for name in names if name in of_metrics}, key=float)
    if noise is None or not ends:
        why = (
            "this experiment measures it"
            if is_repeated_baseline(profile)
            else "neither an A/A nor an earlier result of this server is on file"
        )
        return f"this assumes that blocks scatter by {percentage(ASSUMED_LOG_SD, 2)}: {why}"
    unknown = ", ".join(name for name in names if name not in of_metrics)
    assumed = f"; {percentage(ASSUMED_LOG_SD, 2)} assumed for {unknown}" if unknown else ""
    reach = " to ".join(dict.fromkeys((ends[0], ends[-1])))
    return (
        f"this rests on blocks that scatter by {reach}% (measured on {noise.measured_at[:10]} in "
        f"{display_path(Path(noise.source))}{assumed})"
    )
