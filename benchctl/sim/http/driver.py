"""Wall time for the core: the tokens of a step leave when the wall clock reaches its end, and are counted."""

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate, chain
from typing import Any, Final

import msgspec

from benchctl.records.files import JsonlWriter
from benchctl.sim.core import Core, Phase
from benchctl.sim.engine import StepOutput
from benchctl.sim.http.api import Reply
from benchctl.sim.requests import Request
from benchctl.units import NS_PER_S

log = logging.getLogger("benchctl.sim")

_TIMER_S: Final = 0.001
"""Resolution of the event loop's timer; steps shorter than twice that are released several at a time."""
_SHORT_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_LONG_S: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)


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
        self._anchored_phase: Phase | None = None
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
            self.counters.num_ended["abort"] += 1
            self._wake.set()

    def announce(self, phase: Phase) -> None:
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
            self.counters.count(output)
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
        # A phase of warm-up is not measured: nobody waits for its steps
        is_rushed = self.core.engine.is_warmup and self.core.phase is not None and self.core.phase.is_warmup
        elapsed_s = 0.0 if is_rushed else (self.core.engine.now_ns - virtual_ns) / NS_PER_S
        self.phase_wall_s = elapsed_s / self._config.time_scale
        due_s = wall_s + self.phase_wall_s
        is_short = output.record.dur_ns / NS_PER_S / self._config.time_scale < 2 * _TIMER_S
        while (now_s := time.monotonic()) < due_s:
            await _sleep(due_s - now_s, is_coarse=is_short)
            self._last_turn_s = time.monotonic()
        self.lag_s = max(self.lag_s, now_s - due_s)
        # Time that steps behind the wall clock may run before the network gets its turn
        if now_s - self._last_turn_s > 0.002:
            await asyncio.sleep(0)
            self._last_turn_s = time.monotonic()

    def _deliver(self, output: StepOutput) -> None:
        touched: dict[Reply, None] = {}
        # A closing step ends a sequence and gives it no token: it is finished and not emitted.
        for seq in chain(output.emitted, output.finished):
            reply = self._replies.get(seq.request.request_id)
            if reply is not None and not reply.has_ended(seq):
                reply.add(seq)
                touched[reply] = None
        for reply in touched:
            reply.flush()

    def metrics_page(self) -> Iterator[str]:
        """The lines of a page with the state of this moment: Prometheus' metrics under vLLM's names."""
        engine, counters, model = self.core.engine, self.counters, self._config.model
        scheduler, blocks = engine.scheduler, engine.block_manager
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the batch.", scheduler.num_running),
            ("vllm:num_requests_waiting", "Sequences in the queue.", scheduler.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", blocks.num_used / blocks.num_blocks),
            ("benchctl_sim:virtual_seconds", "Virtual time since the start.", engine.now_ns / NS_PER_S),
            ("benchctl_sim:lag_seconds", "Largest lag of wall time in this phase.", self.lag_s),
            ("benchctl_sim:phase_wall_seconds", "Wall time this phase should have taken.", self.phase_wall_s),
            ("benchctl_sim:abandoned_phases", "Announced schedules given up.", self.core.num_abandoned_phases),
        ):
            yield from _family("gauge", name, text)
            yield _sample(name, value, model_name=model)
        totals: dict[str, int] = {
            "prompt_tokens": counters.num_prompt_tokens,
            "generation_tokens": counters.num_generation_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "prefix_cache_queries": blocks.num_queried_tokens,
            "prefix_cache_hits": blocks.num_hit_tokens,
        }
        if engine.config.num_speculative_tokens:
            totals |= {
                "spec_decode_num_drafts": counters.num_drafts,
                "spec_decode_num_draft_tokens": counters.num_draft_tokens,
                "spec_decode_num_accepted_tokens": counters.num_accepted.total(),
            }
            yield from self._counters("spec_decode_num_accepted_tokens_per_pos", counters.num_accepted, "position")
        for name, total in totals.items():
            yield from _family("counter", f"vllm:{name}_total", f"{name} since the start.")
            yield _sample(f"vllm:{name}_total", total, model_name=model)
        yield from self._counters("request_success", counters.num_ended, "finished_reason")
        for name, histogram in counters.latencies.items():
            yield from _family("histogram", f"vllm:{name}_seconds", f"{name}, virtual seconds")
            yield from histogram.samples(f"vllm:{name}_seconds", model)

    def _counters(self, name: str, parts: Mapping[Any, int], label: str) -> Iterator[str]:
        """A counter for each value of a label."""
        yield from _family("counter", f"vllm:{name}_total", f"{name} since the start.")
        for value, part in parts.items():
            yield _sample(f"vllm:{name}_total", part, **{"model_name": self._config.model, label: str(value)})


def _family(kind: str, name: str, text: str) -> Iterator[str]:
    yield from (f"# HELP {name} {text}", f"# TYPE {name} {kind}")


def _sample(name: str, value: float, **labels: str) -> str:
    pairs = ",".join(f"{label}={msgspec.json.encode(labels[label]).decode()}" for label in sorted(labels))
    return f"{name}{{{pairs}}} {float(value)}"


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


class Histogram:
    """Counts of values up to each bound, in seconds of virtual time.

    Not prometheus_client's own: that takes one value at a time, and a step has as many token times as rows. It
    takes longer to import, too, than its page to write.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds: Final = bounds
        self._counts: Final = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def samples(self, name: str, model: str) -> Iterator[str]:
        for bound, count in zip((*self._bounds, "+Inf"), accumulate(self._counts), strict=True):
            yield _sample(f"{name}_bucket", count, le=str(bound), model_name=model)
        yield _sample(f"{name}_count", sum(self._counts), model_name=model)
        yield _sample(f"{name}_sum", self._sum, model_name=model)


class Counters:
    """Totals since the server started."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_ended: Final = {"stop": 0, "length": 0, "abort": 0}
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted: Final = Counter[int]()
        """Accepted drafts of each position, from 0."""
        self.latencies: Final = {
            "time_to_first_token": Histogram(_SHORT_S),
            "inter_token_latency": Histogram(_SHORT_S),
            "e2e_request_latency": Histogram(_LONG_S),
        }

    def count(self, output: StepOutput) -> None:
        record = output.record
        self.num_generation_tokens += record.output_tokens or 0
        self.num_drafts += record.drafts or 0
        self.num_draft_tokens += record.draft_tokens or 0
        self.num_accepted.update(dict(enumerate(record.accepted_by_position or ())))
        if num_decodes := (record.num_decode_tokens or 0) - (record.draft_tokens or 0):
            self.latencies["inter_token_latency"].add(record.dur_ns / NS_PER_S, num_decodes)
        end_ns = record.start_ns + record.dur_ns
        for seq in output.emitted if record.num_prefill_tokens else ():
            if seq.first_token_ns == end_ns:
                self.latencies["time_to_first_token"].add((end_ns - seq.arrival_ns) / NS_PER_S)
                self.num_prompt_tokens += seq.prompt_tokens if seq.choice == 0 else 0
        for seq in output.finished:
            self.num_ended[seq.answer.finish_reason] += 1
            self.latencies["e2e_request_latency"].add((end_ns - seq.arrival_ns) / NS_PER_S)
