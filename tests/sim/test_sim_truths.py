"""What was published, measured and planted comes out of the simulator."""

import itertools
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.cli import document, printed
from support.datasets import DATA, GSM8K
from support.servers.simulator import FILTERED, NEUTRAL, VALUE_MODEL, measured_steps, question_request
from support.step_time import fitted_model

from benchctl.guided.params import GuidanceParams
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.schema import StepRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad
from benchctl.sim.requests import Request, SamplingParams
from benchctl.sim.simulation import Simulation, simulate
from benchctl.sim.virtual import config_of, core_request
from benchctl.steptime.model import read_model, write_model
from benchctl.workload.datasets.base import DATA_DIRECTORY_VARIABLE
from benchctl.workload.datasets.made import problems
from benchctl.workload.prepare import prepare_requests
from benchmarks.steptime.real_run import GOALS, curve_rows, predict, rows_of
from benchmarks.steptime.run_folder import read_run

TOLERANCE = 0.03
BASELINE_SAMPLING = SamplingParams(min_p=0.01)


@cache
def questions(source: str) -> tuple[str, ...]:
    if source == "gsm8k":
        if not GSM8K.exists():
            pytest.skip("needs ../shared/data/gsm8k/test.jsonl")
        lines = GSM8K.read_text(encoding="utf-8").splitlines()[:50]
        return tuple(json.loads(line)["question"] for line in lines)
    seed = int(source.removeprefix("generated-"))
    return tuple(problem.question for problem in itertools.islice(problems(seed), 50))


def requests_for(source: str, sampling: SamplingParams, guidance: GuidanceParams | None) -> tuple[Request, ...]:
    return tuple(
        question_request(i, question, n=16, seed=1000, sampling=sampling, guidance=guidance)
        for i, question in enumerate(questions(source))
    )


@cache
def baseline(source: str) -> Simulation:
    return simulate(SimConfig(), [SimLoad(requests=requests_for(source, BASELINE_SAMPLING, None))])


@cache
def guided(
    source: str,
    *,
    value_model: str = VALUE_MODEL,
    top_k: int = 5,
    scale: float = 0.0,
    revision: str = "V1",
) -> Simulation:
    guidance = GuidanceParams(mode="centered_exp", value_scale=scale)
    sampling = SamplingParams(top_k=top_k, min_p=0.01)
    config = SimConfig(value_model=value_model, overlap_schedule=False, revision=revision)
    warmup = question_request(99, "How many?", n=1, seed=1, sampling=sampling, guidance=guidance)
    loads = [
        SimLoad(requests=(warmup,), is_warmup=True),
        SimLoad(requests=requests_for(source, sampling, guidance)),
    ]
    return simulate(config, loads)


def mean_ms(steps: tuple[StepRecord, ...], section: str) -> float:
    """Mean over the records that have the section, as the publication takes it."""
    values = [step.sections_ns[section] for step in steps if section in step.sections_ns]
    return sum(values) / len(values) / 1e6


sources = pytest.mark.parametrize("source", ["gsm8k", "generated-0"])


@sources
def test_the_baseline_takes_19_22_seconds(source: str) -> None:
    simulation = baseline(source)
    assert simulation.makespan_ns() / 1e9 == pytest.approx(19.22, rel=TOLERANCE)
    assert len(simulation.steps) == pytest.approx(1193, rel=TOLERANCE)
    assert sum(step.output_tokens or 0 for step in simulation.steps) == pytest.approx(237_675, rel=TOLERANCE)
    for section, published in {"sampler_total": 0.19, "pre_lvm": 0.07, "sample": 0.12}.items():
        assert mean_ms(simulation.steps, section) == pytest.approx(published, rel=TOLERANCE)
    assert mean_ms(simulation.steps, "lvm_apply_outer") == pytest.approx(0.0, abs=0.005)


@sources
def test_the_guided_run_takes_87_44_seconds(source: str) -> None:
    simulation = guided(source)
    steps = measured_steps(simulation)
    assert simulation.makespan_ns() / 1e9 == pytest.approx(87.44, rel=TOLERANCE)
    published = {
        "sampler_total": 50.31,
        "pre_lvm": 0.14,
        "lvm_apply_outer": 50.03,
        "sample": 0.17,
        "lvm_build_pending": 12.25,
        "lvm_forward": 36.6,
        "lvm_apply_guidance": 5.29,
    }
    for section, value in published.items():
        assert mean_ms(steps, section) == pytest.approx(value, rel=TOLERANCE), section
    with_forward = sum("lvm_forward" in step.sections_ns for step in steps) / len(steps)
    assert with_forward == pytest.approx(0.902, rel=TOLERANCE)
    assert not any("value_model_load" in step.sections_ns for step in steps)


