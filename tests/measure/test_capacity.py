"""Questions of capacity: objectives, the search for the largest load, and sweeps on the simulator."""

import pytest

from benchctl.errors import UsageError
from benchctl.measure.capacity import (
    Largest,
    enclosed,
    find_largest,
    is_long,
    parse_objective,
    run_sweep,
    simulate_point,
    sweep_points,
    with_load,
)
from benchctl.profile.load import parse_profile

PROFILE = """\
name: capacity
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


@pytest.fixture(scope="module")
def profile():
    return parse_profile(PROFILE, "test")


def swept(profile, kind, sizes, *objectives, searches=False):
    points = sweep_points([((), profile)], kind, sizes)
    return run_sweep(points, [parse_objective(text) for text in objectives], searches=searches, jobs=1)


def test_an_objective_is_an_upper_limit_where_less_is_better_and_a_lower_one_elsewhere():
    latency, throughput = parse_objective("p99_ttft_ms=200"), parse_objective("output_throughput=1e3")
    assert (latency.holds({"p99_ttft_ms": 200.0}), latency.holds({"p99_ttft_ms": 200.1})) == (True, False)
    assert (throughput.holds({"output_throughput": 1000}), throughput.holds({"output_throughput": 999})) == (
        True,
        False,
    )
    assert str(latency) == "p99_ttft_ms <= 200 ms"


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


def test_an_objective_that_a_load_leaves_unknown_names_the_remedy(profile):
    with pytest.raises(UsageError, match=r"raise workload\.num_prompts"):
        swept(profile, "rate", [5.0], "p99_ttft_ms=100")


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.9, 40.0, 333.3])
@pytest.mark.parametrize("first", [1.0, 16.0])
def test_a_search_encloses_the_capacity_within_two_percent(capacity, first):
    largest = find_largest(lambda size: size <= capacity, enclosed({first: first <= capacity}), is_whole=False)
    assert largest.holds <= capacity < largest.breaks <= 1.02 * largest.holds


@pytest.mark.parametrize("capacity", [1, 2, 3, 31, 100])
def test_a_search_for_slots_finds_the_whole_number(capacity):
    largest = find_largest(lambda size: size <= capacity, Largest(None, None), is_whole=True)
    assert largest == Largest(capacity, capacity + 1)


def test_a_search_ends_where_loads_are_too_short_to_tell():
    largest = find_largest(lambda size: True if size <= 8 else None, Largest(1.0, None), is_whole=False)
    assert largest == Largest(8.0, None)


def test_no_load_above_one_that_breaks_an_objective_counts():
    assert enclosed({1: True, 2: False, 4: True}) == Largest(1, 2)


def test_latency_grows_with_the_rate_and_throughput_saturates(profile):
    outcome = swept(profile, "rate", [5.0, 20.0, 80.0, 320.0])
    e2el = [each.metrics["e2el_ms"] for each in outcome.points]
    throughput = [each.metrics["output_throughput"] for each in outcome.points]
    assert e2el == sorted(e2el)
    assert throughput == sorted(throughput)
    assert throughput[-1] < 1.2 * throughput[-2]


def test_the_largest_rate_of_a_sweep_keeps_the_limit_and_the_next_one_breaks_it(profile):
    outcome = swept(profile, "rate", [2.0, 512.0], "p90_ttft_ms=60", searches=True)
    (largest,) = outcome.capacities.values()
    holds, breaks = largest.holds, largest.breaks
    assert 2 < holds < breaks <= 1.02 * holds
    by_size = {each.point.size: each for each in outcome.points}
    assert by_size[holds].metrics["p90_ttft_ms"] <= 60 < by_size[breaks].metrics["p90_ttft_ms"]


def test_a_burst_does_not_count_as_a_rate_that_is_kept(profile):
    outcome = swept(profile, "rate", [1e5], "p90_ttft_ms=1e6")
    assert [each.holds for each in outcome.points] == [None]
    assert not is_long(outcome.points[0].point, outcome.points[0].metrics)


def test_a_point_has_the_metrics_of_the_mean_over_its_blocks(profile):
    noisy = parse_profile(
        PROFILE.replace("noise: none", "noise: published").replace("blocks: 1", "blocks: 2"), "two"
    )
    both, first = (
        simulate_point(sweep_points([((), each)], "rate", [5.0])[0])
        for each in (noisy, noisy.model_copy(update={"blocks": 1}))
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
