"""Questions to the simulator in virtual time: capacity, whole traces, intervals of a fit, the bonus token."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from support.cli import only_result, printed
from support.step_time import fitted_model

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.errors import DatasetError, ProfileError, UsageError
from benchctl.measure.capacity import (
    Largest,
    enclosed,
    find_largest,
    is_long,
    parse_objective,
    predict_intervals,
    run_sweep,
    simulate_point,
    sweep_points,
    with_load,
)
from benchctl.measure.virtual import simulate_recorded
from benchctl.profile.load import parse_profile
from benchctl.profile.planning import plan_runs
from benchctl.steptime.model import write_model
from benchctl.steptime.speculation_law import DraftCost, speed_up, tokens_per_step
from benchctl.workload.prepare import prepare_requests, recorded_load

PROFILE = """\
name: virtual
seed: 3
blocks: 1
engine: {kind: sim, options: {noise: none, cost_model: roofline, max_num_seqs: 8, max_num_batched_tokens: 512}}
model: llama-3.1-8b
workload:
  dataset: synthetic
  num_prompts: 120
  input_len: 64
  output_len: 32
  arrival: {kind: poisson, request_rate: 1}
  num_warmups: 1
variants:
  baseline: {}
"""
TRACE = """\
name: recorded
seed: 3
blocks: 1
engine: {{kind: sim, options: {{noise: published, cost_model: roofline{options}}}}}
model: llama-3.1-8b
workload:
  dataset: azure-trace
  path: {path}
  num_prompts: {num_prompts}
  arrival: {{kind: trace, speedup: 50{arrival}}}
  num_warmups: 0
  {workload}
variants:
  baseline: {{}}
"""
ACCEPTANCE, DRAFT_COST, DRAFTS = 0.8, 0.05, (1, 2, 4, 8)
ARMS = [(num_drafts, has_bonus) for num_drafts in DRAFTS for has_bonus in (True, False)]
PROFILE_OF_FIT = """\
name: predicted
seed: 3
blocks: 1
engine: {{kind: sim, options: {{noise: none, cost_model: {costs}}}}}
model: qwen2.5-7b
workload:
  dataset: generated
  num_prompts: 6
  output_len: 20
  arrival: {{kind: closed-loop, max_concurrency: 3}}
variants:
  baseline: {{}}
