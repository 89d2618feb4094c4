"""Generated pages are current, stored outputs are compared by their numbers, and pytest is strict."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from generate import PAGES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_current(name):
    written = (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    assert written == PAGES[name](), "run: python docs/generate.py"
    if name == "commands":
        meanings = [line.split("|")[2].strip() for line in written.splitlines() if line.startswith("| `")]
        assert all(meanings), meanings


def test_every_page_is_generated():
    assert {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")} == set(PAGES)


TABLE = "arm       step ms  p50_ttft_ms\nbaseline    11.55       -3.2%\n"
DOCUMENT = {"arms": [{"name": "baseline", "step_ms": 11.55, "is_done": True}]}


def differences(tmp_path, table=TABLE, document=DOCUMENT):
    for name, text, values in (("old", TABLE, DOCUMENT), ("new", table, document)):
        folder = tmp_path / name / "outputs/flag"
        folder.mkdir(parents=True)
        (folder / "show.txt").write_text(text, encoding="utf-8")
        (folder / "show.json").write_text(json.dumps(values, indent=3 if name == "new" else None))
    argv = [sys.executable, "-m", "benchmarks.outputs.differences", str(tmp_path / "old"), str(tmp_path / "new")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (TABLE, None),
        ("p50_ttft_ms | -3.2%\nstep ms | 11.550\n", None),
        (TABLE + "3 blocks\n", None),
        (TABLE.replace("11.55", "11.56"), "- 11.55 (1 times)"),
        (TABLE.replace("-3.2%", "+3.2%"), "- -3.2 (1 times)"),
        ("arm | step ms\nbaseline | 11.55\n", "- -3.2 (1 times)"),
    ],
    ids=["same", "other layout", "one number more", "changed", "sign", "left"],
)
def test_a_number_that_changed_or_left_a_text_is_told_and_a_layout_or_a_further_number_is_not(
    tmp_path, table, line
):
    code, text = differences(tmp_path, table)
    assert code == (line is not None)
    assert f"numbers left or changed in {code}" in text
    assert line is None or line in text


@pytest.mark.parametrize(
    ("changes", "code", "lines"),
    [
        (
            {"name": "base", "step_ms": 12},
            1,
            ["~ arms.0.step_ms: 11.55 -> 12", '~ arms.0.name: "baseline" -> "base"'],
        ),
        ({"wall_s": 1.5}, 0, ["+ arms.0.wall_s: None -> 1.5"]),
    ],
    ids=["changed", "added"],
)
def test_values_of_a_document_are_compared_by_their_path(tmp_path, changes, code, lines):
    ended, text = differences(tmp_path, document={"arms": [DOCUMENT["arms"][0] | changes]})
    assert ended == code
    assert all(line in text for line in lines)


CONFIGURATION = ROOT / "pyproject.toml"


def pytest_in(directory, *options, configuration=CONFIGURATION):
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", configuration, *options]
    command = [*argv, "--rootdir", directory, directory]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_what_is_misspelt_and_an_unexpected_pass_are_errors(tmp_path):
    for name, decorator, parameter in (
        ("marker", "mark.slwo", ""),
        ("repeated", 'mark.parametrize("x", [1, 1])', "x"),
        ("xfail", "mark.xfail", ""),
    ):
        source = f"import pytest\n\n@pytest.{decorator}\ndef test({parameter}):\n    pass\n"
        (tmp_path / f"test_{name}.py").write_text(source)
    finished = pytest_in(tmp_path, "--continue-on-collection-errors")
    assert "1 failed, 2 errors" in finished.stdout
    for message in ("'slwo' not found in `markers`", "Duplicate parametrization IDs", "[XPASS(strict)]"):
        assert message in finished.stdout
    changed = CONFIGURATION.read_text().replace("strict_config = true\n", 'strict_config = true\nmarkres = ["x"]\n')
    (tmp_path / "pyproject.toml").write_text(changed)
    finished = pytest_in(tmp_path, configuration=tmp_path / "pyproject.toml")
    assert (finished.returncode, "Unknown config option: markres" in finished.stderr) == (4, True)
