"""Verdicts have colours at a terminal and nowhere else."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIDES = ["results/example:baseline", "results/example:guided"]
RED = "\x1b[31m"
BOLD_RED = "\x1b[1;31m"


def environment(**env: str) -> dict[str, str]:
    plain = {
        name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR", "COLORTERM"}
    }
    return {**plain, "TERM": "xterm-256color", "COLUMNS": "160", **env}


def at_terminal(*args: str, **env: str) -> str:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "benchctl", *args],
        cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**env),
    ) as process:  # fmt: skip
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 65536):
                output += chunk
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    assert process.returncode == 1
    return output.decode()


def test_at_a_terminal_a_regression_is_red_in_the_sentence_and_in_the_table() -> None:
    output = at_terminal("compare", *SIDES)
    assert f"{BOLD_RED}regression" in output
    assert f"{RED}regression" in output
    assert f"{RED}(" not in output  # exploratory metrics decide nothing


@pytest.mark.parametrize(("args", "env"), [((), {"NO_COLOR": "1"}), (("--json",), {}), (("--markdown",), {})])
def test_without_colours_there_are_none_at_a_terminal_either(args: tuple[str, ...], env: dict[str, str]) -> None:
    output = at_terminal("compare", *SIDES, *args, **env)
    assert "regression" in output
    assert "\x1b[31m" not in output
    assert ";31m" not in output


def test_a_pipe_gets_plain_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchctl", "compare", *SIDES],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("regression")
    assert "\x1b" not in done.stdout
