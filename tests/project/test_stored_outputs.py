"""The script that compares two stores of outputs tells a changed number from a changed layout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = "arm       step ms  p50_ttft_ms\nbaseline    11.55       -3.2%\n"
DOCUMENT = {"arms": [{"name": "baseline", "step_ms": 11.55, "is_done": True}]}


def written(path, table, document):
    for name, text in (("show.txt", table), ("show.json", document)):
        file = path / "outputs/flag" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return path


def differences(tmp_path, table=TABLE, document=None):
    old = written(tmp_path / "old", TABLE, json.dumps(DOCUMENT))
    new = written(tmp_path / "new", table, json.dumps(document or DOCUMENT, indent=3))
    argv = [sys.executable, "-m", "benchmarks.outputs.differences", str(old), str(new)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "table",
    [TABLE, "p50_ttft_ms | -3.2%\nstep ms | 11.550\n", TABLE + "3 blocks\n"],
    ids=["same", "other layout", "one number more"],
)
def test_a_layout_and_a_further_number_are_no_lost_number(tmp_path, table):
    code, text = differences(tmp_path, table)
    assert code == 0
    assert "numbers left or changed in 0" in text


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (TABLE.replace("11.55", "11.56"), "- 11.55 (1 times)"),
        (TABLE.replace("-3.2%", "+3.2%"), "- -3.2 (1 times)"),
        ("arm | step ms\nbaseline | 11.55\n", "- -3.2 (1 times)"),
    ],
    ids=["changed", "sign", "left"],
)
def test_a_number_that_changed_or_left_a_text_is_told(tmp_path, table, line):
    code, text = differences(tmp_path, table)
    assert code == 1
    assert line in text
    assert "numbers left or changed in 1" in text


def test_values_of_a_document_are_compared_by_their_path(tmp_path):
    code, text = differences(tmp_path, document={"arms": [{"name": "base", "step_ms": 12, "is_done": True}]})
    assert code == 1
    assert "~ arms.0.step_ms: 11.55 -> 12" in text
    assert '~ arms.0.name: "baseline" -> "base"' in text
    code, text = differences(tmp_path, document={"arms": [DOCUMENT["arms"][0] | {"wall_s": 1.5}]})
    assert code == 0
    assert "+ arms.0.wall_s: None -> 1.5" in text
