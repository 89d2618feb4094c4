"""A quantised value model has the weights that its numbers of eight bits stand for, however they are multiplied."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from safetensors.torch import save_file
from support.guided.operation_counts import OperationCounts
from support.guided.plain_values import VOCABULARY, random_tensors, tiny_config

from benchctl.guided.modes import mode_batch
from benchctl.guided.operations import FUSED, PLAIN
from benchctl.guided.params import GuidanceError, GuidanceParams
from benchctl.guided.rows import limit_numbers, select_candidates
from benchctl.guided.value_model.checkpoint import Checkpoint
from benchctl.guided.value_model.float8 import choose_product, first_right_product, largest_difference
from benchctl.guided.value_model.linear import (
    FLOAT8,
    Linear,
    emulated,
    quantize_channels,
    quantized,
    scaled_after,
    scaled_rows,
    weights_alone,
)
from benchctl.guided.value_model.scoring import ScoredRow, Scorer
from benchctl.guided.value_model.sizes import value_model_memory, weight_bytes
from benchctl.guided.value_model.value_model import ValueModel, dimensions, load_value_model, random_value_model
from benchctl.guided.vllm.settings import SETTINGS_VARIABLE, settings_of

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def matrices(draw):
    """Rows of any size, from tiny to huge, some of them 0."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    exponents = draw(st.lists(st.integers(-30, 30), min_size=rows, max_size=rows))
    numbers = drawn(rows, columns, seed=draw(st.integers(0, 1000))) * torch.tensor(exponents).exp2()[:, None]
    return numbers * (torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))[:, None])


def assert_close_to(numbers, stored, scales):
    """Half a unit in the last of four places; below 2^-6 of a scale, places no longer move."""
    error = (stored.float() * scales - numbers).abs()
    assert bool((error <= torch.maximum(numbers.abs() / 16, scales * 2**-10) * (1 + 1e-5)).all())


@given(numbers=matrices())
def test_a_weight_is_off_by_a_sixteenth_of_itself_at_most(numbers):
    stored, scales = quantize_channels(numbers)
    assert (stored.dtype, scales.shape) == (FLOAT8, (len(numbers), 1))
    assert_close_to(numbers, stored, scales)
    assert bool((torch.frexp(scales).mantissa == 0.5).all()), "a power of two"
    exact = stored.double() * scales.double()
    linear = quantized(Linear(weight=numbers, bias=None), weights_alone)
    assert torch.equal(linear.dequantized(torch.bfloat16).double(), exact)


@given(numbers=matrices())
def test_an_input_is_off_by_a_sixteenth_of_itself_at_most_and_its_row_is_its_own(numbers):
    stored, scales = PLAIN.quantize_rows(numbers)
    assert_close_to(numbers, stored, scales)
    for row in range(len(numbers)):
        alone, scale = PLAIN.quantize_rows(numbers[row : row + 1])
        assert torch.equal(alone.float()[0], stored.float()[row])
        assert scale == scales[row]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("product", [scaled_rows, scaled_after])
