"""A real Slurm of two nodes with two fake GPUs each on this machine, and experiments that it measures."""

import datetime as dt
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from support.cli import printed
from support.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = _ROOT.parent / "shared" / "tools" / "slurm_local.sh"
NODES, GPUS = 2, 2
_SOON = dt.timedelta(seconds=10)
_HASTY = """
from benchctl.cli import main
from benchctl.cluster import slurm
from benchctl.report import export
slurm._POLL_S, export.why_not_drawn = 0.5, lambda: "a test does without"
main()
"""


def missing_slurm() -> str | None:
    """The reason why no Slurm can be started here; None where it can."""
    if not _SCRIPT.exists():
        return f"{_SCRIPT} does not exist"
    if shutil.which("slurmctld") is None and shutil.which("apt-get") is None:
        return "slurmctld is not installed, and there is no apt-get to install it"
    return None if os.geteuid() == 0 else "a Slurm of tests is started as root"


@dataclass(frozen=True)
class Slurm:
    """A running Slurm."""

    directory: Path
    environment: dict[str, str]

    def command(self, *words: object) -> str:
        """The output of a program of Slurm."""
        return subprocess.run(
            list(map(str, words)), env=os.environ | self.environment, check=True, capture_output=True, text=True
        ).stdout

    def printed(self, *args: object, **options: Any) -> str:
        """The output of benchctl as on a login node, where it succeeds."""
        return printed(*args, **{"CI": "1", **self.environment, **options})

    def start(self, *args: object, cwd: Path, **env: str) -> "subprocess.Popen[str]":
        """The same in a new interpreter, without waiting for its end; it asks the queue each half second."""
        argv = [sys.executable, "-c", _HASTY, *map(str, args)]
        environment = os.environ | {"CI": "1", "PYTHONPATH": str(_ROOT)} | self.environment | env
        return subprocess.Popen(
            argv, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def end(self, command: "subprocess.Popen[str]") -> tuple[int, str]:
        """Exit code and output of a command that ends by itself, while tasks that were queued again begin soon."""

        def has_ended() -> bool:
            self.begin_soon()
            return command.poll() is not None

        until("the end of the command", has_ended)
        output = command.communicate(timeout=10)[0]
        return command.returncode, output

    def resume_nodes(self, name: str) -> None:
        """Let a node take tasks again, and wait until both do."""
        with suppress(subprocess.CalledProcessError):  # it may be up by itself
            self.command("scontrol", "update", f"NodeName={name}", "State=RESUME")
        until("idle nodes", lambda: self.command("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(NODES))

    def queue(self) -> dict[str, str]:
        """State of each task that is queued or runs, by its name."""
        lines = self.command("squeue", "--noheader", "--array", "--format", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_empty(self) -> None:
        """Wait until no task is queued or runs."""
        until("an empty queue", lambda: not self.queue())

    def begin_soon(self) -> None:
        """Let tasks begin in three seconds that Slurm holds back for two minutes after they were queued again.

        Not at once: a node refuses the credential of a job that was made in the second in which it ended the job's
        last attempt, and the job fails.
        """
        waiting = self.command("squeue", "--noheader", "--array", "--states=PENDING", "--format", "%i %S")
        soon = dt.datetime.now().astimezone() + _SOON
        for task, begins_at in (line.split() for line in waiting.splitlines()):
            if begins_at == "N/A" or dt.datetime.fromisoformat(begins_at).astimezone() < soon:
                continue
            subprocess.run(
                ["scontrol", "update", f"JobId={task}", "StartTime=now+3"],
                env=os.environ | self.environment,
                check=False,  # it may begin meanwhile
                capture_output=True,
            )

    def processes_on(self, node: str) -> list[psutil.Process]:
        """The processes of tasks on a node, without the daemons of Slurm."""
        return [
            process
            for process in psutil.process_iter()
            if _environment_of(process).get("SLURMD_NODENAME") == node and self._is_ours(process)
        ]

    def _is_ours(self, process: psutil.Process) -> bool:
        return _environment_of(process).get("SLURM_CONF") == self.environment["SLURM_CONF"]

    def measuring(self, block: int) -> psutil.Process:
        """The process that measures a block, once there is one."""
        words = f" run --block {block} "

        def measuring() -> list[psutil.Process]:
            listed = psutil.process_iter(["cmdline"])
            return [
                each for each in listed if words in " ".join(each.info["cmdline"] or []) and self._is_ours(each)
            ]

        process: psutil.Process = until(f"the measuring of block {block}", measuring)[0]
        return process


def _environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


until = partial(wait_until, limit_s=120.0, pause_s=0.2)
"""Waiting for what Slurm does, which is asked for by starting programs."""


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """A Slurm that ends with the context. Paths of its sockets are short."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        for _ in range(3):  # its ports are chosen at random
            started = subprocess.run(
                [_SCRIPT, "start", directory, str(NODES), str(GPUS)], check=False, capture_output=True, text=True
            )
            conf = started.stdout.strip().rpartition("export SLURM_CONF=")[2]
            slurm = Slurm(directory, {"SLURM_CONF": conf})
            if started.returncode == 0 and conf and "idle" in slurm.command("sinfo"):
                break
            subprocess.run([_SCRIPT, "stop", directory], check=False, capture_output=True)
        else:
            pytest.skip(f"no Slurm starts here: {started.stderr[-300:]}")
        yield slurm
    finally:
        _stop(directory)


def _stop(directory: Path) -> None:
    environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf")}
    subprocess.run(["scancel", "--me", "--signal=KILL"], env=environment, check=False, capture_output=True)
    subprocess.run(["scancel", "--me"], env=environment, check=False, capture_output=True)
    pids = [
        int(path.read_text()) for path in (*directory.glob("*.pid"), directory / "munge" / "pid") if path.exists()
    ]
    subprocess.run([_SCRIPT, "stop", directory], check=False, capture_output=True)
    daemons = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    for process in psutil.wait_procs(daemons, timeout=10)[1]:
        process.kill()
    for process in psutil.process_iter():  # tasks of a node whose daemon was killed
        if _environment_of(process).get("SLURM_CONF") == environment["SLURM_CONF"] and process.pid != os.getpid():
            process.send_signal(signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


def write_profile(path: Path, *, blocks: int, tokens: int, has_two_arms: bool = True, **cluster: object) -> Path:
    """A profile of two equal arms, or one, on the exact simulator, whose answers have ``tokens`` tokens."""
    again = {"again": {"server": {"block_size": 32}}} if has_two_arms else {}
    document = {
        "name": "handed-out",
        "engine": "sim-exact",
        "blocks": blocks,
        "workload": {
            "dataset": "synthetic",
            "num_prompts": 2,
            "input_len": 16,
            "output_len": tokens,
            "arrival": {"kind": "closed-loop", "max_concurrency": 2},
        },
        "variants": {"baseline": {}, **again},
        "telemetry": {"gpu_hz": 0},
        "cluster": {"gpus_per_block": 1, "time": 5, **cluster},
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path
