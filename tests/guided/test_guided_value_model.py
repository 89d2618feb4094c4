"""A value model is read from its directory whole or refused, and computes what transformers computes."""

import json
import math

import pytest
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from safetensors.torch import load_file, save_file
from support.guided.plain_values import FAMILIES, both_models, random_tensors, tiny_config
from transformers import AutoModel

from benchctl.costs.shapes import ModelShape
from benchctl.engines.tiny_models.make import make_value_pair
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.guided.params import CheckpointError
from benchctl.guided.rows import ScoredRow
from benchctl.guided.value_model.checkpoint import HEAD_FILE
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.sizes import backbone_shapes
from benchctl.guided.value_model.value_model import load_value_model, random_value_model

END_ID = 2


def recipe(arch="qwen2", **changes):
    shape = ModelShape(
        name="tiny", layers=2, hidden=48, q_heads=6, kv_heads=2, head_dim=8, ffn=80, vocab=300,
        tied_embeddings=True, qkv_bias=arch == "qwen2",
    )  # fmt: skip
    return Recipe(arch=arch, shape=shape, context=256, dtype="float32", seed=1, **changes)


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    make_value_pair(directory, recipe(), recipe())
    return directory


@pytest.fixture(name="value")
def _value(pair, tmp_path):
    """A directory that a test may spoil."""
    for path in (pair / "value").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def one_value(model, tokens, candidate):
    ids = torch.tensor([[candidate]])
    return float(Scorer(model, 1, 64).score([ScoredRow("a", tokens, 1)], ids))


def assert_values_are_equal(one, other):
    """Two layouts of one checkpoint agree to rounding: alignment in the file decides which kernel runs."""
    assert one == pytest.approx(other, abs=1e-5)


def change(directory, change_tensors, filename="model.safetensors"):
    tensors = load_file(directory / filename)
    change_tensors(tensors)
    save_file(tensors, directory / filename)


def change_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def with_rotation(family, **rotation):
    config = tiny_config(family)
    config.rope_parameters = rotation
    return config


@pytest.mark.parametrize(
    "config",
    [
        *[tiny_config(family) for family in FAMILIES],
        type(tiny_config("llama"))(**(tiny_config("llama").to_dict() | {"attention_bias": True, "mlp_bias": True})),
        type(tiny_config("qwen3"))(**(tiny_config("qwen3").to_dict() | {"attention_bias": True})),
    ],
    ids=[*FAMILIES, "llama-biases", "qwen3-biases"],
)
def test_the_tensors_of_a_backbone_are_those_that_transformers_has(config):
    theirs = {name: tuple(tensor.shape) for name, tensor in AutoModel.from_config(config).state_dict().items()}
    assert backbone_shapes(config) == theirs


