"""Model shapes: the built-in table, names, and what a config.json says."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.costs.shapes import BUILT_IN_SHAPES, ModelShape, shape_for, shape_from_config
from benchctl.errors import UsageError

TINY = ModelShape(
    name="tiny", layers=2, hidden=8, q_heads=4, kv_heads=2, head_dim=4, ffn=16, vocab=100, tied_embeddings=False
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 100,
}


def written(directory: Path, **changes: object) -> Path:
    config = {key: value for key, value in (CONFIG | changes).items() if value != "absent"}
    directory.mkdir(parents=True, exist_ok=True)
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
def test_flops_per_token_of_the_built_in_models(
    name: str, linear: int, attention: int, lm_head: int, value_head: int
) -> None:
    shape = shape_for(name)
    assert shape.linear_flops_per_token() == linear
    assert shape.attention_flops_per_position() == attention
    assert shape.lm_head_flops() == lm_head
    assert shape.value_head_flops() == value_head


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
def test_parameters_are_those_of_the_published_checkpoints(name: str, num_params: int) -> None:
    assert shape_for(name).num_params() == num_params
    assert shape_for(name).weight_bytes() == 2 * num_params


def test_a_hand_computed_shape() -> None:
    # Per layer: Q and O 2·8·16 each, K and V 2·8·8 each, three feed-forward matrices of 2·8·16.
    assert TINY.linear_flops_per_token() == 2 * (2 * 256 + 2 * 128 + 3 * 256)
    assert TINY.attention_flops_per_position() == 2 * 4 * 4 * 4
    assert TINY.lm_head_flops() == TINY.head_flops() == 1600
    assert TINY.value_head_flops() == 128 + 16
    assert TINY.kv_bytes_per_token() == 2 * 2 * 2 * 4 * 2
    assert TINY.kv_bytes_per_token(1) == 32
    # Embedding and head, matrices, two norms for each layer and a last one.
    assert TINY.num_params() == 1600 + 1536 + 5 * 8


def test_a_value_model_trades_its_vocabulary_head_for_a_small_one() -> None:
    value_model = TINY.as_value_model()
    assert value_model.head_flops() == TINY.value_head_flops()
    # The embedding stays, the untied head goes, 8·8 + 8 weights and 8 + 1 biases come.
    assert value_model.num_params() == TINY.num_params() - 800 + 64 + 8 + 9


def test_a_tied_embedding_is_counted_once() -> None:
    tied = shape_for("qwen2.5-0.5b")
    assert tied.tied_embeddings
    assert tied.num_params() < 500e6


@pytest.mark.parametrize(
    "name", ["qwen2.5-7b", "Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "QWEN2.5-7B-INSTRUCT", "models/Qwen2.5-7B/"]
)
def test_a_built_in_model_is_known_by_its_usual_names(name: str) -> None:
    assert shape_for(name) == BUILT_IN_SHAPES["qwen2.5-7b"]


def test_a_published_value_model_is_known_by_its_name() -> None:
    shape = shape_for("./models/namezz/lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct")
    assert shape.head == "value_head"
    assert shape.hidden == 1536


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'qwen2\.5-8b': did you mean .*qwen2\.5-.*config\.json"):
        shape_for("qwen2.5-8b")
    with pytest.raises(UsageError, match=r"unknown model 'gpt-4': Built-in shapes are qwen2\.5-0\.5b"):
        shape_for("gpt-4")
    with pytest.raises(UsageError, match="unknown model 'lvm-math-a-x-b-y'"):
        shape_for("lvm-math-a-x-b-y")


def test_a_directory_is_read_from_its_config(tmp_path: Path) -> None:
    directory = written(tmp_path / "tiny", head_dim=4)
    assert shape_for(str(directory)) == TINY
    assert shape_for(str(directory / "config.json")) == TINY


def test_an_explicit_head_dim_wins_over_the_quotient(tmp_path: Path) -> None:
    assert shape_for(str(written(tmp_path / "absent"))).head_dim == 8 // 4
    assert shape_for(str(written(tmp_path / "null", head_dim=None))).head_dim == 8 // 4
    assert shape_for(str(written(tmp_path / "given", head_dim=32))).head_dim == 32


def test_absent_key_value_heads_mean_one_for_each_query_head(tmp_path: Path) -> None:
    shape = shape_for(str(written(tmp_path, num_key_value_heads="absent")))
    assert shape.kv_heads == shape.q_heads == 4


def test_tied_embeddings_and_biases_are_read(tmp_path: Path) -> None:
    shape = shape_for(str(written(tmp_path / "a", tie_word_embeddings=True, attention_bias=True)))
    assert shape.tied_embeddings
    assert shape.qkv_bias
    assert shape_for(str(written(tmp_path / "b", model_type="qwen2"))).qkv_bias


def test_the_language_part_of_a_vision_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIG, "vocab_size": 7}))
    assert shape_from_config(tmp_path / "config.json").vocab == 100


def test_a_value_model_is_known_by_its_head_file_or_its_architecture(tmp_path: Path) -> None:
    beside = written(tmp_path / "beside")
    (beside / "value_head.safetensors").touch()
    named = written(tmp_path / "named", architectures=["Qwen2ForLengthValueModel"])
    assert shape_for(str(beside)).head == "value_head"
    assert shape_for(str(named)).head == "value_head"
    assert shape_for(str(written(tmp_path / "plain", architectures=None))).head == "lm_head"


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
def test_a_bad_config_is_refused_naming_key_and_file(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    directory = written(tmp_path, **changes)
    with pytest.raises(UsageError) as caught:
        shape_for(str(directory))
    assert message in str(caught.value)
    assert str(directory / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "cannot be read"), (b"\xff", "cannot be read"), (b"[]", "holds list")]
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        shape_for(str(path))


def test_an_impossible_shape_cannot_be_made() -> None:
    with pytest.raises(UsageError, match="4 query heads do not divide among 3 key-value heads"):
        ModelShape(name="x", layers=1, hidden=8, q_heads=4, kv_heads=3, head_dim=2, ffn=16, vocab=100)


@given(layers=st.integers(1, 100), factor=st.integers(2, 5))
def test_everything_per_layer_is_linear_in_the_layers(layers: int, factor: int) -> None:
    def shape(num_layers: int) -> ModelShape:
        return ModelShape(
            name="x", layers=num_layers, hidden=8, q_heads=4, kv_heads=2, head_dim=4, ffn=16, vocab=100
        )

    one, more = shape(layers), shape(layers * factor)
    assert more.linear_flops_per_token() == factor * one.linear_flops_per_token()
    assert more.attention_flops_per_position() == factor * one.attention_flops_per_position()
    assert more.kv_bytes_per_token() == factor * one.kv_bytes_per_token()
    assert more.lm_head_flops() == one.lm_head_flops()


@pytest.mark.parametrize("name", ["x" * 100_000, "~nobody-here/model", "a\x00b", "\x1b[31mred", "/" * 5000])
def test_a_text_that_can_be_no_path_is_an_unknown_model_in_a_short_message_without_control_characters(name):
    with pytest.raises(UsageError, match="unknown model") as caught:
        shape_for(name)
    assert len(str(caught.value)) < 3_000
    assert "\x1b" not in str(caught.value)
