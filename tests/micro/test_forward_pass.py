"""The forward pass: logits of transformers with the same weights, its point, its operators and its least time."""

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from support.guided.tensors import torch

from benchctl.costs.hardware import HARDWARE
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.micro.inside import WorkerError
from benchctl.micro.inside.model import ForwardPass, KvCache, Model, PassPoint
from benchctl.micro.inside.passes import Passes, count_operators
from benchctl.micro.inside.replays import CpuDevice
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


def model_of(shape, dtype="float32", layout="contiguous"):
    settings = {"shape": {"name": "tiny", **shape}, "dtype": dtype, "kv_layout": layout, "seed": 7}
    return Model(settings, torch.device("cpu"))


def tokens_of(shape, batch_size, length):
    return torch.randint(shape["vocab"], (batch_size, length), generator=torch.Generator().manual_seed(11))


@torch.inference_mode()
def logits(shape, batch_size, passes, *, layout="contiguous", page_tokens=4, cache_seed=0, dtype="float32"):
    """Logits after each of ``passes``, pairs of a phase and the new tokens of each sequence, over one cache."""
    ours, length = model_of(shape, dtype), sum(new for _, new in passes)
    pages = {"page_tokens": page_tokens} if layout == "paged" else {}
    cache = KvCache(ours, batch_size, length, seed=cache_seed, **pages)
    tokens, rows, context = tokens_of(shape, batch_size, length), [], 0
    for phase, new in passes:
        point = PassPoint(phase=phase, batch_size=batch_size, new_tokens=new, context_tokens=context)
        forward = ForwardPass(ours, cache, point, tokens[:, context : context + new])
        forward.run()
        rows.append(forward.logits.clone().double())
        forward.run()
        assert torch.equal(rows[-1], forward.logits.double()), "a second run of the same pass differs"
        context += new
    return rows


@torch.inference_mode()
def reference(shape, family, batch_size, length):
    """Logits at every position by transformers' own model of a family with the same weights, ``[B][T][V]``."""
    transformers = pytest.importorskip("transformers", reason="the reference is the model of transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["q_heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        tie_word_embeddings=shape["tied_embeddings"],
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        attention_dropout=0.0,
    )
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    theirs.load_state_dict(checkpoint_of(model_of(shape)), strict=True)
    return theirs(tokens_of(shape, batch_size, length)).logits.double()


def checkpoint_of(weights):
    """The weights as a checkpoint names them, one matrix for each projection."""
    d = weights.dimensions
    heads = (d.q_heads, d.kv_heads, d.kv_heads)
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    state["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}."
        parts = layer.qkv.split([count * d.head_dim for count in heads])
        for name, part in zip("qkv", parts, strict=True):
            state[f"{at}self_attn.{name}_proj.weight"] = part
        if layer.qkv_bias is not None:
            for name, part in zip("qkv", layer.qkv_bias.split([len(part) for part in parts]), strict=True):
                state[f"{at}self_attn.{name}_proj.bias"] = part
        if layer.head_norms is not None:
            state[f"{at}self_attn.q_norm.weight"] = layer.head_norms[0]
            state[f"{at}self_attn.k_norm.weight"] = layer.head_norms[d.q_heads]
        state[f"{at}self_attn.o_proj.weight"] = layer.output
        gate, up = layer.gate_up.chunk(2)
        state |= {
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": layer.down,
        }
        state[f"{at}input_layernorm.weight"] = layer.attention_norm
        state[f"{at}post_attention_layernorm.weight"] = layer.block_norm
    return state


def assert_equal_but_for_rounding(ours, theirs, rounding=ROUNDING):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= rounding * theirs.abs().max()


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_with_the_same_weights(name, layout):
    theirs = reference(FAMILIES[name], name.partition("-")[0], batch_size=3, length=11)
    passes = [("prefill", 5), ("decode", 1), ("prefill", 4), ("decode", 1)]
    end = 0
    for ours, (_, new) in zip(logits(FAMILIES[name], 3, passes, layout=layout), passes, strict=True):
        end += new
        assert_equal_but_for_rounding(ours, theirs[:, end - 1])


def passes_of(lengths):
    """Passes of these lengths; one token is a decode or a prompt."""
    kinds = [st.sampled_from(["decode", "prefill"]) if new == 1 else st.just("prefill") for new in lengths]
    return st.tuples(*(st.tuples(kind, st.just(new)) for kind, new in zip(kinds, lengths, strict=True)))


@given(
    shape=st.sampled_from(list(FAMILIES.values())),
    passes=st.lists(st.integers(1, 6), min_size=1, max_size=5).flatmap(passes_of),
    batch_size=st.integers(1, 4),
    cache=st.fixed_dictionaries(
        {
            "layout": st.sampled_from(["contiguous", "paged"]),
            "page_tokens": st.integers(1, 7),
            "cache_seed": st.integers(0, 5),
        }
    ),
)
@settings(max_examples=40)
def test_a_cached_context_changes_nothing(shape, passes, batch_size, cache):
    """Neither does the layout of the cache, the order of its pages, nor what lay in it before."""
    (whole,) = logits(shape, batch_size, [("prefill", sum(new for _, new in passes))])
    assert_equal_but_for_rounding(logits(shape, batch_size, passes, **cache)[-1], whole)


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_precision_gives_the_same_logits_but_for_its_rounding(dtype, rounding):
    passes = [("prefill", 6), ("decode", 1)]
    whole, half = (
        logits(FAMILIES["Qwen2"], 2, passes, layout="paged", dtype=each)[-1] for each in ("float32", dtype)
    )
    assert_equal_but_for_rounding(half, whole, rounding)


@torch.inference_mode()
def test_a_graph_has_the_eager_outputs_or_is_refused():
    """A graph on this CPU is the work itself, or the work over a model that has changed since."""

    def stale(work, warmups):
        model.head.mul_(1.5)
        return work

    device, model, point = CpuDevice(), model_of(TINY, layout="paged"), PassPoint("decode", 3, 1, 20)
    device.capture = lambda work, warmups: work
    passes = Passes(device, model)
    lengths = {len(passes.measure(point, mode, warmups=2, replays=4)["duration_ns"]) for mode in ("eager", "graph")}
    assert lengths == {4}
    device.capture = stale
    with pytest.raises(WorkerError, match=r"outputs of graph and eager differ by 0\.333 of the largest") as caught:
        Passes(device, model).measure(point, "graph", warmups=2, replays=4)
    assert caught.value.kind == "outputs"


@pytest.mark.parametrize(
    ("name", "layout", "in_a_layer"),
    [("Llama", "contiguous", 14), ("Llama", "paged", 16), ("Qwen3", "contiguous", 16)],
)
@torch.inference_mode()
def test_the_operators_of_a_pass_are_counted(name, layout, in_a_layer):
    """Beside those of the layers: the embedding, the last norm and the head."""
    forward = model_of(FAMILIES[name], layout=layout).make(PassPoint("decode", 3, 1, 20))
    assert count_operators(forward.run) == 3 + in_a_layer * FAMILIES[name]["layers"]


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
