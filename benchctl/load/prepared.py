"""Requests that are made ahead: the next one of a load is bytes before anybody asks for it."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from benchctl.load.transport.exchange import Call, Exchange

MOST_PREPARED: Final = 1024
"""Requests that are made ahead of their time, or wait for a slot after it."""
_MOST_BYTES: Final = 8 << 20
"""Requests that lie ready, in bytes: long prompts are not all kept twice."""


class PreparedRequests:
    """Makes exchanges of calls, in their order, up to ``most`` ahead."""

    def __init__(self, calls: Iterator[Call], begin: Callable[[Call], Exchange], most: int) -> None:
        self._calls, self._begin, self._most = calls, begin, most
        self._ready: deque[Exchange] = deque()
        self._num_bytes = 0
        self.is_exhausted = False
        """Whether there is no call left that has not been made ready."""

    @property
    def is_done(self) -> bool:
        """Whether all have been taken."""
        return self.is_exhausted and not self._ready

    @property
    def is_empty(self) -> bool:
        """Whether none lies ready although there are more to make."""
        return not self._ready and not self.is_exhausted

    @property
    def has_room(self) -> bool:
        """Whether one more should be made ready."""
        return not self.is_exhausted and (
            not self._ready or (len(self._ready) < self._most and self._num_bytes < _MOST_BYTES)
        )

    def make_one(self) -> None:
        """Make one more ready."""
        call = next(self._calls, None)
        if call is None:
            self.is_exhausted = True
            return
        exchange = self._begin(call)
        self._num_bytes += len(exchange.wire)
        self._ready.append(exchange)

    def take_ready(self) -> Exchange | None:
        """The next one that lies ready; None where it is not made yet, or there is none."""
        if not self._ready:
            return None
        exchange = self._ready.popleft()
        self._num_bytes -= len(exchange.wire)
        return exchange

    def take(self) -> Exchange | None:
        """The next one, made now where it does not lie ready; None after the last."""
        if not self._ready and not self.is_exhausted:
            self.make_one()
        return self.take_ready()

    def give_up(self) -> None:
        """Make and hand out no more."""
        self.is_exhausted = True
        self._ready.clear()
