"""The forward pass: logits of transformers with the same weights, and the same ones however a prompt is divided."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensors_have_as_many_parameters_as_the_model_of_transformers(ask_passes, name):
    model, family = FAMILIES[name], name.partition("-")[0]
    theirs = ask_passes("reference", model=model, family=family, batch_size=1, length=2)
    assert ask_passes("count_params", model=model)["num_params"] == theirs["num_params"]


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
