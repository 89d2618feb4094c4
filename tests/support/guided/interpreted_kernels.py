"""Program: differences between kernels and torch, as JSON; Triton's interpreter runs the kernels on the CPU."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from benchctl.guided.kernels.check import largest_differences
from benchctl.guided.operations import PLAIN, kernel_operations
from benchctl.guided.value_model.value_model import ValueModelConfig

LEAST_NORMAL = 2.0**-6


def wrongly_quantized(kernels, dtype):
    """How many numbers differ from torch's, but for what Triton 3.9's interpreter rounds otherwise than GPUs.

    It loses a carry, so that a number that is rounded up to a power of two becomes half of that; it cuts off what
    is below the least normal number; and of two numbers that are equally near it takes the larger.
    """
    numbers = torch.randn(4, 5000, generator=torch.Generator().manual_seed(4)).to(dtype)
    numbers[1], numbers[2, 7] = 0, 1e4
    (ours, our_scales), (theirs, their_scales) = kernels.quantize_rows(numbers), PLAIN.quantize_rows(numbers)
    ours, theirs = ours.float(), theirs.float()
    is_right = (ours == theirs) | ((2 * ours == theirs) & (theirs.abs().log2() % 1 == 0))
    is_right |= (ours + theirs) / 2 == numbers.float() / their_scales
    is_right |= (theirs.abs() <= LEAST_NORMAL) & ((ours - theirs).abs() <= LEAST_NORMAL / 8)
    return float((~is_right).sum() + (our_scales != their_scales).sum())


def main(dtype, has_head_norm, head_dim, spoilt):
    config = ValueModelConfig(
        layers=1, hidden=96, heads=6, kv_heads=2, head_dim=int(head_dim), vocab=64, ffn=80,
        has_head_norm=has_head_norm == "normed", norm_epsilon=1e-6, max_positions=4096,
    )  # fmt: skip
    kernels = kernel_operations()
    if spoilt:
        original = getattr(kernels, spoilt)
        object.__setattr__(kernels, spoilt, lambda *given: original(*given) * 1.5)
    kind = getattr(torch, dtype)
    differences = largest_differences(kernels, config, torch.device("cpu"), kind, float8=False)
    differences["quantize_rows"] = wrongly_quantized(kernels, kind)
    sys.stdout.write(json.dumps(differences) + "\n")


main(*sys.argv[1:])
