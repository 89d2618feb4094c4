"""Model shapes: the built-in table, names, and what a config.json of each family says."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from benchctl.costs.model_shape import MoeShape
from benchctl.costs.roofline import forward_bytes, forward_flops
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
    ("name", "flops"),
    [
        ("qwen2.5-0.5b", (715_653_120, 86_016, 272_269_312, 1_607_424)),
        ("qwen2.5-1.5b", (2_620_391_424, 172_032, 466_747_392, 4_721_664)),
        ("qwen2.5-3b", (5_549_064_192, 294_912, 622_329_856, 8_392_704)),
        ("qwen2.5-7b", (13_050_576_896, 401_408, 1_089_994_752, 25_697_280)),
        ("qwen2.5-14b", (26_424_115_200, 983_040, 1_557_135_360, 52_439_040)),
    ],
)
def test_flops_per_token_of_the_built_in_models(name, flops):
    """Of layers, of attention to a position, and of both heads."""
    shape = shape_for(name)
    of_layers = shape.linear_flops_per_token(), shape.attention_flops_per_position()
    assert (*of_layers, shape.lm_head_flops(), shape.value_head_flops()) == flops


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


def test_a_built_in_model_and_a_published_value_model_are_known_by_their_usual_names():
    for name in ("Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "QWEN2.5-7B-INSTRUCT", "models/Qwen2.5-7B/"):
        assert shape_for(name) == BUILT_IN_SHAPES["qwen2.5-7b"], name
    value_model = shape_for("./models/namezz/lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct")
    assert (value_model.head, value_model.hidden) == ("value_head", 1536)


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


MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLAMA4_MAVERICK = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "vocab_size": 202048,
        "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
    },
}
QWEN15_MOE = {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "vocab_size": 151936,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
}


@pytest.fixture
def shape_of(tmp_path):
    """The shape that a config.json describes, with changes."""

    def shape(config, **changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return shape_for(str(tmp_path))

    return shape


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
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("meta-llama/Llama-2-70b-chat-hf", 68_976_648_192),
        ("codellama/CodeLlama-34b-Instruct-hf", 33_743_970_304),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
        ("meta-llama/Llama-3.1-405B", 405_853_388_800),
        ("mistralai/Mistral-Nemo-Instruct-2407", 12_247_782_400),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30_532_122_624),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", 140_630_071_296),
        ("deepseek-ai/DeepSeek-V2-Chat", 235_741_434_880),
        ("deepseek-ai/DeepSeek-V2-Lite", 15_706_484_224),
        ("deepseek-ai/DeepSeek-V3-0324", 671_026_419_200),
        ("JackFram/llama-68m", 68_030_208),
        ("JackFram/llama-160m", 162_417_408),
    ],
)
def test_parameters_are_those_of_the_published_checkpoints(name, num_params):
    assert shape_for(name).num_params() == num_params


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral-8x7b", 12.9e9), ("deepseek-v3", 37e9), ("qwen3-30b-a3b", 3.3e9)]
)
def test_a_token_is_multiplied_with_the_published_number_of_active_parameters(name, active):
    shape = shape_for(name)
    # Published numbers count the embedding, or the head, or both.
    assert shape.active_params() < active * 1.01
    assert shape.active_params() + shape.vocab * shape.hidden == pytest.approx(active, rel=0.09)


@pytest.mark.parametrize(
    ("config", "built_in"),
    [
        (MIXTRAL, "mixtral-8x7b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (DEEPSEEK_V3 | {"v_head_dim": 0}, "deepseek-v3"),
        (DEEPSEEK_V3 | {"v_head_dim": None}, "deepseek-v3"),
        (QWEN3_30B, "qwen3-30b-a3b"),
        (LLAMA4_MAVERICK, "llama-4-maverick"),
    ],
)
def test_a_config_of_each_family_describes_its_built_in_shape(shape_of, config, built_in):
    shape, expected = shape_of(config), BUILT_IN_SHAPES[built_in]
    assert shape.num_params() == expected.num_params()
    assert shape.linear_flops_per_token() == expected.linear_flops_per_token()
    for part in ("moe", "latent", "weight_format"):
        assert getattr(shape, part) == getattr(expected, part)


def test_experts_have_the_widths_that_each_family_spells_in_its_own_way(shape_of):
    qwen, llama = shape_of(QWEN15_MOE), shape_of(LLAMA4_MAVERICK)
    assert qwen.num_params() == 14_315_784_192
    assert (qwen.moe.expert_ffn, qwen.moe.shared_ffn, qwen.ffn) == (1408, 5632, 5632)
    assert (llama.moe.expert_ffn, llama.moe.shared_ffn, llama.ffn) == (8192, 8192, 16384)
    text = LLAMA4_MAVERICK["text_config"] | {"interleave_moe_layer_step": 0}
    dense = shape_of({"model_type": "llama4", "text_config": text})
    assert (dense.moe, dense.dense_layers) == (None, dense.layers)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, 58),
        ({"first_k_dense_replace": 0}, 61),
        ({"moe_layer_freq": 2}, 29),
        ({"moe_layer_freq": 0}, 58),
        ({"moe_layer_freq": [0] * 11 + [1] * 50}, 50),
        ({"mlp_only_layers": [3, 60]}, 56),
        ({"moe_layers": [5, 6, 7]}, 3),
        ({"decoder_sparse_step": 2}, 29),
    ],
)
def test_layers_with_experts_follow_from_every_key_that_names_them(shape_of, changes, layers):
    assert shape_of(DEEPSEEK_V3, **changes).moe.layers == layers


def test_absorbed_and_expanded_attention_are_those_of_the_closed_forms():
    shape = shape_for("deepseek-v3")
    # Scores of r + R and values of r against 2 (P + R) + 2 V, for 128 heads and 61 layers.
    assert shape.decode_attention_flops_per_position() == 61 * 128 * (2 * (512 + 64) + 2 * 512)
    assert shape.attention_flops_per_position() == 61 * 128 * (2 * (128 + 64) + 2 * 128)
    assert shape.kv_bytes_per_token() == 61 * (512 + 64) * 2


def compressed(weights, activations):
    """The section of a model that was compressed by tensors."""
    groups = {"group_0": {"weights": weights, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8-stored"),
        ({"quant_method": "awq", "w_bit": 4}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        (compressed({"type": "int", "num_bits": 4}, None), "int4"),
        (compressed({"type": "float", "num_bits": 8}, {"type": "float", "num_bits": 8}), "fp8"),
    ],
)
def test_quantised_weights_are_read_from_the_config(shape_of, quantisation, expected):
    shape = shape_of(MIXTRAL, quantization_config=quantisation)
    assert shape.weight_format == expected
    assert shape.weight_bytes() < shape_of(MIXTRAL).weight_bytes()


def test_a_published_name_says_the_format_of_its_weights():
    quantised = "neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a8"
    names = ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen3-8B-FP8", quantised)
    assert [shape_for(name).weight_format for name in names] == ["int4", "fp8", "int8"]
    # 5.6 GB on disk with embedding and head in 16 bits.
    assert shape_for("Qwen/Qwen2.5-7B-Instruct-AWQ").weight_bytes() == pytest.approx(5.6e9, rel=0.02)


@settings(max_examples=50)
@given(experts=st.integers(1, 512), chosen=st.integers(1, 512), tokens=st.integers(1, 10_000))
def test_experts_read_lie_between_those_of_one_token_and_all(experts, chosen, tokens):
    moe = MoeShape(layers=1, experts=experts, experts_per_token=min(chosen, experts), expert_ffn=8)
    for rule in (moe.uniform_experts, moe.linear_experts):
        assert moe.experts_per_token <= rule(tokens) * (1 + 1e-12)
        assert rule(tokens) <= min(experts, rule(tokens + 1))
        assert rule(0) == 0
    assert moe.uniform_experts(tokens) <= moe.linear_experts(tokens) * (1 + 1e-12)
    assert moe.uniform_experts(1) == pytest.approx(moe.experts_per_token)


@settings(max_examples=50)
@given(tokens=st.integers(1, 4096), name=st.sampled_from(["mixtral-8x7b", "deepseek-v3", "llama-4-scout"]))
def test_a_pass_reads_at_most_all_weights_and_more_with_more_tokens(tokens, name):
    shape = shape_for(name)
    assert forward_bytes(shape, 0, tokens) <= forward_bytes(shape, 0, tokens + 1) <= shape.weight_bytes()
    one, two = (forward_flops(shape, num * tokens, 0, 0, decode_positions=0) for num in (1, 2))
    assert two == 2 * one
