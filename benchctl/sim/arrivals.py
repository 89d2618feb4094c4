"""Phases of load: the virtual times at which requests enter the core."""

import heapq
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from benchctl.errors import UsageError
from benchctl.sim.requests import Request


class AnnouncedRequest(NamedTuple):
    """One announced request; ``arrival_ns`` counts from the start of the phase."""

    request_id: str
    arrival_ns: int


class AnnouncedPhase:
    """The announced requests in order, and their progress.

    Request i is due at start + arrival_ns. With a limit C on concurrency request i >= C is not due before the
    (i - C + 1)-th request has ended. Requests enter in order; a request that is due and has not come in holds
    the core back.
    """

    def __init__(self, arrivals: Items[AnnouncedRequest], *, max_concurrency: int | None, is_warmup: bool) -> None:
        self._arrivals: Final = sorted(arrivals, key=lambda arrival: arrival.arrival_ns)
        self._max_concurrency: Final = max_concurrency
        self.is_warmup: Final = is_warmup
        self.start_ns: int | None = None
        self._expected = {arrival.request_id for arrival in arrivals}
        self._come_in: dict[str, Request | None] = {}
        self._num_entered = 0
        self._open: set[str] = set()
        self._ended_ns: list[int] = []

    @property
    def is_over(self) -> bool:
        return self._num_entered == len(self._arrivals) and not self._open

    def start(self, now_ns: int) -> None:
        self.start_ns = now_ns

    def expects(self, request_id: str) -> bool:
        """True if this request was announced and has not come in yet."""
        return request_id in self._expected

    def come_in(self, request_id: str, request: Request | None) -> None:
        """Take in an announced request; None stands for a refused one, which ends as it enters."""
        self._expected.discard(request_id)
        self._come_in[request_id] = request

    def next_entry_ns(self) -> int | None:
        """Time at which the next request in order is due; None if it waits for a slot, or if none is left."""
        index = self._num_entered
        if index == len(self._arrivals) or self.start_ns is None:
            return None
        due_ns = self.start_ns + self._arrivals[index].arrival_ns
        if self._max_concurrency is None or index < self._max_concurrency:
            return due_ns
        ended = index - self._max_concurrency
        return max(due_ns, self._ended_ns[ended]) if ended < len(self._ended_ns) else None

    def next_request_id(self) -> str:
        """The next request in order; there must be one."""
        return self._arrivals[self._num_entered].request_id

    def has_next_come_in(self) -> bool:
        return self.next_request_id() in self._come_in

    def take_due(self, now_ns: int) -> list[Request]:
        """The requests that enter by ``now_ns``, up to one that has not come in."""
        entering: list[Request] = []
        while (entry_ns := self.next_entry_ns()) is not None and entry_ns <= now_ns and self.has_next_come_in():
            request_id = self.next_request_id()
            request = self._come_in[request_id]
            self._num_entered += 1
            if request is None:
                self._ended_ns.append(now_ns)
            else:
                self._open.add(request_id)
                entering.append(request)
        return entering

    def end(self, request_id: str, now_ns: int) -> None:
        """Note the end of a request; one that has not entered will end as it enters."""
        if request_id in self._open:
            self._open.remove(request_id)
            self._ended_ns.append(now_ns)
        elif request_id in self._come_in:
            self._come_in[request_id] = None

    def give_up(self) -> list[Request]:
        """Leave the schedule: the requests that have come in and not entered, in order."""
        left = [self._come_in.get(arrival.request_id) for arrival in self._arrivals[self._num_entered :]]
        self._num_entered = len(self._arrivals)
        self._expected.clear()
        return [request for request in left if request is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLoad:
    """One phase of load: requests, when they arrive, and a limit on concurrency.

    ``requests`` may make each request when it is asked for: a load of a million needs no million objects.
    """

    requests: Items[Request]
    arrival_ns: Items[int] | None = None
    """One offset for each request; None sends all at the start."""
    follows: Items[int] | None = None
    """For each request the index of the one that it follows in a session, or -1. Its offset then counts from the
    end of that request: the time that a user thinks before the next turn. None: no sessions."""
    max_concurrency: int | None = None
    is_warmup: bool = False

    def __post_init__(self) -> None:
        for name, items in (("arrival_ns", self.arrival_ns), ("follows", self.follows)):
            if items is not None and len(items) != len(self.requests):
                raise UsageError(
                    f"{name} has {len(items)} entries for {len(self.requests)} requests; give one for each"
                )
        if self.follows is not None and any(before >= index for index, before in enumerate(self.follows)):
            raise UsageError("follows names a later request, or the request itself; name an earlier turn")


class LoadPhase:
    """The progress of a load. Requests enter in the order in which they are due, then in that of the load.

    With a limit C on concurrency a request enters when fewer than C are open.
    """

    def __init__(self, load: SimLoad) -> None:
        self.is_warmup = load.is_warmup
        self._load = load
        self._offsets: Items[int] = load.arrival_ns if load.arrival_ns is not None else bytes(len(load.requests))
        self._first = self._first_turns()
        """Index of each request that follows none, in the order in which they are due."""
        self.next_entry_ns: int | None = None
        """Time at which the next request is due; None if it waits for an end, or if none is left."""
        self._num_taken = 0
        self._is_next_first = True
        self._num_left = len(load.requests)
        self._start_ns = 0
        self._open: dict[str, int] = {}
        self._ready: list[tuple[int, int]] = []
        """Heap of the later turns whose predecessor has ended: when they are due, and their index."""
        self._followers: dict[int, list[int]] = {}
        for index, before in enumerate(load.follows or ()):
            if before >= 0:
                self._followers.setdefault(before, []).append(index)

    @property
    def is_over(self) -> bool:
        return not self._num_left and not self._open

    def start(self, now_ns: int) -> None:
        self._start_ns = now_ns
        self._find_next()

    def index_of(self, request_id: str) -> int:
        """Index within the load of an open request."""
        return self._open[request_id]

    def take_next(self) -> Request:
        """The request that is due next; there must be one."""
        if self._is_next_first:
            index = self._first[self._num_taken]
            self._num_taken += 1
        else:
            index = heapq.heappop(self._ready)[1]
        self._num_left -= 1
        request = self._load.requests[index]
        self._open[request.request_id] = index
        self._find_next()
        return request

    def end(self, request_id: str, now_ns: int) -> None:
        """Note the end of a request, which releases the next turn of its session."""
        index = self._open.pop(request_id)
        if self._followers:
            for follower in self._followers.get(index, ()):
                heapq.heappush(self._ready, (now_ns + self._offsets[follower], follower))
        self._find_next()

    def _find_next(self) -> None:
        limit, self.next_entry_ns = self._load.max_concurrency, None
        if limit is not None and len(self._open) >= limit:
            return
        self._is_next_first = self._num_taken < len(self._first)
        if self._is_next_first:
            self.next_entry_ns = self._start_ns + self._offsets[self._first[self._num_taken]]
        if self._ready and (self.next_entry_ns is None or self._ready[0][0] < self.next_entry_ns):
            self.next_entry_ns, self._is_next_first = self._ready[0][0], False

    def _first_turns(self) -> Items[int]:
        follows, offsets = self._load.follows, self._offsets
        first = array("q", range(len(offsets)))
        if follows is not None:
            first = array("q", [index for index in first if follows[index] < 0])
        if any(offsets[a] > offsets[b] for a, b in pairwise(first)):
            first = array("q", sorted(first, key=offsets.__getitem__))
        return first
