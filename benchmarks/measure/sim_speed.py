"""How fast the simulator steps, beside the fastest loop that Python could run for the same load.

    python -m benchmarks.measure.sim_speed [--rounds 3] [--azure REQUESTS]

The plain loop keeps the size of the batch, the sum of contexts and a heap of last steps, and nothing else: no
blocks, no sections, no records. The simulator besides schedules, counts blocks, shares prefixes,
preempts, and keeps the columns of every step and request. CPU seconds are those of ``simulate`` alone, in one
process.

Outputs of 16 to 256 tokens at random turn a batch of N over by N / 136 requests a step. "limit" is the plain loop
over the same requests, and "x limit" the simulator's share of its steps a second; with guided rows that loop also
draws the uniform numbers of each batch that the stream of ``AggregateRows`` defines.
"""

import heapq
import random
import resource
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from benchctl.guided.params import GuidanceParams
from benchctl.records.files import encode
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad
from benchctl.sim.requests import CountedRequests, Prompt, Request, SamplingParams
from benchctl.sim.simulation import Simulation, simulate
from benchctl.workload.datasets.published import timestamp_ns
from benchmarks.common.harness import Figures, compared, options, write

AZURE = Path("../shared/data/azure/AzureLLMInferenceTrace_conv.csv")
BLIS_STEPS_PER_S = 24_000
NUM_REQUESTS = 9000
CODEGEN = SimConfig(
    model="llama-2-7b",
    cost_model="roofline",
    num_kv_blocks=7463,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
)
STEPS_PER_REQUEST = 15


