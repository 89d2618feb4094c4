"""Standard streams show control characters instead of sending them, in every encoding, and never end a command."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest
from support.cli import benchctl

from benchctl.cli.conduct import experiment_progress
from benchctl.cli.failures import log_line
from benchctl.records.record import PlannedRun, RunFailure, RunRecord
from benchctl.untrusted.text import escaped

ROOT = Path(__file__).parents[2]
PRINTING = "from benchctl.cli.failures import drawing, steady_streams; import sys; steady_streams(); "
HOSTILE = r"a\x1b]0;title\x07\x9b31m\u202e\ud800\x7fb"
SHOWN = r"a\x1b]0;title\x07\x9b31m\u202e\ud800\x7fb"


def printed(program: str, **env: str) -> bytes:
    """What a program with steady streams writes to stdout."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    done = subprocess.run(
        [sys.executable, "-c", PRINTING + program],
        env={**plain, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def at_terminal(program: str) -> str:
    """What a program with steady streams writes to a terminal."""
    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", PRINTING + program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}, cwd=ROOT,
        stdin=theirs, stdout=theirs, stderr=theirs, check=True,
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 65536)
    os.close(ours)
    return shown.decode()


def test_what_is_printed_has_its_control_characters_as_escapes() -> None:
    assert printed(f'print("{HOSTILE}\\n\\tnext")').decode() == f"{SHOWN}\n\tnext\n"


def test_a_terminal_gets_them_as_escapes_too() -> None:
    assert at_terminal(f'print("{HOSTILE}\\x1b[31mred")') == f"{SHOWN}\\x1b[31mred\r\n"


def test_libraries_that_draw_may_colour_and_return_and_nothing_else() -> None:
    drawn = r'"\x1b[1;31mred\x1b[0m\r\x1b[Aup\x1b]0;title\x07\x1b[2J"'
    shown = at_terminal(f"drawing(sys.stdout).write({drawn})")
    assert shown == "\x1b[1;31mred\x1b[0m\r\x1b[Aup\\x1b]0;title\\x07\\x1b[2J"


def test_a_table_has_our_colours_and_shows_those_of_a_label() -> None:
    table = (
        "from rich.table import Table; from benchctl.cli.screen import verdict_text, wide_console; "
        r't = Table(r"\x1b[31m[red]h :x:"); t.add_row("\x1b[31m[red]label[/red] :x:"); '
        't.add_row(verdict_text("regression")); wide_console().print(t)'
    )
    shown = at_terminal(table)
    assert "\\x1b[31m[red]label[/red] :x:" in shown
    assert "\\x1b[31m[red]h :x:" in shown
    assert "\x1b[31mregression\x1b[0m" in shown


@pytest.mark.parametrize(
    ("env", "encoding", "expected"),
    [
        (
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "ascii",
            r"1 \xb1 2 \xd7 3 \u2192 \xe9 \u6771",
        ),
        ({"PYTHONIOENCODING": "ascii:strict"}, "ascii", r"1 \xb1 2 \xd7 3 \u2192 \xe9 \u6771"),
        ({"PYTHONIOENCODING": "latin-1"}, "latin-1", r"1 ± 2 × 3 \u2192 é \u6771"),  # noqa: RUF001
        ({"PYTHONIOENCODING": "utf-16"}, "utf-16", "1 ± 2 × 3 → é 東"),  # noqa: RUF001
        ({"PYTHONIOENCODING": "utf-8"}, "utf-8", "1 ± 2 × 3 → é 東"),  # noqa: RUF001
    ],
)
def test_an_encoding_gets_escapes_for_characters_that_it_lacks(
    env: dict[str, str], encoding: str, expected: str
) -> None:
    text = "1 ± 2 × 3 → é 東"  # noqa: RUF001
    assert printed(f"print({text!a})", **env).decode(encoding).strip() == expected


def test_json_is_ascii_and_means_the_same() -> None:
    program = f'from benchctl.cli.screen import print_json; print_json({{"a": "{HOSTILE}\\u2028é😀"}})'
    output = printed(program)
    assert output.isascii()
    assert not any(byte < 32 and byte != 10 for byte in output)
    expected = "a\x1b]0;title\x07\x9b31m\u202e\\ud800\x7fb\u2028é😀"  # no JSON holds half a character
    assert json.loads(output) == {"a": expected}


@pytest.mark.parametrize("env", [{"COLUMNS": "1"}, {"COLUMNS": "40", "TERMINAL_WIDTH": "abc"}])
def test_help_and_refusals_can_be_read_however_narrow_the_terminal(env: dict[str, str]) -> None:
    helped, refused = (benchctl("show", option, **env) for option in ("--help", "--no-such-option"))
    assert helped.returncode == 0
    assert "Usage: benchctl show [OPTIONS]" in helped.stdout
    assert refused.returncode == 2
    assert "No such option: --no-such-option" in " ".join(refused.stderr.replace("│", " ").split())


def test_lines_of_a_log_below_a_message_are_shown_and_cut() -> None:
    assert log_line("\x1b]0;owned\x07") == "  | \\x1b]0;owned\\x07"
    assert len(log_line("x" * 1_000_000)) < 2_010


def test_the_outcome_of_a_run_shows_what_its_server_said(capsys: pytest.CaptureFixture[str]) -> None:
    planned = PlannedRun(index=0, run_id="000-b0-baseline", block=0, position=0, variant="baseline", cell={})
    failure = RunFailure(cause="unknown", message="\x1b[2J" + "x" * 1_000_000, log_tail="\x1b]0;owned\x07\x9b31m")
    record = RunRecord(
        schema_version=3, index=0, run_id=planned.run_id, block=0, position=0, variant="baseline", cell={},
        state="failed", attempt=1, argv=(), engine="sim", failure=failure,
    )  # fmt: skip
    with experiment_progress(1, 1, is_quiet=True) as listener:
        listener.on_run_end(planned, record)
    told = capsys.readouterr().err
    assert escaped(told) == told
    assert r"unknown: \x1b[2Jxxx" in told
    assert r"  | \x1b]0;owned\x07\x9b31m" in told
    assert len(told) < 2_200


@pytest.mark.parametrize(
    ("columns", "args"), [(1, ["profiles", "list"]), (40, ["data", "list"]), (40, ["list", "results"])]
)
def test_a_narrow_terminal_gets_whole_words_and_our_colours_alone(columns: int, args: list[str]) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, columns))
    plain = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    running = subprocess.Popen(
        [sys.executable, "-m", "benchctl", *args],
        env={**plain, "TERM": "xterm-256color"}, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # all has been read
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")
    assert running.wait(timeout=60) == 0
    assert escaped(text) == text
    assert any(word in text for word in ("ci-smoke", "gsm8k"))
