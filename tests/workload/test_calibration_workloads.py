"""Workloads of a calibration: runs to add as a profile, and lint of inference-perf configurations that mislead."""

import csv
from copy import deepcopy

import pytest
import yaml
from hypothesis import given, settings, strategies as st
from support.cli import document, printed, refusal

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.inference_perf import read_config
from benchctl.profile.choices import DATASETS
from benchctl.profile.load import load_profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.files import read_jsonl
from benchctl.records.schema import StepRecord
from benchctl.steptime.diagnose import RunToAdd
from benchctl.steptime.queueing import RequestSize, load_at_concurrency, step_time_source
from benchctl.steptime.work import Deployment
from benchctl.workload.calibration import WORKLOADS, profile_text_of_runs, write_inference_perf
from benchctl.workload.lint import LintOptions, lint_config
from benchctl.workload.prepare import prepare_requests

H100 = LintOptions(
    source=step_time_source(Deployment(shape=shape_for("qwen2.5-7b"), hardware=hardware_for("h100-sxm")))
)
SOUND = {
    "api": {"type": "completion", "streaming": True},
    "server": {"type": "vllm", "base_url": "http://127.0.0.1:8000", "ignore_eos": True},
    "load": {
        "type": "concurrent",
        "base_seed": 42,
        "stages": [{"num_requests": 60, "concurrency_level": 1}],
    },
    "data": {
        "type": "shared_prefix",
        "shared_prefix": {
            "seed": 42,
            "num_unique_system_prompts": 60,
            "num_users_per_system_prompt": 1,
            "system_prompt_len": 0,
            "question_len": 1024,
            "output_len": 512,
        },
    },
}


def changed(*changes):
    """The sound configuration with other values at dotted paths; None removes a key."""
    document = deepcopy(SOUND)
    for path, value in changes:
        *above, key = path.split(".")
        section = document
        for name in above:
            section = section[name]
        section.pop(key, None)
        if value is not None:
            section[key] = value
    return document


@pytest.fixture
def write(tmp_path):
    """Writes a configuration, and returns its path."""

    def write(document):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        return tmp_path / "config.yaml"

    return write


def rates(kind, rate, **lengths):
    """Changes to a load at a rate, with a prompt of its own for every request."""
    return [
        ("load.type", kind),
        ("load.stages", [{"rate": rate, "duration": 120}]),
        ("data.shared_prefix.num_unique_system_prompts", int(rate * 120)),
        *((f"data.shared_prefix.{name}", value) for name, value in lengths.items()),
    ]


PROMPTS = "data.shared_prefix.num_unique_system_prompts"
MISLEADING = [
    ("repeated-prompt", "error", PROMPTS, [(PROMPTS, 1)]),
    ("constant-is-random", "warning", "load.type", rates("constant", 8.0, question_len=256, output_len=16)),
    ("overlapping-requests", "error", "load.stages[0].rate", rates("poisson", 0.5)),
    ("no-token-times", "warning", "api.streaming", [("api.streaming", None)]),
    ("saturated", "error", "load.stages[0].rate", rates("poisson", 128.0, question_len=256, output_len=256)),
    ("unseeded-prompts", "warning", "data.shared_prefix", [("data.shared_prefix.seed", None)]),
    ("answers-end-early", "warning", "server.ignore_eos", [("server.ignore_eos", False)]),
    (
        "queue-in-server",
        "warning",
        "load.stages[0].concurrency_level",
        [("load.stages", [{"num_requests": 600, "concurrency_level": 300}]), (PROMPTS, 600)],
    ),
]


@pytest.mark.parametrize(("code", "severity", "key", "changes"), MISLEADING, ids=[each[0] for each in MISLEADING])
def test_each_misleading_form_gives_its_finding_and_only_it(code, severity, key, changes, write):
    path = write(changed(*changes))
    result = lint_config(path, H100)
    (finding,) = result.findings
    assert (finding.code, finding.severity, finding.key) == (code, severity, key)
    assert result.has_errors == (severity == "error")
    line = path.read_text().splitlines()[finding.line - 1]
    assert key.rpartition(".")[2] in line or code == "no-token-times"
    assert str(finding).startswith(f"{path}:{finding.line}: {key}: {severity}: ")
    assert finding.remedy in str(finding)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("server.ignore_eos", False), ("data.shared_prefix.output_len", 1)],  # one token cannot end early
        [(PROMPTS, None), ("data.shared_prefix.num_groups", 60)],  # the other name of the key
    ],
    ids=["sound", "one token", "other name"],
)
def test_a_sound_configuration_has_no_finding(changes, write):
    result = lint_config(write(changed(*changes)), H100)
    assert result.findings == ()
    assert [each.load.concurrency for each in result.predicted] == [pytest.approx(1)]


