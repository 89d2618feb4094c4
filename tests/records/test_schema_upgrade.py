"""Documents of older schemas open as present ones, and the example of schema 1 keeps its verdict."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchctl.records.directory import open_results
from benchctl.records.integrity.digests import manifest_sha256
from benchctl.records.schema import RENAMED_CODES, RENAMED_METRICS, SCHEMA_VERSION, current_metric_name, upgrade
from benchctl.records.stores.peaks_store import read_noise

FIXTURES = Path(__file__).parent.parent / "fixtures"
RECORDED = json.loads((FIXTURES / "example-schema-1-verdict.json").read_text())
"""What benchctl 0.1.0 said of the example."""
HERE = Path("run.json")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "example-schema-1", tmp_path / "example"))


def benchctl(*argv: str) -> tuple[int, Any]:
    ended = subprocess.run([sys.executable, "-m", "benchctl", *argv], capture_output=True, text=True, check=False)
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.parametrize(("old", "new"), RENAMED_CODES.items())
def test_a_warning_code_of_schema_1_gets_its_new_name(old: str, new: str) -> None:
    document = {"schema_version": 1, "warnings": [{"code": old, "message": "m"}, {"code": "client-cpu"}]}
    upgraded = upgrade(document, HERE)
    assert upgraded["warnings"] == [{"code": new, "message": "m"}, {"code": "client-cpu"}]
    assert upgraded["schema_version"] == SCHEMA_VERSION
    assert document["warnings"][0]["code"] == old


def test_a_stop_mode_of_schema_1_gets_its_new_name() -> None:
    assert upgrade({"schema_version": 1, "stop": "forced-natural"}, HERE)["stop"] == "replay-natural"
    assert upgrade({"schema_version": 1, "stop": "natural"}, HERE)["stop"] == "natural"


def test_metrics_of_the_looks_of_a_stopping_rule_get_their_new_names() -> None:
    looks = [{"num_blocks": 6, "half_widths": [{"metric": "bound_stamp_frac"}, {"metric": "step_ms"}]}]
    upgraded = upgrade({"schema_version": 1, "stopping": {"precision_frac": 0.1, "looks": looks}}, HERE)
    (look,) = upgraded["stopping"]["looks"]
    assert [width["metric"] for width in look["half_widths"]] == ["coalesced_chunk_frac", "step_ms"]
    assert upgraded["stopping"]["precision_frac"] == 0.1


def test_the_acceptance_of_schema_2_gets_its_new_name() -> None:
    document = {"schema_version": 2, "metrics": {"acceptance_frac": 1, "step_ms": 2}}
    assert upgrade(document, HERE)["metrics"] == {"acceptance_rate": 1, "step_ms": 2}
    assert current_metric_name("acceptance_frac") == "acceptance_rate"


@pytest.mark.parametrize(
    "part",
    [{"warnings": None}, {"warnings": ["a"]}, {"warnings": [{"code": 1}]}, {"metrics": 1}, {"stopping": []}]
    + [{"stopping": {"looks": looks}} for looks in (1, [1], [{"half_widths": 1}], [{"half_widths": [{}]}])],
)
def test_what_has_another_shape_is_left_to_validation(part: dict[str, Any]) -> None:
    assert upgrade({"schema_version": 1} | part, HERE) == {"schema_version": SCHEMA_VERSION} | part


def test_noise_that_was_stored_without_a_version_is_of_schema_1(tmp_path: Path) -> None:
    known = {"log_sd": 0.1, "num_blocks": 8, "floor_frac": 0.02}
    texts = dict.fromkeys(
        ("measured_at", "source", "host", "engine", "engine_sha256", "model", "request_set_sha256"), "x"
    )
    metrics = dict.fromkeys((*RENAMED_METRICS, "step_ms"), known)
    (tmp_path / "noise.json").write_text(json.dumps(texts | {"metrics": metrics}))
    noise = read_noise(tmp_path / "noise.json")
    assert noise.schema_version == SCHEMA_VERSION
    assert set(noise.metrics) == {*RENAMED_METRICS.values(), "step_ms"}


def test_a_manifest_that_is_written_again_at_a_newer_schema_is_not_altered(example: Path) -> None:
    before = manifest_sha256(example)
    results = open_results(example)
    results.write_manifest(msgspec.structs.replace(results.manifest(), state="running"))
    assert json.loads((example / "manifest.json").read_bytes())["schema_version"] == SCHEMA_VERSION
    assert manifest_sha256(example) == before


def test_the_example_of_schema_1_compares_with_the_same_verdict_and_numbers(example: Path) -> None:
    code, compared = benchctl("compare", f"{example}:baseline", f"{example}:guided", "--json")
    metrics = {metric["name"]: metric for metric in compared["metrics"]}
    assert code == 1
    assert compared["verdict"] == RECORDED["verdict"]
    assert [warning["code"] for warning in compared["warnings"]] == RECORDED["warnings"]
    for name, numbers in RECORDED["numbers"].items():
        metric = metrics[current_metric_name(name)]
        is_equal = metric["role"] == "exploratory" and metric["a_blocks"] == metric["b_blocks"]
        assert metric["verdict"] == ("equal" if is_equal else RECORDED["verdicts"][name]), name
        assert {key: metric[key] for key in numbers} == pytest.approx(numbers, rel=1e-9), name


def test_the_example_of_schema_1_shows_the_same_findings_and_verifies(example: Path) -> None:
    code, shown = benchctl("show", str(example), "--json")
    assert code == 0
    codes = [finding["code"] for finding in shown["findings"]]
    added_since = {"floor-of-guidance"}
    assert [code for code in codes if code not in added_since] == RECORDED["findings"]
    assert [run["state"] for run in shown["runs"]] == ["done"] * 12
    code, verified = benchctl("verify", str(example), "--json")
    assert code == 0
    assert not verified["alterations"], verified
