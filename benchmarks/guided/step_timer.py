"""What taking the times of guided steps costs them.

Steps of a small guided batch on the CPU, with the timer off, and on; in the order off, on, on, off, so that a drift
of the machine hits both. ``--aa`` leaves it off in both halves: what differs then is noise, and no ratio below that
noise says anything. Also the time of one section alone, off and on.

    python -m benchmarks.guided.step_timer [--rounds 30] [--steps 20] [--aa]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig

from benchctl.guided.guide import Guide
from benchctl.guided.params import GuidanceParams
from benchctl.guided.rows import GuideRow
from benchctl.guided.timing import StepTimer
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.value_model import ValueModel, random_value_model

ROWS, PROMPT, VOCABULARY = 16, 100, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20, help="of each of the four parts of a round")
    parser.add_argument("--aa", action="store_true", help="off in both halves")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = random_value_model(config(), "cpu", torch.float32)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "steps.jsonl"
        print(f"one section, off: {section_ns(StepTimer(None)):.0f} ns, on: {section_ns(StepTimer(path)):.0f} ns")
        off = steps_of(model, StepTimer(None), options)
        on = steps_of(model, StepTimer(None if options.aa else path), options)
        ratios, times = [], []
        for _ in range(options.rounds):
            parts = [part() for part in (off, on, on, off)]
            ratios.append((parts[1] + parts[2]) / (parts[0] + parts[3]))
            times.append((parts[0] + parts[3]) / 2 / options.steps)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"step, off: {statistics.median(times) * 1e6:.0f} µs; {'off' if options.aa else 'on'} / off: "
        f"{middle:.4f} (quartiles {low:.4f} to {high:.4f} of {len(ratios)} rounds)"
    )


def config() -> AutoConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    return AutoConfig.for_model("qwen2", **sizes, num_attention_heads=4, num_key_value_heads=2)


def section_ns(timer: StepTimer, count: int = 2000) -> float:
    start = time.perf_counter_ns()
    for number in range(count):
        with timer.section("sample"):
            pass
        if number % 10 == 9:
            timer.end_step()
    return (time.perf_counter_ns() - start) / count


def steps_of(model: ValueModel, timer: StepTimer, options: argparse.Namespace):
    """A function that runs some steps and returns their seconds of processor time."""
    scorer = Scorer(model, ROWS, 4096, timer=timer)
    guide = Guide(lambda: scorer, timer=timer)
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    params = GuidanceParams(value_scale=1.0)
    rows = [
        GuideRow(index=number, key=number, params=params, tokens=[number] * PROMPT, num_prompt=PROMPT, top_k=5)
        for number in range(ROWS)
    ]

    def run() -> float:
        # From the same prefixes each time: longer ones cost more.
        for row in rows:
            del row.tokens[PROMPT:]
        guide.apply(logits.clone(), rows)  # computes the prefixes again, before the clock starts
        timer.end_step()
        start = time.process_time()
        for _ in range(options.steps):
            guide.apply(logits.clone(), rows)
            timer.end_step(guided_rows=guide.pending.step.guided_rows, fused=guide.pending.step.fused)
            for row in rows:
                row.tokens.append(row.index)
        return time.process_time() - start

    run()
    return run


if __name__ == "__main__":
    main()
