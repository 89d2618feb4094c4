"""Commands in every environment: locales, streams, terminals, shells, and texts that try everything."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from support.cli import NO_ROOM_FOR_PICTURES, in_process, preloaded_directory, printed
from support.results.builders import edit_manifest, write_results
from support.results.planted import HOSTILE, write_hostile
from support.servers.simulator import sim_server
from support.servers.stubborn_engine import processes_of

from benchctl.cli.conduct import experiment_progress
from benchctl.records.loaded import load_results
from benchctl.records.record import PlannedRun, RunFailure, RunRecord
from benchctl.untrusted.text import escaped

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "support" / "servers" / "programs" / "many_commands.py"
DIRECTORY = "results/h/r"
FEW = ["--set", "workload.num_prompts=1", "--set", "workload.output_len=4"]
TINY = ["run", "ci-smoke", "--engine", "sim-exact", "--blocks", "1", "--quiet", "--no-store-noise", *FEW]
TINY += ["--set", "variants.guided=null", "--set", "allowed_differences=[]", "--set", "sweep.top_k=null"]
TINY += ["--label", HOSTILE]
COMMANDS = {
    "list": ["list", "results"],
    "show": ["show", DIRECTORY],
    "show-json": ["show", DIRECTORY, "--json"],
    "compare": ["compare", DIRECTORY],
    "compare-github": ["compare", DIRECTORY, "--markdown", "--github-summary"],
    "compare-files": ["compare", DIRECTORY, "-o", "c.md", "-o", "c.csv", "-o", "c.html", "-o", "c.json"],
    "report": ["report", DIRECTORY],
    "export": ["export", DIRECTORY, "--format", "lenvm"],
    "dry-run": ["run", "ci-smoke", "--dry-run"],
    "run": [*TINY, "--output-dir", "own"],
    "doctor": ["doctor"],
    "data": ["data", "list"],
    "profiles": ["profiles", "list"],
    "steptime": ["steptime", "fit", DIRECTORY],
    "help": ["run", "--help"],
    "refused": ["show", "\x1b]0;owned\x07\x9b31m"],
}
ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENVIRONMENTS: dict[str, tuple[dict[str, str | None], dict[str, str | None]]] = {
    "c-locale": ({"LC_ALL": "C", **ASCII}, {}),
    "posix-locale": ({"LC_ALL": "POSIX", **ASCII}, {}),
    "no-locale": ({"LC_ALL": None, "LC_CTYPE": None, "LANG": None}, {}),
    "ascii": ({"PYTHONIOENCODING": "ascii"}, {}),
    "latin-1": ({"PYTHONIOENCODING": "latin-1"}, {}),
    "utf-16": ({"PYTHONIOENCODING": "utf-16"}, {}),
    "40-columns": ({"COLUMNS": "40", "TERM": "dumb"}, {}),
    "1-column": ({"COLUMNS": "1"}, {}),
    "no-number-of-columns": ({"COLUMNS": "abc", "LINES": "-1", "TERM": None}, {}),
    "colours": ({"FORCE_COLOR": "1", "TERM": "xterm-256color"}, {}),
    "no-stdin": ({}, {"stdin": None}),
    "no-stdout": ({}, {"stdout": None}),
    "no-stderr": ({}, {"stderr": None}),
    "no-stdin-stdout": ({}, {"stdin": None, "stdout": None}),
    "no-stdin-stderr": ({}, {"stdin": None, "stderr": None}),
    "no-stdout-stderr": ({}, {"stdout": None, "stderr": None}),
    "no-streams": ({}, {"stdin": None, "stdout": None, "stderr": None}),
    "stderr-full": ({}, {"stderr": "/dev/full"}),
    "reader-left": ({}, {"stdout": "pipe", "stderr": "pipe"}),
    "stdout-full": ({}, {"stdout": "/dev/full"}),
    "both-full": ({}, {"stdout": "/dev/full", "stderr": "/dev/full"}),
}
THOROUGH = ("c-locale", "1-column", "no-streams", "both-full")
"""Environments in which the commands that take long are tried as well."""
ALWAYS = ("c-locale", "both-full")
"""Environments in which commands are tried at every change; the others, and what takes long, every night."""
TAKE_LONG = {"report", "run", "compare-files", "export", "doctor", "steptime"}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def run_all(
    cwd: Path, commands: list[str], environment: dict[str, str | None], streams: dict[str, str | None]
) -> dict[str, tuple[int, bytes, bytes]]:
    """Exit code and output of each command."""
    variables = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT), "BENCHCTL_DATA_DIR": str(cwd / "none")}
    variables |= {"GITHUB_STEP_SUMMARY": str(cwd / "summary.md"), "MPLBACKEND": "agg"}
    variables = {name: value for name, value in {**variables, **environment}.items() if value is not None}
    asked = []
    for name in commands:
        places = {"stdin": os.devnull, "stdout": str(cwd / f"{name}.out"), "stderr": str(cwd / f"{name}.err")}
        asked.append({"argv": COMMANDS[name], "cwd": str(cwd), **places, **streams})
    (cwd / "commands.json").write_text(json.dumps(asked), encoding="utf-8")
    driver = [sys.executable, str(DRIVER), "commands.json"]
    subprocess.run(driver, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, check=True, timeout=600)
    codes = json.loads((cwd / "commands.json").read_bytes())
    files = [[cwd / f"{name}.{end}" for end in ("out", "err")] for name in commands]
    contents = [[path.read_bytes() if path.exists() else b"" for path in pair] for pair in files]
    assert not (cwd / "escaped.txt").exists(), (cwd / "escaped.txt").read_text(encoding="utf-8")
    return {name: (code, out, err) for name, code, (out, err) in zip(commands, codes, contents, strict=True)}


@pytest.fixture(scope="module", name="prepared")
def _prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the hostile result directory, for copies."""
    path = tmp_path_factory.mktemp("hostile")
    write_hostile(path / DIRECTORY)
    return path