def test_top_k_value_model_and_revision_change_the_wall_time_as_published() -> None:
    by_top_k = [guided("generated-0", top_k=k) for k in (2, 5)]
    walls = [simulation.makespan_ns() for simulation in by_top_k]
    assert max(walls) / min(walls) < 1.01
    assert all(45.9 <= mean_ms(measured_steps(each), "lvm_apply_outer") <= 51.2 for each in by_top_k)
    greedy = guided("generated-0", top_k=1)
    assert all(step.is_greedy and not step.guided_rows for step in greedy.steps)
    assert greedy.makespan_ns() == pytest.approx(baseline("generated-0").makespan_ns(), rel=0.1)
    small = guided("generated-0", value_model="qwen2.5-0.5b")
    assert small.makespan_ns() / guided("generated-0").makespan_ns() == pytest.approx(0.80, abs=0.01)
    optimised = guided("generated-0", scale=0.001, revision="V2")
    assert optimised.makespan_ns() / 1e9 == pytest.approx(80.02, rel=TOLERANCE)
    prompts = sum(request.prompt.num_tokens for request in requests_for("generated-0", FILTERED, NEUTRAL))
    prefilled = sum(step.value_prefill_tokens or 0 for step in measured_steps(guided("generated-0")))
    assert prefilled == 16 * prompts


RUN = DATA / "vllm-rtx4090"


@pytest.mark.skipif(not RUN.is_dir(), reason=f"the real vLLM run is not at {RUN}")
def test_a_real_vllm_run_simulated_from_measured_layers_and_its_settings_alone_meets_its_times(monkeypatch) -> None:
    run = read_run(RUN)
    simulation, times, curve = predict(run)
    compared = [row for row in rows_of(run.times, times) if row["goal"] is not None]
    assert len(compared) == len(GOALS)
    assert all(row["holds"] == "yes" for row in compared), compared
    running, memory = curve_rows(run.curve, curve)
    assert running["mean distance"] < 0.05 * running["measured mean"]
    assert memory["mean distance"] < 5
    assert np.array_equal(times.output_tokens, run.times.output_tokens)
    assert (simulation.requests.preemptions > 0).any()
    assert not run.remarks
    # The profile of the run has the steps of the run.
    monkeypatch.setenv(DATA_DIRECTORY_VARIABLE, str(DATA))
    profile = load_profile("rtx4090-replay")
    prepared = prepare_requests(profile, DATA)
    settings = variant_settings(profile, "baseline", {})
    config = config_of(settings)
    load = SimLoad(
        requests=tuple(core_request(request, settings, config) for request in prepared.requests),
        arrival_ns=tuple(request.arrival_ns for request in prepared.requests),
    )
    replayed, direct = simulate(config, [load]).step_columns(), simulation.step_columns()
    assert np.array_equal(replayed.dur_ns, direct.dur_ns)
    assert np.array_equal(replayed.num_seqs, direct.num_seqs)


@pytest.mark.slow
def test_a_fit_to_simulated_steps_returns_the_planted_coefficients(tmp_path: Path) -> None:
    planted = fitted_model(steps_us=150.0)
    write_model(tmp_path / "planted.json", planted)
    for profile in ("steptime-w1", "steptime-w3"):
        options = ("cost_model=fitted", f"step_time_model={tmp_path / 'planted.json'}", "noise=none")
        words = [word for option in options for word in ("--set", f"engine.options.{option}")]
        printed("simulate", "--profile", profile, "--engine", "sim", *words, "--blocks", 1, "--quiet", cwd=tmp_path)
    sources = sorted((tmp_path / "results").glob("steptime-w*/latest-simulated"))
    fitted = document("steptime", "fit", *sources, "-o", tmp_path / "m.json")
    assert fitted["held_out"][0]["whole"]["mape_frac"] < 1e-3
    for mine, theirs in zip(read_model(tmp_path / "m.json").coefficients, planted.coefficients, strict=True):
        assert mine.name == theirs.name
        assert not mine.is_identified or mine.value == pytest.approx(theirs.value, rel=2e-3), mine.name
