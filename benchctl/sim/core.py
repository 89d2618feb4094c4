"""The virtual-time core: the engine, and the phases of load that feed it."""

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

from benchctl.records.schema import StepRecord
from benchctl.sim.arrivals import AnnouncedPhase, AnnouncedRequest
from benchctl.sim.engine import SimulatedEngine, StepOutput
from benchctl.sim.requests import Request
from benchctl.sim.sequences import Sequence
from benchctl.sim.simulate import SimLoad


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


@dataclass(frozen=True, slots=True)
class ServedChoice:
    """One choice that has ended; ``token_ns`` holds the time at which each of its tokens left."""

    sequence: Sequence
    token_ns: list[int]
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """A request that has ended, in virtual nanoseconds. ``slot_free_ns`` is None where it waited for no slot."""

    request_id: str
    planned_ns: int
    slot_free_ns: int | None
    end_ns: int
    choices: tuple[ServedChoice, ...]

    @property
    def sent_ns(self) -> int:
        """Time at which a client without any delay sends it: as planned, or when its slot is free."""
        return self.planned_ns if self.slot_free_ns is None else self.slot_free_ns


class _Slots:
    """The planned time of each request of a phase, and the end of an earlier one that gives it its slot."""

    def __init__(self, start_ns: int, arrivals: Items[AnnouncedRequest], limit: int | None) -> None:
        ordered = sorted(arrivals, key=lambda arrival: arrival.arrival_ns)
        self._planned_ns = [start_ns + arrival.arrival_ns for arrival in ordered]
        self._index = {arrival.request_id: i for i, arrival in enumerate(ordered)}
        self._limit = limit
        self._ended_ns: list[int] = []

    def times_of(self, request_id: str) -> tuple[int, int | None]:
        """The planned time of the request, and that at which the slot became free that it waited for."""
        index = self._index[request_id]
        planned_ns = self._planned_ns[index]
        if self._limit is None or index < self._limit:
            return planned_ns, None
        free_ns = self._ended_ns[index - self._limit]
        return planned_ns, free_ns if free_ns > planned_ns else None

    def end(self, end_ns: int) -> None:
        insort(self._ended_ns, end_ns)


def serve(core: Core, load: SimLoad, on_step: Callable[[StepRecord], None]) -> Iterator[ServedRequest]:
    """Serve one phase to its end; yields each request as it ends.

    The steps are those that the server logs when the same phase is announced and sent over HTTP.
    """
    offsets_ns = load.arrival_ns or (0,) * len(load.requests)
    arrivals = [
        AnnouncedRequest(request.request_id, offset_ns)
        for request, offset_ns in zip(load.requests, offsets_ns, strict=True)
    ]
    core.announce(AnnouncedPhase(arrivals, max_concurrency=load.max_concurrency, is_warmup=load.is_warmup))
    slots = _Slots(core.engine.now_ns, arrivals, load.max_concurrency)
    for request in load.requests:
        core.submit(request)
    token_ns: defaultdict[int, list[int]] = defaultdict(list)
    ended: defaultdict[str, list[ServedChoice]] = defaultdict(list)
    while (output := core.next_step()) is not None:
        on_step(output.record)
        now_ns = core.engine.now_ns
        for seq in output.emitted:
            times_ns = token_ns[seq.seq_id]
            times_ns += [now_ns] * (seq.num_output - len(times_ns))
        for seq in output.finished:
            ended[seq.request.request_id].append(ServedChoice(seq, token_ns.pop(seq.seq_id), now_ns))
        for request_id in output.finished_requests:
            planned_ns, free_ns = slots.times_of(request_id)
            slots.end(now_ns)
            choices = sorted(ended.pop(request_id), key=lambda choice: choice.sequence.choice)
            yield ServedRequest(
                request_id=request_id,
                planned_ns=planned_ns,
                slot_free_ns=free_ns,
                end_ns=now_ns,
                choices=tuple(choices),
            )
