"""A whole request list in virtual time: the server without HTTP and without waiting."""

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from benchctl.records.columns import Integers, StepColumns
from benchctl.records.schema import StepRecord
from benchctl.sim.arrivals import Phase, SimLoad
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.steps import StepLog, columns_of

_MANY_STEPS: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestColumns:
    """Finished choices in the order of their end; each array has one value a choice. Times are virtual ns."""

    load: Integers
    """Index of the load that the request belongs to."""
    index: Integers
    """Index of the request within its load."""
    choice: Integers
    """Number of the choice within its request, from 0."""
    entry: Integers
    """Number of the choice in the order in which they entered the queue, from 1."""
    arrival_ns: Integers
    """The request entered the queue."""
    first_token_ns: Integers
    last_token_ns: Integers
    prompt_tokens: Integers
    output_tokens: Integers
    cached_tokens: Integers
    """Prompt tokens that a shared prefix spared when the request last began."""
    preemptions: Integers
    """Times that the choice lost its key-value memory."""

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """Steps and requests of one server life."""

    config: SimConfig
    loads: tuple[SimLoad, ...]
    log: StepLog
    requests: RequestColumns
    num_preemptions: int
    num_queried_tokens: int
    """Prompt tokens that a prefix cache was asked for, and those that it had."""
    num_hit_tokens: int

    @property
    def steps(self) -> list[StepRecord]:
        """All steps in their order."""
        return list(self.log.records())

    def step_columns(self, *, is_warmup: bool = False) -> StepColumns:
        """The steps of the load, or those of the warm-up, as columns."""
        return columns_of(self.log, is_warmup=is_warmup)

    def makespan_ns(self) -> int:
        """From the first measured step's start to the last one's end."""
        columns = self.step_columns()
        return int(columns.start_ns[-1] + columns.dur_ns[-1] - columns.start_ns[0]) if len(columns) else 0


def simulate(config: SimConfig, loads: Items[SimLoad], *, keeps_steps: bool = True) -> Simulation:
    """Run phases of load on one fresh server.

    The steps are those that the server logs when the same phases are announced and sent over HTTP. Without
    ``keeps_steps`` all but the last are forgotten on the way (``log.num_cleared``).
    """
    engine = SimulatedEngine(config)
    core = Core(engine)
    ended = array("q")
    for number, load in enumerate(loads):
        core.announce(Phase(load))
        while (output := core.leap()) is not None:
            for seq in output.finished:
                times = (seq.arrival_ns, seq.first_token_ns or 0, seq.last_token_ns or 0)
                tokens = (seq.prompt_tokens, seq.num_output, seq.num_cached)
                ended.extend(
                    (number, seq.entry.request_index, seq.choice, seq.seq_id, *times, *tokens, seq.num_preemptions)
                )
            if not keeps_steps and len(engine.log) > _MANY_STEPS:
                engine.log.clear()
    names = [field.name for field in fields(RequestColumns)]
    columns = np.frombuffer(ended, dtype=np.int64).reshape(-1, len(names)).T
    return Simulation(
        config=config,
        loads=tuple(loads),
        log=engine.log,
        requests=RequestColumns(**dict(zip(names, columns, strict=True))),
        num_preemptions=engine.scheduler.num_preemptions,
        num_queried_tokens=engine.block_manager.num_queried_tokens,
        num_hit_tokens=engine.block_manager.num_hit_tokens,
    )
