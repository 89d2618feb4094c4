"""Requests, secrets, variables and jobs in a profile: inherited, swept, and part of its identity or not."""

import pytest
from support.cli import benchctl

from benchctl.analysis.validity.comparable import declared_settings
from benchctl.errors import ProfileError
from benchctl.measure.devices import gpus_of_block
from benchctl.measure.redaction import server_env
from benchctl.profile.engine_table import own_variables
from benchctl.profile.load import dump_profile, load_profile, parse_profile, profile_sha256
from benchctl.profile.planning import arms, variant_settings
from benchctl.profile.sections import ClusterSettings, scheduler_seconds

PENALTY = "request.extra_body.repetition_penalty"


def loaded(*overrides, engine="vllm", **options):
    return load_profile("aa", engine=engine, overrides=overrides, **options)


def stated(profile, variant="again"):
    return variant_settings(profile, variant, {}).request.stated()


def test_a_variant_adds_to_what_the_profile_sends_and_null_removes_it():
    profile = loaded(
        "request={extra_body: {a: {x: 1, y: 2}, b: 3}, headers: {User-Agent: blue}, model: one}",
        "variants.again.request={extra_body: {a: {y: null, z: 4}, b: null, c: null}, headers: {User-Agent: null}}",
    )
    assert stated(profile, "baseline") == {
        "model": "one", "extra_body.a.x": 1, "extra_body.a.y": 2, "extra_body.b": 3, "headers.User-Agent": "blue",
    }  # fmt: skip
    assert stated(profile) == {"model": "one", "extra_body.a.x": 1, "extra_body.a.z": 4, "extra_body.c": None}
    assert stated(parse_profile(dump_profile(profile), "again")) == stated(profile)


def test_a_field_of_the_body_is_swept_by_its_path_and_null_leaves_it_out():
    profile = loaded(f"sweep.{PENALTY}=[null, 1.1]", "request.extra_body.top_n_tokens=3")
    swept = [variant_settings(profile, *arm).request.extra_body for arm in arms(profile)[1:]]
    assert swept == [{"top_n_tokens": 3}, {"top_n_tokens": 3, "repetition_penalty": 1.1}]
    baseline, swept_last = (variant_settings(profile, *arm) for arm in (arms(profile)[0], arms(profile)[-1]))
    assert declared_settings(baseline, swept_last, profile.engine.kind) == {PENALTY}
    with pytest.raises(ProfileError, match="no factor or setting has this name"):
        loaded("sweep.request.extra_bodies.x=[1]")


def test_what_a_profile_does_not_say_leaves_its_identity_as_it_was():
    plain = loaded()
    assert profile_sha256(loaded("request.headers={}", "sampling.presence_penalty=0.0")) == profile_sha256(plain)
    assert profile_sha256(loaded("request.model=x")) != profile_sha256(plain)


def test_a_header_that_an_older_version_recorded_is_still_read():
    stored = dump_profile(loaded("request.headers={User-Agent: blue}")).replace("User-Agent", "X-Team")
    assert stated(parse_profile(stored, "profile.yaml")) == {"headers.X-Team": "blue"}


def test_a_missing_variable_is_told_with_file_and_line_before_requests_are_to_be_sent(tmp_path, monkeypatch):
    file = tmp_path / "p.yaml"
    file.write_text(
        "extends: aa\nvariants:\n  again:\n    request:\n      headers:\n        X-Key: Bearer ${TEAM_KEY}\n"
    )
    monkeypatch.delenv("TEAM_KEY", raising=False)
    assert load_profile(str(file)).variants["again"].request == {"headers": {"X-Key": "Bearer ${TEAM_KEY}"}}
    with pytest.raises(ProfileError, match=r"p\.yaml:6: .*X-Key: TEAM_KEY is not set in the environment"):
        load_profile(str(file), is_to_send=True)
    monkeypatch.setenv("TEAM_KEY", "1")
    assert load_profile(str(file), is_to_send=True)


def test_other_variables_are_taken_and_a_stored_profile_of_an_older_version_stays_readable():
    set_here = ['engine.options.env.VLLM_USE_V2_MODEL_RUNNER="1"']
    profile = load_profile("topk-sweep", engine="vllm-lenvm", overrides=set_here)
    assert profile.engine.options["env"] == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    text = dump_profile(profile).replace("VLLM_USE_V2_MODEL_RUNNER", "BENCHCTL_LENVM_CLOCK")
    assert parse_profile(text, "profile.yaml").engine.options["env"] == {"BENCHCTL_LENVM_CLOCK": "1"}


def test_what_a_shell_sets_for_another_server_does_not_reach_ours():
    told = dict.fromkeys(own_variables(), "leaked")
    assert {"BENCHCTL_LENVM_CLOCK", "BENCHCTL_STEP_LOG", "BENCHCTL_CORRECTS_CPU_SAMPLING"} <= set(told)
    env = server_env(told | {"HOME": "/h"}, {"BENCHCTL_STEP_LOG": "/run/steps"})
    assert env == {"HOME": "/h", "BENCHCTL_STEP_LOG": "/run/steps"}


def test_a_run_says_what_it_does_not_pass_on(tmp_path):
    done = benchctl("run", "ci-smoke", "--dry-run", cwd=tmp_path, BENCHCTL_LENVM_CLOCK="device")
    assert done.returncode == 0
    assert "BENCHCTL_LENVM_CLOCK is set in this environment and not passed on to servers" in done.stderr


def test_times_have_the_forms_of_slurm_or_are_minutes():
    times = {"90": 5400, "1:30": 90, "01:30:00": 5400, "36:00:00": 129_600}
    times |= {"2-03": 183_600, "2-03:04": 183_840, "2-03:04:05": 183_845}
    times |= dict.fromkeys(("UNLIMITED", "-5", "1h", "1:2:3:4"))
    assert {text: scheduler_seconds(text) for text in times} == times
    settings = [ClusterSettings(time=time).time_s for time in ("12:00:00", 30, None)]
    assert settings == [43_200, 1800, None]


def test_the_jobs_of_a_cluster_do_not_change_the_identity_of_an_experiment():
    here, there = load_profile("topk-sweep"), load_profile("topk-sweep", overrides=["cluster.partition=long"])
    assert profile_sha256(here) == profile_sha256(there)
    assert parse_profile(dump_profile(there), "profile.yaml").cluster.partition == "long"


@pytest.mark.parametrize(
    ("engine", "overrides", "gpus"),
    [
        ("sim", [], 0),
        ("transformers-cpu", [], 0),
        ("vllm", ["engine.options.needs_gpu=true", "engine.options.tensor_parallel_size=4"], 4),
        ("vllm", ["cluster.gpus_per_block=2"], 2),
        ("vllm-cpu", [], None),  # it can do without, so their number is open
    ],
)
def test_a_block_has_the_gpus_that_its_largest_server_is_spread_over(engine, overrides, gpus):
    assert gpus_of_block(load_profile("topk-sweep", engine=engine, overrides=overrides)) == gpus
