"""A whole request list in virtual time: the server without HTTP and without waiting."""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import fields
from typing import Final

import numpy as np

from benchctl.sim.arrivals import LoadPhase, SimLoad
from benchctl.sim.config import SimConfig
from benchctl.sim.engine import LeapOutput, SimulatedEngine
from benchctl.sim.sequences import Sequence
from benchctl.sim.simulation import RequestColumns, Simulation
from benchctl.sim.start import engine_for_config
from benchctl.sim.walk import NEVER_NS, Walk, walk_in_blocks

__all__ = ["SimLoad", "Simulation", "engine_for_config", "simulate"]


_MANY_STEPS: Final = 1 << 20


def simulate(
    config: SimConfig, loads: Items[SimLoad], walk: Walk = walk_in_blocks, *, keeps_steps: bool = True
) -> Simulation:
    """Run phases of load on one fresh server.

    The steps are those that the server logs when the same phases are announced and sent over HTTP. ``walk`` changes
    the time that this takes and nothing else. Without ``keeps_steps`` all but the last are forgotten on the way
    (``log.num_cleared``).
    """
    engine = engine_for_config(config, walk)
    ended = array("q")
    for number, load in enumerate(loads):
        phase = LoadPhase(load)
        for output in _leaps(engine, phase):
            for seq in output.finished:
                ended.extend(_ended(number, phase.index_of(seq.request.request_id), seq))
            for request_id in output.finished_requests:
                phase.end(request_id, engine.now_ns)
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


def _leaps(engine: SimulatedEngine, phase: LoadPhase) -> Iterator[LeapOutput]:
    """Let requests in as they are due, jumping over idle time, and run the engine from one to the next."""
    phase.start(engine.now_ns)
    engine.is_warmup = phase.is_warmup
    while True:
        while (entry_ns := phase.next_entry_ns) is not None:
            if entry_ns > engine.now_ns:
                if engine.has_work:
                    break
                engine.now_ns = entry_ns
            engine.add_request(phase.take_next())
        if not engine.has_work:
            return
        yield engine.leap(NEVER_NS if entry_ns is None else entry_ns)


def _ended(load: int, index: int, seq: Sequence) -> tuple[int, ...]:
    """The columns of one choice, in the order of RequestColumns."""
    times = (seq.arrival_ns, seq.first_token_ns or 0, seq.last_token_ns or 0)
    tokens = (seq.prompt_tokens, seq.num_output, seq.num_cached)
    return (load, index, seq.choice, seq.seq_id, *times, *tokens, seq.num_preemptions)