def codegen_arrivals(num_requests: int = NUM_REQUESTS) -> list[int]:
    """Poisson arrivals at 5/s for the first third, then at 10/s, as in the stages of the published workload."""
    draw, now_s, arrivals = random.Random(42), 0.0, []
    for index in range(num_requests):
        now_s += draw.expovariate(5 if index < num_requests // 3 else 10)
        arrivals.append(int(now_s * 1e9))
    return arrivals


def codegen() -> SimLoad:
    """9,000 requests of 566 prompt tokens and 247 output tokens."""
    requests = CountedRequests([566] * NUM_REQUESTS, [247] * NUM_REQUESTS)
    return SimLoad(requests=requests, arrival_ns=codegen_arrivals())


def shared_prefixes() -> SimLoad:
    """Prompts that begin with one of 44 system prompts of 96 tokens, and long answers."""
    draw = random.Random(7)
    groups = [draw.randrange(44) for _ in range(NUM_REQUESTS)]
    requests = tuple(
        Request(
            request_id=f"r{index}",
            prompt=Prompt(
                num_tokens=150,
                digest=str(index),
                asks_for_box=False,
                block_hashes=tuple(("group", group, block) if block < 6 else (index, block) for block in range(9)),
            ),
            max_tokens=draw.randrange(100, 700),
            ignore_eos=True,
        )
        for index, group in enumerate(groups)
    )
    return SimLoad(requests=requests, arrival_ns=codegen_arrivals())


def random_lengths(batch: int) -> list[int]:
    draw = random.Random(batch)
    return [draw.randint(16, 256) for _ in range(40 * batch + 2000)]


def guided_request(index: int, num_tokens: int, *, is_guided: bool) -> Request:
    return Request(
        request_id=f"r{index}",
        prompt=Prompt(num_tokens=100, digest=str(index), asks_for_box=False, block_hashes=()),
        max_tokens=num_tokens,
        ignore_eos=True,
        sampling=SamplingParams(top_k=5, min_p=0.01),
        guidance=GuidanceParams(mode="centered_exp", value_scale=0.0) if is_guided else None,
    )


def random_closed_loop(batch: int, *, is_guided: bool) -> SimLoad:
    lengths = random_lengths(batch)
    template = guided_request(0, 1, is_guided=is_guided)
    requests = CountedRequests([100] * len(lengths), lengths, template=template)
    return SimLoad(requests=requests, max_concurrency=batch)


def turnover_loop(batch: int, *, is_guided: bool) -> int:
    """The steps of a plain loop with the same requests one after the other in each row."""
    source = np.random.default_rng(0) if is_guided else None
    now_ns = context = step = 0
    ends: list[tuple[int, int]] = []
    lengths = iter(random_lengths(batch))
    output: int | None = 0
    while ends or output is not None:
        new_tokens, has_changed = 0, False
        while len(ends) < batch and new_tokens < 8192 and (output := next(lengths, None)) is not None:
            heapq.heappush(ends, (step + output, output))
            new_tokens, context, has_changed = new_tokens + 100, context + 100, True
        if source is not None and has_changed:
            source.random((len(ends), 16))
        now_ns += round(4_000_000 + context * 156.5 + new_tokens * 14_000)
        context += len(ends)
        step += 1
        while ends and ends[0][0] <= step:
            context -= 100 + heapq.heappop(ends)[1]
    return step


def closed_loop(batch: int) -> SimLoad:
    """Requests that keep ``batch`` rows busy and end once in 15 steps, whatever the batch."""
    draw = random.Random(batch)
    lengths = [round(STEPS_PER_REQUEST * batch * draw.uniform(0.5, 1.5)) for _ in range(6000)]
    return SimLoad(requests=CountedRequests([100] * 6000, lengths), max_concurrency=batch)


def constant_batch(batch: int, num_tokens: int, *, is_guided: bool) -> SimLoad:
    """Rows that begin and end together."""
    requests = tuple(guided_request(index, num_tokens, is_guided=is_guided) for index in range(batch))
    return SimLoad(requests=requests)


def azure(num_requests: int) -> SimLoad:
    """The Azure trace, repeated one after the other."""
    rows = [line.split(",") for line in AZURE.read_text().splitlines()[1:]]
    begin_ns = timestamp_ns(rows[0][0])
    arrivals = [timestamp_ns(row[0]) - begin_ns for row in rows]
    period_ns, count = arrivals[-1] + 10**9, len(rows)
    repeated = (divmod(index, count) for index in range(num_requests))
    arrival_ns = array("q", (arrivals[row] + round_ * period_ns for round_, row in repeated))
    prompts = (int(rows[index % count][1]) for index in range(num_requests))
    outputs = (int(rows[index % count][2]) for index in range(num_requests))
    return SimLoad(requests=CountedRequests(prompts, outputs), arrival_ns=arrival_ns)


def plain_loop(arrivals: list[int], prompt: int, output: int, max_rows: int) -> int:
    """The steps of a loop that knows nothing but sums."""
    now_ns = num_rows = context = step = index = 0
    ends: list[int] = []
    waiting = [*arrivals, 1 << 62]
    while index < len(arrivals) or num_rows:
        if not num_rows:
            now_ns = max(now_ns, waiting[index])
        new_tokens = 0
        while waiting[index] <= now_ns and num_rows < max_rows and new_tokens < 2048:
            num_rows, context, new_tokens, index = num_rows + 1, context + prompt, new_tokens + prompt, index + 1
            heapq.heappush(ends, step + output)
        now_ns += round(4_000_000 + context * 156.5 + new_tokens * 14_000)
        context += num_rows
        step += 1
        while ends and ends[0] <= step:
            heapq.heappop(ends)
            num_rows, context = num_rows - 1, context - prompt - output
    return step


def cpu_s(call: Callable[[], object]) -> float:
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def speed(
    config: SimConfig,
    load: SimLoad,
    goal: int | None = None,
    *,
    limit: Callable[[], int] | None = None,
    keeps_steps: bool = True,
) -> Figures:
    """The figures of one simulation, and those of a plain loop right after it."""
    simulations: list[Simulation] = []
    spent_s = cpu_s(lambda: simulations.append(simulate(config, [load], keeps_steps=keeps_steps)))
    (simulation,) = simulations
    steps = len(simulation.log) + simulation.log.num_cleared
    limit_steps: list[int] = []
    limit_s = cpu_s(lambda: limit_steps.append(limit())) if limit is not None else 0.0
    per_s = limit_steps[0] / limit_s if limit_steps else None
    return {
        "steps": steps,
        "CPU s": spent_s,
        "steps/s": steps / spent_s,
        "goal": goal,
        "limit steps/s": per_s,
        "x limit": steps / spent_s / per_s if per_s else None,
        "preemptions": simulation.num_preemptions or None,
        "tokens from the cache": int(simulation.requests.cached_tokens.sum()) or None,
    }


def plain() -> Figures:
    steps: list[int] = []
    spent_s = cpu_s(lambda: steps.append(plain_loop(codegen_arrivals(), 566, 247, 128)))
    return {"steps": steps[0], "CPU s": spent_s, "steps/s": steps[0] / spent_s}


def log_lines() -> Figures:
    log = simulate(CODEGEN, [codegen()]).log
    spent_s = cpu_s(lambda: deque((encode(step) for step in log.records()), maxlen=0))
    return {"steps": len(log), "CPU s": spent_s, "steps/s": len(log) / spent_s}


def ways() -> dict[str, Callable[[], Figures]]:
    large = SimConfig(cost_model="roofline", num_kv_blocks=1 << 20)
    tight = CODEGEN.model_copy(update={"num_kv_blocks": 500, "enable_prefix_caching": True})
    drafts = {"num_speculative_tokens": 4, "acceptance": 0.8, "draft_cost": 0.05}
    chosen: dict[str, Callable[[], Figures]] = {
        "plain loop, codegen": plain,
        "BLIS, as published": lambda: {"steps/s": BLIS_STEPS_PER_S},
    }
    for blocks in (7463, 1 << 20):
        config = CODEGEN.model_copy(update={"num_kv_blocks": blocks})
        chosen[f"codegen, {blocks:,} blocks"] = partial(speed, config, codegen(), 500_000)
    noisy = CODEGEN.model_copy(update={"noise": "published"})
    chosen["codegen with noise"] = partial(speed, noisy, codegen())
    chosen["steps of codegen as lines of a log"] = log_lines
    chosen["prefix cache and 500 blocks"] = partial(speed, tight, shared_prefixes(), 200_000)
    for batch in (8, 256):
        goal = 500_000 if batch == 256 else None
        constant = constant_batch(batch, 50_000, is_guided=False)
        chosen[f"closed loop, batch {batch}, 15 steps a request"] = partial(speed, large, closed_loop(batch), goal)
        chosen[f"constant batch {batch}"] = partial(speed, large, constant, goal)
        few = constant_batch(batch, 2000, is_guided=False)
        chosen[f"speculation, 4 drafts, batch {batch}"] = partial(speed, large.model_copy(update=drafts), few)
    with_values = SimConfig(value_model="qwen2.5-1.5b", num_kv_blocks=1 << 20, guided_rows="aggregate")
    for batch, (is_guided, config, goal) in product(
        (8, 64, 256), ((False, large, 500_000), (True, with_values, 200_000))
    ):
        name = f"{'guided' if is_guided else 'closed'} loop, batch {batch}, outputs of 16 to 256"
        load, limit = (
            random_closed_loop(batch, is_guided=is_guided),
            partial(turnover_loop, batch, is_guided=is_guided),
        )
        chosen[name] = partial(speed, config, load, goal, limit=limit)
    for mode, batch, goal in (("aggregate", 64, 200_000), ("aggregate", 256, 200_000), ("exact", 64, None)):
        config = SimConfig(value_model="qwen2.5-1.5b", num_kv_blocks=1 << 20, guided_rows=mode)
        guided = constant_batch(batch, 10_000, is_guided=True)
        chosen[f"guided {mode}, batch {batch}"] = partial(speed, config, guided, goal)
    return chosen


def azure_scale(num_requests: int, *, keeps_steps: bool) -> Figures:
    config = SimConfig(model="llama-3.1-8b", cost_model="roofline", num_kv_blocks=30_000, max_num_seqs=256)
    start_s = time.monotonic()
    figures = speed(config, azure(num_requests), keeps_steps=keeps_steps)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**figures, "wall s with the load (goal 30)": time.monotonic() - start_s, "peak MB (goal 300)": peak_mb}


def main() -> None:
    asked = options(__doc__, azure=0, rounds=3)
    if asked.azure:
        # In this order: the peak is that of the process until then.
        kinds = {"requests alone, as in simulate --keep summary": False, "requests and all steps": True}
        trace = {name: partial(azure_scale, asked.azure, keeps_steps=keeps) for name, keeps in kinds.items()}
        rows = compared(f"{asked.azure:,} requests of the Azure trace", trace)
    else:
        rows = compared("steps of simulated loads", ways(), rounds=asked.rounds, ratios=["steps/s"])
    write(asked.json, rows)


if __name__ == "__main__":
    main()
