"""Each check of a run, on records that agree and on records that do not."""

import msgspec
import pytest
from support.cli import benchctl
from support.results.builders import PROFILE_YAML, edit_manifest, edit_requests, edit_run, edit_steps, write_results

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.analysis.validity.checks import reconcile, skips_guidance
from benchctl.errors import RecordError
from benchctl.profile.arrival import Arrival
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.loaded import load_results
from benchctl.records.record import RequestError, RunTimes

BASELINE, GUIDED = "000-b0-baseline", "001-b0-guided-top_k5"


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},))


def checks_of(results, run_id, settings=None, **workload):
    """Checks by name, as the profile declares the run unless ``settings`` or keys of its workload say otherwise."""
    loaded = load_results(results.path)
    run = next(run for run in loaded.runs if run.record.run_id == run_id)
    experiment = experiment_of(loaded)
    profile = experiment.profile
    profile = profile.model_copy(update={"workload": profile.workload.model_copy(update=workload)})
    declared = settings or experiment.settings(run.record)
    checks = reconcile(run, profile, declared, loaded.requests, loaded.manifest.stop)
    return {check.name: check for check in checks}


OF_DRAFTS = {"draft-counters", "accepted-drafts", "speculation"}
"""Checks that need steps that count drafts."""


def test_records_that_agree_pass_every_check(results):
    for run_id in (BASELINE, GUIDED):
        checks = checks_of(results, run_id)
        assert [name for name, check in checks.items() if check.ok is not True and name not in OF_DRAFTS] == []
    assert checks["guided"].detail == "guidance declared; guided rows in 8 of 8 steps"
    assert checks["step-tokens"].detail == "steps 64, usage 64"
    assert checks["concurrency"].detail.startswith("4.00 requests in flight on average, limit 4; 8.00 sequences")


def test_a_request_without_a_line_is_named(results):
    edit_requests(results, BASELINE, lambda r: None if r.index == 1 else r)
    check = checks_of(results, BASELINE)["requests"]
    assert check.ok is False
    assert check.is_fatal
    assert "run.json says 4 were sent" in check.detail
    assert "never recorded: r00001" in check.detail


def test_a_request_recorded_twice_is_named(results):
    path = results.run(BASELINE).path / "requests.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    edit_run(results, BASELINE, num_sent=8)
    check = checks_of(results, BASELINE)["requests"]
    assert check.ok is False
    assert "recorded more than once: r00000, r00001, r00002 and 1 more" in check.detail


def test_tokens_that_the_client_saw_must_be_those_of_usage(results):
    edit_requests(
        results, BASELINE, lambda r: msgspec.structs.replace(r, completion_tokens=17) if r.index == 2 else r
    )
    check = checks_of(results, BASELINE)["client-tokens"]
    assert (check.ok, check.is_fatal) == (False, True)
    assert check.detail == "client and usage differ in 1 of 4 requests: r00002 16 != 17"


def test_usage_summed_once_per_choice_is_caught_by_the_steps(results):
    edit_requests(
        results, BASELINE, lambda r: msgspec.structs.replace(r, completion_tokens=r.completion_tokens * 2)
    )
    check = checks_of(results, BASELINE)["step-tokens"]
    assert (check.ok, check.detail) == (False, "steps 64, usage 128")


def test_steps_are_held_against_the_tokens_of_the_client_where_there_is_no_usage(results):
    edit_requests(results, BASELINE, lambda r: msgspec.structs.replace(r, completion_tokens=None))
    assert checks_of(results, BASELINE)["step-tokens"].detail == "steps 64, client 64"
    halve_steps(results, BASELINE)
    check = checks_of(results, BASELINE)["step-tokens"]
    assert (check.ok, check.is_fatal, check.detail) == (False, True, "steps 32, client 64")


def test_a_step_log_that_was_cut_after_the_run_had_ended_is_told_wherever_its_numbers_are_shown(results):
    assert codes_of_runs(results) == {}
    halve_steps(results, GUIDED)
    assert codes_of_runs(results) == {GUIDED: ["check-failed"]}


def halve_steps(results, run_id):
    """Drop the second half of a run's step log."""
    path = results.run(run_id).step_log
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))


def codes_of_runs(results):
    """Codes of the warnings that tables show beside each run that has some."""
    runs = analyze_directory(results.path).runs
    return {run.record.run_id: [warning.code for warning in run.warnings] for run in runs if run.warnings}


