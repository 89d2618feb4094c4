"""The check of neighbours: an A/A experiment whose arms run alone and beside neighbours, and what it came to.

The arms are the baseline of a profile under two names. In each block both are measured on the same slot, each with
a fresh server, in balanced order; during ``beside`` the other slots serve the same load. What the two differ by is
the work of the neighbours, the scatter of the machine, or both, which ``statistics/disturbance.py`` tells apart.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Final

import msgspec

from benchctl.analysis.compare.metric_comparison import roles_of
from benchctl.analysis.experiment.deciding import deciding_between
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import CellPair, Side, match_cells
from benchctl.analysis.experiment.stopping import num_looks_of
from benchctl.analysis.metrics.run_metrics import load_window_ns
from benchctl.analysis.planning.noise_floor import engine_version, repeated_baseline
from benchctl.analysis.planning.power import DEFAULT_MARGIN
from benchctl.analysis.statistics.disturbance import (
    ALPHA,
    blocks_to_decide,
    confidence_of_claims,
    finding_of,
    loses_runs,
)
from benchctl.analysis.statistics.fisher import Share
from benchctl.analysis.statistics.margins import Margins, margins_of
from benchctl.analysis.statistics.sample_size import ASSUMED_LOG_SD, blocks_to_detect
from benchctl.analysis.statistics.screening import MIN_PAIRED_BLOCKS
from benchctl.analysis.statistics.side_ratio import SideRatio
from benchctl.errors import NotComparableError, UsageError
from benchctl.formats import percentage
from benchctl.profile.model import Profile
from benchctl.records.loaded import LoadedRun
from benchctl.records.neighbours import NeighbourCheck, NeighbourEffect, NeighbourReading
from benchctl.records.noise import NoiseFloor
from benchctl.records.samples import GpuSample

ALONE: Final = "alone"
BESIDE: Final = "beside"
NEIGHBOUR_LOST: Final = "neighbours-lost"
"""Cause of the failure of a run whose neighbours did not come up, and code of the warning where one ended early."""
_MOST_BLOCKS: Final = 24
"""Of a check whose number of blocks nobody names: a quarter of the scatter, and hours on a large model."""


def alone_and_beside(profile: Profile, num_blocks: int) -> Profile:
    """The experiment of a check: the baseline of ``profile`` under two names."""
    baseline = profile.variants[profile.baseline]
    return repeated_baseline(profile).model_copy(
        update={
            "name": f"{profile.name}-neighbours",
            "description": f"{profile.baseline} of {profile.name}, alone and beside neighbours on the same host",
            "blocks": num_blocks,
            "baseline": ALONE,
            "variants": {ALONE: baseline, BESIDE: baseline},
        }
    )


@dataclass(frozen=True, slots=True)
class PlannedBlocks:
    """The number of blocks of a check, and the reason for it."""

    number: int
    reason: str


def blocks_of_check(profile: Profile, noise: NoiseFloor | None) -> PlannedBlocks:
    """The fewest blocks, an even number from 6 to 24, that find a disturbance of twice the margin with a power of
    80 %, at the scatter of the noisiest deciding metric on file.

    Even, because over two blocks each arm has each position once. Without noise on file 2 % are assumed.
    """
    names = _primary(profile)
    on_file = [] if noise is None else [noise.metrics[name] for name in names if name in noise.metrics]
    log_sd = max((metric.log_sd for metric in on_file), default=ASSUMED_LOG_SD)
    change_frac = 2 * max((_margins(noise, name).change_frac for name in names), default=DEFAULT_MARGIN)
    needed = blocks_to_detect(change_frac, log_sd, num_tests=len(names) + 1, confidence=1 - ALPHA)
    number = min(max(MIN_PAIRED_BLOCKS, (needed or _MOST_BLOCKS) + (needed or 0) % 2), _MOST_BLOCKS)
    source = "measured" if on_file else "assumed: no A/A on file"
    scatter = f"at a scatter of {percentage(log_sd, 2)} between blocks ({source})"
    effect = f"a disturbance of {percentage(change_frac, 2)} is found with a power of 80%"
    if needed is None or needed > number:
        takes = "more than a thousand" if needed is None else str(needed)
        return PlannedBlocks(
            number, f"the most that are planned unasked; {scatter} {takes} would be needed until {effect}"
        )
    return PlannedBlocks(number, f"{scatter} {effect}")


def checked(experiment: Experiment, begun: NeighbourCheck, noise: NoiseFloor | None) -> NeighbourCheck:
    """The result of the check that ``begun`` describes, from its finished experiment.

    Raises NotComparableError where runs are missing or lacked their neighbours, UsageError where fewer than six
    blocks are usable and the neighbours are not the reason.
    """
    _require_whole(experiment)
    results = experiment.results
    pair = _pair(experiment)
    looks = num_looks_of(results.manifest, results.manifest)
    paired = PairedRuns.of(pair, (experiment, experiment))
    names = deciding_between(_primary(experiment.profile), pair, (experiment, experiment)).names
    num_claims = len(names) + 1
    confidence = confidence_of_claims(num_claims, looks)
    alone, beside = (
        Share(len({**a.excluded, **a.client_excluded}), results.manifest.blocks) for a in (pair.a, pair.b)
    )
    is_losing = loses_runs(beside, alone, confidence)
    later = confidence_of_claims(num_claims, looks + 1)
    ratios = {name: ratio for name in names if (ratio := paired.ratio(name, confidence)) is not None}
    effects = {name: _effect(ratio, _margins(noise, name), later) for name, ratio in ratios.items()}
    fewest = min((effect.num_blocks for effect in effects.values()), default=0)
    if fewest < MIN_PAIRED_BLOCKS and not is_losing:
        raise UsageError(
            f"{results.path} has {fewest} usable blocks: a check of neighbours needs at least {MIN_PAIRED_BLOCKS}. "
            f"Add some: benchctl noise neighbours --resume {results.path} --blocks N"
        )
    return msgspec.structs.replace(
        begun,
        engine_version=engine_version(results),
        confidence=confidence,
        metrics=effects,
        lost_alone=tuple(alone),
        lost_beside=tuple(beside),
        loses_runs=is_losing,
        readings=_readings(paired, confidence),
        throttled=_throttled(pair),
    )


def _primary(profile: Profile) -> list[str]:
    """The primary metrics whose ratio can decide."""
    roles = roles_of(profile.primary_metrics, is_forced=profile.stop != "natural")
    return [name for name, role in roles.items() if role == "deciding"]


def _margins(noise: NoiseFloor | None, name: str) -> Margins:
    metric = None if noise is None else noise.metrics.get(name)
    return margins_of(DEFAULT_MARGIN, 0.0 if metric is None else metric.floor_frac)


def _pair(experiment: Experiment) -> CellPair:
    path = experiment.results.path
    return match_cells(experiment, Side(path, ALONE), experiment, Side(path, BESIDE))[0]


def _require_whole(experiment: Experiment) -> None:
    """Raises NotComparableError unless each planned run has ended, with its neighbours where it has some."""
    results = experiment.results
    records = {run.record.run_id: run.record for run in results.runs}
    unsound = []
    for planned in results.plan.runs:
        record = records.get(planned.run_id)
        codes = set() if record is None else {warning.code for warning in record.warnings}
        cause = None if record is None or record.failure is None else record.failure.cause
        if record is None or not record.has_ended:
            unsound.append(f"{planned.run_id} is not done")
        elif NEIGHBOUR_LOST in {cause, *codes}:
            unsound.append(f"{planned.run_id} lacked a neighbour")
    if unsound:
        raise NotComparableError(
            f"{len(unsound)} of {len(results.plan.runs)} runs of {results.path} do not count, the first: "
            f"{unsound[0]}. Measure them with 'benchctl noise neighbours --resume {results.path}'"
        )


def _effect(ratio: SideRatio, margins: Margins, later_confidence: float) -> NeighbourEffect:
    estimate = ratio.estimate
    is_screening = estimate.num_blocks < MIN_PAIRED_BLOCKS
    finding = "undecided" if is_screening else finding_of(estimate, margins)
    needed = blocks_to_decide(estimate, margins, later_confidence) if finding == "undecided" else None
    return NeighbourEffect(
        ratio=estimate.ratio,
        ci_low=estimate.ci_low,
        ci_high=estimate.ci_high,
        num_blocks=estimate.num_blocks,
        margin_frac=margins.change_frac,
        finding=finding,
        blocks_needed=max(needed or 0, MIN_PAIRED_BLOCKS) if is_screening else needed,
    )


def _gpu_samples(run: LoadedRun) -> list[GpuSample]:
    """The readings of its devices during the load."""
    window = load_window_ns(run)
    return [] if window is None else [sample for sample in run.gpu if window[0] <= sample.t_ns <= window[1]]


def _mean_clock_hz(run: LoadedRun) -> float | None:
    clocks = [sample.sm_clock_hz for sample in _gpu_samples(run) if sample.sm_clock_hz is not None]
    return fmean(clocks) if clocks else None


def _readings(paired: PairedRuns, confidence: float) -> dict[str, NeighbourReading]:
    """Clocks and power of the devices, and processor time of the server, where both sides were read."""
    ratios = {
        "sm_clock_hz": paired.ratio_of(_mean_clock_hz, is_time=False, confidence=confidence),
        "gpu_power_w": paired.ratio("gpu_power_w", confidence),
        "server_cpu_cores": paired.ratio("server_cpu_cores", confidence),
    }
    readings = {}
    for name, ratio in ratios.items():
        if ratio is not None and (interval := ratio.estimate.log_interval) is not None:
            is_beyond_chance = not interval[0] <= 0.0 <= interval[1]
            readings[name] = NeighbourReading(alone=ratio.a, beside=ratio.b, is_beyond_chance=is_beyond_chance)
    return readings


def _throttled(pair: CellPair) -> dict[str, tuple[float, float]]:
    """By reason, the share of readings of either side in which a device gave it for a lowered clock."""
    sides = [
        [sample.throttle_reasons for run in runs for sample in _gpu_samples(run)]
        for runs in (pair.a_runs, pair.b_runs)
    ]
    read = [[reasons for reasons in side if reasons is not None] for side in sides]
    if not all(read):
        return {}
    names = sorted({reason for side in read for reasons in side for reason in reasons})
    alone, beside = ({name: fmean(name in reasons for reasons in side) for name in names} for side in read)
    return {name: (alone[name], beside[name]) for name in names}
