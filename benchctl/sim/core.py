"""The virtual-time core: the engine, and the phases of load that feed it. Pure; the caller decides when.

The requests of a phase are at hand, or are announced with their arrivals by a client that sends them later. Arrival
times are then exact whatever the network does, and the same load gives the same steps, byte for byte.
"""

import heapq
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from benchctl.errors import UsageError
from benchctl.sim.engine import SimulatedEngine, StepOutput
from benchctl.sim.requests import Entry, Request
from benchctl.sim.sequences import Sequence
from benchctl.sim.steps import NEVER_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLoad:
    """One phase of load: requests, when they arrive, and a limit on concurrency.

    ``requests`` may make each request when it is asked for, once and in the order in which they enter: a load of a
    million needs no million objects. It gives None for one that the server refuses.
    """

    requests: Items[Request | None] = ()
    announced: Items[str] = ()
    """Names of requests that come in later, in place of ``requests``."""
    arrival_ns: Items[int] | None = None
    """One offset for each request; None sends all at the start."""
    max_concurrency: int | None = None
    is_warmup: bool = False
    num_warmups: int = 0
    """Requests at the beginning of a measured phase that are warm-up; so are its steps before any other enters."""
    thinks_ns: Mapping[int, int] = field(default_factory=dict)
    """Of each later turn of a conversation the time from the end of the request before it until it is due."""

    def __post_init__(self) -> None:
        if self.arrival_ns is not None and len(self.arrival_ns) != self.num_requests:
            raise UsageError(
                f"arrival_ns has {len(self.arrival_ns)} entries for {self.num_requests} requests; give one for each"
            )

    @property
    def num_requests(self) -> int:
        return len(self.requests) or len(self.announced)


