"""The check of neighbours: an A/A experiment whose arms run alone and beside neighbours, and what it came to.

Warnings about a noise floor that was measured at another time, with another workload or version.
Warnings about neighbours on the same host: blocks that disturb each other, and those that were never checked.
"""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec

from benchctl.analysis.compare.metric import roles_of
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.ladder import num_looks_of
from benchctl.analysis.experiment.pairing import CellPair, PairedRuns, Side, deciding_between, match_cells
from benchctl.analysis.metrics.run import load_window_ns
from benchctl.analysis.planning.noise_floor import engine_version, repeated_baseline
from benchctl.analysis.power import DEFAULT_MARGIN
from benchctl.analysis.statistics.decide import (
    ALPHA,
    ASSUMED_LOG_SD,
    Finding,
    Margins,
    Share,
    blocks_to_decide,
    blocks_to_detect,
    confidence_of_claims,
    finding_of,
    loses_runs,
    margins_of,
)
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS, SideRatio
from benchctl.analysis.validity.machines import machines_of, machines_text
from benchctl.errors import NotComparableError, UsageError
from benchctl.formats import change_of_ratio, count_of, first_of, four_digits, in_a_row, percentage
from benchctl.profile.model import Profile
from benchctl.records.loaded import LoadedResults, LoadedRun
from benchctl.records.schema import GpuSample, ResultWarning
from benchctl.records.stores.noise_store import NoiseKey
from benchctl.records.stores.peaks_store import NoiseFloor
from benchctl.records.stores.stores import NeighbourCheck, NeighbourEffect, NeighbourReading
from benchctl.units import HZ_PER_MHZ

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


_MOST_NAMED: Final = 3
FRESH_DAYS: Final = 30
"""Older noise gets a warning: drivers, clocks, neighbours and temperatures change."""
_REMEDY: Final = "measure it again: benchctl run NAME --aa"


def noise_warnings(noise: NoiseFloor, request_set_sha256: str | None, begins_at: str) -> tuple[ResultWarning, ...]:
    """Warnings about the stored noise for an experiment; none about its workload without a request set."""
    warnings = []
    if request_set_sha256 not in {None, noise.request_set_sha256}:
        message = (
            f"the noise floor is that of the A/A experiment {noise.source}, which had another request set; larger "
            "or smaller loads scatter differently: run this workload as an A/A experiment"
        )
        warnings.append(ResultWarning(code="noise-of-another-workload", message=message))
    days = (_time(begins_at) - _time(noise.measured_at)).days
    if days > FRESH_DAYS:
        message = f"the noise floor is {days} days older than this experiment; {_REMEDY}"
        warnings.append(ResultWarning(code="noise-old", message=message))
    return tuple(warnings)


def other_machine_warning(noise: NoiseFloor, results: LoadedResults) -> ResultWarning | None:
    """The warning that the noise in a result directory is that of a machine which measured none of its runs.

    None where it is that of one of them, for older runs, and for a simulator, whose noise depends on no machine.
    """
    machines = machines_of(results)
    are_recorded = any(machine.blocks for machine in machines)
    if (
        results.manifest.engine == "sim"
        or not are_recorded
        or any(noise.host == machine.hostname for machine in machines)
    ):
        return None
    message = (
        f"the noise floor is that of {noise.host}, and the runs were measured on {machines_text(machines)}: it is "
        f"left out; {_REMEDY}, on that machine"
    )
    return ResultWarning(code="noise-of-another-machine", message=message, where=str(results.source))


def other_server_warning(key: NoiseKey, on_file: Sequence[NoiseFloor], command: str | None) -> ResultWarning | None:
    """The note that noise is on file for this machine, but not for the server of ``key``; None without any.

    ``command`` measures the noise of that server.
    """
    here = [noise for noise in on_file if noise.host == key.host]
    if not here:
        return None
    described = [
        f"{noise.engine}{f' {noise.engine_version}' if noise.engine_version else ''} with {noise.model} "
        f"({_misfit(noise, key)}; {Path(noise.source).parent.name} of {noise.measured_at[:10]})"
        for noise in here
    ]
    message = (
        f"no A/A experiment of this server ({key.engine} with {key.model}) is on file; of this machine there is "
        f"{first_of(described, _MOST_NAMED)}; measure the right one: {command or 'benchctl run NAME --aa'}"
    )
    return ResultWarning(code="noise-of-another-server", message=message)


