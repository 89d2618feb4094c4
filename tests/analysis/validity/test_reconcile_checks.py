"""Each check of a run, on records that agree and on records that do not; and warnings about single runs.

Starved batches, late recordings, neighbours on a node; and which is told first.
"""

import datetime as dt
import itertools
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from hypothesis import given, strategies as st
from support.results.builders import (
    BASELINE,
    GUIDED,
    ONE_BLOCK,
    STEP_NS,
    change_requests,
    change_steps,
    edit_manifest,
    edit_requests,
    edit_run,
    rewrite_lines,
    write_results,
)

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.analysis.validity.checks import (
    in_step_frac,
    reconcile,
    skips_guidance,
    underfilled_batch_warnings,
    value_model_warnings,
)
from benchctl.analysis.validity.machines import side_by_side_warning
from benchctl.profile.arrival import Arrival
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.columns import columns_from
from benchctl.records.loaded import load_results
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord, RunRecord, RunTimes
from benchctl.records.schema import SCHEMA_VERSION, NodeInfo, StepRecord
from benchctl.records.warning_codes import SUSPECT_CODES


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=ONE_BLOCK)


def checks_of(results, run_id=BASELINE, settings=None, server=None, **workload):
    """Checks by name, as the profile declares the run unless ``settings`` or keys of its workload say otherwise."""
    loaded = load_results(results.path)
    run = next(run for run in loaded.runs if run.record.run_id == run_id)
    experiment = experiment_of(loaded)
    declared = settings or experiment.settings(run.record)
    declared = declared.model_copy(update={"server": declared.server.model_copy(update=server or {})})
    of_profile = {"workload": experiment.profile.workload.model_copy(update=workload)}
    profile = experiment.profile.model_copy(update=of_profile)
    return {check.name: check for check in reconcile(run, profile, declared, loaded.requests, loaded.manifest.stop)}


def outcome(check):
    """``agrees``, ``unknown``, or what follows where it fails: the run is ``invalid`` or a ``doubt``."""
    return {True: "agrees", None: "unknown", False: "invalid" if check.is_fatal else "doubt"}[check.ok]


def test_records_that_agree_pass_every_check(results):
    for run_id in (BASELINE, GUIDED):
        checks = checks_of(results, run_id)
        unknown = {name for name, check in checks.items() if check.ok is not True}
        assert unknown == {"draft-counters", "accepted-drafts", "speculation"}, "no step counts drafts"
    assert checks["guided"].detail == "guidance declared; guided rows in 8 of 8 steps"
    assert checks["step-tokens"].detail == "steps 64, usage 64"
    assert checks["concurrency"].detail.startswith("4.00 requests in flight on average, limit 4; 8.00 sequences")


def record_twice(results):
    path = results.run(BASELINE).path / "requests.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    edit_run(results, BASELINE, num_sent=8)


def halve_steps(results, run_id=BASELINE):
    """Drop the second half of a run's step log."""
    path = results.run(run_id).step_log
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))


def lose_usage_and_steps(results):
    change_requests(results, BASELINE, completion_tokens=None)
    halve_steps(results)


def take_virtual_time(results):
    change_steps(results, BASELINE, dur_ns=20 * STEP_NS)
    edit_run(results, BASELINE, clock="virtual", time_scale=20.0)


def double_counters(results):
    rewrite_lines(
        results.run(BASELINE).path / "prometheus.jsonl",
        lambda sample: sample | {"values": {name: 2 * value for name, value in sample["values"].items()}},
    )


def prefill(results, num_tokens, **fields):
    """Let the steps compute so many tokens of the 80 of all prompts, and the server have no counters."""
    (results.run(BASELINE).path / "prometheus.jsonl").unlink()
    change_steps(results, BASELINE, 1, num_prefill_tokens=num_tokens)
    change_steps(results, BASELINE, **fields)


