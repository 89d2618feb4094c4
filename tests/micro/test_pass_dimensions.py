"""The models whose passes are measured, the point of a pass, its operators and its least time."""

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.costs.hardware import HARDWARE
from benchctl.costs.shapes import BUILT_IN_SHAPES, shape_for
from benchctl.errors import UsageError
from benchctl.micro.peaks import MEASURED_SHARE, Peaks, pass_bytes
from benchctl.micro.worker import check_measurable
from benchctl.profile.choices import ForwardPoint

DENSE = [shape for shape in BUILT_IN_SHAPES.values() if shape.moe is None and shape.latent is None]


def test_dense_models_are_measured():
    for shape in DENSE:
        check_measurable(shape)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek-v3", "latent attention|experts"),
        ("mixtral-8x7b", "experts"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "weights as int4"),
        ("lvm-a-7b-b-qwen2.5-1.5b-instruct", "value head"),
    ],
)
def test_a_model_with_other_layers_is_refused_by_name(name, reason):
    with pytest.raises(UsageError, match=rf"({reason}).*forward passes are measured of dense models"):
        check_measurable(shape_for(name))


def test_a_point_has_the_fields_of_the_point_that_the_worker_reads():
    pytest.importorskip("torch", reason="forward passes run where torch is")
    from benchctl.micro.inside.model import PassPoint

    point = ForwardPoint(phase="prefill", batch_size=3, new_tokens=5, context_tokens=7)
    inside = PassPoint(**msgspec.to_builtins(point))
    assert (inside.total_new_tokens, inside.total_tokens) == (point.total_new_tokens, 12)
    assert "3 sequences with 5 new and 7 cached tokens" in str(inside)


COUNT = """
import sys
import torch
from benchctl.micro.inside.passes import count_operators

a, b = torch.ones(2, 3), torch.ones(3, 2)
out = torch.empty(2, 2)
print(count_operators(lambda: torch.mm(a, b, out=out).view(4).add_(1)), "torch._dynamo" in sys.modules)
"""


def test_operators_that_compute_are_counted_and_the_compiler_is_not_imported():
    pytest.importorskip("torch", reason="forward passes run where torch is")
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


LLAMA_68M = shape_for("llama-68m")
PEAKS = Peaks(hardware=HARDWARE["a100-sxm"])
SIZES = st.integers(1, 256)


def decode(batch_size, context_tokens=0):
    return ForwardPoint(phase="decode", batch_size=batch_size, context_tokens=context_tokens)


def test_the_smallest_decode_of_llama_68m_in_16_bits_takes_42_6_us_on_an_a100_unless_it_fits_into_the_cache():
    for cache_bytes, floor_ns in ((0, 42_600), (40_000_000, 42_600), (100_000_000, 500)):
        peaks = Peaks(hardware=HARDWARE["a100-sxm"], cache_bytes=cache_bytes)
        assert peaks.floor_ns(LLAMA_68M, decode(1), "float16") == pytest.approx(floor_ns, rel=2e-3, abs=500)
    assert pass_bytes(LLAMA_68M, decode(1), "float32") == 2 * pass_bytes(LLAMA_68M, decode(1), "bfloat16")


def test_of_a_measured_floor_only_a_share_counts():
    measured = Peaks(hardware=HARDWARE["a100-sxm"], is_measured=True)
    whole = PEAKS.floor_ns(LLAMA_68M, decode(8), "float16")
    assert measured.floor_ns(LLAMA_68M, decode(8), "float16") == pytest.approx(MEASURED_SHARE * whole, abs=1)


@settings(max_examples=50)
@given(SIZES, SIZES, SIZES)
def test_more_sequences_or_a_longer_context_never_lower_the_floor(batch_size, context, more):
    points = (decode(batch_size, context), decode(batch_size + more, context), decode(batch_size, context + more))
    floor, *others = (PEAKS.floor_ns(LLAMA_68M, point, "float16") for point in points)
    assert min(others) >= floor


def test_a_long_prefill_is_bound_by_its_flops():
    prefill = ForwardPoint(phase="prefill", batch_size=16, new_tokens=2048)
    flops_s = 2 * LLAMA_68M.static_params() * 16 * 2048 / HARDWARE["a100-sxm"].peak_flops_per_s
    assert PEAKS.floor_ns(LLAMA_68M, prefill, "float16") > flops_s * 1e9
