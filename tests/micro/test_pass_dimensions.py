"""The models whose passes are measured, and the point of a pass."""

import msgspec
import pytest

from benchctl.costs.shapes import BUILT_IN_SHAPES, shape_for
from benchctl.errors import UsageError
from benchctl.micro.worker import check_measurable
from benchctl.profile.choices import ForwardPoint

DENSE = [shape for shape in BUILT_IN_SHAPES.values() if shape.moe is None and shape.latent is None]


@pytest.mark.parametrize("shape", DENSE, ids=lambda shape: shape.name)
def test_a_dense_model_is_measured(shape):
    check_measurable(shape)


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
    pytest.importorskip("torch", reason="forward passes run where torch is")
    from benchctl.micro.inside.model import PassPoint

    point = ForwardPoint(phase="prefill", batch_size=3, new_tokens=5, context_tokens=7)
    inside = PassPoint(**msgspec.to_builtins(point))
    assert (inside.total_new_tokens, inside.total_tokens) == (point.total_new_tokens, 12)
    assert "3 sequences with 5 new and 7 cached tokens" in str(inside)
