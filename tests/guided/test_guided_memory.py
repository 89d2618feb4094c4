"""Memory of a value model: what the formula says is what is allocated, in any dimensions."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.guided.plain_values import tiny_config
from support.guided.tensors import torch
from transformers import AutoConfig

from benchctl.guided.value_model.layout import Memory
from benchctl.guided.value_model.prefixes import PrefixCache
from benchctl.guided.value_model.sizes import cells_per_slot, value_model_memory, weight_bytes
from benchctl.guided.value_model.value_model import dimensions, random_value_model

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
    config = tiny_config("qwen2")
    limits = {"max_slots": 256, "max_tokens": 4096, "max_candidates": 64}
    usual = value_model_memory(config, 2, **limits).passes
    assert value_model_memory(config, 2, **limits | {"max_slots": 512}).passes > 1.9 * usual
    assert value_model_memory(config, 2, **limits, candidates=5).passes < usual / 4
    assert value_model_memory(config, 2, **limits | {"max_tokens": 500}).passes < usual
    assert value_model_memory(config, 2, **limits, kernels=False).passes > usual
    assert str(value_model_memory(config, 2, **limits)).endswith("for 256 sequences of 4,096 tokens")
