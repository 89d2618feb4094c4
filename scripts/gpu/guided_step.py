"""What guidance with a value model adds to a decode step: the step of a server, with models of random weights.

    goal     batch 64, 5 candidates: the ratio of guided to unguided step with an interval, with everything that
             makes the step fast and without each; where the time goes, by events of the device
    sweep    the ratio at other batch sizes and numbers of candidates

A step computes the base model (a CUDA graph), guides its logits, samples, and waits for the tokens on the host. The
baseline is the same without guidance. Both are timed on the host's clock in turns: clocks of a device drift, but
hardly from one round to the next. The ratio is the median over rounds, its interval the order statistics that hold
the median with 95 %. ``floor`` is the ratio at the peaks of the data sheet; ``base/peak`` says how much of these
peaks the base step reached, because a slow base would make guidance look cheap.

    PYTHONPATH=. python scripts/gpu/guided_step.py goal

``--tiny --device cpu`` tries the script anywhere, in seconds; its numbers say nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from decode import TINY_BASE, TINY_VALUE, BaseModel, BaseStep, config_of, free_unused, wait
from guided_decode import (
    ARMS,
    Decode,
    Point,
    computed_with,
    made_guide,
    made_scorer,
    no_collection,
    operations_of,
)
from paired import Paired, interval_text, judged, paired_rounds, table
from step_sections import sections_text

from benchctl.costs.built_in_shapes import BUILT_IN_SHAPES
from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.costs.roofline import GuidedFloor, guided_floor
from benchctl.guided.kernels.check import choose_operations
from benchctl.guided.value_model.value_model import random_value_model
from benchctl.units import GIB

PUBLISHED_RATIO = 4.03
FIRST_MARK, GOAL_MARK = 1.6, 1.45
GOAL_BATCH, GOAL_CANDIDATES = 64, 5
BATCHES = (64, 1, 256, 8, 32, 128)
CANDIDATES = (5, 2, 4, 3)
"""Both in the order of what matters most, for a sweep that runs out of time."""
FEWEST_ROUNDS = 6
"""The fewest that give an interval."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One arm at one point."""

    arm: str
    point: Point
    paired: Paired
    num_recorded: int
    """Passes that were recorded at the start."""
    num_late: int
    """Passes that were recorded while decoding."""
    setup_s: float

    @property
    def document(self) -> dict[str, object]:
        return asdict(self) | {"ratio": self.paired.ratio, "interval": self.paired.interval}


