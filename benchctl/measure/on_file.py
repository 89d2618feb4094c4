"""Files about this machine: noise and peaks for an experiment, and the durations of earlier runs.

An estimated duration comes from earlier runs of the same engine and model on this machine.
"""

import datetime as dt
import hashlib
import heapq
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

from benchctl.analysis.validity.machines import noise_warnings, other_server_warning
from benchctl.costs.hardware import hardware_or_none
from benchctl.errors import BenchctlError
from benchctl.measure.measured_run import utc_now
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.profile.arrival import Arrival
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.load import engine_sha256, hardware_names
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, is_repeated_baseline, server_of, variant_settings
from benchctl.profile.settings import under_load
from benchctl.records.directory import RequestSets, arm_label
from benchctl.records.files import encode
from benchctl.records.peaks import MeasuredPeaks, hardware_of, machine_peaks, newest_peaks
from benchctl.records.record import LoadRecord, Manifest, PlannedRun, PreparedRequest, RunRecord
from benchctl.records.schema import GpuInfo, ResultWarning
from benchctl.records.stores import (
    NOISE,
    NoiseFloor,
    NoiseKey,
    RunDuration,
    newest_of_each,
    store_duration,
    stored_durations,
)
from benchctl.units import count_of, s_from_ns

if TYPE_CHECKING:
    from benchctl.sim.predict import PlanPrediction


def peaks_on_file(profile: Profile, gpus: Sequence[str]) -> MeasuredPeaks | None:
    """The peaks that apply to an experiment with ``profile`` on a machine with these GPUs; None without any.

    They are those that the profile states as measured, else the newest on file for the device of this machine. A
    profile that states other hardware is taken at its word; a simulated server has no device of this machine, and
    of a server elsewhere nothing is on file here.
    """
    stated = [name for name in hardware_names(profile) if _is_measured(name)]
    if stated:
        on_file = {hardware_of(peaks).name: peaks for peaks in newest_peaks()}
        return on_file.get(stated[0])
    engine = ENGINES[profile.engine.kind]
    if engine.is_virtual or engine.is_attached or "hardware" in profile.model_fields_set:
        return None
    return machine_peaks(gpus)


def _is_measured(name: str) -> bool:
    hardware = hardware_or_none(name) if name.count(":") > 1 else None
    return hardware is not None and hardware.measured_at is not None


def noise_on_file(
    profile: Profile,
    gpus: Sequence[GpuInfo] | None = None,
    *,
    request_set_sha256: str | None = None,
    begins_at: str | None = None,
) -> tuple[NoiseFloor | None, tuple[ResultWarning, ...]]:
    """The noise that applies to an experiment with ``profile``, with the warnings about it.

    It is the newest on file for the baseline's server on this machine; none for an experiment that compares
    nothing, and for an A/A experiment, which measures it. ``gpus`` defaults to those of this machine, ``begins_at``
    to now; without ``request_set_sha256`` the workload is not compared.
    """
    if len(profile.variants) == 1 or is_repeated_baseline(profile):
        return None, ()
    key = _key_here(profile, gpu_inventory() if gpus is None else gpus)
    entries = NOISE.entries(key.name)
    newest = newest_of_each(entries)
    warnings = [ResultWarning(code="noise-unreadable", message=entry.problem) for entry in entries if entry.problem]
    if not newest or newest[0].content is None:
        others = [entry.content for entry in newest_of_each(NOISE.entries()) if entry.content]
        misfit = other_server_warning(key, others)
        return None, (*warnings, *([misfit] if misfit is not None else []))
    noise = newest[0].content
    remarks = noise_warnings(noise, request_set_sha256, begins_at or dt.datetime.now(dt.UTC).isoformat())
    return noise, (*warnings, *remarks)


def _key_here(profile: Profile, gpus: Sequence[GpuInfo]) -> NoiseKey:
    return NoiseKey(
        host=platform.node(),
        gpus=tuple(gpu.name for gpu in gpus),
        engine=profile.engine.kind,
        engine_sha256=engine_sha256(profile),
        model=profile.model,
    )


