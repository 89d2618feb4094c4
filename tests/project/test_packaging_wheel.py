"""What a wheel carries: a benchctl that is installed without its checkout draws pages and finds its profiles."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from support import installation
from support.results.builders import write_results

ROOT = Path(__file__).parents[2]


@pytest.fixture(name="wheel", scope="module")
def _wheel() -> Path:
    return installation.wheel()


@pytest.fixture(name="installed", scope="module")
def _installed() -> Path:
    return installation.unpacked()


def run_installed(installed: Path, cwd: Path, *arguments: str) -> str:
    """What the installed package prints, far from any checkout."""
    env = os.environ | {"PYTHONPATH": str(installed)}
    argv = [sys.executable, *arguments]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_below(directory: Path, suffixes: set[str]) -> set[str]:
    found = (path for path in directory.rglob("*") if path.suffix in suffixes)
    return {path.relative_to(directory).as_posix() for path in found}


def test_a_wheel_carries_style_script_and_templates_of_the_page(wheel: Path) -> None:
    templates = files_below(ROOT / "benchctl/report/page", {".html"})
    assert "templates/page.html" in templates
    with ZipFile(wheel) as archive:
        for name in ("page.css", "page.js", "vendor/vega.js", "vendor/vega.LICENSE", *sorted(templates)):
            place = f"benchctl/report/page/{name}"
            assert archive.read(place) == (ROOT / place).read_bytes()


def test_a_wheel_carries_every_profile_and_every_preset(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if name.startswith("benchctl/_profiles/")}
    expected = files_below(ROOT / "profiles", {".yaml", ".md", ".jsonl"})
    assert {"topk-sweep.yaml", "engines/vllm.yaml", "engines/sim.yaml", "README.md"} <= expected
    assert carried == {f"benchctl/_profiles/{name}" for name in expected}


def test_a_wheel_carries_every_file_of_the_package_that_is_no_module(wheel: Path) -> None:
    """Plugins of engines are found by files beside them, and type checkers look for ``py.typed``."""
    with ZipFile(wheel) as archive:
        carried = set(archive.namelist())
    files = (path for path in (ROOT / "benchctl").rglob("*") if path.is_file())
    others = {path.relative_to(ROOT).as_posix() for path in files if path.suffix not in {".py", ".pyc"}}
    assert "benchctl/py.typed" in others
    assert any("entry_points" in name for name in others)
    assert others - carried == set()


def test_an_installed_benchctl_finds_its_profiles_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    listed = run_installed(installed, tmp_path, "-m", "benchctl", "profiles", "list")
    for name in files_below(ROOT / "profiles", {".yaml"}):
        assert Path(name).stem in listed
    shown = run_installed(
        installed, tmp_path, "-m", "benchctl", "profiles", "show", "topk-sweep", "--engine", "vllm"
    )
    assert "kind: vllm" in shown


def test_an_installed_benchctl_writes_a_whole_report_page(installed: Path, tmp_path: Path) -> None:
    where = run_installed(installed, tmp_path, "-c", "import benchctl; print(benchctl.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.1},))
    run_installed(installed, tmp_path, "-m", "benchctl", "report", "r")
    page = (tmp_path / "r" / "report.html").read_text()
    assert (ROOT / "benchctl/report/page/page.css").read_text().strip() in page
    assert (ROOT / "benchctl/report/page/page.js").read_text().strip() in page
