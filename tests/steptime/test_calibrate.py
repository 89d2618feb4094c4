"""Two scalars carry a model to another device: the published case to the digit, and whole models."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support.datasets import DATA
from support.step_time import planted_run

from benchctl.costs.hardware import hardware_for
from benchctl.errors import UsageError
from benchctl.steptime.calibrate import calibrate, parts_of, solve_scales
from benchctl.steptime.design import select_steps
from benchctl.steptime.fit import FitOptions, fit_model

ORACLE = DATA.parent / "oracles/steptime.json"
PLANTED = {"compute": 1.6, "memory": 1.2, "all_reduce": 1.0, "layers": 45.0, "requests": 10.0, "steps": 100.0}


@pytest.mark.skipif(not ORACLE.is_file(), reason=f"the oracle is not at {ORACLE}")
def test_the_published_few_shot_points_return_their_scalars():
    few_shot = json.loads(ORACLE.read_text(encoding="utf-8"))["few_shot"]
    compute, memory, overhead, measured = np.array(few_shot["rows(P_c,P_m,overhead,y)_us"]).T
    scales = solve_scales(compute, memory, overhead, measured)
    assert scales.compute == pytest.approx(few_shot["s_c"], rel=1e-6)
    assert scales.memory == pytest.approx(few_shot["s_m"], rel=1e-6)


def test_steps_that_do_not_determine_both_scales_are_refused_with_the_remedy():
    memory = np.array([9000.0, 9100.0, 9200.0])
    with pytest.raises(UsageError, match=r"do not determine how arithmetic scales .*add prompts of 512 tokens"):
        solve_scales(np.array([0.0, 0.0, 0.0]), memory, np.zeros(3), memory)
    with pytest.raises(UsageError, match="add decode steps of small batches"):
        solve_scales(memory, memory * 1e-4, np.zeros(3), memory)


def test_the_parts_of_a_price_add_up_and_answer_to_the_peaks():
    run = planted_run("qwen2.5-7b", 1, PLANTED)
    model = fit_model([run], FitOptions(num_draws=5))
    compute, memory, rest = parts_of(model, run)
    np.testing.assert_allclose(compute + memory + rest, model.predict_us(run.work, run.deployment), rtol=1e-9)
    assert (compute[np.asarray(run.work.prefill_tokens) > 2000] > 0).all()
    assert (memory[np.asarray(run.work.tokens) < 20] > 0).all()


@pytest.fixture(scope="module")
def source():
    return fit_model([planted_run("qwen2.5-7b", 1, PLANTED, seed=i) for i in range(3)], FitOptions(num_draws=5))


def twenty_steps(run):
    return select_steps(run, np.arange(0, 300, 15))


def test_a_model_that_was_carried_over_predicts_the_other_device(source):
    scaled = PLANTED | {"compute": 1.25 * PLANTED["compute"], "memory": 0.9 * PLANTED["memory"]}
    target = planted_run("qwen2.5-7b", 1, scaled, seed=7, hardware="a100-sxm")
    carried, scales = calibrate(source, [twenty_steps(target)], fitted_on="2026-11-22")
    assert (scales.compute, scales.memory) == (pytest.approx(1.25, rel=0.02), pytest.approx(0.9, rel=0.02))
    errors = np.asarray(carried.predict_us(target.work, target.deployment)) / target.duration_us - 1.0
    assert np.abs(errors).mean() < 0.02
    assert (carried.hardware, carried.provenance.calibrated_from) == ("a100-sxm", "h100-sxm")
    assert carried.provenance.most_query_tokens == source.provenance.most_query_tokens == 1
    with pytest.raises(UsageError, match="of a100-sxm and the deployment of h100-sxm"):
        carried.predict_us(target.work, replace(target.deployment, hardware=hardware_for("h100-sxm")))


def test_steps_with_drafts_teach_no_verification_and_times_below_the_overhead_are_refused(source):
    target = twenty_steps(planted_run("qwen2.5-7b", 1, PLANTED, hardware="a100-sxm", row_tokens=5))
    assert calibrate(source, [target])[0].provenance.most_query_tokens == 1
    with pytest.raises(UsageError, match=r"a time cannot shrink below 0.*fit a model of its own"):
        calibrate(source, [replace(target, duration_us=np.full(20, 500.0))])
