"""Requests prepared ahead: the next request of a load is bytes before a slot becomes free for it."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from benchctl.load.transport.exchange import Call, Exchange

MOST_PREPARED: Final = 1024
"""Requests that are prepared ahead of their time, or wait for a slot after it."""
_MOST_BYTES: Final = 8 << 20
"""Bytes of prepared requests: long prompts are not all in memory twice."""


class PreparedRequests:
    """Turns calls into exchanges, in their order, up to ``max_ahead`` in advance."""

    def __init__(self, calls: Iterator[Call], begin: Callable[[Call], Exchange], max_ahead: int) -> None:
        self._calls, self._begin, self._max_ahead = calls, begin, max_ahead
        self._ready: deque[Exchange] = deque()
        self._num_bytes = 0
        self.is_exhausted = False
        """True when no call is left to prepare."""

    @property
    def is_done(self) -> bool:
        return self.is_exhausted and not self._ready

    @property
    def is_empty(self) -> bool:
        """True when none is prepared although calls are left."""
        return not self._ready and not self.is_exhausted

    @property
    def has_room(self) -> bool:
        """True when one more should be prepared."""
        return not self.is_exhausted and (
            not self._ready or (len(self._ready) < self._max_ahead and self._num_bytes < _MOST_BYTES)
        )

    def make_one(self) -> None:
        call = next(self._calls, None)
        if call is None:
            self.is_exhausted = True
            return
        exchange = self._begin(call)
        self._num_bytes += len(exchange.wire)
        self._ready.append(exchange)

    def take_ready(self) -> Exchange | None:
        """The next prepared request; None when it is not prepared yet, or after the last."""
        if not self._ready:
            return None
        exchange = self._ready.popleft()
        self._num_bytes -= len(exchange.wire)
        return exchange

    def take(self) -> Exchange | None:
        """The next request, prepared now if necessary; None after the last."""
        if not self._ready and not self.is_exhausted:
            self.make_one()
        return self.take_ready()

    def give_up(self) -> None:
        """Prepare and hand out no more."""
        self.is_exhausted = True
        self._ready.clear()