def earlier_noise(profile: Profile, output_dir: Path) -> NoiseFloor | None:
    """The scatter in the newest result of ``profile`` below ``output_dir``; None unless it is of the same server.

    It serves a plan where no A/A experiment is on file: what was measured of this server is nearer than a guess.
    """
    from benchctl.analysis.experiment.experiment import load_experiment  # noqa: PLC0415 - numpy, where it is read
    from benchctl.analysis.planning import scatter_of_experiment  # noqa: PLC0415 - as above

    with suppress(BenchctlError):
        noise = scatter_of_experiment(load_experiment((output_dir / profile.name / "latest").resolve()))
        if noise.key == _key_here(profile, gpu_inventory()).name:
            return noise
    return None


def keep_noise(path: Path, profile: Profile) -> Path | str | None:
    """Store the noise of a finished experiment; returns the file, or the reason why it is not stored.

    None if the experiment's variants are not all the baseline.
    """
    if not is_repeated_baseline(profile):
        return None
    from benchctl.analysis.experiment.experiment import load_experiment  # noqa: PLC0415 - numpy, after the runs
    from benchctl.analysis.planning import sound_noise  # noqa: PLC0415 - as above

    try:
        return NOISE.add(sound_noise(load_experiment(path)))
    except BenchctlError as error:
        return str(error)


_NEWEST: Final = 12
"""Runs that speak for a later one: a machine changes, and older ones are of how it was."""
AROUND_S: Final = 3.0
"""Before the first run and after the last, where tables and pictures are made: 2.8 and 3.0 s in experiments of 6
and of 2 runs on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """Seconds of one run of each server by the label of its arm, as far as they are known, and what they rest on.

    ``overhead_s`` is what of them is not the load, such as a server's start; None where it is not part of them,
    because no server was started here before.
    """

    run_s: Mapping[str, float]
    around_s: float
    basis: str
    overhead_s: float | None = None
    prediction: "PlanPrediction | None" = None

    def total_s(self, runs: Iterable[PlannedRun]) -> float:
        """Seconds of these runs, without what comes around them."""
        return sum(self.run_s.get(arm_label(run.variant, run.cell), 0.0) for run in runs)


def gpu_names_here(manifest: Manifest) -> tuple[str, ...]:
    """Names of the devices of this machine, where an experiment of another one may be continued."""
    is_here = manifest.host.hostname == platform.node()
    return tuple(gpu.name for gpu in (manifest.gpus if is_here else gpu_inventory()))


def remember_duration(
    profile: Profile, requests: RequestSets, record: RunRecord, took_s: float, gpus: Sequence[str]
) -> None:
    """Store the duration of a run that ended regularly, of a ladder that of each load point; a simulator's is known
    beforehand.
    """
    if record.state not in {"done", "suspect"} or record.is_virtual:
        return
    settings = variant_settings(profile, record.variant, record.cell)
    loads_s = [
        (load.cell if isinstance(load, LoadRecord) else {}, s_from_ns(load.last_token_ns - load.first_send_ns))
        for load in record.loads or (record.times,)
        if load.first_send_ns is not None and load.last_token_ns is not None
    ]
    for point in record.ladder or ({},):
        of_point, sent = [took for cell, took in loads_s if cell == point], requests.of(record.cell | point)
        if not of_point or not sent:
            continue
        arrival = under_load(profile, record.cell | point).workload.arrival
        store_duration(
            RunDuration(
                measured_at=utc_now(),
                host=platform.node(),
                gpus=tuple(gpus),
                engine=profile.engine.kind,
                model=profile.model,
                server_sha256=_sha256(settings.server.model_dump(mode="json")),
                settings_sha256=_settings_sha256(settings),
                overhead_s=max(took_s - sum(took for _, took in loads_s), 0.0),
                token_s=_token_s(sent, arrival, mean(of_point)),
                num_sequences=_num_sequences(sent, arrival),
            ),
        )


def estimate_durations(profile: Profile, requests: RequestSets, gpus: Sequence[str]) -> PlanEstimate | None:
    """Estimate the duration of each server's runs; None without an earlier run on this machine."""
    earlier = _earlier_here(profile.engine.kind, profile.model, gpus)
    if not earlier or not requests.sets[0][1]:
        return None
    run_s, overheads_s, used = dict[str, float](), list[float](), set[int]()
    for variant, cell in arms(profile):
        arrival, sent = under_load(profile, cell).workload.arrival, requests.of(cell)
        num_sequences = _num_sequences(sent, arrival)
        alike = _most_alike(earlier, variant_settings(profile, variant, cell))
        nearest = min(abs(log(duration.num_sequences / num_sequences)) for duration in alike)
        of_such_batches = [d for d in alike if abs(log(d.num_sequences / num_sequences)) == nearest]
        token_s = median(duration.token_s for duration in of_such_batches[-_NEWEST:])
        overhead_s = median(duration.overhead_s for duration in alike[-_NEWEST:])
        overheads_s.append(overhead_s)
        label = arm_label(*server_of(profile, variant, cell))
        run_s[label] = run_s.get(label, overhead_s) + profile.num_loads * load_s(sent, arrival, token_s)
        used.update(map(id, alike[-_NEWEST:]))
    basis = f"from {count_of(len(used), 'earlier run')} on this machine"
    return PlanEstimate(run_s=run_s, around_s=AROUND_S, basis=basis, overhead_s=mean(overheads_s))