def test_failed_requests_leave_the_tokens_of_steps_unexplained(results):
    error = RequestError(kind="early-close", message="the stream ended")
    edit_requests(results, BASELINE, lambda r: msgspec.structs.replace(r, error=error) if r.index == 0 else r)
    check = checks_of(results, BASELINE)["step-tokens"]
    assert check.ok is None
    assert "failed requests took tokens" in check.detail


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("client-tokens", "no request has both usage and tokens counted by the client"),
        ("step-tokens", "steps or usage do not count tokens"),
        ("step-time", "no steps, or no time of first send and last output"),
        ("guided", "the steps do not count guided rows"),
        ("greedy-share", "the steps do not say whether they are greedy"),
        ("forced-stop", "no completed request has usage"),
        ("concurrency", "no closed loop, or no latencies"),
    ],
)
def test_a_check_without_both_accounts_cannot_tell(results, name, detail):
    edit_requests(
        results, BASELINE, lambda r: msgspec.structs.replace(r, choices=(), completion_tokens=None, done_ns=1)
    )
    (results.run(BASELINE).path / "steps.jsonl").unlink()
    edit_run(results, BASELINE, times=RunTimes())
    check = checks_of(results, BASELINE)[name]
    assert (check.ok, check.detail) == (None, detail)


def test_steps_longer_than_the_wall_time_are_a_doubt(results):
    edit_steps(results, BASELINE, lambda s: msgspec.structs.replace(s, dur_ns=s.dur_ns * 2))
    check = checks_of(results, BASELINE)["step-time"]
    assert (check.ok, check.is_fatal) == (False, False)
    assert check.detail == "steps 0.160 s, wall 0.080 s"


def test_step_time_is_compared_on_the_engines_clock(results):
    edit_steps(results, BASELINE, lambda s: msgspec.structs.replace(s, dur_ns=s.dur_ns * 20))
    edit_run(results, BASELINE, clock="virtual", time_scale=20.0)
    check = checks_of(results, BASELINE)["step-time"]
    assert (check.ok, check.detail) == (True, "steps 1.600 s, wall 1.600 s")


def test_a_guided_variant_that_was_never_guided_is_invalid(results):
    edit_steps(results, GUIDED, lambda s: msgspec.structs.replace(s, guided_rows=0))
    check = checks_of(results, GUIDED)["guided"]
    assert (check.ok, check.is_fatal) == (False, True)
    assert "guided rows in 0 of 8 steps" in check.detail


def test_neutral_guidance_that_the_server_leaves_out_is_not_missed(results):
    profile = load_profile("noop-skip")
    settings = {variant: variant_settings(profile, variant, {}) for variant in profile.variants}
    assert {variant: skips_guidance(each) for variant, each in settings.items()} == {
        "baseline": False, "computed": False, "skipped": True,
    }  # fmt: skip
    check = checks_of(results, GUIDED, settings["skipped"])["guided"]
    assert (check.ok, check.is_fatal) == (False, True)
    edit_steps(results, GUIDED, lambda s: msgspec.structs.replace(s, guided_rows=0))
    check = checks_of(results, GUIDED, settings["skipped"])["guided"]
    assert (check.ok, check.detail) == (True, "neutral guidance is skipped; guided rows in 0 of 8 steps")


@pytest.mark.parametrize("engine", ["sim", "sglang-lenvm"])
@pytest.mark.parametrize(("revision", "skips"), [("V1", False), ("V2", True), ("V4", False)])
def test_neutral_guidance_is_left_out_by_the_revisions_that_skip_it(engine, revision, skips):
    profile = load_profile("topk-sweep", engine=engine, overrides=[f"engine.options.revision={revision}"])
    settings = variant_settings(profile, "guided", {"top_k": 5})
    assert skips_guidance(settings) is skips
    tilted = settings.model_copy(update={"guidance": settings.guidance.model_copy(update={"value_scale": -10.0})})
    assert not skips_guidance(tilted)


def test_a_simulated_run_that_skips_neutral_guidance_counts(tmp_path):
    options = [
        "--blocks",
        "1",
        "--set",
        "workload.num_prompts=4",
        "--set",
        "engine.options.revision=V2",
        "--set",
        "sweep.top_k=[5]",
    ]
    run = benchctl("simulate", "--profile", "topk-sweep", "--engine", "sim", *options, "-o", tmp_path / "r")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "check guided failed" not in run.stdout
    experiment = experiment_of(load_results(tmp_path / "r"))
    for loaded in experiment.results.runs:
        assert loaded.record.variant == "baseline" or not loaded.columns.known_values("guided_rows").any()
        assert experiment.usability(loaded).is_usable