@pytest.fixture(scope="module", name="plain")
def _plain(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bytes, bytes]]:
    """What every command does in a plain environment; what it writes has no control characters."""
    cwd = tmp_path_factory.mktemp("plain") / "w"
    shutil.copytree(prepared, cwd)
    outcomes = run_all(cwd, list(COMMANDS), {}, {})
    for path in ("c.md", "c.csv", "c.html"):
        assert _controls((cwd / path).read_text(encoding="utf-8"))[:5] == []
    return outcomes


def faults(output: bytes, encoding: str) -> list[str]:
    """What is wrong with the output of a command."""
    text = COLOURS.sub("", output.decode(encoding))
    shown = [f"control characters: {text[max(0, i - 20) : i + 20]!r}" for i in _controls(text)[:1]]
    return shown + [word for word in ("Traceback", "Exception ignored", "Error:") if word in text]


def _controls(text: str) -> list[int]:
    return [i for i, sign in enumerate(text) if escaped(sign) != sign]


def test_a_plain_environment_shows_everything_and_passes_on_nothing(
    plain: dict[str, tuple[int, bytes, bytes]],
) -> None:
    assert {name: code for name, (code, _, _) in plain.items() if code} == {
        "compare": 4, "compare-github": 4, "compare-files": 4, "refused": 2
    }  # fmt: skip
    for name, (_, out, err) in plain.items():
        assert (faults(out + err, "utf-8"), b"\x1b" in out + err) == ([], False), name
    for name in ("list", "show", "compare"):
        out = plain[name][1].decode()
        assert "x" * 2_001 not in out
        assert r"\x1b]0;owned\x07\x9b31m" in out
        assert "[red]a[/red]" in out
    assert b"\\u001b]0;owned" in plain["show-json"][1]


def check(name: str, cwd: Path, plain: dict[str, tuple[int, bytes, bytes]], commands: list[str]) -> None:
    environment, streams = ENVIRONMENTS[name]
    encoding = environment.get("PYTHONIOENCODING") or "utf-8"
    is_full = streams.get("stdout") == "/dev/full"
    for command, (code, out, err) in run_all(cwd, commands, environment, streams).items():
        assert [*faults(out, encoding), *faults(err, encoding)] == [], command
        expected, output, _ = plain[command]
        assert code == expected or (is_full and output), (command, code, err[-300:])
        assert not (is_full and code == 1), f"{command}: a full device is no regression"


