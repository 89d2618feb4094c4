"""Loads of counted requests in integers: the steps that the engine runs, without its objects for each request.

Where requests differ in their lengths alone, a batch is a number of rows, the sum of their contexts, and a heap of
the steps after which they are over; guided rows are drawn together. Servers that know more of a row, and those that
run out of key-value memory, are left to the engine.
"""

from array import array
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, TypeAlias

from benchctl.sim.aggregate import AggregateRows
from benchctl.sim.costs.cost_model import UNGUIDED, DecodeCost, GuidedStep, StepBatch
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.guidance import GuidedRow
from benchctl.sim.requests import CountedRequests
from benchctl.sim.steps import MOST_STEPS, NEVER_NS, Course, StepLog, walk

if TYPE_CHECKING:
    from benchctl.sim.core import Phase

_Row: TypeAlias = tuple[int, int, int, int, int, GuidedRow | None]
"""Number of a request in the order of entry, time of entry, index, tokens of its prompt and of its answer; its
guidance."""


class CountedRun:
    """The life of a server in place of its idle ``engine``, whose limits and log are used.

    The blocks that rows need and the steps after which they are over are counted as ``Scheduler`` counts them.
    """

    def __init__(self, engine: SimulatedEngine, *, keeps_steps: bool) -> None:
        self.ended: Final = array("q")
        """The values of RequestColumns, one finished request after the other."""
        self._engine: Final = engine
        self._num_blocks: Final = engine.block_manager.num_blocks
        self._keeps_steps: Final = keeps_steps
        self._waiting: Final[deque[_Row]] = deque()
        self._ends: Final[list[tuple[int, int, int, _Row]]] = []
        """Heap of the decoding rows: the step after which each is over, its number, the time of its first token."""
        self._needs: Final = [0] * engine.block_manager.block_size
        self._now_ns = self._step = self._kv_used = self._context = self._num_entered = self._num_phases = 0
        self._num_computed = 0
        """Tokens computed of the first waiting prompt, which has its blocks if there are any."""
        rows = engine.scheduler.guided
        self._guided: Final = rows if isinstance(rows, AggregateRows) else None
        """The decoding rows, where they ask for guidance."""

    def run(self, phase: "Phase") -> bool:
        """Run a whole phase; False where counts do not suffice, or memory runs out."""
        requests, limit, model = phase.load.requests, phase.load.max_concurrency, self._engine.cost_model
        has_more = bool(phase.load.num_warmups or phase.load.thinks_ns)
        if not isinstance(requests, CountedRequests) or not requests.have_tokens or has_more:
            return False
        rows, sampling = self._guided, requests.sampling
        law = None if rows is None else rows.law_of(requests.guidance, sampling)
        loads_at_once = law is not None and law.threshold is None  # the first token of each row has a choice
        if model.forward_ns is None or model.decode is None or not (rows is None or loads_at_once):
            return False
        self._forward_ns, self._is_greedy = model.forward_ns, sampling.is_greedy
        self._price = cache(partial(_price, model.decode, self._engine.log, self._is_greedy, rows is not None))
        waiting, ends, needs, log = self._waiting, self._ends, self._needs, self._engine.log
        order, offsets_ns, start_ns, num_entered = phase.order, phase.offsets_ns, self._now_ns, 0
        prompts, outputs, entered_before = requests.prompt_tokens, requests.output_tokens, self._num_entered
        self._is_warmup, num_requests = phase.is_warmup, len(requests)
        while True:
            num_open, until_ns, now_ns = len(waiting) + len(ends), NEVER_NS, self._now_ns
            while num_entered < num_requests and (limit is None or num_open < limit):
                index = order[num_entered]
                entry_ns = start_ns + offsets_ns[index]
                if entry_ns > now_ns:
                    if num_open:
                        until_ns = entry_ns
                        break
                    self._now_ns = now_ns = entry_ns
                num_open, num_entered = num_open + 1, num_entered + 1
                guided = (
                    None
                    if law is None or rows is None
                    else GuidedRow(law, prompt_tokens=prompts[index], draw=rows.source.random)
                )
                waiting.append(
                    (entered_before + num_entered, now_ns, index, prompts[index], outputs[index], guided)
                )
            if not num_open:
                break
            self._kv_used += needs[self._step % len(needs)]
            if self._kv_used > self._num_blocks:
                return False
            begun: list[_Row] = []
            num_run = (self._run_prompts(begun) if waiting else 0) or self._run_decodes(until_ns)
            self._turn_over(num_run, begun)
            if not self._keeps_steps and len(log) > MOST_STEPS:
                log.clear()
        self._num_entered, self._num_phases = self._num_entered + num_requests, self._num_phases + 1
        return True

    def _run_prompts(self, begun: list[_Row]) -> int:
        """Run a step with the prompts that fit; adds those it completes to ``begun``. Returns 0 where none fits."""
        waiting, scheduler, log, num_rows = self._waiting, self._engine.scheduler, self._engine.log, len(self._ends)
        left = budget = scheduler.max_num_batched_tokens - num_rows
        context = positions = self._context
        num_prompts, computed = 0, self._num_computed
        while waiting and left:
            prompt = waiting[0][3]
            if not computed:
                kv_used = self._kv_used - -prompt // len(self._needs)
                if num_rows + len(begun) == scheduler.max_num_seqs or kv_used > self._num_blocks:
                    break
                self._kv_used = kv_used
            chunk = min(prompt - computed, left)
            positions += chunk * computed + chunk * (chunk + 1) // 2
            left, computed, num_prompts = left - chunk, computed + chunk, num_prompts + 1
            context += computed
            if computed == prompt:
                begun.append(waiting.popleft())
                computed = 0
        if not num_prompts:
            return 0
        self._num_computed, num_sampling, num_tokens = computed, num_rows + len(begun), budget - left
        rest_id, rest_ns = self._score(num_sampling, begun)
        dur_ns = rest_ns + self._forward_ns(num_rows + num_tokens, positions, num_sampling, context)
        log.dur_ns.append(dur_ns)
        log.kv_used.append(self._kv_used)
        counts = (num_prompts, num_rows, num_tokens, context, num_sampling)
        is_greedy = self._is_greedy if num_sampling else -1
        log.add_stretch(rest_id, (1, self._now_ns, self._is_warmup, *counts, is_greedy, 0))
        self._now_ns += dur_ns
        return 1

    def _score(self, num_sampling: int, begun: list[_Row]) -> tuple[int, int]:
        """Score the rows of a step with prompts; returns number and time of its sections but the forward."""
        if self._guided is None:
            return self._price(num_sampling)[1:]
        guided = self._guided.score([(row, prompt) for *_, prompt, _, row in begun if row is not None], self._step)
        is_scored, value_ns = guided.scored_rows > 0, None
        cost, rest_id, rest_ns = self._price(
            num_sampling, loads=is_scored and not self._engine.is_value_model_loaded
        )
        if is_scored and cost.value_forward_ns is not None:
            self._engine.is_value_model_loaded = True
            value_ns = cost.value_forward_ns(int(guided.fused or 0), guided.value_prefill_tokens)
            rest_ns += cost.scored_ns + value_ns
        self._engine.log.add_guided(guided, value_ns)
        return rest_id, rest_ns

    def _run_decodes(self, until_ns: int) -> int:
        """Run steps of the decoding rows alone; returns their number."""
        start_ns, step, num_rows, log = self._now_ns, self._step, len(self._ends), self._engine.log
        cost, rest_id, rest_ns = self._price(num_rows)
        bounds = (until_ns, self._ends[0][0] - step, step, self._kv_used, self._needs, self._num_blocks)
        course = Course(cost, rest_ns, self._context, num_rows, start_ns, *bounds)
        num_run, self._now_ns, self._kv_used = (
            walk(course, log) if self._guided is None else self._guided.walk(course, log)
        )
        counts = (0, num_rows, 0, self._context, num_rows)
        log.add_stretch(rest_id, (num_run, start_ns, self._is_warmup, *counts, self._is_greedy, 0))
        return num_run

    def _turn_over(self, num_run: int, begun: list[_Row]) -> None:
        """Let rows decode from now on whose prompts are computed, and remove those that are over."""
        ends, needs, now_ns, num_phases = self._ends, self._needs, self._now_ns, self._num_phases
        size, context = len(needs), self._context + num_run * len(ends)
        step = self._step = self._step + num_run
        for row in begun:
            number, _, _, prompt, output, guided = row
            if guided is not None and self._guided is not None:
                self._guided.join(guided, prompt + 1 - step, step)
            context += prompt + 1
            needs[(step - prompt) % size] += 1
            heappush(ends, (step + output - 1, number, now_ns, row))
        while ends and ends[0][0] <= step:
            _, number, first_ns, (_, entry_ns, index, prompt, output, guided) = heappop(ends)
            if guided is not None and self._guided is not None:
                self._guided.leave(guided, step)
            context -= prompt + output
            needs[(step + 1 - prompt - output) % size] -= 1
            self._kv_used += (1 - prompt - output) // size  # all tokens but the newest had room in the last step
            self.ended.extend((num_phases, index, 0, number, entry_ns, first_ns, now_ns, prompt, output, 0, 0))
        self._context = context


def _price(
    decode: Callable[[StepBatch], DecodeCost],
    log: StepLog,
    is_greedy: bool,
    is_guided: bool,
    num_sampling: int,
    *,
    loads: bool = False,
) -> tuple[DecodeCost, int, int]:
    """As ``SimulatedEngine`` has it, of so many decoding rows whatever their lengths."""
    cost = decode(
        StepBatch(
            num_seqs=num_sampling,
            num_prefill_tokens=0,
            num_decode_tokens=num_sampling,
            num_sampling=num_sampling,
            context_tokens=0,
            attended_positions=0,
            is_greedy=is_greedy if num_sampling else None,
            guided=GuidedStep(wanted_rows=num_sampling) if is_guided else UNGUIDED,
            loads_value_model=loads,
        )
    )
    return cost, log.rest_id(cost.scored_rest or cost.rest), cost.rest.total_ns()
