"""Kernels compute what torch does: run by Triton's interpreter, in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from support.guided.plain_values import random_tensors, tiny_config

from benchctl.guided.kernels.check import choose_operations, largest_differences, tolerance
from benchctl.guided.operations import NAMES, PLAIN, kernel_operations
from benchctl.guided.value_model.checkpoint import Checkpoint
from benchctl.guided.value_model.sizes import attention_chunks
from benchctl.guided.value_model.value_model import ValueModel, ValueModelConfig

PROGRAMS = Path(__file__).parents[1] / "support/guided"
ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")


def output_of(program, *given, **variables):
    argv = [sys.executable, PROGRAMS / program, *given]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    finished = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("dtype", "norm", "head_dim"),
    [
        ("float32", "normed", 16),
        pytest.param("float32", "plain", 24, marks=pytest.mark.nightly),
        pytest.param("float16", "normed", 16, marks=pytest.mark.nightly),
    ],
)
def test_every_kernel_gives_what_torch_gives(dtype, norm, head_dim):
    by_name = output_of("interpreted_kernels.py", dtype, norm, str(head_dim))
    assert by_name.keys() == set(NAMES)
    assert {name for name in NAMES if not by_name[name] <= tolerance(name, getattr(torch, dtype))} == set()


def test_an_operation_that_computes_something_else_is_noticed():
    config = ValueModelConfig(
        layers=1,
        hidden=24,
        heads=3,
        kv_heads=1,
        head_dim=8,
        vocab=64,
        ffn=16,
        has_head_norm=True,
        norm_epsilon=1e-6,
    )
    for name in ("tree_attention", "tilt_candidates"):
        given = getattr(PLAIN, name)
        spoilt = replace(PLAIN, **{name: lambda *arguments, given=given: given(*arguments) * 1.5})
        by_name = largest_differences(spoilt, config, torch.device("cpu"), torch.float32)
        assert by_name[name] > 10 * tolerance(name, torch.float32)


@pytest.mark.nightly
@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("target", "model", "dtype"),
    [("80", "qwen2.5-7b", "bfloat16"), ("89", "qwen3-0.6b", "float32"), ("90", "qwen2.5-1.5b", "float16")],
)
def test_every_kernel_is_compiled_for_gpus_before_the_first_request_and_never_after(tmp_path, target, model, dtype):
    compiled = output_of("compiled_kernels.py", target, model, dtype, TRITON_CACHE_DIR=str(tmp_path))
    kernels = {each["kernel"] for each in compiled["by_check"]}
    missing = {name for name in NAMES if not {name, f"_{name}"} & kernels}
    # One is called tilt_row.
    assert missing == {"tilt_candidates"}
    assert compiled["later"] == []
    assert {each["kernel"] for each in compiled["by_check"] if each["stack"]} == set()


def test_a_pass_over_prompts_is_not_split_into_more_than_memory_has_room_for():
    heads, head_dim, prompt_tokens = 28, 128, 4096
    assert attention_chunks(4160, 16 * heads * head_dim) == (512, 9)
    assert attention_chunks(4160, prompt_tokens * heads * head_dim) == (8192, 1)


@needs_triton
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    entered = []
    guard = type("Guard", (), {"__enter__": lambda self: None, "__exit__": lambda *_: None})
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: entered.append(tensor) or guard())
    launch = kernel_operations().gated
    with pytest.raises(RuntimeError, match="active drivers"):
        launch(given := torch.zeros(2, 4))
    assert entered == [given]


def test_without_a_gpu_torch_computes_and_the_reason_is_told():
    config = tiny_config("qwen2")
    model = ValueModel(Checkpoint(config, random_tensors(config, torch.float32), frozenset()))
    wanted = choose_operations(model.config, model.device, model.dtype, kernels=True)
    assert (wanted.operations, wanted.reason) == (PLAIN, "kernels need a GPU")
    unwanted = choose_operations(model.config, model.device, model.dtype, kernels=False)
    assert (unwanted.operations, unwanted.reason) == (PLAIN, None)
