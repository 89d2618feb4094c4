"""Commands that measure several blocks at a time, and what they leave."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from support.cli import plain_environment
from support.waiting import wait_until

EXACT = ("run", "ci-smoke", "--engine", "sim-exact", "--quiet", "--set", "workload.num_prompts=2")
SMALL = (*EXACT, "--set", "workload.output_len=24")
SLOW = (*EXACT, "--set", "workload.output_len=12", "--set", "engine.options.time_scale=1")
"""So slow that a signal surely finds the loads under way."""


class Command:
    """A command on a directory of results, in a process of its own."""

    def __init__(self, cwd: Path, *words: str, **env: str) -> None:
        self.results = cwd / "experiment"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchctl", *words],
            cwd=cwd,
            env={**os.environ, **plain_environment(cwd), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, timeout_s: float = 120) -> tuple[int, str, str]:
        out, error = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, error

    def blocks(self) -> dict[int, psutil.Process]:
        """The living processes that measure a block, by their block; of any command."""
        return dict(block_processes(self.results))


def block_processes(results: Path) -> Iterator[tuple[int, psutil.Process]]:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--block" in words and str(results) in words and "launcher.py" not in " ".join(words):
            yield int(words[words.index("--block") + 1]), process


@contextmanager
def command(cwd: Path, *words: str, **env: str) -> Iterator[Command]:
    begun = Command(cwd, *words, **env)
    try:
        yield begun
    finally:
        if begun.process.poll() is None:
            begun.process.kill()
            begun.process.communicate()
        wait_until("the end of all blocks", lambda: not begun.blocks())


def loads(results: Path) -> list[str]:
    """The runs whose servers have computed steps of the load."""
    logs = results.glob("**/runs/*/steps.raw.jsonl")
    return [
        log.parent.name for log in logs if any(b'"is_warmup"' not in line for line in log.read_bytes().splitlines())
    ]


def assert_no_process_is_left(results: Path) -> None:
    def users() -> list[psutil.Process]:
        listed = psutil.process_iter(["cmdline"])
        return [process for process in listed if str(results) in " ".join(process.info["cmdline"] or [])]

    wait_until(f"the end of all that uses {results}", lambda: not users())
