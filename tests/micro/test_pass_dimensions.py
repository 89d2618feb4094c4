"""Parameters and memory of a model and its passes, counted before anything is allocated."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.costs.shapes import BUILT_IN_SHAPES, shape_for
from benchctl.errors import UsageError
from benchctl.micro.inside.dimensions import Dimensions, PassPoint, kv_plan, pass_bytes
from benchctl.micro.worker import check_measurable
from benchctl.profile.choices import ForwardPoint

DENSE = [shape for shape in BUILT_IN_SHAPES.values() if shape.moe is None and shape.latent is None]


def dimensions_of(name):
    return Dimensions.of(msgspec.to_builtins(shape_for(name)))


@pytest.mark.parametrize("shape", DENSE, ids=lambda shape: shape.name)
def test_a_dense_model_has_the_parameters_of_its_shape(shape):
    check_measurable(shape)
    dimensions = Dimensions.of(msgspec.to_builtins(shape))
    assert dimensions.num_params() == shape.num_params()
    assert dimensions.kv_elements_per_token() * 2 == shape.kv_bytes_per_token()


@pytest.mark.parametrize(("name", "params"), [("llama-68m", 68_030_208), ("llama-160m", 162_417_408)])
def test_the_models_of_the_published_numbers_have_their_parameters(name, params):
    assert dimensions_of(name).num_params() == params


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


@given(st.integers(1, 50), st.integers(1, 300), st.integers(1, 64))
def test_pages_have_room_for_every_token_and_waste_less_than_one_page_for_each_sequence(batch, tokens, page):
    point = PassPoint("prefill", batch, tokens)
    plan = kv_plan("paged", point, page)
    assert 0 <= plan.pages * plan.page_tokens - tokens < page
    contiguous = kv_plan("contiguous", point, page)
    assert (contiguous.sequences, contiguous.pages, contiguous.page_tokens) == (batch, 1, tokens)


@given(st.sampled_from(["decode", "prefill"]), st.integers(1, 300), st.integers(1, 64), st.integers(0, 4000))
def test_the_cache_of_a_pass_is_that_of_its_tokens_and_more_of_anything_needs_more(phase, batch, new, context):
    d = dimensions_of("llama-68m")
    point = PassPoint(phase, batch, new, context)
    plan = kv_plan("contiguous", point)
    cache, buffers = pass_bytes(d, point, plan, "float16")
    assert cache == batch * (new + context) * 2 * 2 * 12 * 64 * 2  # layers, keys and values, heads, width, bytes
    assert pass_bytes(d, point, plan, "float32")[0] == 2 * cache
    more = PassPoint(phase, batch + 1, new, context)
    assert pass_bytes(d, more, kv_plan("contiguous", more), "float16") > (cache, buffers)
    paged = pass_bytes(d, point, kv_plan("paged", point), "float16")
    assert paged >= (cache, buffers)
