"""Experts, latent attention and quantised weights: published sizes, and what a config.json says of them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.costs.model_shape import MoeShape
from benchctl.costs.roofline import forward_bytes, forward_flops
from benchctl.costs.shapes import BUILT_IN_SHAPES, shape_for

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


def test_the_language_models_of_llama_4_have_about_their_published_sizes():
    # 109 and 400 billion with their vision part, 17 billion active with the embedding.
    names = ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama-4-Maverick-17B-128E")
    assert [shape_for(name).num_params() for name in names] == pytest.approx([109e9, 400e9], rel=0.02)


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
    assert shape_for("Qwen/Qwen2.5-7B-Instruct-AWQ").weight_format == "int4"
    assert shape_for("Qwen/Qwen3-8B-FP8").weight_format == "fp8"
    assert shape_for("neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a8").weight_format == "int8"
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