def always_tried(name: str) -> list[str]:
    """Commands that are quick; without streams also an experiment, whose servers have none either."""
    return [command for command in COMMANDS if command not in TAKE_LONG or (name, command) == ("no-streams", "run")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALWAYS)
def test_commands_do_the_same_in_an_unusual_environment(
    name: str, prepared: Path, plain: dict[str, tuple[int, bytes, bytes]], tmp_path: Path
) -> None:
    shutil.copytree(prepared, tmp_path / "w")
    check(name, tmp_path / "w", plain, always_tried(name))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_command_does_the_same_in_every_environment(
    name: str, prepared: Path, plain: dict[str, tuple[int, bytes, bytes]], tmp_path: Path
) -> None:
    shutil.copytree(prepared, tmp_path / "w")
    check(name, tmp_path / "w", plain, list(COMMANDS) if name in THOROUGH else always_tried(name))


def test_bytes_that_are_no_text_in_the_command_line_are_kept_as_escapes(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "results", os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", **ASCII}

    def output(*args: str | bytes) -> bytes:
        argv = ["sh", "-c", f'{NO_ROOM_FOR_PICTURES}; exec "$0" -m benchctl "$@"', sys.executable, *args]
        return subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, check=True).stdout

    simulated = ["simulate", "--profile", "ci-smoke", "--engine", "sim-exact", "--blocks", "1", "--quiet", *FEW]
    output(*simulated, "--label", b"\xff\x1b", "--output-dir", b"own\xff")
    (entry,) = json.loads(output("list", b"own\xff", "--json"))["results"]
    assert entry["label"] == "\\udcff\x1b"
    assert faults(output("list", b"r\xff/h"), "ascii") == []


PRINTING = "from benchctl.cli.failures import drawing, steady_streams; import sys; steady_streams(); "
CONTROLS = r"a\x1b]0;title\x07\x9b31m\u202e\ud800\x7fb"
COMPARE = ("compare", "results/example:baseline", "results/example:guided")
RED = "\x1b[31m"


def at_terminal(
    *args: object,
    program: str = "",
    code: int = 0,
    columns: int = 160,
    streams: Iterable[str] = ("stdin", "stdout", "stderr"),
    **env: str,
) -> str:
    """What ``benchctl ARGS``, or a program with steady streams, writes to a terminal that is all of ``streams``."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, columns))
    without = {"CI", "COLUMNS", "COLORTERM", "FORCE_COLOR", "NO_COLOR"}
    variables = {name: value for name, value in os.environ.items() if name not in without}
    variables |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **env}
    argv = [sys.executable, "-c", PRINTING + program] if program else [preloaded_directory() / "benchctl", *args]
    terminal = {name: theirs if name in streams else subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen([*map(str, argv)], cwd=ROOT, env=variables, **terminal) as process:
        os.close(theirs)
        content = b""
        with suppress(OSError):  # the other end is closed
            while piece := os.read(ours, 65536):
                content += piece
        os.close(ours)
    assert process.returncode == code, content
    return content.decode()


def test_verdicts_have_colours_at_a_terminal_that_wants_some_and_nowhere_else() -> None:
    output = at_terminal(*COMPARE, code=1)
    assert f"{RED}regression" in output
    assert f"{RED}(" not in output  # exploratory metrics decide nothing
    for options, env in (((), {"NO_COLOR": "1"}), (("--json",), {}), (("--markdown",), {})):
        output = at_terminal(*COMPARE, *options, code=1, **env)
        assert ("regression" in output, "31m" in output) == (True, False), options
    assert "\x1b" not in printed(*COMPARE, code=1, cwd=ROOT)


def test_a_list_fits_the_terminal_or_a_pipe_and_still_tells_directories_apart(tmp_path: Path) -> None:
    profile = "a-profile-with-a-long-name"
    for number, state in enumerate(("done", "failed", "interrupted")):
        results = write_results(tmp_path / profile / f"20261123T02000{number}Z-0fdbff68", state=state)
        edit_manifest(results, profile=profile, label="a remark " * 8)
    shown = [(columns, at_terminal("list", tmp_path, columns=columns, streams=["stdout"])) for columns in (90, 220)]
    for columns, text in (*shown, (120, printed("list", tmp_path, COLUMNS=""))):
        lines = COLOURS.sub("", text).splitlines()
        assert max(map(len, lines)) <= columns
        names = {word for line in lines for word in line.split() if "/2026" in word}
        assert names == {f"{profile}/20261123T02000{i}Z-0fdbff68" for i in range(3)}
        assert all(state in text for state in ("done", "failed", "interrupted"))
        assert ("no room for the columns created, profile" in text) is (columns < 220)


def printed_by(program: str, **env: str) -> bytes:
    """What a program with steady streams writes to stdout."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    environment = {**rest, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-c", PRINTING + program], env=environment, capture_output=True, check=True
    ).stdout


