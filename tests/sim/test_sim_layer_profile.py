"""The simulator priced by measured layers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import StepBatch, cost_model_for
from tests.support.layer_tables import attention_us, step_us, write_tables

LAYERS = 28
"""Of qwen2.5-7b."""


def _config(folder: Path) -> SimConfig:
    return SimConfig(cost_model="layer-profile", layer_profile=str(folder), max_num_seqs=64)


def test_a_mixed_step_takes_the_time_of_its_measured_layers(tmp_path: Path) -> None:
    batch = StepBatch(
        num_seqs=7,
        num_prefill_tokens=100,
        num_decode_tokens=5,
        num_sampling=6,
        context_tokens=5 * 120 + 80 + 220,
        attended_positions=5 * 120 + (60 * 20 + 60 * 61 // 2) + (40 * 180 + 40 * 41 // 2),
        decode_context=5 * 120,
        is_greedy=True,
    )
    history = (60 * (20 + 30) + 40 * (180 + 20)) / 100 - 50
    expected = step_us(LAYERS, 112, 7, attention_us(100, history, 5, 120))  # padded to a graph of 112 tokens
    cost = cost_model_for(_config(write_tables(tmp_path / "tp1"))).price(batch)
    assert cost.sections() == {"schedule": 0, "model_forward": pytest.approx(expected * 1e3, abs=1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("layers") / "tp1")


@given(rows=st.integers(1, 64), mean=st.integers(1, 6000), later=st.integers(0, 20_000))
def test_a_stretch_of_decode_steps_costs_what_its_steps_cost(
    folder: Path, rows: int, mean: int, later: int
) -> None:
    model = cost_model_for(_config(folder))

    def batch(context: int) -> StepBatch:
        return StepBatch(
            num_seqs=rows,
            num_prefill_tokens=0,
            num_decode_tokens=rows,
            num_sampling=rows,
            context_tokens=context,
            attended_positions=context,
            decode_context=context,
            is_greedy=False,
        )

    assert model.decode is not None
    stretch = model.decode(batch(rows * mean))
    assert stretch.since <= rows * mean
    context = rows * mean + later
    if stretch.until is None or context < stretch.until:
        assert stretch.cost_at(context) == model.price(batch(context))


def test_measured_layers_need_a_folder_and_nothing_else_takes_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name them with layer_profile"):
        SimConfig(cost_model="layer-profile")
    with pytest.raises(UsageError, match="roofline does not read layer_profile; drop it, or take layer-profile"):
        SimConfig(cost_model="roofline", layer_profile=str(tmp_path))
    with pytest.raises(UsageError, match="layer-profile cannot price a value model"):
        SimConfig(cost_model="layer-profile", layer_profile=str(tmp_path), value_model="qwen2.5-1.5b")


def test_tables_of_another_degree_of_parallelism_are_refused(folder: Path) -> None:
    config = SimConfig(cost_model="layer-profile", layer_profile=str(folder), tensor_parallel_size=2)
    with pytest.raises(UsageError, match="name the tables of the same degree"):
        cost_model_for(config)
