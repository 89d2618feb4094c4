"""Answers that have ended and are not recorded yet: decoding waits until sends are no longer urgent."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from benchctl.load.transport.exchange import Exchange
from benchctl.records.record import RequestRecord
from benchctl.units import NS_PER_MS

_WAVE_GAP_NS: Final = 2 * NS_PER_MS
"""Answers that end within this of each other are one wave: all its slots are filled before one is decoded ..."""
_MOST_DELAY_NS: Final = 50 * NS_PER_MS
"""... but no later than this after the first of them: where answers end all the time, no moment is better."""


class Backlog:
    """Exchanges that have ended, in the order of their ends. ``on_record`` gets the record of each."""

    def __init__(self, on_record: Callable[[RequestRecord], None]) -> None:
        self._on_record = on_record
        self._ended: deque[Exchange] = deque()
        self._is_recording = False

    def add(self, exchange: Exchange) -> None:
        self._ended.append(exchange)

    @property
    def is_empty(self) -> bool:
        """True when no answer waits; one may be being recorded."""
        return not self._ended

    @property
    def is_done(self) -> bool:
        """True when every answer has been recorded."""
        return not self._ended and not self._is_recording

    @property
    def is_growing(self) -> bool:
        """True while answers end one after another, so that recording them should wait."""
        if not self._ended:
            return False
        now_ns = time.monotonic_ns()
        is_wave = now_ns - self._ended[-1].done_ns < _WAVE_GAP_NS
        return is_wave and now_ns - self._ended[0].done_ns < _MOST_DELAY_NS

    async def record_first(self) -> None:
        """Decode the one that ended first, in slices that leave the loop free, and hand over its record."""
        exchange = self._ended.popleft()
        self._is_recording = True
        try:
            self._on_record(await exchange.record())
        finally:
            self._is_recording = False