def test_a_pipe_and_a_terminal_get_control_characters_as_escapes() -> None:
    assert printed_by(f'print("{CONTROLS}\\n\\tnext")').decode() == f"{CONTROLS}\n\tnext\n"
    assert at_terminal(program=f'print("{CONTROLS}\\x1b[31mred")') == f"{CONTROLS}\\x1b[31mred\r\n"


def test_libraries_that_draw_may_colour_and_return_and_nothing_else() -> None:
    drawn = r'"\x1b[1;31mred\x1b[0m\r\x1b[Aup\x1b]0;title\x07\x1b[2J"'
    expected = "\x1b[1;31mred\x1b[0m\r\x1b[Aup\\x1b]0;title\\x07\\x1b[2J"
    assert at_terminal(program=f"drawing(sys.stdout).write({drawn})") == expected


def test_a_table_has_our_colours_and_shows_those_of_a_label() -> None:
    table = (
        "from rich.table import Table; from benchctl.cli.screen import verdict_text, text_console; "
        r't = Table(r"\x1b[31m[red]h :x:"); t.add_row("\x1b[31m[red]label[/red] :x:"); '
        't.add_row(verdict_text("regression")); text_console().print(t)'
    )
    shown = at_terminal(program=table)
    for text in ("\\x1b[31m[red]label[/red] :x:", "\\x1b[31m[red]h :x:", "\x1b[31mregression\x1b[0m"):
        assert text in shown


def test_a_terminal_gets_bars_and_one_without_a_width_lines_because_bars_would_be_invisible() -> None:
    program = """
import termios
from benchctl.cli.conduct import experiment_progress
from benchctl.records.record import PlannedRun, RunRecord
fields = dict(index=0, run_id="000-b0-baseline", block=0, position=0, variant="baseline", cell={})
for columns in (100, 0):
    termios.tcsetwinsize(1, (30, columns))
    with experiment_progress(1, 1, is_quiet=False) as listener:
        listener.on_run_start(PlannedRun(**fields), 1)
        listener.on_run_end(PlannedRun(**fields), RunRecord(**fields, schema_version=3, state="done"))
    print("THEN")
"""
    for shown, has_bars in zip(at_terminal(program=program).split("THEN"), (True, False), strict=False):
        assert ("runs: 100%" in shown, "[1/1] 000-b0-baseline" in shown) == (has_bars, not has_bars), shown


def test_a_terminal_shows_numbers_of_the_load_and_a_pipe_ci_and_quiet_make_none() -> None:
    program = """
import os, sys, termios
from benchctl.cli.conduct import experiment_progress
def show(is_quiet):
    with experiment_progress(1, 1, is_quiet=is_quiet) as listener:
        print(f"is made: {listener.on_live is not None}")
        if listener.on_live:
            listener.on_live(("1,702 tokens/s", "64 open", "TTFT p50 41.0, p99 96.0 ms"))
    print("THEN")
for columns in (100, 40):
    if sys.stdout.isatty():
        termios.tcsetwinsize(1, (30, columns))
    show(False)
show(True)
os.environ["CI"] = "1"
show(False)
"""
    wide, narrow, *none = at_terminal(program=program).split("THEN")[:4]
    assert "1,702 tokens/s; 64 open; TTFT p50 41.0, p99 96.0 ms" in wide
    assert "1,702 tokens/s; 64 open" in narrow
    assert "TTFT" not in narrow
    none += printed_by(program).decode().split("THEN")[:4]
    for shown in (wide, narrow):
        assert ("is made: True" in shown, "is made: False" in shown) == (True, False)
    for shown in none:
        assert ("is made: False" in shown, "is made: True" in shown, "tokens/s" in shown) == (True, False, False)


