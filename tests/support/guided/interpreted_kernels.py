"""Program: differences between kernels and torch, as JSON; Triton's interpreter runs the kernels on the CPU."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from benchctl.guided.kernels.check import largest_differences
from benchctl.guided.operations import kernel_operations
from benchctl.guided.value_model.value_model import ValueModelConfig


def main(dtype, has_head_norm, head_dim, spoilt):
    config = ValueModelConfig(
        layers=1, hidden=96, heads=6, kv_heads=2, head_dim=int(head_dim), vocab=64, ffn=80,
        has_head_norm=has_head_norm == "normed", norm_epsilon=1e-6,
    )  # fmt: skip
    kernels = kernel_operations()
    if spoilt:
        original = getattr(kernels, spoilt)
        object.__setattr__(kernels, spoilt, lambda *given: original(*given) * 1.5)
    kind = getattr(torch, dtype)
    differences = largest_differences(kernels, config, torch.device("cpu"), kind)
    sys.stdout.write(json.dumps(differences) + "\n")


main(*sys.argv[1:])
