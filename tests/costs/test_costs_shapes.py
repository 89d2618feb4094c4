"""Model shapes: the built-in table, names, and what a config.json says."""

import json

import pytest

from benchctl.costs.shapes import BUILT_IN_SHAPES, ModelShape, shape_for
from benchctl.errors import UsageError

TINY = ModelShape(
    name="tiny", layers=2, hidden=8, q_heads=4, kv_heads=2, head_dim=4, ffn=16, vocab=100, tied_embeddings=False
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 100,
}


def written(directory, **changes):
    config = {key: value for key, value in (CONFIG | changes).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("name", "linear", "attention", "lm_head", "value_head"),
    [
        ("qwen2.5-0.5b", 715_653_120, 86_016, 272_269_312, 1_607_424),
        ("qwen2.5-1.5b", 2_620_391_424, 172_032, 466_747_392, 4_721_664),
        ("qwen2.5-3b", 5_549_064_192, 294_912, 622_329_856, 8_392_704),
        ("qwen2.5-7b", 13_050_576_896, 401_408, 1_089_994_752, 25_697_280),
        ("qwen2.5-14b", 26_424_115_200, 983_040, 1_557_135_360, 52_439_040),
    ],
)
def test_flops_per_token_of_the_built_in_models(name, linear, attention, lm_head, value_head):
    shape = shape_for(name)
    assert (shape.linear_flops_per_token(), shape.attention_flops_per_position()) == (linear, attention)
    assert (shape.lm_head_flops(), shape.value_head_flops()) == (lm_head, value_head)


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
    ],
)
def test_parameters_are_those_of_the_published_checkpoints(name, num_params):
    assert shape_for(name).num_params() == num_params
    assert shape_for(name).weight_bytes() == 2 * num_params


def test_a_hand_computed_shape():
    # Per layer: Q and O 2·8·16 each, K and V 2·8·8 each, three feed-forward matrices of 2·8·16.
    assert TINY.linear_flops_per_token() == 2 * (2 * 256 + 2 * 128 + 3 * 256)
    assert TINY.attention_flops_per_position() == 2 * 4 * 4 * 4
    assert TINY.lm_head_flops() == TINY.head_flops() == 1600
    assert (TINY.kv_bytes_per_token(), TINY.kv_bytes_per_token(1)) == (2 * 2 * 2 * 4 * 2, 32)
    # Embedding and head, matrices, two norms for each layer and a last one.
    assert TINY.num_params() == 1600 + 1536 + 5 * 8
    value_model = TINY.as_value_model()
    assert value_model.head_flops() == TINY.value_head_flops() == 128 + 16
    # The embedding stays, the untied head goes, 8·8 + 8 weights and 8 + 1 biases come.
    assert value_model.num_params() == TINY.num_params() - 800 + 64 + 8 + 9


@pytest.mark.parametrize(
    "name", ["qwen2.5-7b", "Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "QWEN2.5-7B-INSTRUCT", "models/Qwen2.5-7B/"]
)
def test_a_built_in_model_is_known_by_its_usual_names(name):
    assert shape_for(name) == BUILT_IN_SHAPES["qwen2.5-7b"]


def test_a_published_value_model_is_known_by_its_name():
    shape = shape_for("./models/namezz/lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct")
    assert (shape.head, shape.hidden) == ("value_head", 1536)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen2.5-8b", r"unknown model 'qwen2\.5-8b': did you mean .*qwen2\.5-.*config\.json"),
        ("gpt-4", r"unknown model 'gpt-4': Built-in shapes are qwen2\.5-0\.5b"),
        ("lvm-math-a-x-b-y", "unknown model 'lvm-math-a-x-b-y'"),
        *(
            (text, "unknown model")
            for text in ("x" * 100_000, "~nobody/model", "a\x00b", "\x1b[31mred", "/" * 5000)
        ),
    ],
    ids=["near", "far", "value model", "long", "home", "NUL", "escape", "slashes"],
)
def test_an_unknown_name_is_refused_in_a_short_message_without_control_characters(name, message):
    with pytest.raises(UsageError, match=message) as caught:
        shape_for(name)
    assert len(str(caught.value)) < 3_000
    assert "\x1b" not in str(caught.value)


def test_a_directory_is_read_from_its_config(tmp_path):
    directory = tmp_path / "tiny"
    directory.mkdir()
    written(directory, head_dim=4)
    assert shape_for(str(directory)) == shape_for(str(directory / "config.json")) == TINY
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIG, "vocab_size": 7}))
    assert shape_for(str(tmp_path)).vocab == 100  # of the language part of a vision model


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({}, "head_dim", 8 // 4),
        ({"head_dim": None}, "head_dim", 8 // 4),
        ({"head_dim": 32}, "head_dim", 32),
        ({"num_key_value_heads": "absent"}, "kv_heads", 4),
        ({"tie_word_embeddings": True}, "tied_embeddings", True),
        ({"attention_bias": True}, "qkv_bias", True),
        ({"model_type": "qwen2"}, "qkv_bias", True),
        ({"architectures": ["Qwen2ForLengthValueModel"]}, "head", "value_head"),
        ({"architectures": None}, "head", "lm_head"),
    ],
)
def test_keys_of_a_config_say_what_absent_ones_imply(tmp_path, changes, key, value):
    assert getattr(shape_for(str(written(tmp_path, **changes))), key) == value
    (tmp_path / "value_head.safetensors").touch()
    assert shape_for(str(tmp_path)).head == "value_head"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": 10}, "head_dim is missing and hidden_size 10 does not divide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a positive whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"intermediate_size": 1.5}, "intermediate_size is 1.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads, which is 4"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"num_local_experts": 8}, "num_experts_per_tok or num_experts_per_token or moe_topk or moe_k is missing"),
        ({"n_routed_experts": 8, "num_experts_per_tok": 9}, "each token chooses 9 of 8"),
        ({"kv_lora_rank": 512}, "qk_nope_head_dim is missing"),
        ({"num_experts": -1}, "num_experts is -1; it must be a whole number from 0"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [1]}, "moe_layer_freq has 1 entries"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": "all"}, "must be a list of whole numbers"),
        ({"model_type": "mamba"}, "model_type is 'mamba', whose layers are unknown here; known are"),
        ({"model_type": "gpt2"}, 'name a copy of the file with "model_type": "llama"'),
        ({"mamba_d_state": 16}, "mamba_d_state says that this model has layers with a state space"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "has layers of type linear_attention"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' has weights of an unknown format"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; it must be an object"),
    ],
)
def test_a_bad_config_is_refused_naming_key_and_file(tmp_path, changes, message):
    with pytest.raises(UsageError) as caught:
        shape_for(str(written(tmp_path, **changes)))
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_an_impossible_shape_cannot_be_made():
    with pytest.raises(UsageError, match="4 query heads do not divide among 3 key-value heads"):
        ModelShape(name="x", layers=1, hidden=8, q_heads=4, kv_heads=3, head_dim=2, ffn=16, vocab=100)
