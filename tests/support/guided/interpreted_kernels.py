"""Program: differences between kernels and torch, as JSON; Triton's interpreter runs the kernels on the CPU."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from benchctl.guided.kernels import check
from benchctl.guided.operations import kernel_operations
from benchctl.guided.value_model.value_model import ValueModelConfig


def main(dtype, has_head_norm, head_dim):
    config = ValueModelConfig(
        layers=1, hidden=96, heads=6, kv_heads=2, head_dim=int(head_dim), vocab=64, ffn=80,
        has_head_norm=has_head_norm == "normed", norm_epsilon=1e-6,
    )  # fmt: skip
    rows = check._parameters()[::3]
    check._parameters = lambda: rows  # each takes the interpreter a tenth of a second
    differences = check.largest_differences(kernel_operations(), config, torch.device("cpu"), getattr(torch, dtype))
    sys.stdout.write(json.dumps(differences) + "\n")


main(*sys.argv[1:])
