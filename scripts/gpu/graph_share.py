"""CUDA graphs of a value model: how many are recorded, what they cost, and how many steps repeat one.

Time and memory at the start, beside what the formulas of ``benchctl.guided.value_model.sizes`` say; then decode in
which a share of the rows has no choice and is left out (``benchmarks/guided/graph_shapes.py``, here on the device).

    PYTHONPATH=. python scripts/gpu/graph_share.py

``--tiny --device cpu`` tries the script anywhere; there are no graphs then, and no memory is counted.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from decode import TINY_VALUE, config_of, free_unused, wait
from paired import table

from benchctl.costs.built_in_shapes import BUILT_IN_SHAPES
from benchctl.guided.kernels.check import choose_operations
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.sizes import ValueModelMemory, value_model_memory
from benchctl.guided.value_model.value_model import ValueModel, random_value_model
from benchctl.units import MIB
from benchmarks.guided.graph_shapes import CONTEXT, Cell, decode_with

SHARES = (0.0, 0.3, 0.7)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What making something took: seconds, and bytes of the device, None where nobody counts them."""

    what: str
    seconds: float
    num_bytes: int | None
    computed_bytes: int | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.what,
            "-" if self.computed_bytes is None else f"{self.computed_bytes / MIB:.0f}",
            "-" if self.num_bytes is None else f"{self.num_bytes / MIB:.0f}",
            "-"
            if not self.num_bytes or not self.computed_bytes
            else f"{self.num_bytes / self.computed_bytes - 1:+.1%}",
            f"{self.seconds:.1f}",
        )


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    shape = TINY_VALUE if options.tiny else BUILT_IN_SHAPES[options.value_model]
    config = config_of(shape)
    memories = {
        batch: value_model_memory(
            config, dtype.itemsize, max_slots=batch, max_tokens=CONTEXT, max_candidates=options.candidates
        )
        for batch in options.batch
    }
    weights = memories[options.batch[0]].weights
    model, taken = made_here("weights", weights, lambda: random_value_model(config, device, dtype), device)
    chosen = choose_operations(model.config, device, dtype, kernels=True)
    model.operations = chosen.operations
    print(
        f"Value model {shape.name} in {str(dtype).removeprefix('torch.')}, {options.candidates} candidates, room "
        f"for {CONTEXT} tokens in each prefix. Kernels: {chosen.reason or 'those of Triton'}.\n"
    )
    rows = [taken]
    for batch in options.batch:
        rows += memory_of(model, memories[batch], options.candidates)
    print(table(("made", "computed MiB", "taken MiB", "apart", "seconds"), [row.cells for row in rows]))
    print("\n" + table(COLUMNS, []), flush=True)
    shares = []
    for batch in options.batch:
        scorer = made_scorer(model, batch, options.candidates, is_recorded=True)
        shares += [share_of(scorer, share, batch, options) for share in SHARES]
        del scorer
        free_unused(device)
    if options.json is not None:
        document = {"made": [asdict(row) for row in rows], "shares": shares, "kernels_reason": chosen.reason}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--value-model", default="qwen2.5-1.5b", choices=BUILT_IN_SHAPES)
    parser.add_argument("--batch", type=int, nargs="+", metavar="N", help="rows (64 256)")
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps of each share (200)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a toy's size, few steps: tries the script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there as well")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("graph_share: no CUDA device is here; '--tiny --device cpu' tries the script without")
    options.batch = options.batch or ([2] if options.tiny else [64, 256])
    options.steps = options.steps or (10 if options.tiny else 200)
    return options


def made_here(
    what: str, computed_bytes: int | None, make: Callable[[], T], device: torch.device
) -> tuple[T, Taken]:
    """What ``make`` makes, with its price; memory is what the driver says, so what torch keeps is given back."""
    free_unused(device)
    before = free_bytes(device)
    start = time.perf_counter()
    made = make()
    wait(device)
    seconds = time.perf_counter() - start
    free_unused(device)
    after = free_bytes(device)
    num_bytes = None if before is None or after is None else before - after
    return made, Taken(what=what, seconds=seconds, num_bytes=num_bytes, computed_bytes=computed_bytes)


def free_bytes(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def made_scorer(model: ValueModel, batch: int, candidates: int, *, is_recorded: bool) -> Scorer:
    record = [candidates] if is_recorded else []
    return Scorer(model, batch, CONTEXT, max_candidates=candidates, graphs=True, record=record)


def memory_of(model: ValueModel, computed: ValueModelMemory, candidates: int) -> list[Taken]:
    """Prefixes alone, and what recorded passes add to them."""
    batch = computed.max_slots

    def made(*, is_recorded: bool) -> tuple[Scorer, Taken]:
        return made_here(
            f"prefixes of {batch} rows",
            computed.prefixes,
            lambda: made_scorer(model, batch, candidates, is_recorded=is_recorded),
            model.device,
        )

    bare, prefixes = made(is_recorded=False)
    del bare
    scorer, whole = made(is_recorded=True)
    num_recorded = scorer.num_recorded
    del scorer
    free_unused(model.device)
    with_passes, without = whole.num_bytes, prefixes.num_bytes
    recorded = Taken(
        what=f"their {num_recorded} recorded passes",
        seconds=whole.seconds - prefixes.seconds,
        num_bytes=None if with_passes is None or without is None else with_passes - without,
        computed_bytes=computed.passes,
    )
    return [prefixes, recorded]


COLUMNS = ("rows without a choice", "batch", "replayed", "recorded late", "eager", "padding", "ms a step")


def share_of(scorer: Scorer, share: float, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Decode with one share of rows without a choice; the time of a step includes new prompts."""
    start = time.perf_counter()
    cell: Cell = decode_with(scorer, share, batch, options.candidates, options.steps)
    wait(scorer.model.device)
    step_ms = (time.perf_counter() - start) / options.steps * 1e3
    steps = max(cell.steps, 1)
    cells = (
        f"{share:.0%}", batch, f"{cell.replayed / steps:.1%}", cell.recorded, f"{cell.eager / steps:.1%}",
        f"{cell.padding:.1%}", f"{step_ms:.2f}",
    )  # fmt: skip
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return asdict(cell) | {"step_ms": step_ms}


if __name__ == "__main__":
    main()
