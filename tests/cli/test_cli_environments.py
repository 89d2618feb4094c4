"""Commands on texts that try everything, everywhere: same exit code, no traceback, no control sequence."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.results.hostile import HOSTILE, write_hostile

from benchctl.untrusted.text import escaped

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "support" / "servers" / "programs" / "many_commands.py"
DIRECTORY = "results/h/r"
TINY = ["run", "ci-smoke", "--engine", "sim-exact", "--blocks", "1", "--quiet", "--no-store-noise"]
TINY += ["--set", "workload.num_prompts=1", "--set", "workload.output_len=4", "--label", HOSTILE]
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
ALWAYS = ("c-locale", "no-streams", "both-full")
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
    contents = [[_content(cwd / f"{name}.{end}") for end in ("out", "err")] for name in commands]
    assert not (cwd / "escaped.txt").exists(), (cwd / "escaped.txt").read_text(encoding="utf-8")
    return {name: (code, out, err) for name, code, (out, err) in zip(commands, codes, contents, strict=True)}


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


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
        assert faults(out + err, "utf-8") == [], name
        assert b"\x1b" not in out + err, name
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
        argv = [sys.executable, "-m", "benchctl", *args]
        return subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, check=True).stdout

    simulated = ["simulate", "--profile", "ci-smoke", "--engine", "sim-exact", "--blocks", "1", "--quiet"]
    output(*simulated, "--label", b"\xff\x1b", "--output-dir", b"own\xff")
    (entry,) = json.loads(output("list", b"own\xff", "--json"))["results"]
    assert entry["label"] == "\\udcff\x1b"
    assert faults(output("list", b"r\xff/h"), "ascii") == []
