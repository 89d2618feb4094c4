"""Lint of inference-perf configurations: each of the published ones that misleads, and only for its own reason."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.cli import benchctl

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.inference_perf import read_config
from benchctl.profile.choices import DATASETS
from benchctl.steptime.queueing import RequestSize, load_at_concurrency, step_time_source
from benchctl.steptime.work import Deployment
from benchctl.workload.calibration import WORKLOADS, write_inference_perf
from benchctl.workload.lint import LintOptions, computed_tokens, lint_config

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference" / "workloads"
H100 = LintOptions(
    source=step_time_source(Deployment(shape=shape_for("qwen2.5-7b"), hardware=hardware_for("h100-sxm")))
)
SOUND: dict[str, Any] = {
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


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The sound configuration with other values at dotted paths; None removes a key."""
    document: dict[str, Any] = json.loads(json.dumps(SOUND))
    for path, value in changes:
        *above, key = path.split(".")
        section = document
        for name in above:
            section = section[name]
        section.pop(key, None)
        if value is not None:
            section[key] = value
    return document


def written(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def rates(kind: str, rate: float, duration: int = 120, **lengths: int) -> list[tuple[str, Any]]:
    """Changes to a load at a rate, with a prompt of its own for every request."""
    prompts = int(rate * duration)
    return [
        ("load.type", kind),
        ("load.stages", [{"rate": rate, "duration": duration}]),
        ("data.shared_prefix.num_unique_system_prompts", prompts),
        *((f"data.shared_prefix.{name}", value) for name, value in lengths.items()),
    ]


MISLEADING = {
    "repeated-prompt": [("data.shared_prefix.num_unique_system_prompts", 1)],
    "constant-is-random": rates("constant", 8.0, question_len=256, output_len=16),
    "overlapping-requests": rates("poisson", 0.5),
    "no-token-times": [("api.streaming", None)],
    "saturated": rates("poisson", 128.0, question_len=256, output_len=256),
    "unseeded-prompts": [("data.shared_prefix.seed", None)],
    "answers-end-early": [("server.ignore_eos", False)],
    "queue-in-server": [
        ("load.stages", [{"num_requests": 600, "concurrency_level": 300}]),
        ("data.shared_prefix.num_unique_system_prompts", 600),
    ],
}
ERRORS = {"repeated-prompt", "overlapping-requests", "saturated"}
KEYS = {
    "repeated-prompt": "data.shared_prefix.num_unique_system_prompts",
    "constant-is-random": "load.type",
    "overlapping-requests": "load.stages[0].rate",
    "no-token-times": "api.streaming",
    "saturated": "load.stages[0].rate",
    "unseeded-prompts": "data.shared_prefix",
    "answers-end-early": "server.ignore_eos",
    "queue-in-server": "load.stages[0].concurrency_level",
}


def test_a_sound_configuration_has_no_finding(tmp_path: Path) -> None:
    result = lint_config(written(tmp_path, SOUND), H100)
    assert result.findings == ()
    assert [each.load.concurrency for each in result.predicted] == [pytest.approx(1)]


@pytest.mark.parametrize("code", sorted(MISLEADING))
def test_each_misleading_form_gives_its_finding_and_only_it(code: str, tmp_path: Path) -> None:
    path = written(tmp_path, changed(*MISLEADING[code]))
    result = lint_config(path, H100)
    assert [finding.code for finding in result.findings] == [code]
    (finding,) = result.findings
    assert finding.severity == ("error" if code in ERRORS else "warning")
    assert result.has_errors == (code in ERRORS)
    assert finding.key == KEYS[code]
    last_word = KEYS[code].rpartition(".")[2]
    line = path.read_text().splitlines()[finding.line - 1]
    assert last_word in line or code == "no-token-times"
    assert str(finding).startswith(f"{path}:{finding.line}: {finding.key}: {finding.severity}: ")
    assert finding.remedy in str(finding)


def test_the_published_w1_has_every_finding_that_is_known_of_it(tmp_path: Path) -> None:
    """One prompt at a constant 0.5 requests per second, without streaming."""
    published = changed(
        *rates("constant", 0.5, question_len=128, output_len=1),
        ("data.shared_prefix.num_unique_system_prompts", 1),
        ("api.streaming", None),
    )
    codes = {finding.code for finding in lint_config(written(tmp_path, published), H100).findings}
    assert codes == {"repeated-prompt", "constant-is-random", "no-token-times"}


def test_a_server_without_prefix_cache_may_get_one_prompt_many_times(tmp_path: Path) -> None:
    path = written(tmp_path, changed(*MISLEADING["repeated-prompt"]))
    assert lint_config(path, LintOptions(has_prefix_cache=False)).findings == ()


@pytest.mark.parametrize("users", [1, 2])
def test_an_empty_system_prompt_adds_no_token_to_a_prompt_that_comes_again(users: int, tmp_path: Path) -> None:
    """1,024 tokens are 64 blocks of 16, of which the last is computed again, so that a token can follow."""
    groups = [
        ("data.shared_prefix.num_unique_system_prompts", 1),
        ("data.shared_prefix.num_users_per_system_prompt", users),
    ]
    (finding,) = lint_config(written(tmp_path, changed(*groups))).findings
    assert "of its 1024 tokens only 16 are computed" in finding.problem


@pytest.mark.parametrize(("users", "computed"), [(1, 8128), (2, 4128), (10, 928)])
def test_a_system_prompt_is_computed_once_in_each_group(users: int, computed: int, tmp_path: Path) -> None:
    """Also where it is the group's only prompt; of 8,000 + 128 tokens, the others compute the last 128."""
    groups = [
        ("data.shared_prefix.num_unique_system_prompts", 60 // users),
        ("data.shared_prefix.num_users_per_system_prompt", users),
    ]
    lengths = [("data.shared_prefix.system_prompt_len", 8000), ("data.shared_prefix.question_len", 128)]
    (prefixed,) = lint_config(written(tmp_path, changed(*groups, *lengths)), H100).predicted
    assert H100.source is not None
    size = RequestSize(prompt_tokens=8128, output_tokens=512, cached_tokens=8128 - computed)
    expected = load_at_concurrency(1, size, H100.source.step_s, H100.source.limits)
    assert prefixed.load.ttft_s == pytest.approx(expected.ttft_s)


def test_answers_of_one_token_cannot_end_early(tmp_path: Path) -> None:
    one_token = changed(("server.ignore_eos", False), ("data.shared_prefix.output_len", 1))
    assert lint_config(written(tmp_path, one_token)).findings == ()


def test_prompts_that_come_again_far_apart_matter_where_the_cache_holds_them(tmp_path: Path) -> None:
    stages = [{"num_requests": 5000, "concurrency_level": 64}]
    many = changed(("load.stages", stages), ("data.shared_prefix.num_unique_system_prompts", 512))
    path = written(tmp_path, many)
    assert lint_config(path).findings == ()
    (finding,) = lint_config(path, LintOptions(kv_tokens=1e6)).findings
    assert (finding.code, finding.severity) == ("repeated-prompt", "warning")
    assert lint_config(path, LintOptions(kv_tokens=5e5)).findings == ()


@given(st.integers(1, 10_000))
def test_a_cached_prompt_computes_one_to_sixteen_tokens(prompt_tokens: int) -> None:
    computed = computed_tokens(prompt_tokens)
    assert 1 <= computed <= 16
    assert (prompt_tokens - computed) % 16 == 0


def test_the_wrapper_of_the_first_configurations_is_refused(tmp_path: Path) -> None:
    wrapped = {"version": "1", "seed": 42, "inference_perf": SOUND}
    result = lint_config(written(tmp_path, wrapped))
    (finding,) = result.findings
    assert (finding.code, finding.key) == ("schema", "inference_perf")
    assert "move the sections below it to the top of the file" in finding.remedy
    assert result.has_errors


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("load.type", "steady"), "constant"),
        (("load.type", ["concurrent"]), "is none of"),
        (("load.stages", [{"rate": 1.0, "duration": 60}]), "missing"),
        (("load.stages", [{"num_requests": 0, "concurrency_level": 1}]), "0 is not a number of a load"),
        (("load.stages", 3), "3 is not a list of stages"),
        (("data.shared_prefix", None), "needs the section"),
        (("data.shared_prefix.question_len", "long"), "'long' is not a number of a load"),
        (("server", "vllm"), "stands where 'ignore_eos' is looked for"),
    ],
)
def test_a_value_that_the_rules_cannot_read_is_an_error_at_its_key(
    change: tuple[str, Any], problem: str, tmp_path: Path
) -> None:
    (finding,) = lint_config(written(tmp_path, changed(change))).findings
    assert (finding.code, finding.severity) == ("schema", "error")
    assert problem in finding.problem
    assert finding.key.startswith(change[0].partition(".")[0])


