"""The achievable peaks of a device: measured by a worker, judged, and filed with the machine."""

import datetime as dt
import platform
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from benchctl.errors import UsageError
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.micro.peak_checks import peak_warnings
from benchctl.micro.worker import WorkerInfo, WorkerSettings, find_torch_python, started_worker
from benchctl.records.peaks import MeasuredPeaks
from benchctl.records.schema import SCHEMA_VERSION

_BUSY_S = 0.5
"""Time over which the use of the machine by others is observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineSettings:
    """Device and effort; None chooses what suits the device."""

    device: str | None = None
    """``cpu``, ``cuda`` or ``cuda:N``; None for the first GPU, or the CPU where there is none."""
    python: Path | None = None
    threads: int | None = None
    """Threads of a CPU; None for one on each core that may be used."""
    rounds: int = 9
    dtypes: tuple[str, ...] | None = None
    sizes: tuple[int, ...] | None = None
    buffer_bytes: int | None = None
    least_s: float | None = None
    """Duration of one value."""
    all_reduce_ranks: int | None = None


def measure_roofline(settings: RooflineSettings) -> MeasuredPeaks:
    """Measure one device of this machine.

    Raises UsageError and EngineUnavailableError as ``started_worker`` does.
    """
    device = settings.device or ("cuda:0" if gpu_inventory() else "cpu")
    busy_frac = psutil.cpu_percent(_BUSY_S) / 100
    worker_settings = WorkerSettings(
        python=find_torch_python(settings.python), device=device, threads=settings.threads
    )
    with started_worker(worker_settings) as worker:
        answer = worker.ask(
            "peaks",
            dtypes=settings.dtypes,
            sizes=settings.sizes,
            buffer_bytes=settings.buffer_bytes,
            memory_bytes=worker.info.free_bytes,
            rounds=settings.rounds,
            least_s=settings.least_s,
            all_reduce_ranks=settings.all_reduce_ranks,
        )
        return judged_peaks(worker.info, answer, busy_frac=busy_frac)


def judged_peaks(info: WorkerInfo, answer: dict[str, object], *, busy_frac: float | None) -> MeasuredPeaks:
    """The answer of a worker as peaks of this machine, with the warnings about them.

    Raises UsageError where no product or neither copy nor read could be measured.
    """
    is_cpu = info.device == "cpu"
    about = {
        "schema_version": SCHEMA_VERSION,
        "measured_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "host": platform.node(),
        "kind": "cpu" if is_cpu else "cuda",
        "device": info.device_name,
        "threads": info.num_threads if is_cpu else None,
        "memory_bytes": info.total_bytes,
        "torch_version": info.torch_version,
        "cuda_version": info.cuda_version,
        "float32_precision": info.float32_precision,
        "busy_frac": busy_frac,
    }
    try:
        peaks = msgspec.convert(answer | about, MeasuredPeaks)
    except msgspec.ValidationError as error:
        unmeasured = msgspec.convert(answer["unmeasured"], dict[str, str])
        reasons = "; ".join(f"{dtype}: {reason}" for dtype, reason in unmeasured.items())
        advice = reasons or "ask for more arithmetic with --dtype"
        raise UsageError(f"the peaks of {info.device_name} are incomplete: {error}; {advice}") from error
    return msgspec.structs.replace(peaks, warnings=peak_warnings(peaks))