class Bench:
    """Both models on the device, and what is measured with them."""

    def __init__(self, options: argparse.Namespace, batches: Sequence[int]) -> None:
        self.options = options
        self.device = torch.device(options.device)
        is_cuda = self.device.type == "cuda"
        dtype = torch.float32 if options.tiny else torch.bfloat16
        self.base_shape = TINY_BASE if options.tiny else BUILT_IN_SHAPES[options.base]
        self.value_shape = TINY_VALUE if options.tiny else BUILT_IN_SHAPES[options.value_model]
        self.vocabulary = min(self.base_shape.vocab, self.value_shape.vocab)
        tokens = self.point(1, 1).mean_context
        self._base_steps: dict[int, BaseStep] = {}
        self.base = BaseModel(self.base_shape, max(batches), tokens, self.device, dtype)
        self.model = random_value_model(config_of(self.value_shape), self.device, dtype)
        chosen = choose_operations(self.model.config, self.device, dtype, kernels=True)
        self.model.operations, self.kernels_reason = chosen.operations, chosen.reason
        self.hardware: Hardware | None = (
            hardware_or_none(torch.cuda.get_device_name(self.device)) if is_cuda else None
        )

    def point(self, batch: int, candidates: int) -> Point:
        return Point(
            batch=batch,
            candidates=candidates,
            context=self.options.context,
            steps=self.options.steps,
            max_tokens=self.options.max_tokens,
        )

    def base_step(self, point: Point) -> BaseStep:
        if point.batch not in self._base_steps:
            self._base_steps[point.batch] = self.base.step(point.batch, point.mean_context)
        return self._base_steps[point.batch]

    def measured(self, arm: str, point: Point, rounds: int) -> Measured:
        """Rounds of one arm in turns with rounds of the baseline."""
        switches, base = ARMS[arm], self.base_step(point)
        baseline = Decode(base, self.vocabulary, point)
        with computed_with(self.model, operations_of(self.model, switches)):
            start = time.perf_counter()
            scorer = made_scorer(self.model, point, switches)
            wait(self.device)
            setup_s = time.perf_counter() - start
            guided = Decode(base, self.vocabulary, point, made_guide(scorer, point, switches))
            with no_collection():
                paired = paired_rounds(baseline.round_ms, guided.round_ms, rounds)
        num_late = scorer.counters.recordings
        measured = Measured(
            arm=arm,
            point=point,
            paired=paired,
            num_recorded=scorer.num_recorded - num_late,
            num_late=num_late,
            setup_s=setup_s,
        )
        del guided, scorer
        free_unused(self.device)
        return measured

    def floor(self, point: Point) -> GuidedFloor | None:
        if self.hardware is None:
            return None
        return guided_floor(
            self.base_shape, self.value_shape, self.hardware,
            batch=point.batch, candidates=point.candidates, context=point.mean_context,
        )  # fmt: skip

    def about(self) -> str:
        """What the numbers are of."""
        base, kernels = (
            "Triton kernels" if reason is None else f"torch alone ({reason})"
            for reason in (self.base.kernels_reason, self.kernels_reason)
        )
        peaks = "unknown" if self.hardware is None else f"those of {self.hardware.name}, {self.hardware.source}"
        return (
            f"Base model {self.base_shape.name}, value model {self.value_shape.name}, random weights in "
            f"{str(self.model.dtype).removeprefix('torch.')}; prompts of {self.options.context} tokens, "
            f"{self.options.steps} steps in each of {self.options.rounds} rounds. Guidance computes with "
            f"{kernels}, the base model with {base}; prefixes have room for {self.options.max_tokens} tokens. "
            f"Peaks: {peaks}."
        )


