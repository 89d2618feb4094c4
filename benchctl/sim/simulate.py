"""A whole request list in virtual time: the server without HTTP and without waiting."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields

import numpy as np

from benchctl.records.columns.step_columns import StepColumns, columns_from
from benchctl.records.step import StepRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core
from benchctl.sim.costs.cost_model import cost_model_for
from benchctl.sim.costs.noise import published_noise
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.phase import AnnouncedPhase, AnnouncedRequest
from benchctl.sim.request import Request
from benchctl.sim.request_columns import RequestColumns
from benchctl.sim.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLoad:
    """One phase of load: requests, their offsets from its start, and a limit on concurrency."""

    requests: tuple[Request, ...]
    arrival_ns: tuple[int, ...] | None = None
    """One offset for each request; None sends all at the start."""
    max_concurrency: int | None = None
    is_warmup: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Steps and sequences of one server life."""

    steps: tuple[StepRecord, ...]
    sequences: tuple[Sequence, ...]
    """Finished sequences in the order of their end."""

    requests: RequestColumns
    """The same sequences as columns."""

    def step_columns(self, *, is_warmup: bool = False) -> StepColumns:
        """The steps of the load, or those of the warm-up, as columns."""
        return columns_from(self.steps, is_warmup=is_warmup)

    def measured_steps(self) -> tuple[StepRecord, ...]:
        return tuple(step for step in self.steps if not step.is_warmup)

    def makespan_ns(self) -> int:
        """From the first measured step's start to the last one's end."""
        steps = self.measured_steps()
        return steps[-1].start_ns + steps[-1].dur_ns - steps[0].start_ns if steps else 0


def engine_for_config(config: SimConfig) -> SimulatedEngine:
    """A fresh engine. Raises UsageError when the configuration names an unknown model or device."""
    noise = None
    if config.noise == "published":
        noise = published_noise(config.noise_seed, has_value_model=config.value_model is not None)
    return SimulatedEngine(config, cost_model_for(config), noise)


def simulate(config: SimConfig, loads: Items[SimLoad]) -> Simulation:
    """Run phases of load on one fresh server.

    The steps are those that the server logs when the same phases are announced and sent over HTTP.
    """
    core = Core(engine_for_config(config))
    steps: list[StepRecord] = []
    sequences: list[Sequence] = []
    rows: list[tuple[int, ...]] = []
    for number, load in enumerate(loads):
        index_of = {request.request_id: index for index, request in enumerate(load.requests)}
        arrival_ns = load.arrival_ns or (0,) * len(load.requests)
        request_ids = (request.request_id for request in load.requests)
        arrivals = [AnnouncedRequest(*arrival) for arrival in zip(request_ids, arrival_ns, strict=True)]
        core.announce(AnnouncedPhase(arrivals, max_concurrency=load.max_concurrency, is_warmup=load.is_warmup))
        for request in load.requests:
            core.submit(request)
        while (output := core.next_step()) is not None:
            steps.append(output.record)
            sequences += output.finished
            rows += (_row(number, index_of[seq.request.request_id], seq) for seq in output.finished)
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(fields(RequestColumns))).T
    names = (field.name for field in fields(RequestColumns))
    requests = RequestColumns(**dict(zip(names, columns, strict=True)))
    return Simulation(steps=tuple(steps), sequences=tuple(sequences), requests=requests)


def _row(load: int, index: int, seq: Sequence) -> tuple[int, ...]:
    first_ns, last_ns = seq.first_token_ns or 0, seq.last_token_ns or 0
    times = (seq.arrival_ns, first_ns, last_ns)
    return (load, index, seq.choice, *times, seq.prompt_tokens, seq.num_output, seq.num_cached, seq.num_preemptions)
