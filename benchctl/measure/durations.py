"""Estimated duration of an experiment, from earlier runs of its engine and model on this machine."""

import hashlib
import heapq
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Any, Final

from benchctl.measure.measured_run import utc_now
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.profile.arrival import Arrival
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import arm_label
from benchctl.records.files import encode
from benchctl.records.record import Manifest, PreparedRequest, RunRecord
from benchctl.records.stores import RunDuration, store_duration, stored_durations
from benchctl.units import s_from_ns

_NEWEST: Final = 12
"""Runs that speak for a later one: a machine changes, and older ones are of how it was."""
AROUND_S: Final = 3.0
"""Before the first run and after the last, where tables and pictures are made: 2.8 and 3.0 s in experiments of 6
and of 2 runs on two cores."""
_HALVINGS: Final = 60
_LONGEST_TOKEN_S: Final = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationEstimate:
    """Estimated seconds of one run of each arm, by the arm's label, and the number of earlier runs behind it."""

    run_s: Mapping[str, float]
    num_runs: int


def gpu_names_here(manifest: Manifest) -> tuple[str, ...]:
    """Names of the devices of this machine, where an experiment of another one may be continued."""
    is_here = manifest.host.hostname == platform.node()
    return tuple(gpu.name for gpu in (manifest.gpus if is_here else gpu_inventory()))


def remember_duration(
    profile: Profile, requests: Sequence[PreparedRequest], record: RunRecord, took_s: float, gpus: Sequence[str]
) -> None:
    """Store the duration of a run that ended regularly; a simulator's is known beforehand."""
    first_ns, last_ns = record.times.first_send_ns, record.times.last_token_ns
    if record.state not in {"done", "suspect"} or record.is_virtual or not requests:
        return
    if first_ns is None or last_ns is None:
        return
    load_s = s_from_ns(last_ns - first_ns)
    settings = variant_settings(profile, record.variant, record.cell)
    store_duration(
        RunDuration(
            measured_at=utc_now(),
            host=platform.node(),
            gpus=tuple(gpus),
            engine=profile.engine.kind,
            model=profile.model,
            server_sha256=_sha256(settings.server.model_dump(mode="json")),
            settings_sha256=_settings_sha256(settings),
            overhead_s=max(took_s - load_s, 0.0),
            token_s=_token_s(requests, profile.workload.arrival, load_s),
            num_sequences=_num_sequences(requests, profile.workload.arrival),
        ),
    )


def estimate_durations(
    profile: Profile, requests: Sequence[PreparedRequest], gpus: Sequence[str]
) -> DurationEstimate | None:
    """Estimate the duration of each arm's runs; None without an earlier run on this machine."""
    earlier = _earlier_here(profile, gpus)
    if not earlier or not requests:
        return None
    arrival, run_s = profile.workload.arrival, {}
    num_sequences, used = _num_sequences(requests, arrival), set[int]()
    for variant, cell in arms(profile):
        alike = _most_alike(earlier, variant_settings(profile, variant, cell))
        nearest = min(abs(log(duration.num_sequences / num_sequences)) for duration in alike)
        of_such_batches = [d for d in alike if abs(log(d.num_sequences / num_sequences)) == nearest]
        token_s = median(duration.token_s for duration in of_such_batches[-_NEWEST:])
        overhead_s = median(duration.overhead_s for duration in alike[-_NEWEST:])
        run_s[arm_label(variant, cell)] = overhead_s + load_s(requests, arrival, token_s)
        used.update(map(id, alike[-_NEWEST:]))
    return DurationEstimate(run_s=run_s, num_runs=len(used))


def _earlier_here(profile: Profile, gpus: Sequence[str]) -> list[RunDuration]:
    here = (platform.node(), tuple(gpus), profile.model)
    stored = stored_durations(profile.engine.kind)
    return [duration for duration in stored if (duration.host, duration.gpus, duration.model) == here]


def earlier_overhead_s(profile: Profile, gpus: Sequence[str]) -> float | None:
    """Median over earlier runs here of all but their loads: a server's start, warm-up and end; None without any."""
    overheads_s = [duration.overhead_s for duration in _earlier_here(profile, gpus)[-_NEWEST:]]
    return median(overheads_s) if overheads_s else None


def _most_alike(earlier: Sequence[RunDuration], settings: VariantSettings) -> Sequence[RunDuration]:
    """Earlier runs of the same settings, or else of the same server, or else all of the model."""
    whole, server = _settings_sha256(settings), _sha256(settings.server.model_dump(mode="json"))
    same_settings = [duration for duration in earlier if duration.settings_sha256 == whole]
    return same_settings or [duration for duration in earlier if duration.server_sha256 == server] or earlier


def load_s(requests: Sequence[PreparedRequest], arrival: Arrival, token_s: float) -> float:
    """Duration of a load, first send to last token, whose sequences get a token every ``token_s`` seconds."""
    limit = arrival.max_concurrency or len(requests)
    free_s = [0.0] * min(limit, len(requests))
    end_s = 0.0
    for request in requests:
        start_s = max(heapq.heappop(free_s), s_from_ns(request.arrival_ns))
        heapq.heappush(free_s, start_s + request.max_tokens * token_s)
        end_s = max(end_s, start_s + request.max_tokens * token_s)
    return end_s


def _token_s(requests: Sequence[PreparedRequest], arrival: Arrival, took_s: float) -> float:
    """The time per token with which a load takes ``took_s``, by bisection: the duration grows with it."""
    low_s, high_s = 0.0, _LONGEST_TOKEN_S
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if load_s(requests, arrival, middle_s) < took_s else (low_s, middle_s)
    return high_s


def _num_sequences(requests: Sequence[PreparedRequest], arrival: Arrival) -> int:
    answers = max(request.n for request in requests)
    return min(arrival.max_concurrency or len(requests), len(requests)) * answers


def _settings_sha256(settings: VariantSettings) -> str:
    return _sha256({**settings.model_dump(mode="json"), "variant": ""})


def _sha256(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode(document)).hexdigest()