"""


@pytest.fixture(scope="module")
def profile():
    return parse_profile(PROFILE, "test")


def swept(profile, kind, sizes, *objectives, searches=False):
    points = sweep_points([((), profile)], kind, sizes)
    return run_sweep(points, [parse_objective(text) for text in objectives], searches=searches, jobs=1)


def test_an_objective_is_an_upper_limit_where_less_is_better_and_a_lower_one_elsewhere():
    for text, name, values in (
        ("p99_ttft_ms=200", "p99_ttft_ms", (200.0, 200.1)),
        ("output_throughput=1e3", "output_throughput", (1000, 999)),
    ):
        assert [parse_objective(text).holds({name: value}) for value in values] == [True, False]
    assert str(parse_objective("p99_ttft_ms=200")) == "p99_ttft_ms <= 200 ms"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("p99_ttft_ms", "expected METRIC=LIMIT"),
        ("ttft_p99_ms=200", "did you mean 'p99_ttft_ms'?"),
        ("output_tokens=5", "neither more nor less"),
        ("ttft_ms=fast", "'fast' is not a number"),
    ],
)
def test_an_objective_that_cannot_be_read_is_an_error_of_usage(text, says):
    with pytest.raises(UsageError, match=says.replace("?", r"\?")):
        parse_objective(text)


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.9, 40.0, 333.3])
@pytest.mark.parametrize("first", [1.0, 16.0])
def test_a_search_encloses_the_capacity_within_two_percent(capacity, first):
    largest = find_largest(lambda size: size <= capacity, enclosed({first: first <= capacity}), is_whole=False)
    assert largest.holds <= capacity < largest.breaks <= 1.02 * largest.holds


def test_a_search_finds_whole_slots_ends_where_loads_are_too_short_to_tell_and_passes_over_what_holds_by_chance():
    for capacity in (1, 2, 3, 31, 100):
        largest = find_largest(lambda size, most=capacity: size <= most, Largest(None, None), is_whole=True)
        assert largest == Largest(capacity, capacity + 1)
    largest = find_largest(lambda size: True if size <= 8 else None, Largest(1.0, None), is_whole=False)
    assert largest == Largest(8.0, None)
    assert enclosed({1: True, 2: False, 4: True}) == Largest(1, 2)


def test_latency_grows_with_the_rate_and_throughput_saturates(profile):
    points = swept(profile, "rate", [5.0, 20.0, 80.0, 320.0]).points
    e2el, throughput = ([each.metrics[name] for each in points] for name in ("e2el_ms", "output_throughput"))
    assert e2el == sorted(e2el)
    assert throughput == sorted(throughput)
    assert throughput[-1] < 1.2 * throughput[-2]


def test_the_largest_rate_of_a_sweep_keeps_the_limit_and_the_next_one_breaks_it(profile):
    outcome = swept(profile, "rate", [2.0, 512.0], "p90_ttft_ms=60", searches=True)
    (largest,) = outcome.capacities.values()
    assert 2 < largest.holds < largest.breaks <= 1.02 * largest.holds
    ttft_ms = {each.point.size: each.metrics["p90_ttft_ms"] for each in outcome.points}
    assert ttft_ms[largest.holds] <= 60 < ttft_ms[largest.breaks]


def test_a_burst_does_not_count_as_a_rate_that_is_kept_and_a_percentile_of_too_few_names_the_remedy(profile):
    (point,) = swept(profile, "rate", [1e5], "p90_ttft_ms=1e6").points
    assert (point.holds, is_long(point.point, point.metrics)) == (None, False)
    with pytest.raises(UsageError, match=r"raise workload\.num_prompts"):
        swept(profile, "rate", [5.0], "p99_ttft_ms=100")


def test_a_point_has_the_metrics_of_the_mean_over_its_blocks():
    noisy = parse_profile(PROFILE.replace("noise: none", "noise: published"), "noisy")
    both, first = (
        simulate_point(sweep_points([((), noisy.model_copy(update={"blocks": blocks}))], "rate", [5.0])[0])
        for blocks in (2, 1)
    )
    assert both["num_steps"] != first["num_steps"] or both["e2el_ms"] != first["e2el_ms"]
    assert both["num_requests"] == first["num_requests"] == 120


def test_the_same_sweep_on_two_processes_gives_the_same_points(profile):
    points = sweep_points([((), profile)], "max-concurrency", [2, 4])
    one, two = (run_sweep(points, (), searches=False, jobs=jobs) for jobs in (1, 2))
    assert [each.metrics for each in one.points] == [each.metrics for each in two.points]


def test_another_load_keeps_the_kind_of_an_open_schedule(profile):
    assert with_load(profile, "rate", 7.0).workload.arrival.kind == "poisson"
    closed = with_load(profile, "max-concurrency", 4)
    assert (closed.workload.arrival.kind, closed.workload.arrival.max_concurrency) == ("closed-loop", 4)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Forty requests, a second apart and a bit more each time."""
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = [f"2023-11-16 18:00:{i:02d}.{i:02d}00000,{40 + 13 * i % 700},{1 + 7 * i % 90}\n" for i in range(40)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    return path


def replayed(path, *, options="", arrival="", workload="", num_prompts=40):
    text = TRACE.format(path=path, options=options, arrival=arrival, workload=workload, num_prompts=num_prompts)
    return parse_profile(text, "test")


def metrics_of(profile):
    return simulate_recorded(profile, plan_runs(profile).runs[0], recorded_load(profile))


@pytest.mark.parametrize("arrival", ["", ", max_concurrency: 3"], ids=["open", "with a cap"])
def test_the_metrics_of_a_trace_are_those_of_the_run_whose_records_are_kept(trace, arrival):
    profile = replayed(trace, arrival=arrival, options=", max_num_seqs: 8")
    whole = simulate_point(sweep_points([((), profile)], None, ())[0])
    told = {name: value for name, value in metrics_of(profile).items() if value is not None}
    assert {"ttft_ms", "p90_ttft_ms", "tpot_ms", "e2el_ms", "output_throughput", "num_steps"} <= told.keys()
    assert told == pytest.approx({name: whole[name] for name in told})


def test_a_repeated_trace_goes_on_behind_its_last_arrival_and_prompts_repeat_as_their_lengths_do(trace):
    profile = replayed(trace, workload="repeat: true", num_prompts=90)
    requests, load = prepare_requests(profile).requests, recorded_load(profile)
    assert [request.prompt_tokens for request in requests] == list(load.prompt_tokens)
    assert [request.arrival_ns for request in requests] == list(load.arrival_ns) == sorted(load.arrival_ns)
    assert len({request.request_id for request in requests}) == 90
    assert list(load.prompt_tokens[:40]) == list(load.prompt_tokens[40:80])
    gaps = {b - a for a, b in zip(load.arrival_ns[:40], load.arrival_ns[40:80], strict=True)}
    assert len(gaps) == 1


def test_a_trace_that_is_too_short_names_the_key_that_repeats_it(trace):
    for prepare in (recorded_load, prepare_requests):
        with pytest.raises(DatasetError, match=r"workload\.repeat"):
            prepare(replayed(trace, num_prompts=41))


@pytest.mark.parametrize(
    ("options", "workload", "says"),
    [
        (", enable_prefix_caching: true", "", "switch it off, or keep the requests"),
        (", num_kv_blocks: 2", "", "blocks"),
        ("", "output_len: 5", "replayed as it is"),
        ("", "samples_per_prompt: 2", "replayed as it is"),
    ],
)
def test_what_a_summary_cannot_hold_is_an_error_of_usage(trace, options, workload, says):
    with pytest.raises((UsageError, ProfileError), match=says):
        metrics_of(replayed(trace, options=options, workload=workload))


@pytest.fixture
def fitted(tmp_path):
    """The profile of a simulation by a model with 21 draws, from 0.9 to 1.1 of its coefficients."""
    model = fitted_model(steps_us=150.0)
    values = [coefficient.value for coefficient in model.coefficients]
    draws = tuple(tuple((0.9 + 0.01 * i) * value for value in values) for i in range(21))
    write_model(tmp_path / "model.json", replace(model, draws=draws))
    return PROFILE_OF_FIT.format(costs=f"fitted, step_time_model: {tmp_path / 'model.json'}")


def predicted(text, num_draws):
    profile = parse_profile(text, "test")
    (arm,) = predict_intervals(profile, prepare_requests(profile).sets, num_draws)
    return arm


def test_an_interval_holds_the_metrics_of_the_draws_and_the_fit_lies_inside(fitted):
    arm = predicted(fitted, 100)
    assert (arm.num_draws, arm.level, predicted(fitted, 4).num_draws) == (21, 0.9, 4)
    step, throughput, tokens = (arm.metrics[name] for name in ("step_ms", "output_throughput", "output_tokens"))
    assert (step.low, step.high) == pytest.approx((0.91 * step.value, 1.09 * step.value), rel=1e-4)
    assert throughput.low < throughput.value
    assert tokens.low == tokens.value == tokens.high


def test_a_cost_model_without_uncertainty_is_an_error_of_usage(fitted, tmp_path):
    with pytest.raises(UsageError, match="has no uncertainty to draw from"):
        predicted(PROFILE_OF_FIT.format(costs="roofline"), 5)
    write_model(tmp_path / "model.json", fitted_model(steps_us=150.0))
    with pytest.raises(UsageError, match="has no bootstrap draws"):
        predicted(fitted, 5)


def test_simulate_prints_the_intervals_and_keeps_them_in_the_directory(fitted, tmp_path):
    (tmp_path / "p.yaml").write_text(fitted)
    said = printed("simulate", "-p", "p.yaml", "--draws", 5, "--quiet", cwd=tmp_path)
    assert "Predicted, with the interval of 90% of 5 draws of the fit" in said
    (arm,) = json.loads((only_result(tmp_path) / "predictions.json").read_text())["predictions"]
    assert arm["arm"] == "baseline"
    assert arm["metrics"]["wall_s"]["low"] < arm["metrics"]["wall_s"]["high"]
    printed("verify", only_result(tmp_path))


@pytest.fixture(name="sweep", scope="module")
def _sweep(tmp_path_factory: pytest.TempPathFactory) -> AnalyzedExperiment:
    path = tmp_path_factory.mktemp("bonus-tokens")
    settings = ("workload.num_prompts=8", "workload.output_len=256", f"sweep.num_speculative_tokens={list(DRAFTS)}")
    words = [word for setting in settings for word in ("--set", setting)]
    printed("simulate", "--profile", "bonus-tokens", "--quiet", *words, cwd=path)
    return analyze_directory(only_result(path))


def of_arm(listed, num_drafts: int, has_bonus: bool):
    arm = ("with-bonus" if has_bonus else "without-bonus", num_drafts)
    (entry,) = (each for each in listed if (each.variant, each.cell.get("num_speculative_tokens")) == arm)
    return entry


def interval(values: list[float]) -> tuple[float, float]:
    """A t interval of the mean that holds for all arms together at 95 %, and is as wide as ends of answers are."""
    half = stats.t.ppf(1 - 0.025 / len(ARMS), len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    half += 0.012 * np.mean(values)  # the last step of an answer is cut: half a step in 256 tokens
    return float(np.mean(values) - half), float(np.mean(values) + half)


@pytest.mark.parametrize(("num_drafts", "has_bonus"), ARMS)
def test_each_arm_with_drafts_agrees_with_the_closed_form_within_its_interval(sweep, num_drafts, has_bonus):
    runs = of_arm(sweep.cells, num_drafts, has_bonus).runs
    expected = tokens_per_step([ACCEPTANCE] * num_drafts, bonus=has_bonus)
    low, high = interval([run.number("tokens_per_step") for run in runs])
    assert low <= expected <= high
    ratio = of_arm(sweep.sweep, num_drafts, has_bonus).number("step_ms_ratio")
    assert ratio == pytest.approx(1 + num_drafts * DRAFT_COST, rel=1e-2), "a first step has no drafts"
    (baseline,) = (cell for cell in sweep.cells if cell.variant == "baseline")
    plain_ms = np.mean([run.number("tpot_ms") for run in baseline.runs])
    low, high = interval([float(plain_ms / run.number("tpot_ms")) for run in runs])
    assert low <= speed_up(expected, num_drafts, DraftCost(draft=DRAFT_COST), bonus=has_bonus) <= high


def test_one_draft_without_the_bonus_token_cannot_win_and_every_run_passes_its_checks(sweep):
    told = [(each.code, each.sentence.partition(" ")[0]) for each in sweep.findings if "speculation" in each.code]
    assert told == [("speculation-cannot-win", "without-bonus")]
    ratio = of_arm(sweep.sweep, 1, has_bonus=False).number("wall_ratio")
    assert ratio == pytest.approx(1 + DRAFT_COST, rel=2e-3)
    assert {run.record.state for run in sweep.runs} == {"done"}
    for run in sweep.runs:
        assert ((run.number("draft_tokens") or 0) > 0) == (run.record.variant != "baseline")
