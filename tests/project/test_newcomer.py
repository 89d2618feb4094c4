"""The first minutes with an installed benchctl: every command names the next one, up to the verdict."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from support.installation import run_installed, unpacked

pytestmark = pytest.mark.slow


def command_in(output: str, beginning: str) -> list[str]:
    """The words behind ``benchctl`` of the last line of an output that holds this command."""
    lines = [line[line.index(beginning) :] for line in output.splitlines() if beginning in line]
    assert lines, f"no line with {beginning!r} in:\n{output}"
    return shlex.split(lines[-1])[1:]


def test_what_is_printed_leads_from_the_bare_command_to_the_verdict(tmp_path: Path) -> None:
    helped = run_installed(tmp_path)
    init = command_in(helped.stdout + helped.stderr, "benchctl init ")
    written = run_installed(tmp_path, *init)
    assert written.returncode == 0, written.stderr

    ran = run_installed(tmp_path, *command_in(written.stdout, "benchctl run "), "--quiet")
    assert ran.returncode in {0, 4}, ran.stdout + ran.stderr  # 4: a busy machine made the client late
    page = re.search(r"^page: (.*)$", ran.stdout, re.MULTILINE)
    assert page is not None
    assert "<html" in (tmp_path / page[1]).read_text(encoding="utf-8")

    compared = run_installed(tmp_path, *command_in(ran.stdout, "benchctl compare "))
    if ran.returncode == 0:
        assert compared.returncode == 1, compared.stdout + compared.stderr
        assert compared.stdout.startswith("regression")


def test_messages_name_only_what_an_installation_has(tmp_path: Path) -> None:
    """An engine that is missing, and one that a model is missing for: the remedy is a command that exists."""
    refused = run_installed(
        tmp_path, "run", "flag", "--engine", "sglang", "--set", "engine.options.needs_gpu=false", "--quick"
    )
    assert refused.returncode == 2
    assert "benchctl engines install sglang" in refused.stderr
    for listing in (run_installed(tmp_path, "doctor"), run_installed(tmp_path, "engines", "list")):
        text = listing.stdout + listing.stderr
        assert "scripts/" not in text
        assert "docs/" not in text
        assert "benchctl[" not in text


def test_nothing_that_is_installed_names_a_script_a_page_or_an_extra_of_the_checkout() -> None:
    """Texts that a user meets: profiles, and messages in the code."""
    package = unpacked() / "benchctl"
    wrong = []
    for path in (*package.rglob("*.py"), *(package / "_profiles").rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        texts = messages_of(text) if path.suffix == ".py" else [text]
        names = [
            word for each in texts for word in re.findall(r"scripts/\w+|docs/[\w/]+\.md|'?benchctl\[\w+\]", each)
        ]
        wrong += [f"{path.relative_to(package)}: {name}" for name in names]
    assert wrong == []


def messages_of(source: str) -> list[str]:
    """String constants of a module that are no docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.value for node in constants if id(node) not in docstrings]


def test_the_profiles_to_start_with_run_as_they_are(tmp_path: Path) -> None:
    for name in ("flag", "two-builds"):
        ran = run_installed(tmp_path, "run", name, "--quick", "--quiet")
        assert ran.returncode in {0, 4}, ran.stdout + ran.stderr
