"""The forward pass: logits of transformers with the same weights, its point, its operators and its least time."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.costs.hardware import HARDWARE
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.micro.peaks import MEASURED_SHARE, Peaks, pass_bytes
from benchctl.micro.worker import check_measurable
from benchctl.profile.choices import ForwardPoint

TINY = {
    "layers": 2, "hidden": 48, "q_heads": 4, "kv_heads": 4, "head_dim": 12, "ffn": 80, "vocab": 97,
    "tied_embeddings": False, "qkv_bias": False, "qk_norm": False,
}  # fmt: skip
FAMILIES = {
    "Llama": TINY,
    "Llama-grouped": {**TINY, "kv_heads": 2},
    "Qwen2": {**TINY, "kv_heads": 2, "qkv_bias": True, "tied_embeddings": True},
    "Qwen3": {**TINY, "kv_heads": 1, "head_dim": 16, "qk_norm": True},
}
ROUNDING = 2e-5
"""Largest difference of float32 logits, in units of the largest, that other orders of the same sums explain."""


def assert_equal_but_for_rounding(ours, theirs, rounding=ROUNDING):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= rounding * np.abs(theirs).max()


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_with_the_same_weights(ask_passes, name, layout):
    model, family = FAMILIES[name], name.partition("-")[0]
    theirs = ask_passes("reference", model=model, family=family, batch_size=3, length=11)
    passes = [("prefill", 5), ("decode", 1), ("prefill", 4), ("decode", 1)]
    ours = ask_passes("logits", model=model, batch_size=3, passes=passes, layout=layout)
    ends = np.cumsum([new for _, new in passes]) - 1
    assert_equal_but_for_rounding(ours["logits"], np.asarray(theirs["logits"])[:, ends].swapaxes(0, 1))


def passes_of(lengths):
    """Passes of these lengths; one token is a decode or a prompt."""
    kinds = [st.sampled_from(["decode", "prefill"]) if new == 1 else st.just("prefill") for new in lengths]
    return st.tuples(*(st.tuples(kind, st.just(new)) for kind, new in zip(kinds, lengths, strict=True)))


@given(
    model=st.sampled_from(list(FAMILIES.values())),
    passes=st.lists(st.integers(1, 6), min_size=1, max_size=5).flatmap(passes_of),
    batch_size=st.integers(1, 4),
    layout=st.sampled_from(["contiguous", "paged"]),
    page_tokens=st.integers(1, 7),
    cache_seed=st.integers(0, 5),
)
@settings(max_examples=40)
def test_a_cached_context_changes_nothing(ask_passes, model, passes, batch_size, layout, page_tokens, cache_seed):
    """Neither does the layout of the cache, the order of its pages, nor what lay in it before."""
    length = sum(new for _, new in passes)
    whole = ask_passes("logits", model=model, batch_size=batch_size, passes=[("prefill", length)])
    divided = ask_passes(
        "logits",
        model=model,
        batch_size=batch_size,
        passes=passes,
        layout=layout,
        page_tokens=page_tokens,
        cache_seed=cache_seed,
    )
    assert_equal_but_for_rounding(divided["logits"][-1], whole["logits"][-1])


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_precision_gives_the_same_logits_but_for_its_rounding(ask_passes, dtype, rounding):
    passes = [("prefill", 6), ("decode", 1)]
    asked = {"model": FAMILIES["Qwen2"], "batch_size": 2, "passes": passes, "layout": "paged"}
    whole, half = ask_passes("logits", **asked), ask_passes("logits", **asked, dtype=dtype)
    assert_equal_but_for_rounding(half["logits"], whole["logits"], rounding)


def test_a_graph_of_the_same_pass_has_the_eager_outputs(ask_passes):
    answer = ask_passes("graph_difference", model=TINY, is_stale=False, replays=4)
    assert len(answer["graph"]["duration_ns"]) == len(answer["eager"]["duration_ns"]) == 4


@pytest.mark.parametrize(
    ("name", "layout", "in_a_layer"),
    [("Llama", "contiguous", 14), ("Llama", "paged", 16), ("Qwen3", "contiguous", 16)],
)
def test_the_operators_of_a_pass_are_counted(ask_passes, name, layout, in_a_layer):
    """Beside those of the layers: the embedding, the last norm and the head."""
    model = FAMILIES[name]
    operators = ask_passes("num_operators", model=model, layout=layout)["num_operators"]
    assert operators == 3 + in_a_layer * model["layers"]


def test_a_graph_with_other_outputs_than_the_eager_pass_is_refused(ask_passes):
    failure = ask_passes("graph_difference", is_failing=True, model=TINY, is_stale=True, replays=4)
    assert failure["kind"] == "outputs"
    assert "the outputs of graph and eager differ by 0.333 of the largest" in failure["message"]


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
