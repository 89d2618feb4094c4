"""The simulator priced by a fitted step-time model."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.servers.simulator import MIXED_BATCH, decode_batch, request_of
from support.step_time import fitted_model

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad, simulate
from benchctl.sim.costs.cost_model import cost_model_for
from benchctl.sim.costs.fitted import decode_work
from benchctl.steptime.model import write_model
from benchctl.steptime.work import Deployment, StepWork

MODEL = fitted_model(
    steps_us=150.0,
    draws=((1.6, 1.25, 1.0, 30.0, 20.0, 150.0), (1.4, 1.3, 1.0, 29.0, 22.0, 160.0)),
)
DEPLOYMENT = Deployment(shape=shape_for("qwen2.5-7b"), hardware=hardware_for("h100-sxm"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fitted") / "model.json"
    write_model(path, MODEL)
    return path


def _config(file: Path, **options: object) -> SimConfig:
    return SimConfig(cost_model="fitted", step_time_model=str(file), **options)


def test_a_step_takes_what_the_model_predicts_for_its_work(file: Path) -> None:
    work = StepWork(
        num_prefills=2,
        prefill_tokens=100,
        prefill_context=20 + 180,
        prefill_positions=60 * (20 + 30) + 40 * (180 + 20),
        num_decodes=5,
        decode_tokens=5,
        decode_context=5 * 119,
        decode_positions=5 * 119.5,
        num_sampled=6,
    )
    expected_us = MODEL.predict_us(work, DEPLOYMENT)
    assert cost_model_for(_config(file)).price(MIXED_BATCH).sections() == {
        "schedule": 0,
        "model_forward": pytest.approx(expected_us * 1e3, abs=1),
    }


@given(rows=st.integers(1, 300), mean=st.integers(1, 9000), later=st.integers(0, 200_000))
def test_a_stretch_of_decode_steps_costs_what_its_steps_cost(file: Path, rows: int, mean: int, later: int) -> None:
    model = cost_model_for(_config(file))
    context = rows * mean
    stretch = model.decode(decode_batch(rows, context))
    assert stretch.since <= context < stretch.until
    if (x := context + later) < stretch.until:
        assert stretch.cost_at(x) == model.price(decode_batch(rows, x))
        expected_us = MODEL.predict_us(decode_work(rows, x), DEPLOYMENT)
        assert stretch.forward_at(x) == pytest.approx(expected_us * 1e3, rel=1e-8, abs=1)


def test_steps_of_a_simulation_are_the_models_predictions(file: Path) -> None:
    requests = tuple(
        request_of(f"r{i}", prompt_tokens=50 + 30 * i, max_tokens=60, ignore_eos=True) for i in range(9)
    )
    simulation = simulate(_config(file), [SimLoad(requests=requests)])
    decodes = [step for step in simulation.steps if step.phase == "decode"]
    assert len(decodes) > 50
    for step in decodes:
        expected_us = MODEL.predict_us(decode_work(step.num_seqs, step.context_tokens or 0), DEPLOYMENT)
        assert step.dur_ns == pytest.approx(expected_us * 1e3, abs=1)


def test_verifications_of_a_simulation_are_the_models_predictions(file: Path) -> None:
    requests = tuple(request_of(f"r{i}", prompt_tokens=50 + 30 * i, max_tokens=60, seed=i) for i in range(9))
    config = _config(file, num_speculative_tokens=3, acceptance=0.7, draft_cost=0.1, backfill="prefill")
    decodes = [step for step in simulate(config, [SimLoad(requests=requests)]).steps if step.phase == "decode"]
    assert len(decodes) > 15
    for step in decodes:
        rows, tokens, new = step.num_seqs, step.num_decode_tokens or 0, 4
        assert tokens == new * rows
        cached = (step.context_tokens or 0) - tokens
        work = StepWork(
            num_decodes=rows,
            decode_tokens=tokens,
            decode_context=cached,
            decode_positions=new * cached + rows * new * new / 2,
            num_sampled=tokens,
        )
        expected_us = MODEL.predict_us(work, DEPLOYMENT)
        assert step.sections_ns["model_forward"] == pytest.approx(expected_us * 1e3, abs=1)
        passes_us = sum(
            MODEL.predict_us(decode_work(rows, cached + rows * (i + 1)), DEPLOYMENT) for i in range(new - 1)
        )
        assert step.sections_ns["draft"] == pytest.approx(0.1 * passes_us * 1e3, abs=2)


def test_each_server_life_may_take_a_draw_of_the_coefficients(file: Path) -> None:
    batch = decode_batch(8, 8000)
    costs = {
        seed: cost_model_for(_config(file, noise="fitted", noise_seed=seed)).price(batch).model_forward
        for seed in range(3)
    }
    assert costs[0] != costs[1]
    assert costs[0] == costs[2]


def test_files_and_devices_that_do_not_fit_are_refused(file: Path, tmp_path: Path) -> None:
    several = tmp_path / "several.json"
    write_model(several, replace(MODEL, tensor_parallel=(1, 2)))
    for path, options, message in (
        (tmp_path / "absent.json", {}, "steptime fit"),
        (file, {"hardware": "a100-sxm"}, r"h100-sxm.*a100-sxm"),
        (several, {"tensor_parallel_size": 4}, "tensor-parallel sizes 1, 2 and the deployment has 4"),
    ):
        with pytest.raises(UsageError, match=message):
            cost_model_for(_config(path, **options))
    assert cost_model_for(_config(several, tensor_parallel_size=2)).decode is not None
    for options, message in (
        ({"cost_model": "fitted"}, "name them with step_time_model"),
        ({"noise": "fitted"}, "take none or published"),
        ({"cost_model": "roofline", "tensor_parallel_size": 2}, "roofline prices one device; drop it, or take"),
    ):
        with pytest.raises(ValidationError, match=message):
            SimConfig(**options)