def test_a_load_at_a_terminal_shows_its_numbers_and_prints_none_of_them(tmp_path: Path) -> None:
    sizes = ("--num-prompts", "60", "--max-concurrency", "4", "--input-len", "20", "--output-len", "16")
    with sim_server(tmp_path / "server", time_scale=2.0) as server:
        words = ("load", server.client.base_url, *sizes, "--goodput", "e2el:60000")
        shown = at_terminal(*words, "-o", tmp_path / "shown")
        silent = at_terminal(*words, "--json", "-o", tmp_path / "silent")
        assert re.search(r"\d tokens/s; [0-4] open; 100% within the objective; TTFT p50 [\d.]+", shown)
    assert "tokens/s; " not in silent


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
    output = printed_by(f'from benchctl.cli.screen import print_json; print_json({{"a": "{CONTROLS}\\u2028é😀"}})')
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
    assert r" \x1b[2Jxxx" in told
    assert r"  | \x1b]0;owned\x07\x9b31m" in told
    assert len(told) < 2_200


def test_a_warning_is_named_with_the_first_run_that_has_it_and_with_each_suspect_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    planned = PlannedRun(index=0, run_id="r", block=0, position=0, variant="baseline", cell={})
    with experiment_progress(3, 9, is_quiet=True) as listener:
        for state, codes in (("done", "a"), ("done", "ab"), ("done", "ab"), ("suspect", "ab")):
            warnings = [{"code": code, "message": "long"} for code in codes]
            ended = {**msgspec.to_builtins(planned), "schema_version": 3, "state": state, "warnings": warnings}
            listener.on_run_end(planned, msgspec.convert(ended, RunRecord))
    ends = [line.partition("; ")[2] for line in capsys.readouterr().err.splitlines()]
    assert ends == ["a", "b", "", "a, b"]


