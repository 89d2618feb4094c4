"""An installation without extras: its size, and the way from the bare command to the verdict."""

import ast
import re
import shlex
from collections import Counter

import pytest
from support.installation import installed, run_installed, site_packages, unpacked
from support.results.lenvm_results import write_directory
from support.servers.simulator import sim_server

MOST_BYTES = 355_000_000
"""Of what pip unpacks; modules are compiled as they are imported."""


def succeed(cwd, *arguments):
    done = run_installed(cwd, *arguments)
    assert done.returncode == 0, f"benchctl {' '.join(arguments)}: {done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


def command_in(output, beginning):
    """The words behind ``benchctl`` of the last line of an output that holds this command."""
    lines = [line[line.index(beginning) :] for line in output.splitlines() if beginning in line]
    assert lines, f"no line with {beginning!r} in:\n{output}"
    return shlex.split(lines[-1])[1:]


@pytest.mark.slow
def test_an_installation_without_extras_is_small_and_leads_from_the_bare_command_to_the_verdict(tmp_path):
    """One test, because one process installs it."""
    sizes, packages = Counter(), site_packages(installed())
    for path in packages.rglob("*"):
        if path.is_file() and not path.is_symlink():
            sizes[path.relative_to(packages).parts[0]] += path.stat().st_size
    assert {"benchctl", "numpy", "scipy"} <= set(sizes)
    assert sizes.total() <= MOST_BYTES, f"{sizes.total() / 1e6:.0f} MB, largest: {sizes.most_common(12)}"

    helped = run_installed(tmp_path)
    written = succeed(tmp_path, *command_in(helped.stdout + helped.stderr, "benchctl init "))
    ran = run_installed(tmp_path, *command_in(written, "benchctl run "), "--quiet")
    assert ran.returncode in {0, 4}, ran.stdout + ran.stderr  # 4: a busy machine made the client late
    assert "picture: " in ran.stdout
    page = re.search(r"^page: (.*)$", ran.stdout, re.MULTILINE)[1]
    assert "<html" in (tmp_path / page).read_text(encoding="utf-8")
    compare = command_in(ran.stdout, "benchctl compare ")
    compared = run_installed(tmp_path, *compare, "-o", "page.html", "-o", "x.png")
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
        assert says in succeed(tmp_path, *words)

    with sim_server(tmp_path / "server") as server:
        url = str(server.client.base_url)
        output = succeed(tmp_path, "load", url, "--num-prompts", "8", "--max-concurrency", "4", "--output-len", "8")
    assert "8 completed, 0 failed" in output
    names = "Qwen2.5-7B-Instruct_vs_lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct"
    succeed(tmp_path, "import", "lenvm", str(write_directory(tmp_path / names).path), "-o", "imported")
    assert "baseline" in succeed(tmp_path, "show", "imported")

    # Messages name only what an installation has: the remedy for a missing engine is a command that exists.
    without_gpu = ("--set", "engine.options.needs_gpu=false", "--quick")
    refused = run_installed(tmp_path, "run", "flag", "--engine", "sglang", *without_gpu)
    assert (refused.returncode, "benchctl engines install sglang" in refused.stderr) == (2, True)
    for words in (("doctor",), ("engines", "list")):
        listing = run_installed(tmp_path, *words)
        assert not re.search(r"scripts/|docs/|benchctl\[", listing.stdout + listing.stderr)


def test_nothing_that_is_installed_names_a_script_a_page_or_an_extra_of_the_checkout():
    """Texts that a user meets: profiles, and messages in the code."""
    package, wrong = unpacked() / "benchctl", []
    for path in (*package.rglob("*.py"), *(package / "_profiles").rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        for each in messages_of(text) if path.suffix == ".py" else [text]:
            names = re.findall(r"scripts/\w+|docs/[\w/]+\.md|'?benchctl\[\w+\]", each)
            wrong += [f"{path.relative_to(package)}: {name}" for name in names]
    assert wrong == []


def messages_of(source):
    """String constants of a module that are no docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.value for node in constants if id(node) not in docstrings]