EARLY = RequestError(kind="early-close", message="the stream ended")
CASES = {
    "a request without a line": (
        lambda r: edit_requests(r, BASELINE, lambda request: None if request.index == 1 else request),
        "requests", "invalid", "run.json says 4 were sent; never recorded: r00001",
    ),
    "requests recorded twice": (
        record_twice, "requests", "invalid", "recorded more than once: r00000, r00001, r00002 and 1 more",
    ),
    "another usage than what the client saw": (
        lambda r: change_requests(r, BASELINE, 2, completion_tokens=17),
        "client-tokens", "invalid", "client and usage differ in 1 of 4 requests: r00002 16 != 17",
    ),
    "usage summed once per choice": (
        lambda r: change_requests(r, BASELINE, completion_tokens=32),
        "step-tokens", "invalid", "steps 64, usage 128",
    ),
    "no usage": (
        lambda r: change_requests(r, BASELINE, completion_tokens=None),
        "step-tokens", "agrees", "steps 64, client 64",
    ),
    "no usage and a step log that was cut": (
        lose_usage_and_steps, "step-tokens", "invalid", "steps 32, client 64",
    ),
    "a failed request, which took steps": (
        lambda r: change_requests(r, BASELINE, 0, error=EARLY),
        "step-tokens", "unknown", "failed requests took tokens",
    ),
    "another counter of tokens": (double_counters, "counters", "invalid", "grew by 128, usage 64"),
    "steps longer than the wall time": (
        lambda r: change_steps(r, BASELINE, dur_ns=2 * STEP_NS),
        "step-time", "doubt", "steps 0.160 s, wall 0.080 s",
    ),
    "steps on the engine's clock": (take_virtual_time, "step-time", "agrees", "steps 1.600 s, wall 1.600 s"),
    "an unguided variant that was guided": (
        lambda r: change_steps(r, BASELINE, guided_rows=1),
        "guided", "invalid", "no guidance declared; guided rows in 8 of 8 steps",
    ),
    "a greedy step of a sampling variant": (
        lambda r: change_steps(r, BASELINE, 1, is_greedy=True),
        "greedy-share", "doubt", "sampling declared; 1 of 8 steps are greedy",
    ),
    "a forced output of another length": (
        lambda r: change_requests(r, BASELINE, 3, completion_tokens=15),
        "forced-stop", "invalid", "1 of 4 requests have a different length: r00003 15 != 16",
    ),
    "natural stops": (lambda r: edit_manifest(r, stop="natural"), "forced-stop", "unknown", "end naturally"),
    "outputs forced to their natural length": (
        lambda r: edit_manifest(r, stop="replay-natural"), "forced-stop", "agrees", "4 requests have",
    ),
    "a prompt token that no step computed": (
        partial(prefill, num_tokens=79), "prefix-cache", "invalid",
        "steps left out 1 of the prompt tokens that usage counts",
    ),
    "prompts that steps computed once": (partial(prefill, num_tokens=80), "prefix-cache", "agrees", ""),
    "prompts computed again after preemption": (partial(prefill, num_tokens=200), "prefix-cache", "agrees", ""),
    "drafts that the steps alone count": (
        lambda r: change_steps(r, BASELINE, drafts=8, draft_tokens=16, accepted_tokens=8),
        "draft-counters", "unknown", "steps or counters do not count drafts",
    ),
    "a step log that lacks output says nothing of a cache": (
        partial(prefill, num_tokens=0, output_tokens=1), "prefix-cache", "unknown", "neither counters nor usage",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_check_sees_what_records_disagree_in(results, case):
    change, name, expected, words = CASES[case]
    change(results)
    check = checks_of(results)[name]
    assert (outcome(check), words in check.detail) == (expected, True), check.detail


def test_a_step_log_that_was_cut_after_the_run_had_ended_is_told_wherever_its_numbers_are_shown(results):
    halve_steps(results, GUIDED)
    runs = analyze_directory(results.path).runs
    codes = {run.record.run_id: [warning.code for warning in run.warnings] for run in runs}
    assert codes == {BASELINE: [], GUIDED: ["check-failed"]}


def test_a_check_without_both_accounts_cannot_tell(results):
    change_requests(results, BASELINE, choices=(), completion_tokens=None, done_ns=1)
    (results.run(BASELINE).path / "steps.jsonl").unlink()
    edit_run(results, BASELINE, times=RunTimes())
    checks = checks_of(results)
    details = {
        "client-tokens": "no request has both usage and tokens counted by the client",
        "step-tokens": "steps or usage do not count tokens",
        "step-time": "no steps, or no time of first send and last output",
        "guided": "the steps do not count guided rows",
        "greedy-share": "the steps do not say whether they are greedy",
        "forced-stop": "no completed request has usage",
        "concurrency": "no closed loop, or no latencies",
    }
    assert {name: (outcome(checks[name]), checks[name].detail) for name in details} == {
        name: ("unknown", detail) for name, detail in details.items()
    }


def test_a_cache_that_is_allowed_is_no_contradiction_and_more_requests_than_the_loop_allows_are_a_doubt(results):
    prefill(results, 79)
    assert checks_of(results, allow_prefix_cache_hits=True)["prefix-cache"].ok is None
    three = Arrival(kind="closed-loop", max_concurrency=3)
    assert outcome(checks_of(results, arrival=three)["concurrency"]) == "doubt"


def test_neutral_guidance_that_the_server_leaves_out_is_not_missed(results):
    profile = load_profile("noop-skip")
    settings = {variant: variant_settings(profile, variant, {}) for variant in profile.variants}
    skips = {variant: skips_guidance(each) for variant, each in settings.items()}
    assert skips == {"baseline": False, "computed": False, "skipped": True}
    assert outcome(checks_of(results, GUIDED, settings["skipped"])["guided"]) == "invalid"
    change_steps(results, GUIDED, guided_rows=0)
    for declared, expected, detail in (
        (settings["skipped"], "agrees", "neutral guidance is skipped; guided rows in 0 of 8 steps"),
        (None, "invalid", "guidance declared; guided rows in 0 of 8 steps"),
    ):
        check = checks_of(results, GUIDED, declared)["guided"]
        assert (outcome(check), check.detail) == (expected, detail)


@pytest.mark.parametrize("engine", ["sim", "sglang-lenvm"])
@pytest.mark.parametrize(("revision", "skips"), [("V1", False), ("V2", True), ("V4", False)])
def test_neutral_guidance_is_left_out_by_the_revisions_that_skip_it(engine, revision, skips):
    profile = load_profile("topk-sweep", engine=engine, overrides=[f"engine.options.revision={revision}"])
    settings = variant_settings(profile, "guided", {"top_k": 5})
    assert skips_guidance(settings) is skips
    tilted = settings.model_copy(update={"guidance": settings.guidance.model_copy(update={"value_scale": -10.0})})
    assert not skips_guidance(tilted)


def test_top_k_one_is_reported_as_the_greedy_path_and_not_as_a_violation(tmp_path):
    results, run_id = (
        write_results(tmp_path, block_factors=ONE_BLOCK, cells=({"top_k": 1},)),
        "001-b0-guided-top_k1",
    )
    guided, greedy = (checks_of(results, run_id)[name] for name in ("guided", "greedy-share"))
    assert (outcome(guided), outcome(greedy)) == ("unknown", "agrees")
    assert guided.detail.startswith("greedy path")
    assert greedy.detail == "greedy declared; 8 of 8 steps are greedy"
    change_steps(results, run_id, 1, is_greedy=False)
    assert outcome(checks_of(results, run_id)["greedy-share"]) == "doubt"


PREFIX = "vllm:spec_decode_num"
GROWN = {"drafts": 56, "draft_tokens": 112, "accepted_tokens": 56, "by_position": (42, 14)}
NO_DRAFTS = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens", "accepted_by_position"))
DECODE_STEPS = range(2, 9)


def plant_counters(results, *, by_position, **grown):
    series = {f'{PREFIX}_{name}_total{{engine="0",model_name="m"}}': count for name, count in grown.items()}
    for position, count in enumerate(by_position):
        series[f'{PREFIX}_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="{position}"}}'] = count

    def change(sample):
        has_grown = any(sample["values"].values())
        return sample | {"values": sample["values"] | {name: 5.0 + n * has_grown for name, n in series.items()}}

    rewrite_lines(results.run(BASELINE).path / "prometheus.jsonl", change)


@pytest.mark.parametrize(
    ("steps", "counters", "name", "expected", "words"),
    [
        ({}, {}, "draft-counters", "agrees", "accepted by position (42, 14) by steps, (42, 14) by counters"),
        ({}, {"drafts": 57}, "draft-counters", "invalid", f"drafts 56 by steps, 57 by {PREFIX}_drafts_total"),
        ({}, {"draft_tokens": 111}, "draft-counters", "invalid", "draft tokens 112 by steps, 111 by"),
        ({}, {"accepted_tokens": 55}, "draft-counters", "invalid", "accepted tokens 56 by steps, 55 by"),
        ({}, {"by_position": (41, 15)}, "draft-counters", "invalid", "(42, 14) by steps, (41, 15) by counters"),
        # A position that was never accepted may be missing from a page.
        ({"accepted_by_position": (8, 0, 0)}, {"by_position": (56,)}, "draft-counters", "agrees", ""),
        ({}, {}, "accepted-drafts", "agrees", "56 of 112"),
        ({"accepted_by_position": (2, 6)}, {}, "accepted-drafts", "invalid", "more often than the one before"),
        ({"accepted_tokens": 17}, {}, "accepted-drafts", "invalid", "more than were drafted"),
        ({"accepted_tokens": 17}, {}, "accepted-drafts", "invalid", "the positions add up to 56"),
        ({}, {}, "speculation", "agrees", "speculation declared"),
        (
            NO_DRAFTS, GROWN | dict.fromkeys(GROWN, 0) | {"by_position": (0, 0)},
            "speculation", "invalid", "speculation declared; 0 draft tokens",
        ),
    ],
)  # fmt: skip
def test_drafts_by_steps_and_by_counters_and_by_options_agree(results, steps, counters, name, expected, words):
    """Seven decode steps draft two tokens for each of eight sequences."""
    drafted = {"drafts": 8, "draft_tokens": 16, "accepted_tokens": 8, "accepted_by_position": (6, 2)}
    change_steps(results, BASELINE, *DECODE_STEPS, **drafted | steps)
    plant_counters(results, **GROWN | counters)
    check = checks_of(results, server={"num_speculative_tokens": 2})[name]
    assert (outcome(check), words in check.detail) == (expected, True), check.detail
    undeclared = checks_of(results, server={"num_speculative_tokens": None})["speculation"]
    assert outcome(undeclared) == ("agrees" if steps == NO_DRAFTS else "doubt"), "drafts that nobody asked for"


@pytest.fixture(name="template", scope="module")
def _template(tmp_path_factory):
    return load_results(write_results(tmp_path_factory.mktemp("results")).path).runs[0]


def request_of(index, num_steps, num_choices=1, **changes):
    """A request that is in flight for ``num_steps`` steps from time 0."""
    end_ns = num_steps * STEP_NS
    choices = tuple(ChoiceRecord(index=i, chunk_ns=(end_ns,)) for i in range(num_choices))
    fields = {"choices": choices, "done_ns": end_ns, "completion_tokens": 1} | changes
    return RequestRecord(request_id=f"r{index}", index=index, scheduled_ns=0, sent_ns=0, **fields)


def step_of(number, num_seqs, dur_ns=STEP_NS, **changes):
    return StepRecord(
        step=number, start_ns=number * STEP_NS, dur_ns=int(dur_ns), clock="host", phase="decode", num_seqs=num_seqs,
        **changes,
    )  # fmt: skip


ONE, STEP = [request_of(0, 10)], [step_of(0, 1)]
FAILED = request_of(1, 10, error=RequestError(kind="timeout", message="late"))


@pytest.mark.parametrize(
    ("requests", "steps", "clock", "share", "is_doubted"),
    [
        pytest.param(
            [request_of(i, 60) for i in range(40)], [step_of(i, 40) for i in range(60)], "host", 1, False,
            id="all that is in flight",
        ),
        pytest.param(
            [request_of(i, 120) for i in range(12)], [step_of(i, 1) for i in range(120)], "host", 1 / 12, True,
            id="one of twelve at a time",
        ),
        pytest.param(
            [request_of(0, 10, num_choices=4)], [step_of(i, 4) for i in range(10)], "host", 1, False,
            id="every choice is a sequence",
        ),
        pytest.param(
            [request_of(i, 50) for i in range(3)], [step_of(i, 3, 0.75 * STEP_NS) for i in range(50)], "host", 0.75,
            False, id="overhead between steps",
        ),
        pytest.param(
            [request_of(i, 50) for i in range(3)], [step_of(i, 3, 0.65 * STEP_NS) for i in range(50)], "host", 0.65,
            True, id="too much of it",
        ),
        pytest.param(
            [*ONE, request_of(1, 1000, is_warmup=True)],
            [*(step_of(i, 1) for i in range(10)), step_of(10, 900, is_warmup=True)], "host", 1, False,
            id="a warm-up",
        ),
        pytest.param(ONE, [], "host", None, False, id="no steps"),
        pytest.param(ONE, STEP, "virtual", None, False, id="a virtual clock"),
        pytest.param([*ONE, FAILED], STEP, "host", None, False, id="a failed request"),
    ],
)  # fmt: skip
def test_an_engine_that_steps_with_less_than_the_load_has_in_flight_is_doubted(
    template, requests, steps, clock, share, is_doubted
):
    record = msgspec.structs.replace(template.record, clock=clock)
    run = replace(template, record=record, requests=tuple(requests), columns=columns_from(steps))
    assert in_step_frac(run) == (None if share is None else pytest.approx(share))
    assert [warning.code for warning in underfilled_batch_warnings(run)] == ["underfilled-batch"] * is_doubted


def value_warnings(results):
    return value_model_warnings(load_results(results.path).runs[1])


def test_passes_that_the_load_recorded_make_a_run_suspect_with_their_number_and_time(results):
    assert value_warnings(results) == (), "a log that knows nothing of recordings"
    change_steps(results, GUIDED, value_recordings=0, dur_ns=10_000_000)
    assert value_warnings(results) == ()
    for number, recordings in ((5, 2), (3, 1)):
        change_steps(results, GUIDED, number, value_recordings=recordings, dur_ns=300_000_000)
    (warning,) = value_warnings(results)
    assert (warning.code, warning.code in SUSPECT_CODES) == ("value-passes-recorded-late", True)
    for words in ("2 of 8 steps of the load recorded 3 passes", "took 0.6 s, 90.9% of the time of all; raise max"):
        assert words in warning.message
    change_steps(results, GUIDED, 3, 5, is_warmup=True)
    assert value_warnings(results) == ()


@pytest.mark.parametrize(
    ("description", "is_noted"),
    [
        ({"device": "cuda", "has_kernels": False, "kernels_reason": "differs from torch by 0.3"}, True),
        ({"device": "cpu", "has_kernels": False, "kernels_reason": "kernels need a GPU"}, False),
        ({"device": "cuda", "has_kernels": True}, False),
        ({"device": "cuda", "has_kernels": False}, False),
    ],
    ids=["wanted", "a-processor", "kernels", "kernels-switched-off"],
)
def test_a_gpu_without_the_kernels_that_were_wanted_is_noted_with_the_reason(results, description, is_noted):
    config = {f"server.value_model.{name}": value for name, value in description.items()}
    edit_run(results, GUIDED, effective_config=config)
    notes = [(note.code, "differs from torch by 0.3" in note.message) for note in value_warnings(results)]
    assert notes == [("value-kernels-missing", True)] * is_noted


def a_run(block: int, begin_s: float, length_s: float, node: str = "n1", **fields: object) -> RunRecord:
    """A run's record; its monotonic clock began at some other time than those of others."""
    launch_ns = (block * 977 + 5) * 10**9
    values = {
        "node": NodeInfo(name=node, hostname=node),
        "started_at": (dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=begin_s)).isoformat(),
        "times": RunTimes(launch_ns=launch_ns, stop_ns=launch_ns + int(length_s * 10**9)),
        "argv": ("s",),
    }
    return RunRecord(
        schema_version=SCHEMA_VERSION, index=0, run_id="r", block=block, position=0, variant="v", **values | fields
    )


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        pytest.param([a_run(0, 0, 10), a_run(1, 9, 10), a_run(0, 20, 10)], "2 of 3 runs|(n1)", id="at one time"),
        pytest.param([a_run(0, 0, 10), a_run(1, 10, 10)], None, id="one after the other"),
        pytest.param([a_run(0, 0, 10, "n1"), a_run(1, 5, 10, "n2")], None, id="on two nodes"),
        pytest.param(
            [a_run(0, 0, 10), a_run(1, 3600, 10, "n2"), a_run(2, 3605, 10, "n2")], "2 of 3 runs|(n2)",
            id="clocks an hour apart",
        ),
        pytest.param([a_run(0, 0, 10, clock="virtual"), a_run(1, 5, 10, clock="virtual")], None, id="virtual time"),
        pytest.param([a_run(0, 0, 10), a_run(1, 0, 10, times=RunTimes(), node=None)], None, id="without times"),
        pytest.param([a_run(0, 0, 10), a_run(1, 0, 10, started_at="noon")], None, id="a damaged date"),
    ],
)  # fmt: skip
def test_two_blocks_at_the_same_time_on_one_node_are_named(runs, words):
    warning = side_by_side_warning(runs)
    assert (warning and warning.code) == (words and "neighbours-unchecked")
    assert words is None or all(part in warning.message for part in words.split("|"))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 20)), max_size=12))
def test_the_count_of_neighbours_is_that_of_all_pairs_compared(spans: list[tuple[int, int, int]]) -> None:
    shared = {
        index
        for (i, (block, begin, length)), (j, (other, later, long)) in itertools.combinations(enumerate(spans), 2)
        if block != other and begin < later + long and later < begin + length
        for index in (i, j)
    }
    warning = side_by_side_warning(a_run(block, begin, length) for block, begin, length in spans)
    assert (warning is None) == (not shared)
    assert warning is None or warning.message.startswith(f"{len(shared)} of {len(spans)} runs ")
