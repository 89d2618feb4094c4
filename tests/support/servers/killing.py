"""Kill one process of a server that benchctl measures, at a set moment, and see what comes of it.

Used by ``test_engines_real.py`` and ``scripts/kill_matrix``; real processes from end to end.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchctl.measure.server.process import is_alive
from benchctl.measure.server.supervise import mapped_segments, segments

FRONT_END = "front end"
MOMENTS = ("start", "warm-up", "load", "stop")
NUM_REQUESTS = 96
"""So many that a blow under load falls into the load, also where this process waits for a busy processor."""
_PROFILE = f"""\
name: killing
blocks: 1
engine: {{kind: sim}}
workload:
  dataset: generated
  num_prompts: {NUM_REQUESTS}
  output_len: 64
  num_warmups: 48
  arrival: {{kind: closed-loop, max_concurrency: 4}}
variants: {{baseline: {{}}}}
timeouts: {{ready_s: 180}}
telemetry: {{gpu_hz: 0}}
"""
_LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Blow:
    """Who is killed, with what, when; ``who`` is a part of a process title, or ``front end``."""

    engine: str
    who: str
    number: signal.Signals
    moment: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it. ``told_s`` is from the death to the record, which is written when all is cleaned up."""

    state: str
    codes: frozenset[str]
    """Of the warnings of the run."""
    cause: str
    message: str
    told_s: float
    exit_code: int
    leftovers: tuple[str, ...]


@dataclass
class _Experiment:
    """A running benchctl, every process seen below it, and the shared memory of these by its inodes."""

    benchctl: psutil.Process
    results: Path
    seen: set[psutil.Process] = field(default_factory=set)
    older_segments: set[int] = field(default_factory=lambda: set(segments()))
    segments: set[int] = field(default_factory=set)

    def written(self, name: str) -> bytes:
        """The content of a file of the run; empty where there is none."""
        paths = list(self.results.glob(f"killing/2*/runs/000-*/{name}"))
        return paths[0].read_bytes() if paths else b""

    def record(self) -> dict[str, Any]:
        return dict(json.loads(self.written("run.json") or "{}"))

    def find(self, who: str) -> psutil.Process | None:
        """The process to be killed, when it is there."""
        try:
            self.seen.update(self.benchctl.children(recursive=True))
            self.segments |= mapped_segments(process.pid for process in self.seen)
            if who == FRONT_END:
                servers = [server for supervisor in self.benchctl.children() for server in supervisor.children()]
                return servers[0] if servers else None
            return next((process for process in self.seen if is_alive(process) and who in _title(process)), None)
        except psutil.Error:
            return None

    def has_come_to(self, moment: str) -> bool:
        if moment == "start":
            return bool(self.record())
        if moment == "warm-up":
            return "warmup_start_ns" in self.record().get("times", {})
        num_ended = sum(b'"is_warmup":true' not in line for line in self.written("requests.jsonl").splitlines())
        return num_ended >= (1 if moment == "load" else NUM_REQUESTS)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def strike(blow: Blow, model: Path, directory: Path) -> Outcome:
    """Measure with ``model`` into ``directory`` and strike."""
    directory.mkdir(parents=True, exist_ok=True)
    profile = directory / "killing.yaml"
    profile.write_text(_PROFILE)
    options = ("--profile", profile, "--engine", blow.engine, "--set", f"model={model}", "--output-dir", directory)
    command = [sys.executable, "-m", "benchctl", "run", "--quiet", *map(str, options)]
    with (directory / "benchctl.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    experiment = _Experiment(benchctl=psutil.Process(process.pid), results=directory)
    try:
        victim = _wait(lambda: experiment.find(blow.who), experiment.benchctl)
        if blow.moment == "start":
            time.sleep(1.0)
        _wait(lambda: experiment.find(blow.who) and experiment.has_come_to(blow.moment), experiment.benchctl)
        victim = experiment.find(blow.who) or victim
        assert victim is not None, f"benchctl ended before: {(directory / 'benchctl.log').read_text()}"
        assert is_alive(victim), f"it was dead before: {(directory / 'benchctl.log').read_text()}"
        victim.send_signal(blow.number)
        _wait(lambda: not is_alive(victim), experiment.benchctl)
        died_s = time.monotonic()
        _wait(lambda: experiment.record().get("state") in {"failed", "done", "suspect"}, experiment.benchctl)
        told_s = time.monotonic() - died_s
        exit_code = process.wait(_LIMIT_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    alive = [f"{member.pid} {_title(member)[:40]}" for member in experiment.seen if is_alive(member)]
    new_segments = experiment.segments - experiment.older_segments
    shared = [str(path) for inode, path in segments().items() if inode in new_segments]
    record = experiment.record()
    failure = record.get("failure") or {}
    return Outcome(
        state=record["state"],
        codes=frozenset(warning["code"] for warning in record.get("warnings", ())),
        cause=failure.get("cause", ""),
        message=failure.get("message", ""),
        told_s=told_s,
        exit_code=exit_code,
        leftovers=(*alive, *shared),
    )


def _wait(happens: Callable[[], Any], benchctl: psutil.Process) -> Any:
    """What ``happens`` returns when it is true, or when benchctl has ended."""
    deadline = time.monotonic() + _LIMIT_S
    while not (result := happens()):
        assert time.monotonic() < deadline, f"nothing came of it within {_LIMIT_S:g} s"
        if not is_alive(benchctl):
            return happens()
        time.sleep(0.1)  # a look at all processes takes a while
    return result
