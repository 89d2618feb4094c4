"""Do the Triton kernels compute what torch computes here? The check of a server's start, written out.

For each data type, and models of other dimensions: the largest difference of every operation, and what is allowed.

    PYTHONPATH=. python scripts/gpu/kernel_check.py

Exit code 1 where a kernel differs by more than is allowed, or cannot run; a server then computes with torch alone.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode import TINY_VALUE, config_of
from paired import table

from benchctl.costs.built_in_shapes import BUILT_IN_SHAPES
from benchctl.guided.kernels.check import choose_operations, largest_differences, tolerance
from benchctl.guided.operations import NAMES, kernel_operations
from benchctl.guided.value_model.value_model import ValueModelConfig, dimensions

VALUE_MODEL, SMALLER = "qwen2.5-1.5b", "qwen2.5-0.5b"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Case = tuple[str, ValueModelConfig, torch.dtype]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy's dimensions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all differences there as well")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("kernel_check: no CUDA device is here; '--tiny --device cpu' tries the script without")
    print(f"Largest difference from torch, beside what is allowed, on {device}.\n")
    print(table(("model", "data type", *NAMES), []), flush=True)
    lines = []
    for case in cases(is_tiny=options.tiny):
        lines.append(measured(*case, device))
        print("| " + " | ".join(row(lines[-1])) + " |", flush=True)
    reasons = {line["reason"] for line in lines if line["reason"]}
    print("\n" + ("\n".join(sorted(reasons)) if reasons else "A server computes with the kernels in all of these."))
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")
    sys.exit(bool(reasons) and device.type == "cuda")


def cases(*, is_tiny: bool) -> list[Case]:
    """Name, dimensions and data type, what matters most first; each takes seconds to compile."""
    shape = TINY_VALUE if is_tiny else BUILT_IN_SHAPES[VALUE_MODEL]
    config = dimensions(config_of(shape))
    usual: list[Case] = [(shape.name, config, dtype) for dtype in DTYPES]
    normed = replace(config, has_head_norm=True)
    others: list[Case] = [(f"{shape.name}, norms of heads as in Qwen3", normed, torch.bfloat16)]
    if not is_tiny:
        others.append((SMALLER, dimensions(config_of(BUILT_IN_SHAPES[SMALLER])), torch.bfloat16))
    return usual + others


def measured(name: str, config: ValueModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Differences by operation, empty where kernels cannot run, and why a server would not take them."""
    reason = choose_operations(config, device, dtype, kernels=True).reason
    differences: dict[str, float] = {}
    if device.type == "cuda":
        try:
            differences = largest_differences(kernel_operations(), config, device, dtype)
        except Exception as error:  # noqa: BLE001 - compilers fail in ways of their own; the reason says so
            reason = reason or f"kernels cannot run here ({type(error).__name__}: {error})"
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "differences": differences,
        "allowed": {each: tolerance(each, dtype) for each in NAMES},
        "reason": reason,
    }


def row(line: dict[str, Any]) -> list[str]:
    differences, allowed = line["differences"], line["allowed"]
    cells = [judged(differences[name], allowed[name]) if name in differences else "-" for name in NAMES]
    return [line["model"], line["dtype"], *cells]


def judged(difference: float, allowed: float) -> str:
    return f"{difference:.1e} {'≤' if difference <= allowed else '>'} {allowed:.0e}"


if __name__ == "__main__":
    main()