def _earlier_here(engine: str, model: str, gpus: Sequence[str]) -> list[RunDuration]:
    here = (platform.node(), tuple(gpus), model)
    return [
        duration for duration in stored_durations(engine) if (duration.host, duration.gpus, duration.model) == here
    ]


def earlier_overhead_s(profile: Profile, gpus: Sequence[str]) -> float | None:
    """Median over earlier runs here of all but their loads: a server's start, warm-up and end; None without any."""
    overheads_s = [each.overhead_s for each in _earlier_here(profile.engine.kind, profile.model, gpus)[-_NEWEST:]]
    return median(overheads_s) if overheads_s else None


def tokens_of_start(engine: str, model: str) -> float:
    """The tokens that a sequence gets in the time that a server takes to start, by earlier runs here; 0 without."""
    earlier = _earlier_here(engine, model, [gpu.name for gpu in gpu_inventory()])[-_NEWEST:]
    return median(each.overhead_s / each.token_s for each in earlier) if earlier else 0.0


def _most_alike(earlier: Sequence[RunDuration], settings: VariantSettings) -> Sequence[RunDuration]:
    """Earlier runs of the same settings, or else of the same server, or else all of the model."""
    whole, server = _settings_sha256(settings), _sha256(settings.server.model_dump(mode="json"))
    same_settings = [each for each in earlier if each.settings_sha256 == whole]
    return same_settings or [each for each in earlier if each.server_sha256 == server] or earlier


def load_s(requests: Sequence[PreparedRequest], arrival: Arrival, token_s: float) -> float:
    """Duration of a load, first send to last token, whose sequences get a token every ``token_s`` seconds."""
    free_s = [0.0] * min(arrival.max_concurrency or len(requests), len(requests))
    for request in requests:
        start_s = max(free_s[0], s_from_ns(request.arrival_ns))
        heapq.heapreplace(free_s, start_s + request.max_tokens * token_s)
    return max(free_s, default=0.0)


def _token_s(requests: Sequence[PreparedRequest], arrival: Arrival, took_s: float) -> float:
    """The time per token with which a load takes ``took_s``: the duration grows with it."""
    if not any(request.arrival_ns for request in requests):  # in proportion
        return took_s / (load_s(requests, arrival, 1.0) or 1.0)
    low_s, high_s = 0.0, 100.0
    # Bisection to a microsecond
    for _ in range(27):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if load_s(requests, arrival, middle_s) < took_s else (low_s, middle_s)
    return high_s


def _num_sequences(requests: Sequence[PreparedRequest], arrival: Arrival) -> int:
    return min(arrival.max_concurrency or len(requests), len(requests)) * max(request.n for request in requests)


def _settings_sha256(settings: VariantSettings) -> str:
    return _sha256({**settings.model_dump(mode="json"), "variant": ""})


def _sha256(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode(document)).hexdigest()
