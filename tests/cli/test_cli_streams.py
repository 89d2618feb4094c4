"""Standard streams, terminals and shells: colours, bars and completions where they belong, and escapes."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from support.cli import at_terminal, in_process, preloaded_directory, printed, refusal
from support.results.builders import edit_manifest, write_results

from benchctl.cli.conduct import experiment_progress
from benchctl.cli.failures import log_line
from benchctl.records.record import PlannedRun, RunFailure, RunRecord
from benchctl.untrusted.text import escaped

ROOT = Path(__file__).parents[2]
PRINTING = "from benchctl.cli.failures import drawing, steady_streams; import sys; steady_streams(); "
HOSTILE = r"a\x1b]0;title\x07\x9b31m\u202e\ud800\x7fb"
COMPARE = ("compare", "results/example:baseline", "results/example:guided")
RED = "\x1b[31m"
BOLD_RED = "\x1b[1;31m"
PROFILE = "a-profile-with-a-very-long-name-that-nobody-would-type-by-hand"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "\n")


def test_verdicts_have_colours_at_a_terminal_that_wants_some_and_nowhere_else() -> None:
    output = at_terminal(*COMPARE, code=1, cwd=ROOT)
    assert f"{BOLD_RED}regression" in output
    assert f"{RED}regression" in output
    assert f"{RED}(" not in output  # exploratory metrics decide nothing
    for options, env in (((), {"NO_COLOR": "1"}), (("--json",), {}), (("--markdown",), {})):
        output = at_terminal(*COMPARE, *options, code=1, cwd=ROOT, **env)
        assert "regression" in output, options
        assert "31m" not in output, options
    assert "\x1b" not in printed(*COMPARE, code=1, cwd=ROOT)


def test_a_table_fits_the_terminal_and_still_tells_directories_apart_and_a_pipe_gets_all_of_it(
    tmp_path: Path,
) -> None:
    for number, state in enumerate(("done", "failed", "interrupted")):
        results = write_results(tmp_path / PROFILE / f"20261123T02000{number}Z-0fdbff68", state=state)
        edit_manifest(results, profile=PROFILE, label="a remark " * 8)
    for columns in (100, 120, 160):
        head, *lines = plain(at_terminal("list", tmp_path, columns=columns, streams=["stdout"])).splitlines()
        assert head.split() == ["directory", "created", "profile", "engine", "state", "runs", "remarks"]
        assert max(map(len, lines)) <= columns
        assert all("…" in line for line in lines)
        assert len({line.split()[0] for line in lines}) == 3
        assert {line.split()[4] for line in lines} == {"done", "failed", "interrupted"}
    piped = printed("list", tmp_path)
    assert "…" not in piped
    assert piped.count(f"{PROFILE}/20261123T02000") == 3


@pytest.mark.parametrize(
    ("columns", "args"), [(1, ["profiles", "list"]), (40, ["data", "list"]), (40, ["list", "results"])]
)
def test_a_narrow_terminal_gets_whole_words_and_our_colours_alone(columns: int, args: list[str]) -> None:
    text = plain(at_terminal(*args, columns=columns, cwd=ROOT))
    assert escaped(text) == text
    assert any(word in text for word in ("ci-smoke", "gsm8k"))


def test_help_and_refusals_can_be_read_however_narrow_the_terminal() -> None:
    for env in ({"COLUMNS": "1"}, {"COLUMNS": "40", "TERMINAL_WIDTH": "abc"}):
        assert "Usage: benchctl show [OPTIONS]" in printed("show", "--help", **env)
        message = refusal("show", "--no-such-option", **env)
        assert "No such option: --no-such-option" in " ".join(message.replace("│", " ").split())


def printed_by(program: str, **env: str) -> bytes:
    """What a program with steady streams writes to stdout."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    environment = {**rest, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-c", PRINTING + program], env=environment, capture_output=True, check=True
    ).stdout


