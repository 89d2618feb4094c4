"""Completion in a shell: the script, the words, and nothing that would make a key press wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.results.builders import write_results


def completed(words: str, cwd: Path, **env: str) -> list[str]:
    """What bash would offer for the last of ``words``."""
    done = subprocess.run(
        [sys.executable, "-m", "benchctl"],
        cwd=cwd,
        env={
            **os.environ, "_BENCHCTL_COMPLETE": "complete_bash", "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1), **env,
        },
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_commands_profiles_and_engines_are_completed(tmp_path: Path) -> None:
    assert completed("benchctl spec", tmp_path) == ["speculation"]
    assert completed("benchctl profiles show topk", tmp_path) == ["topk-sweep"]
    assert completed("benchctl profiles validate aa ci-", tmp_path) == ["ci-smoke"]
    assert completed("benchctl run --engine llama", tmp_path) == ["llamacpp", "llamacpp-cpu"]
    assert completed("benchctl engines install trans", tmp_path) == ["transformers"]


def test_a_profile_of_the_user_is_completed(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.yaml").write_text("extends: aa\n")
    assert completed("benchctl run --profile mi", tmp_path) == ["mine"]


def test_result_directories_are_completed_from_the_parent_that_the_environment_names(tmp_path: Path) -> None:
    for root in ("results", "elsewhere"):
        write_results(tmp_path / root / "x" / f"of-{root}", block_factors=({"baseline": 1.0, "guided": 1.1},))
        (tmp_path / root / "x" / "latest").symlink_to(f"of-{root}")
    assert completed("benchctl show results/x/l", tmp_path) == ["results/x/latest"]
    offered = completed("benchctl show else", tmp_path, BENCHCTL_RESULTS="elsewhere")
    assert offered == ["elsewhere/x/latest", "elsewhere/x/of-elsewhere"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(tmp_path: Path, shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchctl"],
        env={**os.environ, "_BENCHCTL_COMPLETE": f"source_{shell}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "_BENCHCTL_COMPLETE" in done.stdout


def test_completing_imports_nothing_heavy() -> None:
    code = (
        "import sys, benchctl.cli.app; from benchctl.cli.options.options import *; "
        "assert complete_profile('topk') and complete_engine('vllm'); complete_results(''); "
        "heavy = {'numpy', 'scipy', 'vl_convert', 'httpx', 'aiohttp', 'pydantic', 'psutil', 'msgspec'} "
        "& set(sys.modules); sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_help_groups_commands_by_what_they_are_for_and_names_the_first_step() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchctl", "--help"],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    positions = [done.stdout.index(f"─ {title} ─") for title in ("Set up", "Measure", "Judge", "Explain")]
    assert positions == sorted(positions)
    assert "─ Commands ─" not in done.stdout  # every command is in a group
    first_step = "benchctl init mine --change flag --engine sim --value max_num_seqs=4"
    assert first_step in [line.strip() for line in done.stdout.splitlines()]
