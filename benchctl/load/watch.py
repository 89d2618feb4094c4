"""Supervision of open streams: their time limits, and the memory that their reads take."""

import asyncio
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

from benchctl.load.exchange import Exchange
from benchctl.load.limits import check_interval_s, limit_reached
from benchctl.load.sockets import HeldBytes
from benchctl.profile.sections import Timeouts
from benchctl.records.record import RequestError
from benchctl.units import NS_PER_S

_CHECK_S: Final = 0.1
"""Interval between checks of the memory; shorter where time limits are short."""
_HELD_BYTES: Final = 8 << 20
"""Bytes of undecoded reads beyond which streams are decoded while they are open."""


class Watch:
    """Supervises ``open_exchanges``, a set that others change; ``stop`` ends one that is overdue."""

    def __init__(
        self,
        open_exchanges: AbstractSet[Exchange],
        timeouts: Timeouts,
        held: HeldBytes,
        stop: Callable[[Exchange, RequestError], None],
    ) -> None:
        self._open = open_exchanges
        self._timeouts = timeouts
        self._held = held
        self._stop = stop

    async def run(self) -> None:
        """Stop requests that have reached a limit, and bound the memory of undecoded reads; never returns."""
        limits_interval_s = check_interval_s(self._timeouts)
        interval_ns = round(limits_interval_s * NS_PER_S)
        next_check_ns = 0
        while True:
            await asyncio.sleep(min(limits_interval_s, _CHECK_S))
            now_ns = time.monotonic_ns()
            if now_ns >= next_check_ns:
                next_check_ns = now_ns + interval_ns
                await self._stop_overdue(now_ns)
            await self._decode_some()

    async def _stop_overdue(self, now_ns: int) -> None:
        for exchange in tuple(self._open):
            num_reads = len(exchange.reads)
            reached = limit_reached(exchange, self._timeouts, now_ns) if exchange in self._open else None
            if reached is not None:
                self._stop(exchange, reached)
            if len(exchange.reads) < num_reads:
                await asyncio.sleep(0)  # decoding took a while: let others run

    async def _decode_some(self) -> None:
        """Decode reads of open streams, longest first, when they take too much memory."""
        if self._held.num_bytes <= _HELD_BYTES:
            return
        for exchange in self._longest_first():
            while len(exchange.reads) > 1 and exchange in self._open:
                self._decode(exchange)
                await asyncio.sleep(0)
            if self._held.num_bytes <= _HELD_BYTES // 2:
                return

    def decode_now(self) -> None:
        """Decode reads of open streams until little of them is left, whatever waits meanwhile.

        A server that sends faster than anybody generates is not measured, only survived.
        """
        for exchange in self._longest_first():
            while exchange.reads and exchange in self._open:
                self._decode(exchange)
            if self._held.num_bytes <= _HELD_BYTES // 2:
                return

    def _longest_first(self) -> list[Exchange]:
        return sorted(self._open, key=lambda exchange: len(exchange.reads), reverse=True)

    def _decode(self, exchange: Exchange) -> None:
        """Decode some reads; end a stream of which no more must be read."""
        exchange.decode_some()
        if exchange.excess is not None:
            self._stop(exchange, exchange.excess)
