"""A value model is read from its directory whole or refused, computes what transformers does, in known memory."""

import json
import math

import pytest
from hypothesis import given, settings, strategies as st
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from safetensors.torch import load_file, save_file
from support.guided import plain_values
from support.guided.plain_values import FAMILIES, PlainModel, both_models, tiny_config
from transformers import AutoConfig

from benchctl.costs.shapes import ModelShape
from benchctl.engines.tiny_models.make import make_value_pair
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.guided.params import CheckpointError
from benchctl.guided.rows import ScoredRow
from benchctl.guided.value_model.checkpoint import HEAD_FILE
from benchctl.guided.value_model.layout import Memory
from benchctl.guided.value_model.prefixes import PrefixCache
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.sizes import cells_per_slot, value_model_memory, weight_bytes
from benchctl.guided.value_model.value_model import dimensions, load_value_model, random_value_model

END_ID = 2


def recipe(arch="qwen2", **changes):
    shape = ModelShape(
        name="tiny", layers=2, hidden=48, q_heads=6, kv_heads=2, head_dim=8, ffn=80, vocab=300,
        tied_embeddings=True, qkv_bias=arch == "qwen2",
    )  # fmt: skip
    return Recipe(arch=arch, shape=shape, context=256, dtype="float32", seed=1, **changes)


@pytest.fixture(name="value")
def _value(tmp_path):
    """A directory that a test may spoil."""
    make_value_pair(tmp_path, recipe(), recipe())
    return tmp_path / "value"


def one_value(model, tokens, candidate):
    ids = torch.tensor([[candidate]])
    return float(Scorer(model, 1, 64).score([ScoredRow("a", tokens, 1)], ids))


def change(directory, change_tensors, filename="model.safetensors"):
    tensors = load_file(directory / filename)
    change_tensors(tensors)
    save_file(tensors, directory / filename)


def change_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


ROTATIONS = [
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]  # fmt: skip


def test_positions_are_turned_as_the_configuration_says(monkeypatch):
    plain, _ = both_models("llama", torch.float64)
    tokens = [(7 * place) % 97 for place in range(40)]
    for rotation in ROTATIONS:
        config = tiny_config("llama")
        config.rope_parameters = {"rope_theta": 700.0, **rotation}
        monkeypatch.setattr(plain_values, "tiny_config", lambda family, config=config: config)
        ours, theirs = both_models("llama", torch.float64)
        assert one_value(ours, tokens, 5) == pytest.approx(theirs.value([*tokens, 5]), abs=1e-5)
        assert one_value(ours, tokens, 5) != pytest.approx(one_value(plain, tokens, 5), abs=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_made_value_model_is_loaded_with_its_size_and_its_ends_and_gives_a_constant_value(tmp_path, family):
    made = recipe(family)
    make_value_pair(tmp_path, made, made, constant=0.05)
    model, shape = load_value_model(tmp_path / "value"), made.shape
    assert (model.config.heads, model.eos_ids, model.dtype) == (shape.q_heads, {END_ID}, torch.float32)
    for name in ("layers", "hidden", "kv_heads", "head_dim", "vocab"):
        assert getattr(model.config, name) == getattr(shape, name)
    # Qwen3's norms of heads, which shapes leave out, are kept for each head.
    head_norms = shape.layers * (6 + 2) * shape.head_dim if family == "qwen3" else 0
    assert model.num_bytes == 4 * (shape.as_value_model().num_params() + head_norms)
    assert load_value_model(tmp_path / "value", dtype=torch.bfloat16).dtype == torch.bfloat16
    for tokens in ([1], list(range(40))):
        assert 1 / (1 + math.exp(-one_value(model, tokens, 7))) == pytest.approx(0.05, rel=1e-6)


def test_values_of_a_made_model_are_those_of_transformers(value):
    tensors = {
        name.removeprefix("model."): tensor
        for filename in ("model.safetensors", HEAD_FILE)
        for name, tensor in load_file(value / filename).items()
    }
    theirs = PlainModel(AutoConfig.from_pretrained(value), tensors)
    ours = load_value_model(value)
    tokens = list(range(10, 50))
    values = [one_value(ours, tokens, candidate) for candidate in range(20)]
    assert values == pytest.approx([theirs.value([*tokens, candidate]) for candidate in range(20)], abs=2e-5)
    assert max(values) - min(values) > 0.1


def test_weights_may_be_spread_over_shards_named_without_prefix_and_with_a_vocabulary_head(value):
    before = one_value(load_value_model(value), [1, 2], 3)
    tensors = load_file(value / "model.safetensors") | load_file(value / HEAD_FILE)
    for path in (value / "model.safetensors", value / HEAD_FILE):
        path.unlink()
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")  # tied, it is the embedding
    places, names = {}, sorted(tensors)
    for number, part in enumerate((names[:7], names[7:])):
        save_file({name.removeprefix("model."): tensors[name] for name in part}, value / f"{number}.safetensors")
        places |= {name.removeprefix("model."): f"{number}.safetensors" for name in part}
    (value / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    # Alignment in the file decides which kernel runs.
    assert one_value(load_value_model(value), [1, 2], 3) == pytest.approx(before, abs=1e-5)
    (value / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no 1\.safetensors"):
        load_value_model(value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: change(d, lambda t: t.pop("model.norm.weight")), r"has no norm\.weight;"),
        (lambda d: change(d, lambda t: t.pop("v_head.fc.bias"), HEAD_FILE), r"has no v_head\.fc\.bias;"),
        (
            lambda d: change(d, lambda t: t.update({"v_head.extra": torch.zeros(1)}), HEAD_FILE),
            r"has v_head\.extra, which no such model has",
        ),
        (lambda d: (d / HEAD_FILE).unlink(), r"has no v_head\.fc\.weight, .*v_head\.summary\.bias"),
        (lambda d: change_config(d, num_hidden_layers=3), r"has no layers\.2\..* and 7 more"),
        (lambda d: change_config(d, num_hidden_layers=1), r"has layers\.1\.input_layernorm\.weight, "),
        (
            lambda d: change_config(d, intermediate_size=64),
            r"gate_proj\.weight is \(80, 48\) and must be \(64, 48\)",
        ),
        (
            lambda d: change(d, lambda t: t.update({"v_head.fc.bias": torch.zeros(48)})),
            r"v_head\.fc\.bias is stored a second time",
        ),
        (lambda d: (d / "model.safetensors").unlink(), r"has no model\.safetensors; name a complete directory"),
        (lambda d: (d / "model.safetensors").write_bytes(b"no"), "cannot be read as safetensors"),
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda d: change_config(d, model_type="gpt2"), "model_type is 'gpt2'.*qwen2, qwen3, llama"),
        (lambda d: change_config(d, hidden_act="gelu"), "hidden_act is 'gelu'"),
        (
            lambda d: change_config(d, use_sliding_window=True, sliding_window=16, max_window_layers=1),
            "sliding-window",
        ),
        (
            lambda d: change_config(d, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "rope_type is 'dynamic'.*one of default",
        ),
    ],
)
def test_a_directory_that_is_no_whole_value_model_is_refused_by_what_is_wrong_in_it(value, spoil, message):
    spoil(value)
    with pytest.raises(CheckpointError, match=message):
        load_value_model(value)


def test_ends_are_those_of_all_files_together(value):
    change_config(value, eos_token_id=[2, 40])
    (value / "generation_config.json").write_text(json.dumps({"eos_token_id": 41}))
    settings = json.loads((value / "tokenizer_config.json").read_text())
    settings["eos_token"] = {"content": "<|endoftext|>"}
    (value / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_value_model(value).eos_ids == {2, 40, 41, 0}


def test_random_weights_of_a_size_are_made_where_they_are_used():
    config = tiny_config("qwen2")
    model, again = (random_value_model(config, "cpu", torch.bfloat16, seed=3) for _ in range(2))
    assert one_value(model, [1, 2, 3], 4) == one_value(again, [1, 2, 3], 4) != 0


META = torch.device("meta")
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])