def main() -> None:
    options = parse()
    PARTS[options.part](options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--base", default="qwen2.5-7b", choices=BUILT_IN_SHAPES)
    parser.add_argument("--value-model", default="qwen2.5-1.5b", choices=BUILT_IN_SHAPES)
    parser.add_argument("--context", type=int, help="tokens of each prompt (300)")
    parser.add_argument("--max-tokens", type=int, help="longest prefix that there is room for (4096)")
    parser.add_argument("--steps", type=int, help="timed steps of a round (goal 24, sweep 16)")
    parser.add_argument("--rounds", type=int, help="rounds (goal 12, sweep 9)")
    parser.add_argument("--seconds", type=float, default=150.0, help="a sweep begins no point after so many (150)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a toy's size, few steps: tries the script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there as well")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("guided_step: no CUDA device is here; '--tiny --device cpu' tries the script without")
    is_goal = options.part == "goal"
    options.context = options.context or (20 if options.tiny else 300)
    options.max_tokens = options.max_tokens or (64 if options.tiny else 4096)
    options.steps = options.steps or (3 if options.tiny else 24 if is_goal else 16)
    options.rounds = options.rounds or (6 if options.tiny else 12 if is_goal else 9)
    return options


def goal(options: argparse.Namespace) -> None:
    """The part ``goal``: every arm at one point, and the sections of its steps."""
    bench = Bench(options, [4 if options.tiny else GOAL_BATCH])
    point = bench.point(4 if options.tiny else GOAL_BATCH, GOAL_CANDIDATES)
    base = bench.base_step(point)
    lines: list[Measured] = []
    print(f"{bench.about()} Attention of the base model by {base.attention}.\n", flush=True)
    for arm in ARMS:
        # What is claimed is the first; how much worse the others are shows in fewer rounds.
        lines.append(bench.measured(arm, point, options.rounds if not lines else FEWEST_ROUNDS))
        write(options, bench, lines)
        if len(lines) == 1:
            print(f"{verdicts(bench, lines[0])}\n", flush=True)
            print(sections_text(bench.model, base, bench.vocabulary, point) + "\n", flush=True)
            print(table(COLUMNS, []))
        print(table_row(bench, lines[-1]), flush=True)
    print(f"\n{memory_text(bench.device)}")


def sweep(options: argparse.Namespace) -> None:
    """The part ``sweep``: everything on, at other points."""
    batches, numbers = ((2, 1), (5, 2)) if options.tiny else (BATCHES, CANDIDATES)
    start = time.monotonic()
    bench = Bench(options, batches)
    print(f"{bench.about()}\n\n{table(COLUMNS, [])}", flush=True)
    lines, left_out = [], []
    for candidates in numbers:
        for batch in batches:
            if time.monotonic() - start > options.seconds:
                left_out.append(f"batch {batch} with {candidates}")
                continue
            point = bench.point(batch, candidates)
            lines.append(bench.measured("everything on", point, options.rounds))
            write(options, bench, lines)
            print(table_row(bench, lines[-1]), flush=True)
    if left_out:
        print(f"\nNot measured within {options.seconds:.0f} seconds: {', '.join(left_out)} candidates.")


PARTS = {"goal": goal, "sweep": sweep}
COLUMNS = (
    "arm", "batch", "candidates", "base ms", "guided ms", "ratio", "interval", "floor", "base/peak", "recorded",
    "start s",
)  # fmt: skip


def table_row(bench: Bench, line: Measured) -> str:
    lowest = bench.floor(line.point)
    base_ms = statistics.median(line.paired.base_ms)
    cells = (
        line.arm,
        line.point.batch,
        line.point.candidates,
        f"{base_ms:.3f}",
        f"{statistics.median(line.paired.guided_ms):.3f}",
        f"{line.paired.ratio:.3f}",
        interval_text(line.paired.interval).strip() or "too few rounds",
        "-" if lowest is None else f"{lowest.ratio:.2f}",
        "-" if lowest is None else f"{lowest.base_s * 1e3 / base_ms:.0%}",
        f"{line.num_recorded} + {line.num_late}",
        f"{line.setup_s:.1f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def verdicts(bench: Bench, line: Measured) -> str:
    """What became of the marks."""
    lowest = bench.floor(line.point)
    floor_text = "unknown without peaks" if lowest is None else f"{lowest.ratio:.2f}"
    return (
        f"**Guided / unguided step: {line.paired.ratio:.3f}{interval_text(line.paired.interval)}** at batch "
        f"{line.point.batch} with {line.point.candidates} candidates.\n"
        f"First mark {FIRST_MARK}: {judged(line.paired, FIRST_MARK)}. Goal {GOAL_MARK}: "
        f"{judged(line.paired, GOAL_MARK)}. Floor: {floor_text}. Published for SGLang's fork, optimised, over 800 "
        f"answers: {PUBLISHED_RATIO}."
    )


def memory_text(device: torch.device) -> str:
    """The most memory that torch took, and what is taken of the device now."""
    if device.type != "cuda":
        return "Memory of a device: none is here."
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"Memory: torch took {torch.cuda.max_memory_reserved(device) / GIB:.1f} GiB at most, all models, prefixes "
        f"and graphs together; {(total - free) / GIB:.1f} of {total / GIB:.1f} GiB are taken now."
    )


def write(options: argparse.Namespace, bench: Bench, lines: Sequence[Measured]) -> None:
    if options.json is not None:
        document = {
            "base": bench.base_shape.name,
            "value_model": bench.value_shape.name,
            "kernels_reason": bench.kernels_reason,
            "lines": [line.document for line in lines],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