def _misfit(noise: NoiseFloor, key: NoiseKey) -> str:
    """The first part of the key in which the noise belongs to another server."""
    if noise.engine != key.engine:
        return "another engine"
    if noise.model != key.model:
        return "another model"
    return "other devices" if noise.gpus != key.gpus else "other options of the server"


def version_warning(noise: NoiseFloor, engine_version: str | None) -> ResultWarning | None:
    """The warning that the noise is that of another engine version; None if both are equal or one is unknown."""
    if noise.engine_version is None or engine_version is None or noise.engine_version == engine_version:
        return None
    message = f"the noise floor is that of {noise.engine} {noise.engine_version}, and this is {engine_version}; "
    return ResultWarning(code="noise-of-another-version", message=message + _REMEDY)


def age_days(noise: NoiseFloor, now: dt.datetime) -> int:
    """Whole days since the noise was measured."""
    return (now - _time(noise.measured_at)).days


def _time(iso: str) -> dt.datetime:
    return dt.datetime.fromisoformat(iso)


_REASONS: Final = {
    "sw-power-cap": "the power limit",
    "hw-power-brake": "the power brake of the board",
    "hw-thermal": "heat",
    "sw-thermal": "heat",
    "hw-slowdown": "the slow-down of the hardware",
}
"""Reasons for a lowered clock in words, by NVIDIA's name."""
_NOTABLE_SHARE: Final = 0.1
"""A reason counts as one where it is given in so much more of the readings beside neighbours."""


def neighbour_warnings(check: NeighbourCheck, begins_at: str, command: str) -> tuple[ResultWarning, ...]:
    """Warnings about the check on file for an experiment that begins at ``begins_at``.

    ``command`` checks again.
    """
    warnings = []
    if (text := disturbance_text(check)) is not None:
        message = (
            f"blocks that run at the same time disturb each other: {text} ({_origin(check)}); absolute numbers are "
            "those of a busy host, and their scatter is larger. Fewer blocks at a time disturb less (--parallel)"
        )
        warnings.append(ResultWarning(code="neighbours-disturb", message=message))
    elif overall_finding(check) == "undecided":
        message = (
            "whether blocks that run at the same time disturb each other is open: "
            f"{_effects(check, 'undecided')} ({_origin(check)}); "
            f"{more_blocks_text(check)}"
        )
        warnings.append(ResultWarning(code="neighbours-undecided", message=message))
    days = (dt.datetime.fromisoformat(begins_at) - dt.datetime.fromisoformat(check.measured_at)).days
    if days > FRESH_DAYS:
        message = f"the check of neighbours is {days} days older than this experiment; measure it again: {command}"
        warnings.append(ResultWarning(code="neighbours-unchecked", message=message))
    return tuple(warnings)


def unchecked_warning(parallel: int, command: str) -> ResultWarning:
    """The warning that no check is on file for an experiment with so many blocks at a time."""
    message = (
        f"{parallel} blocks run at the same time on this host, and nobody has measured whether they disturb each "
        f"other; measure it: {command}"
    )
    return ResultWarning(code="neighbours-unchecked", message=message)


def overall_finding(check: NeighbourCheck) -> Finding:
    """``disturbed`` where anything is, ``undecided`` where anything is open, else ``undisturbed``."""
    findings = {effect.finding for effect in check.metrics.values()}
    if check.loses_runs or "disturbed" in findings:
        return "disturbed"
    return "undecided" if "undecided" in findings else "undisturbed"