class Phase:
    """The progress of a load. Requests enter in the order in which they are due, then in that of the load.

    With a limit C on concurrency a request enters when fewer than C are open: the k-th one not before the (k -
    C)-th end. A request that is due and has not come in holds the others back.

    A conversation is open from the entry of its first turn to the end of its last, and so the limit is one of
    conversations: a later turn enters when it is due.
    """

    def __init__(self, load: SimLoad) -> None:
        self.is_warmup = load.is_warmup
        self.is_measured = not (load.is_warmup or load.num_warmups)
        """Whether a request has entered that is measured."""
        self.next_entry_ns: int | None = None
        """Time at which the next request is due; None if it waits for an end, or if none is left."""
        self.load = load
        self.offsets_ns: Items[int] = load.arrival_ns if load.arrival_ns is not None else bytes(load.num_requests)
        self.order: Items[int] = range(load.num_requests)
        """Indices of the requests, without later turns, in the order in which they enter."""
        if load.thinks_ns:
            self.order = array("q", (index for index in self.order if index not in load.thinks_ns))
        if any(later < earlier for earlier, later in pairwise(self.offsets_ns)):
            self.order = array("q", sorted(self.order, key=self.offsets_ns.__getitem__))
        self._start_ns = 0
        self._num_entered = 0
        """Those of ``order``."""
        self._due: list[tuple[int, int]] = []
        """Heap of later turns whose time is known, with their indices."""
        self._num_ended = 0
        self._ended_ns = array("q")
        """Ends of conversations, and of requests outside of any."""
        self._open: dict[str, int] = {}
        """Requests that have entered and not ended, with their indices."""
        self._waiting = {name: index for index, name in enumerate(load.announced)}
        """Index of each announced request that has not entered."""
        self._come_in: dict[int, Request | None] = {}
        """Those of them that have come in; None for a refused one, which ends as it enters."""
        self._next = 0
        """Index of the next request that is due."""

    @property
    def is_over(self) -> bool:
        return self._num_entered == len(self.order) and not (self._open or self._due)

    @property
    def progress(self) -> float:
        """Share of the requests of a load that have ended; 0 in a warm-up."""
        return 0.0 if self.is_warmup else self._num_ended / max(self.load.num_requests, 1)

    def start(self, now_ns: int) -> None:
        self._start_ns = now_ns
        self._find_next()

    def expects(self, name: str) -> bool:
        """True if this request was announced and has not come in yet."""
        index = self._waiting.get(name)
        return index is not None and index not in self._come_in

    def come_in(self, name: str, request: Request | None) -> None:
        """Take in an announced request; None stands for a refused one."""
        self._come_in[self._waiting[name]] = request

    def missing(self) -> str | None:
        """The next request, if it waits for no end and has not come in."""
        if self.next_entry_ns is None or not self.load.announced:
            return None
        return None if self._next in self._come_in else self.load.announced[self._next]

    def enter(self, now_ns: int) -> tuple[Request, Entry] | None:
        """Let the next request in, which is due and there; None for a refused one, which has ended with that."""
        index, planned_ns = self._next, self.next_entry_ns or 0
        limit, slot_free_ns = self.load.max_concurrency, None
        if index in self.load.thinks_ns:
            heapq.heappop(self._due)
        else:
            if limit is not None and self._num_entered >= limit:
                free_ns = self._ended_ns[self._num_entered - limit]
                slot_free_ns = free_ns if free_ns > planned_ns else None
            self._num_entered += 1
        if self.load.announced:
            del self._waiting[self.load.announced[index]]
            request = self._come_in.pop(index)
        else:
            request = self.load.requests[index]
        self.is_measured = self.is_measured or not (self.is_warmup or index < self.load.num_warmups)
        if request is None:
            self._end(index, now_ns)
            return None
        self._open[request.request_id] = index
        self._find_next()
        return request, Entry(index, planned_ns, slot_free_ns)

    def end(self, name: str, now_ns: int) -> None:
        """Note the end of a request; one that has come in and not entered will end as it enters."""
        if name in self._open:
            self._end(self._open.pop(name), now_ns)
        elif self._waiting.get(name) in self._come_in:
            self._come_in[self._waiting[name]] = None

    def _end(self, index: int, now_ns: int) -> None:
        self._num_ended += 1
        think_ns = self.load.thinks_ns.get(index + 1)
        if think_ns is None:
            self._ended_ns.append(now_ns)
        elif not self.load.announced or self.load.announced[index + 1] in self._waiting:
            heapq.heappush(self._due, (now_ns + think_ns, index + 1))
        self._find_next()

    def give_up(self) -> list[Request]:
        """Leave the schedule: the requests that have come in and not entered, in order."""
        order = (*self.order[self._num_entered :], *(index for _, index in sorted(self._due)))
        left = [self._come_in.get(index) for index in order]
        self._num_entered = len(self.order)
        self._due.clear()
        self._waiting.clear()
        self._find_next()
        return [request for request in left if request is not None]

    def _find_next(self) -> None:
        limit, self.next_entry_ns = self.load.max_concurrency, None
        has_slot = limit is None or self._num_entered - len(self._ended_ns) < limit
        if has_slot and self._num_entered < len(self.order):
            self._next = self.order[self._num_entered]
            self.next_entry_ns = self._start_ns + self.offsets_ns[self._next]
        if self._due and (self.next_entry_ns is None or self._due[0][0] < self.next_entry_ns):
            self.next_entry_ns, self._next = self._due[0]


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

    def leap(self) -> list[Sequence] | None:
        """Admit the requests that are due and run steps until the batch changes; None if there is nothing to do.

        Returns the sequences that ended.
        """
        if not self._can_run():
            return None
        entry_ns = None if self.phase is None else self.phase.next_entry_ns
        finished, finished_requests = self.engine.leap(NEVER_NS if entry_ns is None else entry_ns)
        self._note_ends(finished_requests)
        return finished

    def _can_run(self) -> bool:
        self._turn_phases()
        phase, engine = self.phase, self.engine
        if (phase is not None and not self._admit(phase)) or not engine.has_work:
            return False
        engine.is_warmup = phase is not None and not (phase.is_measured or phase.is_over)
        engine.progress = 0.0 if phase is None else phase.progress
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
