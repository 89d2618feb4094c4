"""A phase of load: the virtual times at which its requests enter the engine.

The requests of a phase are at hand, or are announced with their arrivals by a client that sends them later. Arrival
times are then exact whatever the network does, and the same load gives the same steps, byte for byte.
"""

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from benchctl.errors import UsageError
from benchctl.sim.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLoad:
    """One phase of load: requests, when they arrive, and a limit on concurrency.

    ``requests`` may make each request when it is asked for: a load of a million needs no million objects.
    """

    requests: Items[Request] = ()
    announced: Items[str] = ()
    """Names of requests that come in later, in place of ``requests``."""
    arrival_ns: Items[int] | None = None
    """One offset for each request; None sends all at the start."""
    max_concurrency: int | None = None
    is_warmup: bool = False

    def __post_init__(self) -> None:
        if self.arrival_ns is not None and len(self.arrival_ns) != self.num_requests:
            raise UsageError(
                f"arrival_ns has {len(self.arrival_ns)} entries for {self.num_requests} requests; give one for each"
            )

    @property
    def num_requests(self) -> int:
        return len(self.requests) or len(self.announced)


class Entry(NamedTuple):
    """A request's place in its phase."""

    request_index: int
    """Index within the load."""
    planned_ns: int
    """Time at which it is due."""
    slot_free_ns: int | None
    """Time at which the slot became free that it waited for; None where it waited for none."""


OUTSIDE: Final = Entry(-1, 0, None)
"""The place of a request that belongs to no phase."""


class Phase:
    """The progress of a load. Requests enter in the order in which they are due, then in that of the load.

    With a limit C on concurrency a request enters when fewer than C are open: the k-th one not before the (k -
    C)-th end. A request that is due and has not come in holds the others back.
    """

    def __init__(self, load: SimLoad) -> None:
        self.is_warmup = load.is_warmup
        self.next_entry_ns: int | None = None
        """Time at which the next request is due; None if it waits for an end, or if none is left."""
        self._load = load
        self._offsets: Items[int] = load.arrival_ns if load.arrival_ns is not None else bytes(load.num_requests)
        self._order: Items[int] = range(load.num_requests)
        if any(later < earlier for earlier, later in pairwise(self._offsets)):
            self._order = array("q", sorted(self._order, key=self._offsets.__getitem__))
        self._start_ns = 0
        self._num_entered = 0
        self._ended_ns = array("q")
        self._open: set[str] = set()
        """Requests that have entered and not ended."""
        self._waiting = {name: index for index, name in enumerate(load.announced)}
        """Index of each announced request that has not entered."""
        self._come_in: dict[int, Request | None] = {}
        """Those of them that have come in; None for a refused one, which ends as it enters."""

    @property
    def is_over(self) -> bool:
        return self._num_entered == self._load.num_requests and not self._open

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
        if self.next_entry_ns is None or not self._load.announced:
            return None
        index = self._order[self._num_entered]
        return None if index in self._come_in else self._load.announced[index]

    def enter(self, now_ns: int) -> tuple[Request, Entry] | None:
        """Let the next request in, which is due and there; None for a refused one, which has ended with that."""
        index, planned_ns = self._order[self._num_entered], self.next_entry_ns or 0
        limit, slot_free_ns = self._load.max_concurrency, None
        if limit is not None and self._num_entered >= limit:
            free_ns = self._ended_ns[self._num_entered - limit]
            slot_free_ns = free_ns if free_ns > planned_ns else None
        if self._load.announced:
            del self._waiting[self._load.announced[index]]
            request = self._come_in.pop(index)
        else:
            request = self._load.requests[index]
        self._num_entered += 1
        if request is None:
            self._ended_ns.append(now_ns)
        else:
            self._open.add(request.request_id)
        self._find_next()
        return None if request is None else (request, Entry(index, planned_ns, slot_free_ns))

    def end(self, name: str, now_ns: int) -> None:
        """Note the end of a request; one that has come in and not entered will end as it enters."""
        if name in self._open:
            self._open.remove(name)
            self._ended_ns.append(now_ns)
            self._find_next()
        elif self._waiting.get(name) in self._come_in:
            self._come_in[self._waiting[name]] = None

    def give_up(self) -> list[Request]:
        """Leave the schedule: the requests that have come in and not entered, in order."""
        left = [self._come_in.get(index) for index in self._order[self._num_entered :]]
        self._num_entered = self._load.num_requests
        self._waiting.clear()
        self._find_next()
        return [request for request in left if request is not None]

    def _find_next(self) -> None:
        limit, self.next_entry_ns = self._load.max_concurrency, None
        has_slot = limit is None or len(self._open) < limit
        if has_slot and self._num_entered < len(self._order):
            self.next_entry_ns = self._start_ns + self._offsets[self._order[self._num_entered]]