def drawn_by(program: str, columns: int = 80) -> str:
    """What a program with steady streams writes to a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, columns))
    rest = {name: value for name, value in os.environ.items() if name not in {"CI", "COLUMNS"}}
    subprocess.run(
        [sys.executable, "-c", PRINTING + program],
        env={**rest, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}, cwd=ROOT,
        stdin=theirs, stdout=theirs, stderr=theirs, check=True,
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    return shown


def test_a_pipe_and_a_terminal_get_control_characters_as_escapes() -> None:
    assert printed_by(f'print("{HOSTILE}\\n\\tnext")').decode() == f"{HOSTILE}\n\tnext\n"
    assert drawn_by(f'print("{HOSTILE}\\x1b[31mred")') == f"{HOSTILE}\\x1b[31mred\r\n"


def test_libraries_that_draw_may_colour_and_return_and_nothing_else() -> None:
    drawn = r'"\x1b[1;31mred\x1b[0m\r\x1b[Aup\x1b]0;title\x07\x1b[2J"'
    shown = drawn_by(f"drawing(sys.stdout).write({drawn})")
    assert shown == "\x1b[1;31mred\x1b[0m\r\x1b[Aup\\x1b]0;title\\x07\\x1b[2J"


def test_a_table_has_our_colours_and_shows_those_of_a_label() -> None:
    table = (
        "from rich.table import Table; from benchctl.cli.screen import verdict_text, wide_console; "
        r't = Table(r"\x1b[31m[red]h :x:"); t.add_row("\x1b[31m[red]label[/red] :x:"); '
        't.add_row(verdict_text("regression")); wide_console().print(t)'
    )
    shown = drawn_by(table)
    for text in ("\\x1b[31m[red]label[/red] :x:", "\\x1b[31m[red]h :x:", "\x1b[31mregression\x1b[0m"):
        assert text in shown


def test_a_terminal_gets_bars_and_one_without_a_width_lines_because_bars_would_be_invisible() -> None:
    program = """
from benchctl.cli.conduct import experiment_progress
from benchctl.records.record import PlannedRun, RunRecord
fields = dict(index=0, run_id="000-b0-baseline", block=0, position=0, variant="baseline", cell={})
with experiment_progress(1, 1, is_quiet=False) as listener:
    listener.on_run_start(PlannedRun(**fields), 1)
    listener.on_run_end(PlannedRun(**fields), RunRecord(**fields, schema_version=3, state="done"))
"""
    for columns, has_bars in ((100, True), (0, False)):
        shown = drawn_by(program, columns)
        assert ("runs: 100%" in shown, "[1/1] 000-b0-baseline" in shown) == (has_bars, not has_bars), shown


def test_an_encoding_gets_escapes_for_characters_that_it_lacks() -> None:
    text = "1 ± 2 × 3 → é 東"  # noqa: RUF001
    in_ascii = r"1 \xb1 2 \xd7 3 \u2192 \xe9 \u6771"
    for env, encoding, expected in (
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "ascii", in_ascii),
        ({"PYTHONIOENCODING": "ascii:strict"}, "ascii", in_ascii),
        ({"PYTHONIOENCODING": "latin-1"}, "latin-1", r"1 ± 2 × 3 \u2192 é \u6771"),  # noqa: RUF001
        ({"PYTHONIOENCODING": "utf-16"}, "utf-16", text),
    ):
        assert printed_by(f"print({text!a})", **env).decode(encoding).strip() == expected


def test_json_is_ascii_and_means_the_same() -> None:
    output = printed_by(f'from benchctl.cli.screen import print_json; print_json({{"a": "{HOSTILE}\\u2028é😀"}})')
    assert not any((byte < 32 and byte != 10) or byte > 126 for byte in output)
    expected = "a\x1b]0;title\x07\x9b31m\u202e\\ud800\x7fb\u2028é😀"  # no JSON holds half a character
    assert json.loads(output) == {"a": expected}


def test_the_outcome_of_a_run_shows_what_its_server_said_and_cuts_it(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert len(log_line("x" * 1_000_000)) < 2_010


def in_shell(line: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of bash."""
    path = f"{preloaded_directory()}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line],
        cwd=cwd, env={**os.environ, "PATH": path, **env}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_reader_that_leaves_changes_no_exit_code_and_leaves_no_traceback(tmp_path: Path) -> None:
    for command, code in (("profiles list", 0), ("profiles validate aa no-such-name", 2)):
        for reader in ("true", "head -1"):
            done = in_shell(f"benchctl {command} | {reader}; exit ${{PIPESTATUS[0]}}", tmp_path)
            assert done.returncode == code, (command, reader)
            assert not any(word in done.stderr for word in ("Error", "Broken pipe")), done.stderr