def test_both_names_of_a_key_are_read(tmp_path: Path) -> None:
    document = changed(
        ("data.shared_prefix.num_unique_system_prompts", None), ("data.shared_prefix.num_groups", 60)
    )
    assert lint_config(written(tmp_path, document), H100).findings == ()


@pytest.mark.parametrize("text", ["load: [", "- a\n- b\n", "", "\x00"])
def test_a_file_that_is_not_a_configuration_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"broken\.yaml"):
        read_config(path)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_exported_workloads_have_no_finding(name: str, tmp_path: Path) -> None:
    paths = write_inference_perf(WORKLOADS[name], tmp_path)
    assert len(paths) == len(tuple(WORKLOADS[name].by_size()))
    for path in paths:
        result = lint_config(path, H100)
        assert result.findings == ()
        open_requests = [stage.concurrency for stage in _stages_of(path, name)]
        assert [round(each.load.concurrency) for each in result.predicted] == open_requests


def _stages_of(path: Path, name: str) -> tuple[Any, ...]:
    config = read_config(path)
    prompt, output = (config.value("data", "shared_prefix", key) for key in ("question_len", "output_len"))
    return dict(WORKLOADS[name].by_size())[prompt, output]


@pytest.mark.parametrize(("name", "num_requests"), [("W2", 12), ("V1", 256)])
def test_the_list_counts_the_requests_that_the_profile_sends(name: str, num_requests: int, tmp_path: Path) -> None:
    """Those of the completed requests in the results; answers are shorter here, which changes no count."""
    listed = benchctl("workloads", "list", cwd=tmp_path).stdout.splitlines()
    (row,) = [line.split() for line in listed if line.startswith(f"{name} ")]
    simulated = benchctl("simulate", "--profile", row[1], "--set", "workload.output_len=1", "--quiet", cwd=tmp_path)
    assert simulated.returncode == 0, simulated.stderr
    table = tmp_path / "results" / row[1] / "latest" / "summary.csv"
    with table.open(newline="") as file:
        sent = sum(int(run["num_completed"]) for run in csv.DictReader(file))
    assert int(row[2]) == sent == num_requests


