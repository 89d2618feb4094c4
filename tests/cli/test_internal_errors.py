"""Whatever is nobody's error but ours: exit code 70 and two lines; never a verdict."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import typer

from benchctl import errors
from benchctl.cli import _run
from benchctl.cli.app import COMMANDS, load_command
from benchctl.errors import RunError, UsageError

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "benchctl"]
SHORT = ["run", "ci-smoke", "--engine", "sim-exact", "--blocks", "1", "--quiet", "--set", "workload.num_prompts=1"]


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams and handlers of this process stay as they are."""
    monkeypatch.setattr("benchctl.cli.steady_streams", lambda: None)
    monkeypatch.setattr("benchctl.cli._handle_signals", lambda: None)


def run_planted(names: tuple[str, ...], error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command that does nothing but raise ``error``; returns the exit code."""
    command = load_command(names[0])
    leaf = command if len(names) == 1 else command.commands[names[1]]

    def fail() -> None:
        raise error

    leaf.params, leaf.callback = [], fail
    monkeypatch.setattr("benchctl.cli.app.load_command", lambda _name: command)
    monkeypatch.setattr(sys, "argv", ["benchctl", *names])
    return _run()


def test_a_mistake_in_any_command_is_70_with_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        (name, child) for name in COMMANDS for child in getattr(load_command(name), "commands", None) or [""]
    ]
    assert len(commands) > 40
    assert {("run", ""), ("noise", "add"), ("micro", "forward"), ("simulate", "sweep")} <= {*commands}
    for name, child in commands:
        names = (name, child) if child else (name,)
        assert run_planted(names, KeyError("planted"), monkeypatch) == 70
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith(f"benchctl: internal error in 'benchctl {' '.join(names)}' (version ")
        assert first.endswith("): KeyError: 'planted'")
        assert second.endswith("which is printed with BENCHCTL_TRACEBACK=1")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecursionError("too deep"), 70),
        (AssertionError(), 70),
        (ImportError("cannot import name 'x'"), 70),
        (SystemExit(1), 70),
        (SystemExit("text"), 70),
        (SystemExit(0), 0),
        (ExceptionGroup("tasks", [KeyError("x"), UsageError("y")]), 70),
        (ExceptionGroup("tasks", [ExceptionGroup("inner", [UsageError("y")])]), 2),
        (ExceptionGroup("tasks", [RunError("y"), ConnectionResetError()]), 5),
        (BaseExceptionGroup("tasks", [KeyboardInterrupt(), KeyError("x")]), 130),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 2),
        (OSError(24, "Too many open files"), 2),
        (RuntimeError("can't start new thread"), 2),
        (ImportError("libx.so: failed to map segment from shared object"), 2),
        (BrokenPipeError(32, "Broken pipe"), 2),
        (typer.Abort(), 2),
        (typer.BadParameter("no"), 2),
        (typer.Exit(1), 1),
        (typer.Exit(3), 3),
    ],
    ids=repr,
)
def test_each_kind_of_error_has_its_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_planted(("list",), error, monkeypatch) == code


def test_a_damaged_installation_is_named_with_the_command_that_repairs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_planted(("list",), ModuleNotFoundError("No module named 'msgspec'"), monkeypatch)
    assert "the installation is damaged; run '" in (text := capsys.readouterr().err)
    assert "-m pip install --force-reinstall benchctl'; the traceback is printed with" in text


def test_neither_the_message_nor_the_traceback_holds_a_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", "key-of-mine-123")
    monkeypatch.setenv("BENCHCTL_TRACEBACK", "1")
    run_planted(("list",), ValueError("refused key-of-mine-123 and hf_abcdefghijklmnop"), monkeypatch)
    text = capsys.readouterr().err
    assert "in fail\n" in text
    for secret in ("key-of-mine-123", "hf_abcdefghijklmnop"):
        assert secret not in text


def ended(cwd: Path, *args: str, planted: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
    """Run ``benchctl`` in a new interpreter that executes ``planted`` at its start."""
    (cwd / "sitecustomize.py").write_text(planted)
    return subprocess.run(
        [*COMMAND, *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{cwd}:{ROOT}", "XDG_STATE_HOME": str(cwd / "state"), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def failing_import(name: str, what: str) -> str:
    """A program in which the import of ``name`` fails."""
    return (
        "import sys\n"
        "class Failing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {name!r}:\n"
        f"            raise {what}\n"
        "sys.meta_path.insert(0, Failing())\n"
    )


def test_an_installation_without_a_module_is_70_and_no_traceback(tmp_path: Path) -> None:
    for module, args in (
        ("benchctl.errors", ["list"]),
        ("benchctl.cli", ["list"]),
        ("typer", ["--help"]),
        ("benchctl.cli.failures", ["--version"]),
        ("msgspec", ["list"]),
    ):
        done = ended(tmp_path, *args, planted=failing_import(module, f"ImportError('no {module}')"))
        assert (done.returncode, done.stderr.count("\n")) == (70, 2), done.stderr
        assert "Traceback" not in done.stderr, module
        assert "-m pip install --force-reinstall benchctl" in done.stderr, module


def test_a_traceback_is_printed_where_the_variable_asks_for_it(tmp_path: Path) -> None:
    planted = failing_import("benchctl.report.export", "KeyError('planted')")
    quiet = ended(tmp_path, "list", planted=planted)
    loud = ended(tmp_path, "list", planted=planted, BENCHCTL_TRACEBACK="1")
    assert (quiet.returncode, loud.returncode) == (70, 70)
    assert "Traceback (most recent call last)" not in quiet.stderr
    assert "Traceback (most recent call last)" in loud.stderr


def test_an_interrupt_before_the_command_line_is_imported_is_silent(tmp_path: Path) -> None:
    planted = failing_import("benchctl.cli", "__import__('signal').raise_signal(2) or ValueError()")
    done = ended(tmp_path, "list", planted=planted)
    assert (done.returncode, done.stderr) == (130, "")


def test_an_interrupt_that_a_library_makes_an_error_of_its_own_is_still_one(tmp_path: Path) -> None:
    """pydantic does so while it builds a model."""
    planted = (
        "import signal\n"
        "def interrupted():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt as error:\n"
        "        return ValueError(f'cannot build: {error!r}')\n"
    ) + failing_import("benchctl.report.export", "interrupted()")
    done = ended(tmp_path, "list", planted=planted)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.slow
def test_a_mistake_in_mid_run_leaves_no_run_and_no_server_behind(tmp_path: Path) -> None:
    planted = (
        "import sys\n"
        "class Planting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'benchctl.cli.screen':\n"
        "            import benchctl.measure.run as run\n"
        "            def fail(*_): raise NameError('planted')\n"
        "            run._write_steps = fail\n"
        "sys.meta_path.insert(0, Planting())\n"
    )
    done = ended(tmp_path, *SHORT, planted=planted)
    assert done.returncode == 70, done.stderr
    assert "Traceback" not in done.stderr
    (manifest,) = tmp_path.glob("results/*/2*/manifest.json")
    assert json.loads(manifest.read_bytes())["state"] == "failed"
    (record,) = (json.loads(path.read_bytes()) for path in manifest.parent.glob("runs/*/run.json"))
    assert record["state"] == "failed"
    assert record["failure"] == {"cause": "internal-error", "message": "NameError: planted"}
    assert record["times"]["stop_ns"]


def test_the_exit_code_1_is_that_of_a_verdict_alone() -> None:
    """``compare`` takes it from its verdict; two other commands find what is wrong with a load."""
    ends = re.compile(r"(?:Exit|exit)\((?:code=)?1\)|^_\w+: Final = 1$", re.MULTILINE)
    sources = {path.name: ends.findall(path.read_text()) for path in (ROOT / "benchctl" / "cli").rglob("*.py")}
    assert {name: places for name, places in sources.items() if places} == {
        "workloads.py": ["Exit(1)"],
        "simulate.py": ["_NO_OBJECTIVE_HELD: Final = 1"],
    }
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert {kind.exit_code for kind in classes if issubclass(kind, errors.BenchctlError)} == {2, 4, 5}


def script(directory: Path) -> list[str]:
    """The console script that an installation makes of the entry point in ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["benchctl"].partition(":")
    path = directory / "benchctl"
    path.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return [sys.executable, str(path)]


@pytest.mark.slow
@pytest.mark.parametrize(("start", "args"), [("module", ["list"]), ("script", ["run", "ci-smoke", "--dry-run"])])
def test_an_interrupt_at_any_moment_is_silent(tmp_path: Path, start: str, args: list[str]) -> None:
    """Before the first line of benchctl Python itself handles it, and says where it was: that is not ours."""
    (tmp_path / "results").mkdir()
    command = COMMAND if start == "module" else script(tmp_path)
    codes = set()
    for delay_ms in range(0, 300, 30):
        with subprocess.Popen(
            [*command, *args], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            time.sleep(delay_ms / 1000)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        assert f'File "{ROOT}/benchctl' not in stderr, (delay_ms, stderr)
        if process.returncode not in {0, 130}:
            assert process.returncode in {-signal.SIGINT, 1}, (delay_ms, process.returncode, stderr)
            assert "benchctl: " not in stderr
        elif process.returncode == 130:
            assert stderr == "", (delay_ms, stderr)
        codes.add(process.returncode)
    assert 130 in codes
