"""PNG pictures without matplotlib, which an installation without extras lacks."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.results.builders import write_results

REFUSAL = (
    "the package matplotlib is not installed here, and PNG pictures cannot be drawn without it; "
    f"run: {sys.executable} -m pip install matplotlib"
)


def without_matplotlib(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['matplotlib'] = None; from benchctl.cli import main; main()"
    argv = [sys.executable, "-c", code, *arguments]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "r:baseline", "r:guided", "--output", "x.png"),
        ("compare", "r", "--output", "x.png"),
        ("speculation", "--acceptance", "0.8", "--draft-tokens", "2", "--plot", "x.png"),
        ("steptime", "fit", "r", "-o", "model.json", "--picture", "x.png"),
        ("steptime", "evaluate", "r", "--picture", "x.png"),
    ],
    ids=["compare", "compare a directory", "speculation", "fit", "evaluate"],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_any_work(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    write_results(tmp_path / "r")
    refused = without_matplotlib(tmp_path, *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert REFUSAL in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_a_report_without_matplotlib_is_whole_but_for_its_pictures_and_says_so_once(tmp_path: Path) -> None:
    write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.1},))
    written = without_matplotlib(tmp_path, "report", "r")
    assert written.returncode == 0, written.stderr
    assert f"not drawn: plots/*.png: {REFUSAL}" in written.stdout.splitlines()
    assert written.stdout.count("matplotlib") == 2  # the package, and the command that installs it
    names = {path.name for path in (tmp_path / "r").iterdir()}
    assert {"report.html", "summary.csv", "sweep_summary.csv"} <= names
    assert "plots" not in names


def test_a_sweep_of_loads_without_matplotlib_keeps_its_numbers_and_says_that_there_is_no_picture(
    tmp_path: Path,
) -> None:
    swept = without_matplotlib(
        tmp_path, "simulate", "sweep", "--profile", "ci-smoke", "--max-concurrency", "2,4", "--output-dir", "out"
    )
    assert swept.returncode == 0, swept.stderr
    assert f"saturation.png is not drawn: {REFUSAL}" in swept.stderr
    assert [path.name for path in (tmp_path / "out").glob("*/*-sweep/*")] == ["sweep.json"]
