"""Wall time for the core: the tokens of a step leave when the wall clock reaches its end."""

import asyncio
import logging
import time
from typing import Final

from benchctl.records.files import JsonlWriter
from benchctl.sim.core import Core
from benchctl.sim.engine import StepOutput
from benchctl.sim.http.counters import Counters
from benchctl.sim.http.reply import Reply
from benchctl.sim.phase import AnnouncedPhase
from benchctl.sim.requests.request import Request
from benchctl.units import NS_PER_S

log = logging.getLogger("benchctl.sim")

_SLICE_S: Final = 0.002
"""Time that steps behind the wall clock may run before the network gets its turn."""
_TIMER_S: Final = 0.001
"""Resolution of the event loop's timer; steps shorter than twice that are released several at a time."""


class Driver:
    """Runs the core for ever, logs its steps and hands out their tokens.

    Wall and virtual time are tied together when the first request of a phase or of a busy period comes in; from
    then on a step that ends at virtual v is released at anchor + (v - anchor_v) / time_scale, however long earlier
    steps took.
    """

    def __init__(self, core: Core, step_log: JsonlWriter | None) -> None:
        self.core: Final = core
        self.counters: Final = Counters()
        self.lag_s = 0.0
        """Largest delay of a release in this phase or busy period."""
        self.phase_wall_s = 0.0
        """Planned wall time of this phase or busy period until now."""
        self._step_log: Final = step_log
        self._config: Final = core.engine.config
        self._replies: dict[str, Reply] = {}
        self._wake: Final = asyncio.Event()
        self._anchor: tuple[float, int] | None = None
        self._anchored_phase: AnnouncedPhase | None = None
        self._busy_since_s: float | None = None
        self._last_turn_s = 0.0

    def is_open(self, request_id: str) -> bool:
        return request_id in self._replies

    def submit(self, request: Request, reply: Reply) -> None:
        self._replies[request.request_id] = reply
        if self._busy_since_s is None:
            self._busy_since_s = time.monotonic()
        self.core.submit(request)
        self._wake.set()

    def refuse(self, request_id: str) -> None:
        self.core.refuse(request_id)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """Forget a request whose client has disconnected, or has all of it."""
        if (reply := self._replies.pop(request_id, None)) is not None and not reply.is_done:
            self.core.abort(request_id)
            self.counters.num_aborted += 1
            self._wake.set()

    def announce(self, phase: AnnouncedPhase) -> None:
        self.core.announce(phase)
        self._wake.set()

    async def run(self) -> None:
        while True:
            output = self.core.next_step()
            if output is None:
                await self._wait_for_arrival()
                continue
            if self._step_log is not None:
                self._step_log.write(output.record)
            await self._wait_for_release(output)
            self._deliver(output)

    async def _wait_for_arrival(self) -> None:
        missing, patience_s = self.core.missing(), self._config.schedule_patience_s
        if missing is None and (self.core.phase is None or self.core.phase.is_over):
            self._anchor = self._busy_since_s = None
        try:
            async with asyncio.timeout(patience_s if missing is not None else None):
                await self._wake.wait()
        except TimeoutError:
            log.warning(
                "announced request %s did not come within %g s: the schedule is given up, arrivals are no longer "
                "exact",
                missing,
                patience_s,
            )
            self.core.abandon_phase()
            self._anchor = self._busy_since_s = None
        self._wake.clear()

    async def _wait_for_release(self, output: StepOutput) -> None:
        if self._anchor is None or self.core.phase is not self._anchored_phase:
            since_s = time.monotonic() if self._busy_since_s is None else self._busy_since_s
            self._anchor = (since_s, output.record.start_ns)
            self._anchored_phase = self.core.phase
            self.lag_s = 0.0
        wall_s, virtual_ns = self._anchor
        elapsed_s = (self.core.engine.now_ns - virtual_ns) / NS_PER_S
        self.phase_wall_s = elapsed_s / self._config.time_scale
        due_s = wall_s + self.phase_wall_s
        is_short = output.record.dur_ns / NS_PER_S / self._config.time_scale < 2 * _TIMER_S
        while (now_s := time.monotonic()) < due_s:
            await _sleep(due_s - now_s, is_coarse=is_short)
            self._last_turn_s = time.monotonic()
        self.lag_s = max(self.lag_s, now_s - due_s)
        if now_s - self._last_turn_s > _SLICE_S:
            await asyncio.sleep(0)
            self._last_turn_s = time.monotonic()

    def _deliver(self, output: StepOutput) -> None:
        self.counters.count(output)
        reports_cached = self._config.has_cache
        touched: dict[str, Reply] = {}
        for seq in output.emitted:
            reply = self._replies.get(seq.request.request_id)
            if reply is not None:
                reply.add(seq, reports_cached=reports_cached)
                touched[seq.request.request_id] = reply
        for seq in output.finished:
            reply = self._replies.get(seq.request.request_id)
            # A closing step ends a sequence and gives it no token.
            if reply is not None and not reply.has_ended(seq):
                reply.add(seq, reports_cached=reports_cached)
                touched[seq.request.request_id] = reply
        for reply in touched.values():
            reply.flush()


async def _sleep(duration_s: float, *, is_coarse: bool) -> None:
    """Sleep about ``duration_s``. The loop's timer counts whole milliseconds; the last two are left to a thread,
    which the kernel wakes more exactly.
    """
    if is_coarse:
        await asyncio.sleep(max(duration_s, _TIMER_S))
    elif duration_s > 2 * _TIMER_S:
        await asyncio.sleep(duration_s - 2 * _TIMER_S)
    else:
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, duration_s)
