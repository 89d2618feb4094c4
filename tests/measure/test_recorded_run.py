"""Traces of which only metrics are kept: the same numbers as with all records, from any number of requests."""

import pytest

from benchctl.errors import DatasetError, ProfileError, UsageError
from benchctl.measure.capacity import simulate_point, sweep_points
from benchctl.measure.virtual import simulate_recorded
from benchctl.profile.load import parse_profile
from benchctl.profile.planning import plan_runs
from benchctl.sim.requests import CountedRequests, Prompt, Request, SamplingParams
from benchctl.workload.prepare import prepare_requests, recorded_load

PROFILE = """\
name: recorded
seed: 3
blocks: 1
engine: {{kind: sim, options: {{noise: published, cost_model: roofline{options}}}}}
model: llama-3.1-8b
workload:
  dataset: azure-trace
  path: {path}
  num_prompts: 40
  arrival: {{kind: trace, speedup: 50{arrival}}}
  num_warmups: 0
  {workload}
variants:
  baseline: {{}}
"""
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Forty requests, a second apart and a bit more each time."""
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = [f"2023-11-16 18:00:{i:02d}.{i:02d}00000,{40 + 13 * i % 700},{1 + 7 * i % 90}\n" for i in range(40)]
    path.write_text(HEADER + "".join(rows))
    return path


def profile_of(trace, *, options="", arrival="", workload=""):
    return parse_profile(PROFILE.format(path=trace, options=options, arrival=arrival, workload=workload), "test")


def metrics_of(profile):
    return simulate_recorded(profile, plan_runs(profile).runs[0], recorded_load(profile))


@pytest.mark.parametrize("arrival", ["", ", max_concurrency: 3"], ids=["open", "with a cap"])
def test_the_metrics_are_those_of_the_run_whose_records_are_kept(trace, arrival):
    profile = profile_of(trace, arrival=arrival, options=", max_num_seqs: 8")
    whole = simulate_point(sweep_points([((), profile)], None, ())[0])
    summary = metrics_of(profile)
    known = {name: value for name, value in summary.items() if value is not None}
    assert {"ttft_ms", "p90_ttft_ms", "tpot_ms", "e2el_ms", "output_throughput", "num_steps"} <= known.keys()
    assert known == pytest.approx({name: whole[name] for name in known})


def test_a_request_of_a_trace_has_the_lengths_of_its_row_and_the_sampling_of_the_profile(trace):
    load = recorded_load(profile_of(trace))
    template = Request(
        request_id="example", prompt=Prompt.of(["a"], 16), max_tokens=1, sampling=SamplingParams(top_k=4)
    )
    requests = CountedRequests(load.prompt_tokens, load.output_tokens, prefix="", template=template)
    assert len(requests) == 40
    assert (requests[3].prompt.num_tokens, requests[3].max_tokens) == (40 + 13 * 3, 1 + 7 * 3)
    assert {request.request_id for request in map(requests.__getitem__, range(10, 13))} == {"10", "11", "12"}
    assert requests[3].sampling.top_k == 4


def test_a_repeated_trace_goes_on_behind_its_last_arrival(trace):
    once = recorded_load(profile_of(trace))
    twice = once.repeated(100)
    assert list(twice.prompt_tokens[:40]) == list(twice.prompt_tokens[40:80]) == list(once.prompt_tokens)
    assert list(twice.arrival_ns) == sorted(twice.arrival_ns)
    gaps = {b - a for a, b in zip(twice.arrival_ns[:40], twice.arrival_ns[40:80], strict=True)}
    assert len(gaps) == 1


def test_prompts_repeat_as_their_lengths_do(trace):
    profile = profile_of(trace, workload="repeat: true")
    more = profile.model_copy(update={"workload": profile.workload.model_copy(update={"num_prompts": 90})})
    requests, load = prepare_requests(more).requests, recorded_load(more)
    assert [request.prompt_tokens for request in requests] == list(load.prompt_tokens)
    assert [request.arrival_ns for request in requests] == list(load.arrival_ns)
    assert len({request.request_id for request in requests}) == 90


def test_a_trace_that_is_too_short_names_the_key_that_repeats_it(trace):
    profile = profile_of(trace)
    more = profile.model_copy(update={"workload": profile.workload.model_copy(update={"num_prompts": 41})})
    with pytest.raises(DatasetError, match=r"set workload\.repeat"):
        recorded_load(more)
    with pytest.raises(DatasetError, match=r"begin again with workload\.repeat"):
        prepare_requests(more)


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
        metrics_of(profile_of(trace, options=options, workload=workload))
