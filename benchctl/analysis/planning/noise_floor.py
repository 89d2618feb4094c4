"""The noise of a machine: what an A/A experiment shows although nothing changed.

The floor of a metric is the end farther from 0 of the A/A interval: the largest change that identical servers were
not able to rule out, bias of the set-up included. A change that stays below it is not told from none.
"""

import hashlib
import json
import math
from statistics import stdev

from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import CellPair, Side, match_cells
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.statistics.block_ratio import MIN_PAIRED_BLOCKS, log_ratios
from benchctl.analysis.statistics.side_ratio import SideRatio
from benchctl.errors import NotComparableError, UsageError
from benchctl.profile.model import Profile
from benchctl.profile.planning.plan import arms, variant_settings
from benchctl.records.loaded import LoadedResults
from benchctl.records.manifest import Manifest
from benchctl.records.noise import MetricNoise, NoiseFloor
from benchctl.records.schema import SCHEMA_VERSION


def noise_of_experiment(experiment: Experiment) -> NoiseFloor:
    """The noise of every metric with a better direction, from an experiment whose variants are all the same.

    Raises NotComparableError where they are not, UsageError where fewer than six blocks can be compared.
    """
    profile, results = experiment.profile, experiment.results
    others = _repeats_of_baseline(profile, results)
    pairs = [_pair(experiment, other) for other in others]
    fewest = min(len(pair.blocks) for pair in pairs)
    if fewest < MIN_PAIRED_BLOCKS:
        raise UsageError(
            f"{results.path} has {fewest} usable blocks: a noise floor needs at least {MIN_PAIRED_BLOCKS}. Measure "
            "it again with more --blocks"
        )
    found = [_noise_of_pair(PairedRuns.of(pair, (experiment, experiment))) for pair in pairs]
    return NoiseFloor(
        schema_version=SCHEMA_VERSION,
        measured_at=results.manifest.created_at,
        source=str(results.path.resolve()),
        host=results.manifest.host.hostname,
        gpus=gpu_names(results.manifest),
        engine=profile.engine.kind,
        engine_sha256=engine_sha256(profile),
        engine_version=engine_version(results),
        model=profile.model,
        request_set_sha256=results.manifest.request_set_sha256,
        metrics={
            name: max((noise[name] for noise in found if name in noise), key=lambda noise: noise.floor_frac)
            for name in {name: None for noise in found for name in noise}
        },
    )


def is_repeated_baseline(profile: Profile) -> bool:
    """Whether every variant is the baseline under another name: an A/A experiment."""
    baseline = _settings(profile, profile.baseline)
    others = [variant for variant, cell in arms(profile) if variant != profile.baseline or cell]
    return bool(others) and not profile.sweep and all(_settings(profile, name) == baseline for name in others)


def engine_sha256(profile: Profile) -> str:
    """Of the baseline's server options: noise is that of a server, not of a name."""
    options = variant_settings(profile, profile.baseline, {}).server.model_dump(mode="json")
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


def engine_version(results: LoadedResults) -> str | None:
    """What the servers called themselves; None where they did not, or not all the same."""
    versions = {run.record.engine_version for run in results.runs}
    return versions.pop() if len(versions) == 1 else None


def gpu_names(manifest: Manifest) -> tuple[str, ...]:
    """The devices of the machine, by name."""
    return tuple(gpu.name for gpu in manifest.gpus)


def _settings(profile: Profile, variant: str) -> dict[str, object]:
    return variant_settings(profile, variant, {}).model_dump(exclude={"variant"})


def _repeats_of_baseline(profile: Profile, results: LoadedResults) -> tuple[str, ...]:
    if not is_repeated_baseline(profile):
        raise NotComparableError(
            f"{results.path} is no A/A experiment: its variants are not all the same server, asked the same way. "
            "'benchctl run --profile aa' measures one"
        )
    return tuple(name for name in profile.variants if name != profile.baseline)


def _pair(experiment: Experiment, other: str) -> CellPair:
    path = experiment.path
    a, b = Side(path, experiment.results.manifest.baseline), Side(path, other)
    return match_cells(experiment, a, experiment, b)[0]


def _noise_of_pair(paired: PairedRuns) -> dict[str, MetricNoise]:
    found = {}
    for name, metric in METRICS.items():
        if metric.direction == "none" or metric.is_exact:
            continue
        ratio = paired.ratio(name)
        if ratio is not None and ratio.estimate.num_blocks >= MIN_PAIRED_BLOCKS:
            found[name] = _noise(ratio)
    return found


def _noise(ratio: SideRatio) -> MetricNoise:
    low, high = ratio.estimate.log_interval or (0.0, 0.0)
    differences = log_ratios(ratio.a_values, ratio.b_values)
    return MetricNoise(
        log_sd=stdev(differences),
        num_blocks=len(differences),
        floor_frac=math.expm1(max(abs(low), abs(high))),
    )
