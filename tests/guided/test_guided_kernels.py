"""Kernels compute what torch does: run by Triton's interpreter, in a process of its own."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from support.guided.plain_values import random_tensors, tiny_config

from benchctl.guided.kernels.check import choose_operations, tolerance
from benchctl.guided.operations.registry import NAMES, PLAIN
from benchctl.guided.value_model.checkpoint import Checkpoint
from benchctl.guided.value_model.value_model import ValueModel

PROGRAM = Path(__file__).parents[1] / "support/guided/interpreted_kernels.py"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")


def differences(dtype, norm="plain", head_dim=16, spoilt=""):
    argv = [sys.executable, PROGRAM, dtype, norm, str(head_dim), spoilt]
    finished = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("dtype", "norm", "head_dim"), [("float32", "normed", 16), ("float32", "plain", 24), ("float16", "normed", 16)]
)
def test_every_kernel_gives_what_torch_gives(dtype, norm, head_dim):
    by_name = differences(dtype, norm, head_dim)
    assert by_name.keys() == set(NAMES)
    assert {name for name in NAMES if not by_name[name] <= tolerance(name, getattr(torch, dtype))} == set()


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("spoilt", ["tree_attention", "tilt_candidates"])
def test_a_kernel_that_computes_something_else_is_noticed(spoilt):
    by_name = differences("float32", spoilt=spoilt)
    assert by_name[spoilt] > 10 * tolerance(spoilt, torch.float32)


def test_without_a_gpu_torch_computes_and_the_reason_is_told():
    config = tiny_config("qwen2")
    model = ValueModel(Checkpoint(config, random_tensors(config, torch.float32), frozenset()))
    wanted = choose_operations(model.config, model.device, model.dtype, kernels=True)
    assert (wanted.operations, wanted.reason) == (PLAIN, "kernels need a GPU")
    unwanted = choose_operations(model.config, model.device, model.dtype, kernels=False)
    assert (unwanted.operations, unwanted.reason) == (PLAIN, None)