@pytest.mark.parametrize("users", [1, 2])
def test_an_empty_system_prompt_adds_no_token_to_a_prompt_that_comes_again(users, write):
    """1,024 tokens are 64 blocks of 16, of which the last is computed again, so that a token can follow."""
    path = write(changed((PROMPTS, 1), ("data.shared_prefix.num_users_per_system_prompt", users)))
    (finding,) = lint_config(path).findings
    assert "of its 1024 tokens only 16 are computed" in finding.problem
    assert lint_config(path, LintOptions(has_prefix_cache=False)).findings == ()


@pytest.mark.parametrize(("users", "computed"), [(1, 8128), (2, 4128), (10, 928)])
def test_a_system_prompt_is_computed_once_in_each_group(users, computed, write):
    """Also where it is the group's only prompt; of 8,000 + 128 tokens, the others compute the last 128."""
    groups = [(PROMPTS, 60 // users), ("data.shared_prefix.num_users_per_system_prompt", users)]
    lengths = [("data.shared_prefix.system_prompt_len", 8000), ("data.shared_prefix.question_len", 128)]
    (prefixed,) = lint_config(write(changed(*groups, *lengths)), H100).predicted
    size = RequestSize(prompt_tokens=8128, output_tokens=512, cached_tokens=8128 - computed)
    expected = load_at_concurrency(1, size, H100.source.step_s, H100.source.limits)
    assert prefixed.load.ttft_s == pytest.approx(expected.ttft_s)


@pytest.mark.parametrize(
    ("document", "key", "words"),
    [
        (changed(("load.type", "steady")), "load", "constant"),
        (changed(("load.type", ["concurrent"])), "load", "is none of"),
        (changed(("load.stages", [{"rate": 1.0, "duration": 60}])), "load", "missing"),
        (
            changed(("load.stages", [{"num_requests": 0, "concurrency_level": 1}])),
            "load",
            "0 is not a number of a load",
        ),
        (changed(("load.stages", 3)), "load", "3 is not a list of stages"),
        (changed(("data.shared_prefix", None)), "data", "needs the section"),
        (changed(("data.shared_prefix.question_len", "long")), "data", "'long' is not a number of a load"),
        (changed(("server", "vllm")), "server", "stands where 'ignore_eos' is looked for"),
        ({"version": "1", "inference_perf": SOUND}, "inference_perf", "move the sections below it to the top"),
    ],
)
def test_a_value_that_the_rules_cannot_read_is_an_error_at_its_key(document, key, words, write):
    result = lint_config(write(document))
    (finding,) = result.findings
    assert (finding.code, finding.severity, result.has_errors) == ("schema", "error", True)
    assert words in str(finding)
    assert finding.key.startswith(key)


@pytest.mark.parametrize("text", ["load: [", "- a\n- b\n", "", "\x00"])
def test_a_file_that_is_not_a_configuration_is_refused(text, tmp_path):
    (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"broken\.yaml"):
        lint_config(tmp_path / "broken.yaml")


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_exported_workloads_have_no_finding(name, tmp_path):
    sizes = dict(WORKLOADS[name].by_size())
    paths = write_inference_perf(WORKLOADS[name], tmp_path)
    assert len(paths) == len(sizes)
    for path in paths:
        result = lint_config(path, H100)
        assert result.findings == ()
        config = read_config(path)
        lengths = (config.value("data", "shared_prefix", key) for key in ("question_len", "output_len"))
        open_requests = [stage.concurrency for stage in sizes[tuple(lengths)]]
        assert [round(each.load.concurrency) for each in result.predicted] == open_requests


def test_the_list_counts_the_requests_that_the_profile_sends_and_show_their_stages(tmp_path):
    """Answers are shorter here, which changes no count."""
    listed = printed("workloads", "list", cwd=tmp_path)
    assert all(f"\n{name} " in listed for name in DATASETS)
    (row,) = [line.split() for line in listed.splitlines() if line.startswith("W2 ")]
    printed("simulate", "--profile", row[1], "--set", "workload.output_len=1", "--quiet", cwd=tmp_path)
    with (tmp_path / "results" / row[1] / "latest-simulated" / "summary.csv").open(newline="") as file:
        assert int(row[2]) == sum(int(run["num_completed"]) for run in csv.DictReader(file)) == 12
    stages = printed("workloads", "show", "W3").splitlines()[2:]
    assert [stage.strip() for stage in stages] == [
        f"prompts of 256, outputs of 256, {size} open, 128 requests" for size in (1, 8, 32, 64, 128)
    ]
    assert "name one of W1" in refusal("workloads", "show", "W9")


def test_the_command_exits_by_severity(write, tmp_path):
    printed("workloads", "export", "w1", "-o", "out", cwd=tmp_path)
    sound = sorted((tmp_path / "out").iterdir())
    on_h100 = ("--model", "qwen2.5-7b", "--hardware", "h100-sxm")
    assert "concurrency 1, " in printed("workloads", "lint", *sound, *on_h100, cwd=tmp_path)
    warned = write(changed(("api.streaming", None)))
    for code, *strict in ([0], [1, "--strict"]):
        printed("workloads", "lint", warned, *strict, code=code, cwd=tmp_path)
    (finding,) = document("workloads", "lint", write(changed((PROMPTS, 1))), code=1, cwd=tmp_path)
    assert finding["code"] == "repeated-prompt"
    for options, remedy in (
        (["absent.yaml"], "absent.yaml"),
        (["config.yaml", "--model", "qwen2.5-7b"], "--hardware is missing"),
        (["config.yaml", "--hardware", "l4"], "--model is missing"),
        (["config.yaml", "--model", "qwen2.5-72b", "--hardware", "l4"], "raise --tensor-parallel"),
    ):
        assert remedy in refusal("workloads", "lint", *options, cwd=tmp_path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A directory with the results of a simulated W1."""
    path = tmp_path_factory.mktemp("measured")
    printed("simulate", "--profile", "steptime-w1", "--set", "workload.num_prompts=6", "--quiet", cwd=path)
    return path


def test_a_fitted_model_replaces_the_roofline(write, measured):
    printed("steptime", "fit", "results/steptime-w1/latest-simulated", "-o", "m.json", cwd=measured)
    options = ["lint", write(SOUND), "--model", "qwen2.5-7b", "--step-time-model", "m.json"]
    title = "predicted by the step-time model of qwen2.5-7b on h100-sxm\n"
    assert title in printed("workloads", *options, cwd=measured)
    assert "steptime calibrate" in refusal("workloads", *options, "--hardware", "a100-sxm", cwd=measured)


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
    profile = yaml.safe_load(text)
    assert (profile["engine"], profile["model"], profile["seed"]) == ({"preset": "vllm"}, "qwen2.5-1.5b", 3)
    with pytest.raises(UsageError, match="no runs to add"):
        profile_text_of_runs([])


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


def test_diagnose_writes_the_profile_for_the_engine_that_was_measured(measured):
    options = ["results/steptime-w1/latest-simulated", "--profile-out", "next.yaml"]
    assert "profile: next.yaml" in printed("steptime", "diagnose", *options, cwd=measured)
    engine = load_profile(str(measured / "next.yaml")).engine
    assert (engine.kind, engine.options["cost_model"], engine.options["time_scale"]) == ("sim", "roofline", 4)


def test_the_simulator_runs_it_at_the_concurrencies_that_were_asked_for(tmp_path):
    (tmp_path / "next.yaml").write_text(profile_text_of_runs([add(2048, 16, 1), add(64, 32, 6)]))
    printed("simulate", "--profile", "next.yaml", "--quiet", cwd=tmp_path)
    logs = tmp_path.glob("results/*/2*/runs/*/steps.jsonl")
    assert sorted(max(step.num_seqs for step in read_jsonl(log, StepRecord)) for log in logs) == [1, 6]