def finding_text(check: NeighbourCheck) -> str:
    """The result of a check in one sentence."""
    beside, finding = f"beside {count_of(check.parallel - 1, 'neighbour')}", overall_finding(check)
    if finding == "disturbed":
        return f"disturbed {beside}: {disturbance_text(check)}"
    if finding == "undecided":
        return f"undecided {beside}: {more_blocks_text(check)}"
    return f"not disturbed {beside}: all intervals are inside the threshold"


def disturbance_text(check: NeighbourCheck) -> str | None:
    """The disturbances that a check found, with their likely cause; None where it found none."""
    effects = _effects(check, "disturbed")
    lost = ""
    if check.loses_runs:
        lost = (
            f"{check.lost_beside[0]} of {check.lost_beside[1]} runs beside neighbours do not count, and "
            f"{check.lost_alone[0]} of {check.lost_alone[1]} alone"
        )
    if not effects and not lost:
        return None
    cause = cause_text(check)
    return "; ".join(filter(None, (effects, lost, cause and f"likely cause: {cause}")))


def cause_text(check: NeighbourCheck) -> str | None:
    """The cause of a disturbance, as far as clocks and processor time tell it; None where they do not."""
    causes = []
    clock = check.readings.get("sm_clock_hz")
    if clock is not None and clock.is_beyond_chance and clock.beside < clock.alone:
        fall = percentage(1 - clock.beside / clock.alone, 2)
        reasons = dict.fromkeys(
            words
            for name, words in _REASONS.items()
            if name in check.throttled and check.throttled[name][1] - check.throttled[name][0] > _NOTABLE_SHARE
        )
        held = f", held down by {in_a_row(list(reasons))}" if reasons else ""
        causes.append(
            f"the clock of the GPU fell by {fall} ({four_digits(clock.alone / HZ_PER_MHZ)} to "
            f"{four_digits(clock.beside / HZ_PER_MHZ)} MHz){held}"
        )
    cores = check.readings.get("server_cpu_cores")
    if cores is not None and cores.is_beyond_chance and cores.beside < cores.alone:
        causes.append(
            f"the server got {percentage(1 - cores.beside / cores.alone, 2)} less processor time "
            f"({four_digits(cores.alone)} to {four_digits(cores.beside)} cores)"
        )
    return " and ".join(causes) or None


def more_blocks_text(check: NeighbourCheck) -> str:
    """The number of blocks that would decide what a check left open."""
    open_effects = [effect for effect in check.metrics.values() if effect.finding == "undecided"]
    needed = [effect.blocks_needed for effect in open_effects]
    have = max((effect.num_blocks for effect in open_effects), default=0)
    numbers = [number for number in needed if number is not None]
    if not numbers or len(numbers) < len(needed):
        return "no number of blocks would tell: the change is below the noise floor, or it scatters too much"
    return (
        f"about {count_of(max(numbers) - have, 'more block')} would tell: benchctl noise neighbours "
        f"--resume {check.source} --blocks {max(numbers)}"
    )


def effect_text(name: str, effect: NeighbourEffect) -> str:
    """``tpot_ms +12.1% [+10.2%, +14.0%]``."""
    if effect.ci_low is None or effect.ci_high is None:
        return f"{name} {change_of_ratio(effect.ratio)}"
    ends = f"{change_of_ratio(effect.ci_low)}, {change_of_ratio(effect.ci_high)}"
    return f"{name} {change_of_ratio(effect.ratio)} [{ends}]"


def _effects(check: NeighbourCheck, finding: str) -> str:
    texts = [effect_text(name, effect) for name, effect in check.metrics.items() if effect.finding == finding]
    return " and ".join(texts)


def _origin(check: NeighbourCheck) -> str:
    blocks = max((effect.num_blocks for effect in check.metrics.values()), default=check.lost_beside[1])
    beside = count_of(check.parallel - 1, "neighbour")
    return (
        f"beside {beside}, {percentage(check.confidence, 3)} interval of {count_of(blocks, 'block')}, check of "
        f"{check.measured_at[:10]}"
    )