def test_a_full_device_behind_the_output_is_one_message_and_no_success(tmp_path: Path) -> None:
    done = in_shell("benchctl profiles list > /dev/full", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the output: No space left on device; free space there, or name another directory" in done.stderr
    assert "kept" not in done.stderr
    assert in_shell("benchctl --version > /dev/full", tmp_path).returncode == 2


COMMANDS = (
    "list", "show r", "report r", "compare r", "verify r", "export r --format vllm -o x", "run ci-smoke --dry-run",
    "run ci-smoke", "run --resume r", "simulate --profile ci-smoke",
    "init x --change flag --engine sim --value max_num_seqs=1",
    "profiles list", "profiles show aa", "profiles validate aa", "engines list", "data list", "models list",
    "workloads list", "workloads lint x.yml", "noise list", "flops --model qwen2.5-0.5b",
    "steptime fit r", "speculation --acceptance 0.8", "import lenvm x", "doctor", "load http://127.0.0.1:9",
)  # fmt: skip


def test_a_current_directory_that_is_gone_is_the_one_remedy_of_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for command in COMMANDS:
        code, _, message = in_process(*command.split())
        assert code in {0, 2}, (command, message)
        assert "kept" not in message, command
        if code and "Usage:" not in message:
            assert message.endswith("\nbenchctl: the current directory was deleted; cd to another one\n"), command


def completed(words: str, cwd: Path, **env: str) -> list[str]:
    """What bash would offer for the last of ``words``."""
    asked = {"_BENCHCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    if not env:
        return printed(cwd=cwd, **asked).split()
    argv, variables = [sys.executable, "-m", "benchctl"], {**os.environ, **asked, **env}
    done = subprocess.run(argv, cwd=cwd, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_commands_profiles_and_engines_are_completed(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.yaml").write_text("extends: aa\n")
    for words, offered in {
        "spec": ["speculation"],
        "profiles show topk": ["topk-sweep"],
        "profiles validate aa ci-": ["ci-smoke"],
        "run --engine llama": ["llamacpp", "llamacpp-cpu"],
        "engines install trans": ["transformers"],
        "run --profile mi": ["mine"],
    }.items():
        assert completed(f"benchctl {words}", tmp_path) == offered


def test_result_directories_are_completed_from_the_parent_that_the_environment_names(tmp_path: Path) -> None:
    for root in ("results", "elsewhere"):
        write_results(tmp_path / root / "x" / f"of-{root}", block_factors=({"baseline": 1.0, "guided": 1.1},))
        (tmp_path / root / "x" / "latest").symlink_to(f"of-{root}")
    assert completed("benchctl show results/x/l", tmp_path) == ["results/x/latest"]
    offered = completed("benchctl show else", tmp_path, BENCHCTL_RESULTS="elsewhere")
    assert offered == ["elsewhere/x/latest", "elsewhere/x/of-elsewhere"]


def test_the_script_for_a_shell_is_printed(tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_BENCHCTL_COMPLETE" in printed(cwd=tmp_path, _BENCHCTL_COMPLETE=f"source_{shell}")


@pytest.mark.parametrize("words", [None, "benchctl sp"])
def test_help_and_names_of_commands_import_no_command(words: str | None) -> None:
    completing = {"_BENCHCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "1"} if words else {}
    code = (
        "import sys\nfrom benchctl.cli.app import app\n"
        "try:\n    app(['--help'], prog_name='benchctl')\n"
        "finally:\n    print('loaded', *sys.modules)\n"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env={**os.environ, **completing}, capture_output=True, text=True, check=False)
    loaded = set(done.stdout.partition("loaded ")[2].split())
    assert "benchctl.cli.app" in loaded, done.stderr
    heavy = {"numpy", "scipy", "vl_convert", "httpx", "aiohttp", "msgspec"} | (
        set() if words else {"pydantic", "psutil"}
    )
    assert not loaded & {"benchctl.cli.conduct", "benchctl.cli.screen", *heavy}


def test_the_help_groups_commands_by_what_they_are_for_and_names_the_first_step() -> None:
    text = printed("--help", COLUMNS="100")
    positions = [text.index(f"─ {title} ─") for title in ("Set up", "Measure", "Judge", "Explain")]
    assert positions == sorted(positions)
    assert "─ Commands ─" not in text  # every command is in a group
    first_step = "benchctl init mine --change flag --engine sim --value max_num_seqs=4"
    assert first_step in [line.strip() for line in text.splitlines()]