@st.composite
def configs(draw):
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 4))
    return AutoConfig.for_model(
        draw(st.sampled_from(["qwen2", "qwen3", "llama"])),
        hidden_size=heads * draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(1, 300)),
        num_hidden_layers=draw(st.integers(1, 5)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.integers(1, 32)) * 2,
        vocab_size=draw(st.integers(10, 2000)),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(
    config=configs(),
    dtype=DTYPES,
    max_slots=st.integers(1, 1024),
    max_tokens=st.integers(1, 40_000),
    max_candidates=st.integers(1, 64),
)
def test_the_bytes_of_prefixes_are_those_that_the_cache_takes(config, dtype, max_slots, max_tokens, max_candidates):
    limits = {"max_slots": max_slots, "max_tokens": max_tokens, "max_candidates": max_candidates}
    memory = Memory(slots=max_slots + 1, cells=cells_per_slot(max_tokens, max_candidates))
    cache = PrefixCache(dimensions(config), memory, META, dtype, max_candidates=max_candidates)
    assert value_model_memory(config, dtype.itemsize, **limits).prefixes == cache.num_bytes


@settings(max_examples=40, deadline=None)
@given(config=configs(), dtype=DTYPES)
def test_the_bytes_of_weights_are_those_of_the_loaded_model_but_for_a_sum_that_is_kept_in_float32(config, dtype):
    model = random_value_model(config, META, dtype)
    widened = (config.hidden_size + 1) * max(4 - dtype.itemsize, 0)
    norms = 0  # of a head, repeated for each head
    if config.model_type == "qwen3":
        norms = config.num_attention_heads + config.num_key_value_heads - 2
    repeated = config.num_hidden_layers * norms * config.head_dim * dtype.itemsize
    assert model.num_bytes == weight_bytes(config, dtype.itemsize) + widened + repeated


def test_passes_need_more_with_more_rows_candidates_and_longer_slots():
    def passes(**changes):
        limits = {"max_slots": 256, "max_tokens": 4096, "max_candidates": 64} | changes
        return value_model_memory(tiny_config("qwen2"), 2, **limits).passes

    assert passes(max_slots=512) > 1.9 * passes()
    assert passes(candidates=5) < passes() / 4
    assert passes(max_tokens=500) < passes() < passes(kernels=False)