@pytest.mark.skipif(not REFERENCE.is_dir(), reason=f"{REFERENCE} is not on this machine")
@pytest.mark.parametrize("name", ["w1", "w2", "w3", "w4"])
def test_the_corrected_configurations_have_no_finding(name: str) -> None:
    assert lint_config(REFERENCE / f"{name}_fixed.yaml").findings == ()
    predicted = lint_config(REFERENCE / f"{name}_fixed.yaml", H100)
    assert not predicted.has_errors
    # 512 prompts for 5,000 requests: they come again while a cache of a million tokens holds them.
    assert [finding.code for finding in predicted.findings] == (["repeated-prompt"] if name == "w3" else [])


def test_the_command_exits_by_severity(tmp_path: Path) -> None:
    assert benchctl("workloads", "export", "w1", "-o", "out", cwd=tmp_path).returncode == 0
    sound = sorted((tmp_path / "out").iterdir())
    assert len(sound) == 6
    clean = benchctl("workloads", "lint", *sound, "--model", "qwen2.5-7b", "--hardware", "h100-sxm", cwd=tmp_path)
    assert (clean.returncode, clean.stderr) == (0, "")
    assert "concurrency 1, " in clean.stdout
    warned = written(tmp_path, changed(*MISLEADING["no-token-times"]))
    assert benchctl("workloads", "lint", warned, cwd=tmp_path).returncode == 0
    assert benchctl("workloads", "lint", warned, "--strict", cwd=tmp_path).returncode == 1
    wrong = written(tmp_path, changed(*MISLEADING["repeated-prompt"]))
    result = benchctl("workloads", "lint", wrong, "--json", cwd=tmp_path)
    assert result.returncode == 1
    assert [finding["code"] for finding in json.loads(result.stdout)] == ["repeated-prompt"]
    assert benchctl("workloads", "lint", "absent.yaml", cwd=tmp_path).returncode == 2


def test_the_command_lists_and_shows_workloads_and_names_unknown_ones(tmp_path: Path) -> None:
    listed = benchctl("workloads", "list", cwd=tmp_path).stdout
    assert "steptime-w3" in listed
    assert all(f"\n{name} " in listed for name in DATASETS)
    assert "outputs of 1024, 32 open, 64 requests" in benchctl("workloads", "show", "W4", cwd=tmp_path).stdout
    stages = benchctl("workloads", "show", "W3", cwd=tmp_path).stdout.splitlines()[2:]
    assert [stage.strip() for stage in stages] == [
        f"prompts of 256, outputs of 256, {size} open, 128 requests" for size in (1, 8, 32, 64, 128)
    ]
    unknown = benchctl("workloads", "show", "W9", cwd=tmp_path)
    assert (unknown.returncode, "name one of W1" in unknown.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (["--model", "qwen2.5-7b"], "--hardware is missing"),
        (["--hardware", "l4"], "--model is missing"),
        (["--model", "qwen2.5-72b", "--hardware", "l4"], "raise --tensor-parallel"),
    ],
)
def test_predictions_that_cannot_be_made_are_refused(options: list[str], remedy: str, tmp_path: Path) -> None:
    result = benchctl("workloads", "lint", written(tmp_path, SOUND), *options, cwd=tmp_path)
    assert result.returncode == 2
    assert remedy in result.stderr


def test_a_fitted_model_replaces_the_roofline(tmp_path: Path) -> None:
    simulated = ["simulate", "--profile", "steptime-w1", "--set", "workload.num_prompts=6", "--quiet"]
    assert benchctl(*simulated, cwd=tmp_path).returncode == 0
    assert benchctl("steptime", "fit", "results/steptime-w1/latest", "-o", "m.json", cwd=tmp_path).returncode == 0
    path = written(tmp_path, SOUND)
    options = ["--model", "qwen2.5-7b", "--step-time-model", "m.json"]
    result = benchctl("workloads", "lint", path, *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "predicted by the step-time model of qwen2.5-7b on h100-sxm\n" in result.stdout
    other = benchctl("workloads", "lint", path, *options, "--hardware", "a100-sxm", cwd=tmp_path)
    assert (other.returncode, "steptime calibrate" in other.stderr) == (2, True)
