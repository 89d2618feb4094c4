"""The least time of a forward pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.costs.hardware import HARDWARE
from benchctl.costs.shapes import shape_for
from benchctl.micro.peaks import MEASURED_SHARE, Peaks, pass_bytes
from benchctl.profile.choices import ForwardPoint

LLAMA_68M = shape_for("llama-68m")
PEAKS = Peaks(hardware=HARDWARE["a100-sxm"])
SIZES = st.integers(1, 256)


def decode(batch_size: int, context_tokens: int = 0) -> ForwardPoint:
    return ForwardPoint(phase="decode", batch_size=batch_size, context_tokens=context_tokens)


def test_the_smallest_decode_of_llama_68m_in_16_bits_takes_42_6_us_on_an_a100():
    assert PEAKS.floor_ns(LLAMA_68M, decode(1), "float16") == pytest.approx(42_600, abs=50)


def test_32_bits_take_twice_as_long():
    assert pass_bytes(LLAMA_68M, decode(1), "float32") == 2 * pass_bytes(LLAMA_68M, decode(1), "bfloat16")


def test_a_model_that_fits_into_the_cache_is_not_held_against_the_memory():
    cached = Peaks(hardware=HARDWARE["a100-sxm"], cache_bytes=100_000_000)
    assert cached.floor_ns(LLAMA_68M, decode(1), "float16") < 1_000
    larger = Peaks(hardware=HARDWARE["a100-sxm"], cache_bytes=40_000_000)
    assert larger.floor_ns(LLAMA_68M, decode(1), "float16") == pytest.approx(42_600, abs=50)


def test_of_a_measured_floor_only_a_share_counts():
    measured = Peaks(hardware=HARDWARE["a100-sxm"], is_measured=True)
    whole = PEAKS.floor_ns(LLAMA_68M, decode(8), "float16")
    assert measured.floor_ns(LLAMA_68M, decode(8), "float16") == pytest.approx(MEASURED_SHARE * whole, abs=1)


@given(SIZES, SIZES, SIZES)
def test_more_sequences_or_a_longer_context_never_lower_the_floor(batch_size, context, more):
    floor = PEAKS.floor_ns(LLAMA_68M, decode(batch_size, context), "float16")
    assert PEAKS.floor_ns(LLAMA_68M, decode(batch_size + more, context), "float16") >= floor
    assert PEAKS.floor_ns(LLAMA_68M, decode(batch_size, context + more), "float16") >= floor


def test_a_long_prefill_is_bound_by_its_flops():
    prefill = ForwardPoint(phase="prefill", batch_size=16, new_tokens=2048)
    flops_s = 2 * LLAMA_68M.static_params() * 16 * 2048 / HARDWARE["a100-sxm"].peak_flops_per_s
    assert PEAKS.floor_ns(LLAMA_68M, prefill, "float16") > flops_s * 1e9
