"""An announced phase of load: its requests, and the virtual times at which they enter the core.

The client announces the requests of a load and their arrivals before it sends them. Arrival times are then exact
whatever the network does, and the same load gives the same steps, byte for byte.
"""

from collections.abc import Sequence as Items
from typing import Final, NamedTuple

from benchctl.sim.requests.request import Request


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
