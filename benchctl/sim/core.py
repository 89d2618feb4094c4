"""The virtual-time core: the engine, and the phases of load that feed it. Pure; the caller decides when."""

from collections import deque
from typing import Final

from benchctl.sim.engine import SimulatedEngine, StepOutput
from benchctl.sim.phase import AnnouncedPhase
from benchctl.sim.requests.request import Request


class Core:
    """Feeds the engine from announced phases, one after the other, and from unannounced requests.

    A phase starts when the engine is idle and the phase before it is over or abandoned. Virtual time passes in
    steps, and within a phase in jumps to the next arrival; between phases it does not pass.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine: Final = engine
        self.phase: AnnouncedPhase | None = None
        self._announced: deque[AnnouncedPhase] = deque()
        self.num_abandoned_phases = 0

    def announce(self, phase: AnnouncedPhase) -> None:
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
        phase, entry_ns = self.phase, None if self.phase is None else self.phase.next_entry_ns()
        if phase is None or entry_ns is None or phase.has_next_come_in():
            return None
        is_due = entry_ns <= self.engine.now_ns or not self.engine.has_work
        return phase.next_request_id() if is_due else None

    def abandon_phase(self) -> None:
        """Fall back to free running: requests that have come in enter now, later ones as they come."""
        if self.phase is not None:
            for request in self.phase.give_up():
                self.engine.add_request(request)
            self.num_abandoned_phases += 1

    def next_step(self) -> StepOutput | None:
        """Admit the requests that are due and run one step; None if the core must wait for a request."""
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
        """Admit the requests that are due, jumping over idle time; False while one of them has not come in."""
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
