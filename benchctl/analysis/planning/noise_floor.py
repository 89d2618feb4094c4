"""The noise of a machine: the changes that an A/A experiment measures although nothing changed.

The floor of a metric is the end of the A/A interval that is farther from 0: the largest change that identical
servers could not rule out, including the bias of the set-up. A change below it cannot be distinguished from none.
"""

import hashlib
import json
import math
from statistics import stdev
from typing import Final

from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.ladder import num_looks_of
from benchctl.analysis.experiment.pairing import ArmPair, Side, match_cells
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.planning.stopping_rule import ALPHA
from benchctl.analysis.statistics.estimate import DEFAULT_ESTIMATOR, MIN_PAIRED_BLOCKS
from benchctl.analysis.validity.machines import Machine, gpu_names, machines_of, machines_text
from benchctl.errors import NotComparableError, UsageError
from benchctl.profile.load import NOT_MEASURED
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.loaded import LoadedResults
from benchctl.records.noise import MetricNoise, NoiseFloor
from benchctl.records.schema import SCHEMA_VERSION

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
