"""The published LenVM experiment comes out of the simulator: 50 questions, 16 samples, one H100."""

import itertools
import json
from functools import cache

import pytest
from support.datasets import GSM8K
from support.servers.simulator import FILTERED, NEUTRAL, VALUE_MODEL, measured_steps, question_request

from benchctl.guided.params import GuidanceParams
from benchctl.records.schema import StepRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad, Simulation, simulate
from benchctl.sim.requests import Request, SamplingParams
from benchctl.workload.datasets.made import problems

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
    by_top_k = [guided("generated-0", top_k=k) for k in (2, 3, 4, 5)]
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
