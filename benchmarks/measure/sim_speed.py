"""How fast the simulator steps, beside the fastest loop that Python could run for the same load.

    python -m benchmarks.measure.sim_speed [--rounds 3] [--azure REQUESTS]

The plain loop keeps the size of the batch, the sum of contexts and a heap of last steps, and nothing else: no
blocks, no sections, no records. The simulator besides schedules, counts blocks, shares prefixes,
preempts, and keeps the columns of every step and request. CPU seconds are those of ``simulate`` alone, in one
process.
"""

import heapq
import random
import resource
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchctl.guided.params import GuidanceParams
from benchctl.records.files import encode
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad, Simulation, simulate
from benchctl.sim.requests import CountedRequests, Prompt, Request, SamplingParams
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


def closed_loop(batch: int) -> SimLoad:
    """Requests that keep ``batch`` rows busy and end once in 15 steps, whatever the batch."""
    draw = random.Random(batch)
    lengths = [round(STEPS_PER_REQUEST * batch * draw.uniform(0.5, 1.5)) for _ in range(6000)]
    return SimLoad(requests=CountedRequests([100] * 6000, lengths), max_concurrency=batch)


def constant_batch(batch: int, num_tokens: int, *, is_guided: bool) -> SimLoad:
    """Rows that begin and end together."""
    requests = tuple(
        Request(
            request_id=f"r{index}",
            prompt=Prompt(num_tokens=100, digest=str(index), asks_for_box=False, block_hashes=()),
            max_tokens=num_tokens,
            ignore_eos=True,
            sampling=SamplingParams(top_k=5, min_p=0.01),
            guidance=GuidanceParams(mode="centered_exp", value_scale=0.0) if is_guided else None,
        )
        for index in range(batch)
    )
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


def speed(config: SimConfig, load: SimLoad, goal: int | None = None) -> Figures:
    simulations: list[Simulation] = []
    spent_s = cpu_s(lambda: simulations.append(simulate(config, [load])))
    (simulation,) = simulations
    return {
        "steps": len(simulation.log),
        "CPU s": spent_s,
        "steps/s": len(simulation.log) / spent_s,
        "goal": goal,
        "preemptions": simulation.num_preemptions or None,
        "tokens from the cache": simulation.num_hit_tokens or None,
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
    for mode, batch, goal in (("aggregate", 64, 200_000), ("aggregate", 256, 200_000), ("exact", 64, None)):
        config = SimConfig(value_model="qwen2.5-1.5b", num_kv_blocks=1 << 20, guided_rows=mode)
        guided = constant_batch(batch, 10_000, is_guided=True)
        chosen[f"guided {mode}, batch {batch}"] = partial(speed, config, guided, goal)
    return chosen


def azure_scale(num_requests: int) -> Figures:
    config = SimConfig(model="llama-3.1-8b", cost_model="roofline", num_kv_blocks=30_000, max_num_seqs=256)
    start_s = time.monotonic()
    figures = speed(config, azure(num_requests))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**figures, "wall s with the load (goal 60)": time.monotonic() - start_s, "peak MB": peak_mb}


def main() -> None:
    asked = options(__doc__, azure=0, rounds=3)
    if asked.azure:
        rows = compared("Azure trace", {f"{asked.azure:,} requests": lambda: azure_scale(asked.azure)})
    else:
        rows = compared("steps of simulated loads", ways(), rounds=asked.rounds, ratios=["steps/s"])
    write(asked.json, rows)


if __name__ == "__main__":
    main()