@pytest.mark.parametrize(
    "rotation",
    [
        {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 700.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rotation: rotation["rope_type"],
)
def test_positions_are_turned_as_the_configuration_says(monkeypatch, rotation):
    from support.guided import plain_values

    plain, _ = both_models("llama", torch.float64)
    monkeypatch.setattr(plain_values, "tiny_config", lambda family: with_rotation(family, **rotation))
    ours, theirs = both_models("llama", torch.float64)
    tokens = [(7 * place) % 97 for place in range(40)]
    assert one_value(ours, tokens, 5) == pytest.approx(theirs.value([*tokens, 5]), abs=1e-5)
    assert one_value(ours, tokens, 5) != pytest.approx(one_value(plain, tokens, 5), abs=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_made_value_model_is_loaded_with_its_size_and_its_ends(tmp_path, family):
    made = recipe(family)
    make_value_pair(tmp_path, made, made)
    model = load_value_model(tmp_path / "value")
    config = model.config
    shape = made.shape
    assert (config.layers, config.hidden, config.heads) == (shape.layers, shape.hidden, shape.q_heads)
    assert (config.kv_heads, config.head_dim, config.vocab) == (shape.kv_heads, shape.head_dim, shape.vocab)
    assert model.eos_ids == {END_ID}
    assert model.dtype == torch.float32
    # Qwen3's norms of heads, which shapes leave out, are kept for each head.
    head_norms = shape.layers * (6 + 2) * shape.head_dim if family == "qwen3" else 0
    assert model.num_bytes == 4 * (shape.as_value_model().num_params() + head_norms)
    stored = load_file(tmp_path / "value/model.safetensors")
    assert "lm_head.weight" not in stored
    assert load_value_model(tmp_path / "value", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_values_of_a_made_model_are_those_of_transformers(pair):
    from support.guided.plain_values import PlainModel
    from transformers import AutoConfig

    tensors = {
        name.removeprefix("model."): tensor
        for filename in ("model.safetensors", HEAD_FILE)
        for name, tensor in load_file(pair / "value" / filename).items()
    }
    theirs = PlainModel(AutoConfig.from_pretrained(pair / "value"), tensors)
    ours = load_value_model(pair / "value")
    tokens = list(range(10, 50))
    values = [one_value(ours, tokens, candidate) for candidate in range(20)]
    assert values == pytest.approx([theirs.value([*tokens, candidate]) for candidate in range(20)], abs=2e-5)
    assert max(values) - min(values) > 0.1


@pytest.mark.parametrize("constant", [0.5, 0.05, 0.9])
def test_a_constant_value_model_gives_every_token_that_value(tmp_path, constant):
    make_value_pair(tmp_path, recipe(), recipe(), constant=constant)
    model = load_value_model(tmp_path / "value")
    for tokens in ([1], list(range(40))):
        raw = one_value(model, tokens, 7)
        assert 1 / (1 + math.exp(-raw)) == pytest.approx(constant, rel=1e-6)


def test_the_head_may_lie_among_the_shards(value):
    before = one_value(load_value_model(value), [1, 2], 3)
    head = load_file(value / HEAD_FILE)
    (value / HEAD_FILE).unlink()
    change(value, lambda tensors: tensors.update(head))
    assert_values_are_equal(one_value(load_value_model(value), [1, 2], 3), before)


def test_weights_may_be_spread_over_shards_and_named_without_their_prefix(value):
    before = one_value(load_value_model(value), [1, 2], 3)
    tensors = load_file(value / "model.safetensors")
    (value / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {}
    for number, part in enumerate((names[:7], names[7:])):
        save_file({name.removeprefix("model."): tensors[name] for name in part}, value / f"{number}.safetensors")
        places |= {name.removeprefix("model."): f"{number}.safetensors" for name in part}
    (value / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert_values_are_equal(one_value(load_value_model(value), [1, 2], 3), before)
    (value / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no 1\.safetensors"):
        load_value_model(value)


def test_a_tied_checkpoint_with_a_vocabulary_head_alone_has_its_embedding_there(value):
    before = one_value(load_value_model(value), [1, 2], 3)
    change(value, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert_values_are_equal(one_value(load_value_model(value), [1, 2], 3), before)


def test_a_vocabulary_head_beside_the_embedding_is_not_used(value):
    before = one_value(load_value_model(value), [1, 2], 3)
    change(value, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(300, 48)}))
    assert_values_are_equal(one_value(load_value_model(value), [1, 2], 3), before)


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
    model = random_value_model(tiny_config("qwen2"), "cpu", torch.bfloat16, seed=3)
    again = random_value_model(tiny_config("qwen2"), "cpu", torch.bfloat16, seed=3)
    assert one_value(model, [1, 2, 3], 4) == one_value(again, [1, 2, 3], 4) != 0
    assert model.num_bytes == random_tensors_bytes()


def random_tensors_bytes():
    summary_in_float32 = 2 * (48 + 1)
    return sum(tensor.nbytes for tensor in random_tensors(tiny_config("qwen2"), torch.bfloat16).values()) + (
        summary_in_float32
    )
