"""Runs to add as a profile: valid, ready, and with every run that was asked for."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli import benchctl

from benchctl.errors import UsageError
from benchctl.profile.load import load_profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.files import read_jsonl
from benchctl.records.schema import StepRecord
from benchctl.steptime.diagnose import RunToAdd
from benchctl.workload.calibration import profile_text_of_runs
from benchctl.workload.prepare import prepare_requests

runs_strategy = st.lists(
    st.builds(
        RunToAdd,
        prompt_tokens=st.integers(1, 3000),
        output_tokens=st.integers(1, 1000),
        concurrency=st.sampled_from([1, 2, 8, 50]),
        reason=st.sampled_from(["few steps at this batch", "β2: colon # and 'quotes'"]),
        coefficients=st.sampled_from([(), ("kv", "per_request")]),
        model=st.sampled_from([None, "qwen2.5-1.5b", "qwen2.5-0.5b"]),
        tensor_parallel=st.sampled_from([None, 1]),
    ),
    min_size=1,
    max_size=5,
)


@given(runs=runs_strategy)
@settings(max_examples=12)
def test_the_profile_is_valid_and_measures_every_run(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("next") / "next.yaml"
    path.write_text(profile_text_of_runs(runs))
    profile = load_profile(str(path))
    sizes = {(request.prompt_tokens, request.max_tokens) for request in prepare_requests(profile).requests}
    assert sizes == {(run.prompt_tokens, run.output_tokens) for run in runs}
    largest = profile.workload.arrival.max_concurrency
    assert profile.workload.num_prompts >= 2 * largest
    served = set()
    for variant, cell in arms(profile):
        configured = variant_settings(profile, variant, cell)
        served.add((configured.model, min(largest, int(configured.server.model_dump()["max_num_seqs"]))))
    assert {(run.model, run.concurrency) for run in runs if run.model} <= served
    assert {run.concurrency for run in runs} <= {concurrency for _, concurrency in served}
    assert len(arms(profile)) <= len(runs)


def add(prompt_tokens=9, output_tokens=9, concurrency=4, reason="few steps", **more):
    return RunToAdd(
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, concurrency=concurrency, reason=reason, **more
    )


def test_reasons_stand_in_the_file_and_no_runs_make_no_profile():
    run = add(4096, 64, 8, "no long contexts", coefficients=("kv",))
    text = profile_text_of_runs([run], engine="vllm", model="qwen2.5-1.5b", seed=3)
    assert "# * prompts of 4096, outputs of 64, 8 open: no long contexts (kv)" in text
    document = yaml.safe_load(text)
    assert (document["engine"], document["model"], document["seed"]) == ({"preset": "vllm"}, "qwen2.5-1.5b", 3)
    assert "sweep" not in document
    with pytest.raises(UsageError, match="no runs to add"):
        profile_text_of_runs([])


def test_every_engine_can_run_it(tmp_path):
    path = tmp_path / "next.yaml"
    for engine in ("sim", "vllm", "sglang", "llamacpp-cpu", "transformers-cpu"):
        path.write_text(profile_text_of_runs([add(concurrency=1), add(concurrency=16)], engine=engine))
        assert load_profile(str(path)).workload.num_prompts == 32


@pytest.mark.parametrize(
    ("sizes", "options", "sweep"),
    [
        ([1], {}, None),
        ([2], {"options": {"tensor_parallel_size": 2}}, None),
        ([1, 4], {"options": {"tensor_parallel_size": 4}}, {"server.tensor_parallel_size": [1]}),
    ],
)
def test_devices_are_an_option_of_the_engine_or_a_sweep(sizes, options, sweep):
    text = profile_text_of_runs([add(tensor_parallel=size) for size in sizes], engine="vllm")
    document = yaml.safe_load(text)
    assert document["engine"] == {"preset": "vllm"} | options
    assert document.get("sweep") == sweep


def test_as_many_runs_are_measured_as_are_asked_for(tmp_path):
    asked = [("codellama-34b", 2, 1), ("llama-2-70b", 4, 32), ("codellama-34b", 2, 8)]
    runs = [add(512, 64, concurrency, model=model, tensor_parallel=size) for model, size, concurrency in asked]
    (tmp_path / "next.yaml").write_text(profile_text_of_runs(runs, engine="vllm"))
    profile = load_profile(str(tmp_path / "next.yaml"))
    served = [variant_settings(profile, *arm) for arm in arms(profile)]
    devices = [(each.model, each.server.model_dump()["tensor_parallel_size"]) for each in served]
    assert devices == [("llama-2-70b", 4), ("codellama-34b", 2), ("codellama-34b", 2)]
    assert profile.workload.arrival.max_concurrency == 32
    assert [each.server.model_dump()["max_num_seqs"] for each in served[1:]] == [1, 8]
    with pytest.raises(UsageError, match=r"need several devices.*--engine, such as vllm"):
        profile_text_of_runs(runs)


def test_diagnose_writes_the_profile_for_the_engine_that_was_measured(tmp_path):
    measured = ["simulate", "--profile", "steptime-w1", "--set", "workload.num_prompts=6", "--quiet"]
    assert benchctl(*measured, cwd=tmp_path).returncode == 0
    options = ["results/steptime-w1/latest", "--profile-out", "next.yaml"]
    diagnosed = benchctl("steptime", "diagnose", *options, cwd=tmp_path)
    assert diagnosed.returncode == 0, diagnosed.stderr
    assert "profile: next.yaml" in diagnosed.stdout
    engine = load_profile(str(tmp_path / "next.yaml")).engine
    assert (engine.kind, engine.options["cost_model"], engine.options["time_scale"]) == ("sim", "roofline", 4)


def test_the_simulator_runs_it_at_the_concurrencies_that_were_asked_for(tmp_path):
    (tmp_path / "next.yaml").write_text(profile_text_of_runs([add(2048, 16, 1), add(64, 32, 6)]))
    result = benchctl("simulate", "--profile", "next.yaml", "--quiet", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    logs = tmp_path.glob("results/*/2*/runs/*/steps.jsonl")
    assert sorted(max(step.num_seqs for step in read_jsonl(log, StepRecord)) for log in logs) == [1, 6]