def in_shell(line: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of bash."""
    path = f"{preloaded_directory()}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line],
        cwd=cwd, env={**os.environ, "PATH": path, **env}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_full_device_behind_the_output_is_one_message_and_no_success(tmp_path: Path) -> None:
    done = in_shell("benchctl profiles list > /dev/full", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the output: No space left on device; free space there, or name another directory" in done.stderr
    assert "kept" not in done.stderr
    assert in_shell("benchctl --version > /dev/full", tmp_path).returncode == 2


IN_NO_DIRECTORY = (
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
    for command in IN_NO_DIRECTORY:
        code, _, message = in_process(*command.split())
        assert code in {0, 2}, (command, message)
        assert "kept" not in message, command
        if code and "Usage:" not in message:
            assert message.endswith("\nbenchctl: the current directory was deleted; cd to another one\n"), command


def completed(words: str, cwd: Path, **env: str) -> list[str]:
    """What bash would offer for the last of ``words``; with ``env``, which imports read, in a new interpreter."""
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
    for shell in ("bash", "zsh", "fish"):
        assert "_BENCHCTL_COMPLETE" in printed(cwd=tmp_path, _BENCHCTL_COMPLETE=f"source_{shell}")


def test_result_directories_are_completed_from_the_parent_that_the_environment_names(tmp_path: Path) -> None:
    for root in ("results", "elsewhere"):
        write_results(tmp_path / root / "x" / f"of-{root}", block_factors=({"baseline": 1.0, "guided": 1.1},))
        (tmp_path / root / "x" / "latest").symlink_to(f"of-{root}")
    assert completed("benchctl show results/x/l", tmp_path) == ["results/x/latest"]
    offered = completed("benchctl show else", tmp_path, BENCHCTL_RESULTS="elsewhere")
    assert offered == ["elsewhere/x/latest", "elsewhere/x/of-elsewhere"]


SCIENCE = {"numpy", "scipy", "vl_convert"}
NETWORK = {"httpx", "uvicorn"}
NOT_IMPORTED: dict[str, tuple[list[str], str | None, set[str]]] = {
    "help": (
        ["--help"],
        None,
        {
            "benchctl.cli.conduct",
            "benchctl.cli.screen",
            "msgspec",
            "psutil",
            "pydantic",
            "rich",
            *SCIENCE,
            *NETWORK,
        },
    ),
    "completion": (
        ["--help"],
        "benchctl sp",
        {"benchctl.cli.conduct", "benchctl.cli.screen", "msgspec", *SCIENCE, *NETWORK},
    ),
    "help of run": (
        ["run", "--help"],
        None,
        {"benchctl.cli.conduct", "pydantic", "rich.traceback", *SCIENCE, *NETWORK},
    ),
    "profiles": (["profiles", "list"], None, {"pydantic", "psutil", *SCIENCE, *NETWORK}),
    "profile": (["profiles", "show", "ci-smoke"], None, {*SCIENCE, *NETWORK}),
}
"""Words of commands, words to complete, and modules that would make the command begin late."""


@pytest.mark.parametrize("name", NOT_IMPORTED)
def test_a_command_imports_nothing_large_that_it_does_not_use(name: str) -> None:
    command, words, heavy = NOT_IMPORTED[name]
    completing = {"_BENCHCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "1"} if words else {}
    code = (
        "import sys\nfrom benchctl.cli.app import app\n"
        f"try:\n    app({command}, prog_name='benchctl')\n"
        "finally:\n    print('loaded', *sys.modules)\n"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env={**os.environ, **completing}, capture_output=True, text=True, check=False)
    loaded = set(done.stdout.partition("loaded ")[2].split())
    assert "benchctl.cli.app" in loaded, done.stderr
    assert not loaded & heavy


SMALLEST = """\
seed: 1
blocks: 1
engine: {kind: sim, options: {time_scale: 100.0}}
model: qwen2.5-7b
hardware: h100-sxm
workload:
  dataset: generated
  num_prompts: 1
  samples_per_prompt: 1
  output_len: 2
  arrival: {kind: closed-loop, max_concurrency: 1}
  num_warmups: 0
variants:
  baseline: {}
"""
CODE_OF_RUN = """\
import os, signal, sys
from benchctl.cli import conduct, main
from benchctl.measure.sending import ServerUnderTest
from benchctl.measure.server.server import ServerProcess
enter, send = ServerProcess.__enter__, ServerUnderTest.send_load
def launched(server):
    print("launched", *sys.modules)
    return enter(server)
async def sent(*load):
    before = set(sys.modules)
    await send(*load)
    print("loaded", len(before), *(sys.modules.keys() - before))
    os.kill(os.getpid(), signal.SIGINT)
ServerProcess.__enter__, ServerUnderTest.send_load = launched, sent
"""


def run_of(tmp_path: Path, more: str = "") -> subprocess.CompletedProcess[str]:
    """A run of one request, which prints what was imported until its server was launched, and during its load,
    and is then interrupted.
    """
    (tmp_path / "smallest.yaml").write_text(SMALLEST)
    argv = [sys.executable, "-c", f"{CODE_OF_RUN}{more}main()", "run", "smallest.yaml", "-o", "out"]
    return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)


def test_run_imports_what_only_judges_after_its_server_was_started_and_nothing_during_the_load(
    tmp_path: Path,
) -> None:
    done = run_of(tmp_path)
    assert done.returncode == 130, done.stderr
    lines = {line.partition(" ")[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert "benchctl.measure.run" in lines["launched"]
    judging = {"benchctl.analysis.compare", "benchctl.analysis.experiment", "benchctl.report", "jinja2", "pygments"}
    assert not {*judging, *SCIENCE} & set(lines["launched"])
    assert lines["loaded"][1:] == []


def test_an_interrupt_while_run_imports_what_judges_ends_the_server_and_is_recorded(tmp_path: Path) -> None:
    interrupts = "conduct._import_what_judges = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
    done = run_of(tmp_path, interrupts)
    assert done.returncode == 130, done.stderr
    assert "\nloaded " not in done.stdout
    (run,) = load_results(tmp_path / "out").runs
    assert run.record.failure is not None
    assert (run.record.failure.cause, run.record.num_sent) == ("interrupted", 0)
    assert processes_of(str(tmp_path)) == []
