"""How commands end that cannot do their work: a mistake of ours is 70, a limit of the machine has a remedy."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import typer
from support.cli import NO_ROOM_FOR_PICTURES, in_process, printed

from benchctl.cli.app import COMMANDS, load_command
from benchctl.errors import RunError, UsageError
from benchctl.measure.machine import OWN_OPEN_FILES

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "benchctl"]


def ended_by(error: BaseException, *names: str) -> tuple[int, str]:
    """Exit code and messages of a command that does nothing but raise ``error``."""
    command = load_command(names[0])
    leaf = command if len(names) == 1 else command.commands[names[1]]
    leaf.params, leaf.callback = [], mock.Mock(side_effect=error)
    with mock.patch("benchctl.cli.app.load_command", return_value=command):
        code, _, message = in_process(*names)
    return code, message


def test_a_mistake_in_any_command_is_70_with_two_lines() -> None:
    commands = [
        (name, child) for name in COMMANDS for child in getattr(load_command(name), "commands", None) or [""]
    ]
    assert len(commands) > 40
    assert {("run", ""), ("noise", "add"), ("micro", "forward"), ("simulate", "sweep")} <= {*commands}
    for name, child in commands:
        names = (name, child) if child else (name,)
        code, message = ended_by(KeyError("planted"), *names)
        first, second = message.splitlines()
        assert code == 70
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
def test_each_kind_of_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert ended_by(error, "list")[0] == code


def test_neither_the_message_nor_the_traceback_holds_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "key-of-mine-123")
    monkeypatch.setenv("BENCHCTL_TRACEBACK", "1")
    _, text = ended_by(ValueError("refused key-of-mine-123 and hf_abcdefghijklmnop"), "list")
    assert "Traceback (most recent call last)" in text
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
        assert "the installation is damaged" in done.stderr, module
        assert "-m pip install --force-reinstall benchctl" in done.stderr, module


def test_an_interrupt_is_silent_before_the_command_line_is_imported_and_where_a_library_makes_an_error_of_it(
    tmp_path: Path,
) -> None:
    """pydantic does so while it builds a model."""
    planted = failing_import("benchctl.cli", "__import__('signal').raise_signal(2) or ValueError()")
    done = ended(tmp_path, "list", planted=planted)
    assert (done.returncode, done.stderr) == (130, "")
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
    done = ended(tmp_path, "run", "ci-smoke", *SIM.split(), "--set", "workload.num_prompts=1", planted=planted)
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


@pytest.mark.slow
def test_an_interrupt_at_any_moment_is_silent(tmp_path: Path) -> None:
    """Before the first line of benchctl Python itself handles it, and says where it was: that is not ours."""
    codes = set()
    for delay_ms in range(0, 300, 20):
        with subprocess.Popen(
            [*COMMAND, "run", "ci-smoke", "--dry-run"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
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


ALONE = "--set variants.guided=null --set allowed_differences=[] --set sweep.top_k=null"
"""The baseline alone: one run of one server."""
SIM = f"--engine sim-exact --blocks 1 --quiet --set engine.options.time_scale=20 {ALONE}"
STREAMS = "--set workload.num_prompts=64 --set workload.arrival.max_concurrency=64 --set workload.output_len=4"


def in_shell(line: str, cwd: Path, *, isolated: bool = False, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of bash; ``isolated`` with mounts of its own, as root of them."""
    return subprocess.run(
        [*(["unshare", "-rm"] if isolated else []), "bash", "-c", f"{NO_ROOM_FOR_PICTURES}; {line}"],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(cwd / "state"),
            "benchctl": f"{sys.executable} -m benchctl",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@cache
def can_mount() -> bool:
    program = shutil.which("unshare")
    return program is not None and (
        subprocess.run([program, "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode == 0
    )


needs_mounts = pytest.mark.skipif(
    "not can_mount()", reason="needs mounts of its own: permissions do not bind the superuser"
)


def is_one_message(done: "subprocess.CompletedProcess[str]") -> bool:
    """Whether stderr holds one message of benchctl, beside warnings, and nothing of Python's."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    return len(lines) == 1 and lines[0].startswith("benchctl: ")


def failures_in(directory: Path) -> list[tuple[str, str]]:
    """Cause and message of every run that an experiment left."""
    records = [json.loads(path.read_bytes()) for path in directory.glob("results/ci-smoke/2*/runs/*/run.json")]
    assert records
    return [(record["failure"]["cause"], record["failure"]["message"]) for record in records]


def test_limits_too_low_are_named_with_their_remedy_before_anything_is_measured(tmp_path: Path) -> None:
    streams = "64 requests are open at once, each an open file, and a process may have"
    for limit, words in (
        ("-n 16", [f"{streams} 16", f"ulimit -n {64 + OWN_OPEN_FILES}"]),
        ("-n 64", [f"{streams} 64", f"ulimit -n {64 + OWN_OPEN_FILES}", "max_concurrency to at most 32"]),
        ("-v 600000", ["ulimit -v unlimited"]),
        ("-f 1", ["File too large; raise the limit of the size of a file: ulimit -f unlimited"]),
    ):
        done = in_shell(f"ulimit {limit}; $benchctl run ci-smoke {SIM} {STREAMS}", tmp_path)
        assert done.returncode == 2, done.stderr
        assert is_one_message(done), done.stderr
        assert [text for text in words if text not in done.stderr] == []
        assert "kept" not in done.stderr
    assert list(tmp_path.glob("results/*/*/runs/*")) == []


def test_a_plan_and_the_doctor_name_the_same_limit(tmp_path: Path) -> None:
    plan = in_shell(f"ulimit -n 64; $benchctl run ci-smoke --dry-run {STREAMS}", tmp_path)
    assert plan.returncode == 0
    assert "not to be measured on this machine: 64 requests are open at once" in plan.stderr
    doctor = in_shell("ulimit -n 64; ulimit -v 800000; $benchctl doctor --json", tmp_path)
    checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
    assert checks["open files"]["finding"] == "64 at once, enough for 32 requests in flight"
    assert "ulimit -n 65536" in checks["open files"]["remedy"]
    assert "a process may reserve 819 MB of address space" in checks["memory"]["finding"]
    assert (checks["memory"]["state"], doctor.returncode) == ("missing", 2)


@pytest.mark.slow
def test_as_many_streams_as_the_message_says_are_measured_and_a_soft_limit_is_raised(tmp_path: Path) -> None:
    # A server of twenty times the speed falls behind where the machine does other work.
    run = f"$benchctl run ci-smoke {SIM} {STREAMS} --set engine.options.time_scale=1"
    for limit in ("ulimit -n 64; fewer=--set=workload.arrival.max_concurrency=32", "ulimit -S -n 64"):
        done = in_shell(f"{limit}; {run} $fewer", tmp_path)
        assert (done.returncode, "runs: 1 done" in done.stdout) == (0, True), done.stderr


@pytest.mark.slow
def test_an_open_loop_that_meets_the_limit_is_warned_of_and_its_cause_is_on_record(tmp_path: Path) -> None:
    """The number of streams of an open loop is unknown before; here the server waits for requests that fail."""
    loop = {"kind": "poisson", "request_rate": 400, "max_concurrency": "null"}
    settings = " ".join(f"--set workload.arrival.{key}={value}" for key, value in loop.items())
    line = f"ulimit -n 64; $benchctl run ci-smoke {SIM} --set workload.num_prompts=200 {settings}"
    done = in_shell(f"{line} --set timeouts.stall_s=4", tmp_path)
    assert done.returncode == 5, done.stderr
    assert "warning: 200 requests may be open at once" in done.stderr
    for cause, message in failures_in(tmp_path):
        assert (cause, "raise the limit: ulimit -n 65536" in message) == ("too-many-open-files", True)


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_that_ends_a_server_is_the_cause_on_record(tmp_path: Path) -> None:
    done = in_shell(f"ulimit -f 10; $benchctl run ci-smoke {SIM} --set workload.num_prompts=2", tmp_path)
    assert done.returncode == 5, done.stderr
    for cause, message in failures_in(tmp_path):
        assert (cause, "ulimit -f unlimited" in message) == ("file-too-large", True)


@needs_mounts
def test_a_disk_too_small_for_the_results_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    mount = "mount -t tmpfs -o size=1m none small"
    many = "--set workload.num_prompts=64 --set workload.output_len=400"
    done = in_shell(f"{mount}; $benchctl run ci-smoke {SIM} {many} --output-dir small", tmp_path, isolated=True)
    assert done.returncode == 2, done.stderr
    assert is_one_message(done)
    assert re.search(r"small: the experiment writes about [\d.]+ MB, and 1\.0 MB are free there; ", done.stderr)


@needs_mounts
def test_results_that_cannot_be_written_to_are_read_reported_elsewhere_and_not_resumed(tmp_path: Path) -> None:
    one = ("--profile", "ci-smoke", *SIM.split(), "--set", "workload.num_prompts=1")
    printed("simulate", *one, "-o", "r", cwd=tmp_path)
    mount = "rm -f r/runs/000*/run.json; mount --bind r r; mount -o remount,ro,bind r"
    for command, remedy in (
        ("report r", "Read-only file system; write the report elsewhere with -o DIR, or copy r"),
        ("run --resume r", "Read-only file system; copy r to where files can be written, and name the copy"),
    ):
        refused = in_shell(f"{mount}; $benchctl {command}", tmp_path, isolated=True)
        assert (refused.returncode, is_one_message(refused)) == (2, True), refused.stderr
        assert remedy in refused.stderr
    elsewhere = in_shell(f"{mount}; $benchctl report r -o page && $benchctl show r", tmp_path, isolated=True)
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert (tmp_path / "page" / "report.html").is_file()
