"""The virtual-time core: the engine, and the phases of load that feed it. Pure; the caller decides when.

``simulate`` runs a whole list of requests: the server without HTTP and without waiting.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from benchctl.records.columns import Integers, StepColumns
from benchctl.records.schema import StepRecord
from benchctl.sim.arrivals import Phase, SimLoad
from benchctl.sim.config import SimConfig
from benchctl.sim.engine import LeapOutput, SimulatedEngine, StepOutput
from benchctl.sim.requests import Request
from benchctl.sim.steps import StepLog, columns_of
from benchctl.sim.walk import NEVER_NS

_MANY_STEPS: Final = 1 << 20


class Core:
    """Feeds the engine from announced phases, one after the other, and from unannounced requests.

    A phase starts when the engine is idle and the phase before it is over or abandoned. Virtual time passes in
    steps, and within a phase in jumps to the next arrival; between phases it does not pass.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine: Final = engine
        self.phase: Phase | None = None
        self._announced: deque[Phase] = deque()
        self.num_abandoned_phases = 0

    def announce(self, phase: Phase) -> None:
        """Queue a phase; it replaces an idle one that still misses requests."""
        self._announced.append(phase)
        self._turn_phases()

    def submit(self, request: Request) -> None:
        """Take a request in: an announced one enters when it is due, any other now."""
        self._turn_phases()
        for phase in self._phases():
            if phase.expects(request.request_id):
                phase.come_in(request.request_id, request)
                return
        self.engine.add_request(request)

    def refuse(self, request_id: str) -> None:
        """Give up a request that cannot be served; if it was announced, its phase no longer waits for it."""
        self._turn_phases()
        for phase in self._phases():
            if phase.expects(request_id):
                phase.come_in(request_id, None)
        if self.phase is not None:
            self._admit(self.phase)

    def abort(self, request_id: str) -> None:
        """Drop a request whose client has disconnected."""
        self.engine.abort(request_id)
        for phase in self._phases():
            phase.end(request_id, self.engine.now_ns)

    def missing(self) -> str | None:
        """The announced request that holds the core back, or None."""
        phase, engine = self.phase, self.engine
        if phase is None or phase.next_entry_ns is None:
            return None
        return phase.missing() if phase.next_entry_ns <= engine.now_ns or not engine.has_work else None

    def abandon_phase(self) -> None:
        """Fall back to free running: requests that have come in enter now, later ones as they come."""
        if self.phase is not None:
            for request in self.phase.give_up():
                self.engine.add_request(request)
            self.num_abandoned_phases += 1

    def next_step(self) -> StepOutput | None:
        """Admit the requests that are due and run one step; None if the core must wait for a request."""
        if not self._can_run():
            return None
        output = self.engine.step()
        self._note_ends(output.finished_requests)
        return output

    def leap(self) -> LeapOutput | None:
        """Admit the requests that are due and run steps until the batch changes; None if there is nothing to do."""
        if not self._can_run():
            return None
        entry_ns = None if self.phase is None else self.phase.next_entry_ns
        output = self.engine.leap(NEVER_NS if entry_ns is None else entry_ns)
        self._note_ends(output.finished_requests)
        return output

    def _can_run(self) -> bool:
        self._turn_phases()
        phase, engine = self.phase, self.engine
        if (phase is not None and not self._admit(phase)) or not engine.has_work:
            return False
        engine.is_warmup = phase is not None and phase.is_warmup and not phase.is_over
        return True

    def _note_ends(self, finished_requests: Iterable[str]) -> None:
        if self.phase is not None:
            for request_id in finished_requests:
                self.phase.end(request_id, self.engine.now_ns)

    def _admit(self, phase: Phase) -> bool:
        """Let requests in up to now, over idle time up to the next arrival; False if one is missing."""
        engine = self.engine
        while True:
            while (entry_ns := phase.next_entry_ns) is not None and entry_ns <= engine.now_ns:
                if phase.missing() is not None:
                    return False
                if (entered := phase.enter(engine.now_ns)) is not None:
                    engine.add_request(*entered)
            if engine.has_work or entry_ns is None:
                return True
            if phase.missing() is not None:
                return False
            engine.now_ns = entry_ns

    def _turn_phases(self) -> None:
        if not self._announced or self.engine.has_work:
            return
        if self.phase is not None and not self.phase.is_over:
            self.abandon_phase()
            if self.engine.has_work:
                return
        self.phase = self._announced.popleft()
        self.phase.start(self.engine.now_ns)

    def _phases(self) -> list[Phase]:
        return [*([self.phase] if self.phase else []), *self._announced]


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
