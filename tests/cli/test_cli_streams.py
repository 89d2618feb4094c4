"""Standard streams show control characters instead of sending them, in every encoding, and never end a command."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRINTING = "from benchctl.cli.streams import drawing, steady_streams; import sys; steady_streams(); "
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
        "from rich.table import Table; from benchctl.cli.output.screen import verdict_text, wide_console; "
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
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "ascii", r"1 +- 2 x 3 -> \xe9 \u6771"),
        ({"PYTHONIOENCODING": "ascii:strict"}, "ascii", r"1 +- 2 x 3 -> \xe9 \u6771"),
        ({"PYTHONIOENCODING": "latin-1"}, "latin-1", r"1 ± 2 × 3 -> é \u6771"),  # noqa: RUF001
        ({"PYTHONIOENCODING": "utf-16"}, "utf-16", "1 ± 2 × 3 → é 東"),  # noqa: RUF001
        ({"PYTHONIOENCODING": "utf-8"}, "utf-8", "1 ± 2 × 3 → é 東"),  # noqa: RUF001
    ],
)
def test_an_encoding_gets_stand_ins_for_characters_that_it_lacks(
    env: dict[str, str], encoding: str, expected: str
) -> None:
    text = "1 ± 2 × 3 → é 東"  # noqa: RUF001
    assert printed(f"print({text!a})", **env).decode(encoding).strip() == expected


def test_json_is_ascii_and_means_the_same() -> None:
    program = f'from benchctl.cli.output.screen import print_json; print_json({{"a": "{HOSTILE}\\u2028é😀"}})'
    output = printed(program)
    assert output.isascii()
    assert not any(byte < 32 and byte != 10 for byte in output)
    expected = "a\x1b]0;title\x07\x9b31m\u202e\\ud800\x7fb\u2028é😀"  # no JSON holds half a character
    assert json.loads(output) == {"a": expected}