def test_an_unguided_variant_that_was_guided_is_invalid(results):
    edit_steps(results, BASELINE, lambda s: msgspec.structs.replace(s, guided_rows=1))
    check = checks_of(results, BASELINE)["guided"]
    assert (check.ok, check.detail) == (False, "no guidance declared; guided rows in 8 of 8 steps")


def test_top_k_one_is_reported_as_the_greedy_path_and_not_as_a_violation(tmp_path):
    results = write_results(
        tmp_path / "k1", block_factors=({"baseline": 1.0, "guided": 1.0},), cells=({"top_k": 1},)
    )
    run_id = "001-b0-guided-top_k1"
    edit_steps(results, run_id, lambda s: msgspec.structs.replace(s, guided_rows=0, is_greedy=True))
    checks = checks_of(results, run_id)
    assert checks["guided"].ok is None
    assert checks["guided"].detail.startswith("greedy path")
    assert checks["greedy-share"].ok is True
    assert checks["greedy-share"].detail == "greedy declared; 8 of 8 steps are greedy"


def test_greedy_steps_in_a_sampling_variant_are_a_doubt(results):
    edit_steps(results, BASELINE, lambda s: msgspec.structs.replace(s, is_greedy=s.step == 1))
    check = checks_of(results, BASELINE)["greedy-share"]
    assert (check.ok, check.is_fatal) == (False, False)
    assert check.detail == "sampling declared; 1 of 8 steps are greedy"


def test_a_forced_output_of_another_length_is_invalid(results):
    edit_requests(
        results, GUIDED, lambda r: msgspec.structs.replace(r, completion_tokens=15) if r.index == 3 else r
    )
    check = checks_of(results, GUIDED)["forced-stop"]
    assert (check.ok, check.detail) == (False, "1 of 4 requests have a different length: r00003 15 != 16")


def test_natural_stops_have_no_declared_length(results):
    edit_manifest(results, stop="natural")
    assert checks_of(results, GUIDED)["forced-stop"].ok is None


def test_outputs_forced_to_their_natural_length_have_a_declared_one(results):
    edit_manifest(results, stop="replay-natural")
    assert checks_of(results, GUIDED)["forced-stop"].ok is True


def test_more_requests_in_flight_than_the_loop_allows_are_a_doubt(results):
    check = checks_of(results, BASELINE, arrival=Arrival(kind="closed-loop", max_concurrency=3))["concurrency"]
    assert (check.ok, check.is_fatal) == (False, False)


def test_a_profile_that_was_damaged_since_is_named(results):
    path = results.path / "profile.yaml"
    path.write_text(PROFILE_YAML.replace("num_prompts", "num_promts"))
    with pytest.raises(RecordError, match=r"profile\.yaml cannot be read as the profile of these results"):
        experiment_of(load_results(results.path)).profile  # noqa: B018  # raises


def prefilling(num_tokens):
    """A change of steps: those of the load that compute prompt compute ``num_tokens`` of it."""
    return lambda step: msgspec.structs.replace(
        step, num_prefill_tokens=num_tokens if step.num_prefill_tokens else 0
    )


def without_counters(results):
    (results.run(BASELINE).path / "prometheus.jsonl").unlink()


def test_prompts_that_no_step_computed_came_from_a_cache_even_if_the_server_tells_of_none(results):
    without_counters(results)
    edit_steps(results, BASELINE, prefilling(79))  # of 4 prompts of 20 tokens
    check = checks_of(results, BASELINE)["prefix-cache"]
    assert (check.ok, check.is_fatal) == (False, True)
    assert check.detail.startswith("steps left out 1 of the prompt tokens that usage counts")
    assert checks_of(results, BASELINE, allow_prefix_cache_hits=True)["prefix-cache"].ok is None


@pytest.mark.parametrize("computed", [80, 200])
def test_prompts_that_were_computed_once_or_again_after_preemption_came_from_no_cache(results, computed):
    without_counters(results)
    edit_steps(results, BASELINE, prefilling(computed))
    assert checks_of(results, BASELINE)["prefix-cache"].ok is True


def test_a_step_log_that_lacks_steps_says_nothing_of_a_cache(results):
    without_counters(results)
    edit_steps(results, BASELINE, lambda step: msgspec.structs.replace(prefilling(0)(step), output_tokens=1))
    assert checks_of(results, BASELINE)["prefix-cache"].ok is None
