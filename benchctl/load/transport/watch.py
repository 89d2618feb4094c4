"""What has to be seen to while streams are open: limits of time that are reached, and memory that fills."""

import asyncio
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

from benchctl.load.transport.exchange import Exchange
from benchctl.load.transport.limits import limit_reached, look_s
from benchctl.load.transport.receiver import HeldBytes
from benchctl.profile.model import Timeouts
from benchctl.records.request import RequestError
from benchctl.units import NS_PER_S

_LOOK_S: Final = 0.1
"""How often it is seen to that what is held stays within bounds; more often where limits are short."""
_HELD_BYTES: Final = 8 << 20
"""Reads of open streams that are kept before some are decoded while the streams go on."""


class Watch:
    """Looks after the exchanges in ``open_ones``, a set that others change; ``stop`` ends one that is overdue."""

    def __init__(
        self,
        open_ones: AbstractSet[Exchange],
        timeouts: Timeouts,
        held: HeldBytes,
        stop: Callable[[Exchange, RequestError], None],
    ) -> None:
        self._open = open_ones
        self._timeouts = timeouts
        self._held = held
        self._stop = stop

    async def keep(self) -> None:
        """Stop requests that have reached a limit, and keep what is held within bounds; never returns."""
        limits_look_s = look_s(self._timeouts)
        look_ns = round(limits_look_s * NS_PER_S)
        next_look_ns = 0
        while True:
            await asyncio.sleep(min(limits_look_s, _LOOK_S))
            now_ns = time.monotonic_ns()
            if now_ns >= next_look_ns:
                next_look_ns = now_ns + look_ns
                await self._stop_overdue(now_ns)
            await self._decode_some()

    async def _stop_overdue(self, now_ns: int) -> None:
        for exchange in tuple(self._open):
            num_reads = len(exchange.reads)
            reached = limit_reached(exchange, self._timeouts, now_ns) if exchange in self._open else None
            if reached is not None:
                self._stop(exchange, reached)
            if len(exchange.reads) < num_reads:
                await asyncio.sleep(0)  # to decode them took its time: others have their turn

    async def _decode_some(self) -> None:
        """Where streams are so long or so many that their reads fill the memory, decode them as they come."""
        if self._held.num_bytes <= _HELD_BYTES:
            return
        for exchange in sorted(self._open, key=lambda exchange: len(exchange.reads), reverse=True):
            while len(exchange.reads) > 1 and exchange in self._open:
                exchange.decode_some()
                await asyncio.sleep(0)
            if self._held.num_bytes <= _HELD_BYTES // 2:
                return
