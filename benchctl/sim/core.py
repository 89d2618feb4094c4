"""The virtual-time core: the engine, and the phases of load that feed it. Pure; the caller decides when."""

from collections import deque
from typing import Final

from benchctl.sim.engine import SimulatedEngine, StepOutput
from benchctl.sim.phase import AnnouncedPhase
from benchctl.sim.request import Request


class Core:
    """Feeds the engine from announced phases, one after the other, and from whoever comes unannounced.

    A phase starts when the engine is idle and the phase before it is over or abandoned. Virtual time passes in
    steps, and within a phase in jumps to the next arrival; between phases it stands still.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine: Final = engine
        self.phase: AnnouncedPhase | None = None
        self._announced: deque[AnnouncedPhase] = deque()
        self.num_abandoned_phases = 0

    def announce(self, phase: AnnouncedPhase) -> None:
        """Queue a phase; it replaces one in which nothing runs and whose requests did not all come."""
        self._announced.append(phase)
        self._turn_phases()

    def submit(self, request: Request) -> None:
        """A request has come in: announced ones enter when they are due, others now."""
        self._turn_phases()
        for phase in self._phases():
            if phase.expects(request.request_id):
                phase.come_in(request.request_id, request)
                return
        self.engine.add_request(request)

    def refuse(self, request_id: str) -> None:
        """A request came in that cannot be served; if it was announced, nobody waits for it any longer."""
        self._turn_phases()
        for phase in self._phases():
            if phase.expects(request_id):
                phase.come_in(request_id, None)
        if self.phase is not None:
            self._admit(self.phase)

    def abort(self, request_id: str) -> None:
        """The client has gone."""
        self.engine.abort(request_id)
        for phase in self._phases():
            phase.end(request_id, self.engine.now_ns)

    def missing(self) -> str | None:
        """The announced request that holds the core back, or None."""
        phase, entry_ns = self.phase, None if self.phase is None else self.phase.next_entry_ns()
        if phase is None or entry_ns is None or phase.has_next_come_in():
            return None
        is_due = entry_ns <= self.engine.now_ns or not self.engine.has_work
        return phase.next_request_id() if is_due else None

    def abandon_phase(self) -> None:
        """Fall back to free running: what has come in enters now, what comes later enters as it comes."""
        if self.phase is not None:
            for request in self.phase.give_up():
                self.engine.add_request(request)
            self.num_abandoned_phases += 1

    def next_step(self) -> StepOutput | None:
        """Let in what is due and run one step; None when nothing can happen before something comes in."""
        self._turn_phases()
        if self.phase is not None and not self._admit(self.phase):
            return None
        if not self.engine.has_work:
            return None
        self.engine.is_warmup = self.phase is not None and self.phase.is_warmup and not self.phase.is_over
        output = self.engine.step()
        if self.phase is not None:
            for request_id in output.finished_requests:
                self.phase.end(request_id, self.engine.now_ns)
        return output

    def _admit(self, phase: AnnouncedPhase) -> bool:
        """Let in what is due, jumping over idle time; False while a request that is due has not come in."""
        while True:
            for request in phase.take_due(self.engine.now_ns):
                self.engine.add_request(request)
            if self.engine.has_work:
                return self.missing() is None
            entry_ns = phase.next_entry_ns()
            if entry_ns is None or not phase.has_next_come_in():
                return entry_ns is None
            self.engine.now_ns = entry_ns

    def _turn_phases(self) -> None:
        if not self._announced or self.engine.has_work:
            return
        if self.phase is not None and not self.phase.is_over:
            self.abandon_phase()
            if self.engine.has_work:
                return
        self.phase = self._announced.popleft()
        self.phase.start(self.engine.now_ns)

    def _phases(self) -> list[AnnouncedPhase]:
        return [*([self.phase] if self.phase else []), *self._announced]