@pytest.mark.parametrize("has_bias", [True, False])
def test_torch_s_products_of_float8_give_what_the_numbers_stand_for(product, dtype, has_bias):
    bias = drawn(48, seed=1, dtype=dtype) if has_bias else None
    linear = quantized(Linear(weight=drawn(48, 32, dtype=dtype), bias=bias), product)
    x = drawn(5, 32, seed=2, dtype=dtype)
    x[3] = 0
    torch.testing.assert_close(linear(x), emulated(x, linear), rtol=2e-2, atol=2e-2)
    # A padded token may hold anything; what the others get does not depend on it.
    spoilt = x.clone()
    spoilt[0] = torch.nan
    assert torch.equal(linear(spoilt)[1:], linear(x)[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_products_of_float8_the_quantised_weights_are_multiplied_as_any_others(dtype):
    linear = quantized(Linear(weight=drawn(48, 32, dtype=dtype), bias=drawn(48, dtype=dtype)), weights_alone)
    x = drawn(5, 32, seed=2, dtype=dtype)
    wanted = torch.nn.functional.linear(x.double(), linear.dequantized(torch.float64), linear.bias.double())
    torch.testing.assert_close(linear(x).double(), wanted, rtol=1e-2, atol=3e-2)


def quantised(product, dtype=torch.float32, family="qwen2", operations=PLAIN):
    config = tiny_config(family)
    checkpoint = Checkpoint(config, random_tensors(config, dtype), frozenset())
    return ValueModel(checkpoint, operations, product=product)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_announced_bytes_of_weights_are_those_of_the_tensors(family, dtype):
    config = tiny_config(family)
    usual, small = (random_value_model(config, "cpu", dtype, product=product) for product in (None, weights_alone))
    saved = weight_bytes(config, dtype.itemsize) - weight_bytes(config, dtype.itemsize, "fp8")
    assert usual.num_bytes - small.num_bytes == saved > 0
    limits = {"max_slots": 2, "max_tokens": 30, "max_candidates": 3}
    memory = value_model_memory(config, dtype.itemsize, **limits, quantization="fp8")
    assert memory.weights == weight_bytes(config, dtype.itemsize, "fp8")
    assert memory.prefixes == value_model_memory(config, dtype.itemsize, **limits).prefixes


def raw_values(model, num_rows=4):
    rows = [ScoredRow(n, [(7 * n + i) % VOCABULARY for i in range(9 + n)], 9 + n) for n in range(num_rows)]
    ids = torch.arange(num_rows * 5).view(num_rows, 5)
    return Scorer(model, num_rows, 40).score(rows, ids)


def test_a_quantised_model_computes_what_one_with_these_weights_does():
    model, config = quantised(weights_alone), tiny_config("qwen2")
    tensors = random_tensors(config, torch.float32)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            stored, scales = quantize_channels(tensor)
            tensors[name] = stored.float() * scales
    torch.testing.assert_close(raw_values(model), raw_values(ValueModel(Checkpoint(config, tensors, frozenset()))))
    assert not torch.allclose(raw_values(model), raw_values(quantised(None)))


def law(raw, params):
    rows = len(raw)
    logits = drawn(rows, VOCABULARY, seed=5)
    limits = torch.tensor(
        [limit_numbers(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0)] * rows, dtype=torch.float64
    )
    chosen = select_candidates(logits, limits, 5)
    modes = mode_batch([params] * rows, CPU, list(range(rows)))
    return PLAIN.tilt_candidates(
        chosen.probs, chosen.mask, chosen.counts, chosen.ids, raw, torch.arange(rows), torch.tensor([0]),
        modes.table, modes.rules,
    ).exp()  # fmt: skip


@pytest.mark.parametrize(
    "params",
    [GuidanceParams(mode="centered_exp", value_scale=-3.0), GuidanceParams(mode="mul", value_scale=0.8)],
    ids=["centered_exp", "mul"],
)
@pytest.mark.parametrize("product", [weights_alone, scaled_rows])
def test_the_guided_law_moves_by_little(product, params):
    laws = [law(raw_values(quantised(each)), params) for each in (None, product)]
    distance = (laws[0] - laws[1]).abs().sum(dim=1).max() / 2
    assert 0 < distance < 0.1


def test_on_a_cpu_weights_alone_are_quantised_and_the_reason_is_told():
    chosen = choose_product(dimensions(tiny_config("qwen2")), CPU, torch.bfloat16)
    assert (chosen.name, chosen.reason) == (
        "weights_alone", "products of float8 need a GPU of compute capability 8.9",
    )  # fmt: skip


def test_a_product_that_fails_or_gives_something_else_is_not_used():
    config = dimensions(tiny_config("qwen2"))

    def fails(x, linear):
        raise RuntimeError("no such kernel")

    def doubles(x, linear):
        return 2 * emulated(x, linear)

    def loses(x, linear):
        return emulated(x, linear) * torch.nan

    chosen = first_right_product({"a": fails, "b": doubles, "c": emulated}, config, CPU, torch.bfloat16)
    assert (chosen.name, chosen.product, chosen.reason) == ("c", emulated, None)
    chosen = first_right_product({"a": fails, "b": doubles, "c": loses}, config, CPU, torch.bfloat16)
    assert chosen.product is weights_alone
    for part in ("a fails (no such kernel)", "b differs by 1 ", "c differs by inf "):
        assert part in chosen.reason
    assert largest_difference(scaled_rows, config, CPU, torch.bfloat16) < 2e-2


def test_a_layer_asks_for_one_operation_more_in_each_of_its_four_maps():
    totals = []
    for product in (None, scaled_rows):
        model = quantised(product, operations=FUSED, dtype=torch.bfloat16)
        scorer = Scorer(model, 1, 40)
        scorer.score([ScoredRow(0, [1, 2, 3], 3)], torch.tensor([[4, 5]]))
        with OperationCounts() as counts:
            scorer.score([ScoredRow(0, [1, 2, 3, 6], 3)], torch.tensor([[4, 5]]))
        totals.append(counts.total)
    assert totals[1] - totals[0] == 4 * tiny_config("qwen2").num_hidden_layers


def test_a_directory_is_quantised_as_the_same_tensors_are(tmp_path):
    config = tiny_config("qwen2")
    save_file(random_tensors(config, torch.float32), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    loaded = load_value_model(tmp_path, product=weights_alone)
    torch.testing.assert_close(raw_values(loaded), raw_values(quantised(weights_alone)))


@pytest.mark.parametrize("name", ["int4", "FP8", ""])
def test_an_unknown_quantisation_is_refused(name):
    with pytest.raises(GuidanceError, match=r"quantization is '.*'; take one of none, fp8"):
        settings_of({SETTINGS_VARIABLE: json.dumps({"quantization": name})})
