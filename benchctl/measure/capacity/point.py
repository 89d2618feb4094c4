"""One load on one arm of a profile, simulated in memory: its metrics, by the definitions of measured runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from benchctl.analysis.metrics.run import run_metrics
from benchctl.measure.run import noise_seed
from benchctl.measure.tokenizing.choice import planning_tokenizer, prepare_counted
from benchctl.measure.warmup import warmup_bursts
from benchctl.profile.model import Arrival, Profile, VariantSettings
from benchctl.profile.planning import plan_runs, variant_settings
from benchctl.records.columns.columns import columns_from
from benchctl.records.directory import arm_label
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import PlannedRun, PreparedRequest, RunRecord
from benchctl.records.schema import SCHEMA_VERSION, Cell
from benchctl.sim.virtual_server import VirtualServer
from benchctl.units import MS_PER_S

if TYPE_CHECKING:
    from benchctl.records.schema import StepRecord

_FEWEST_WAVES: Final = 5
_IDLE_REQUESTS: Final = 0.1
"""Mean requests in flight, by Little's law, below which a server counts as idle."""
LoadKind: TypeAlias = Literal["rate", "max-concurrency"]
"""The size of a load: requests per second of an open loop, or slots of a closed one."""
Metrics: TypeAlias = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One arm of a profile under one load. ``settings`` are the overrides that made the profile, as given."""

    profile: Profile
    settings: tuple[str, ...]
    variant: str
    cell: Cell
    kind: LoadKind | None
    size: float | None
    """Requests per second or slots; None for the profile's own load."""

    @property
    def label(self) -> str:
        return " ".join((arm_label(self.variant, self.cell), *self.settings))


def with_load(profile: Profile, kind: LoadKind, size: float) -> Profile:
    """The profile under another load: of its own kind of schedule, or Poisson where that has no rate."""
    arrival = profile.workload.arrival
    if kind == "max-concurrency":
        arrival = Arrival(kind="closed-loop", max_concurrency=round(size))
    elif arrival.kind in {"constant", "poisson", "gamma"}:
        arrival = arrival.model_copy(update={"request_rate": size})
    else:
        arrival = Arrival(kind="poisson", request_rate=size)
    workload = profile.workload.model_copy(update={"arrival": arrival})
    return profile.model_copy(update={"workload": workload})


def simulate_point(point: LoadPoint) -> Metrics:
    """The metrics of a load, each the mean over the profile's blocks; None where a block does not know it."""
    profile = point.profile
    if point.kind is not None and point.size is not None:
        profile = with_load(profile, point.kind, point.size)
    runs = [run for run in plan_runs(profile).runs if (run.variant, run.cell) == (point.variant, point.cell)]
    blocks = [_metrics_of(profile, run) for run in runs]
    return {name: _mean([block[name] for block in blocks]) for name in blocks[0]}


def is_long(point: LoadPoint, metrics: Metrics) -> bool:
    """True if a queue has time to grow: the arrivals take five mean latencies, or the slots are filled five times.

    A shorter load is a burst, which a server may absorb at a rate that it cannot sustain.
    """
    num_requests, e2el_ms = metrics["num_requests"], metrics["e2el_ms"]
    if point.size is None:
        return True
    if num_requests is None or e2el_ms is None:
        return False
    if point.kind == "max-concurrency":
        return num_requests >= _FEWEST_WAVES * point.size
    return num_requests / point.size >= _FEWEST_WAVES * e2el_ms / MS_PER_S


def is_idle(point: LoadPoint, metrics: Metrics) -> bool:
    """True for a rate at which requests hardly meet: no smaller one gives better latencies."""
    e2el_ms = metrics["e2el_ms"]
    if point.kind != "rate" or point.size is None or e2el_ms is None:
        return False
    return point.size * e2el_ms / MS_PER_S < _IDLE_REQUESTS


def _metrics_of(profile: Profile, planned: PlannedRun) -> Metrics:
    settings = variant_settings(profile, planned.variant, planned.cell)
    requests = prepare_counted(profile, planning_tokenizer(profile)).requests
    return metrics_of_life(profile, settings, requests, noise_seed(profile, planned))


def metrics_of_life(
    profile: Profile, settings: VariantSettings, requests: Sequence[PreparedRequest], seed: int
) -> Metrics:
    """The metrics of one server life with the warm-up and the load of a profile; ``seed`` is that of its noise."""
    steps: list[StepRecord] = []
    server = VirtualServer(settings, noise_seed=seed, on_step=steps.append)
    for burst in warmup_bursts(requests, profile, settings):
        list(server.send_burst(burst))
    records = tuple(server.send_load(requests, profile.workload.arrival))
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        run_id=settings.variant,
        index=0,
        block=0,
        position=0,
        variant=settings.variant,
        clock="virtual",
    )
    run = LoadedRun(record=record, requests=records, columns=columns_from(steps))
    return run_metrics(run, profile.workload.arrival)


def _mean(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fsum(numbers) / len(numbers) if len(numbers) == len(values) else None
