"""Experiments whose blocks several processes measure: prepared by ``run --prepare``, measured by real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
from support.cli import benchctl
from support.waiting import wait_until

from benchctl.cluster.blocks import begin_block, this_owner
from benchctl.records.directory import OWNER_FILE, ResultDirectory
from benchctl.records.files import encode
from benchctl.records.record import RunRecord
from benchctl.records.writers import current_manifest, owner_of

PROFILE = """\
name: small
seed: 3
engine: sim-exact
model: qwen2.5-7b
blocks: {blocks}
workload:
  dataset: generated
  num_prompts: 3
  output_len: {output_len}
  arrival: {{kind: closed-loop, max_concurrency: 3}}
  num_warmups: 0
variants: {{baseline: {{}}{changed}}}
allowed_differences: [server.*]
"""
CHANGED = ", changed: {server: {max_num_seqs: 2}}"
LONG_OUTPUT = 120
"""Tokens of a load that takes about three seconds with ``SLOWLY``, so that something can happen in mid-run."""
SLOWLY = ("--set", "engine.options.time_scale=0.5")


def prepared_directory(
    parent: Path, *options: str, blocks: int = 2, output_len: int = 8, has_two_arms: bool = False
) -> Path:
    """The directory of an experiment whose blocks are handed out, of which nothing is measured."""
    profile, path = parent / "small.yaml", parent / "shared"
    profile.write_text(
        PROFILE.format(blocks=blocks, output_len=output_len, changed=CHANGED if has_two_arms else "")
    )
    done = benchctl("run", "-p", profile, "--prepare", "-o", path, *options, cwd=parent)
    assert done.returncode == 0, done.stderr
    return path


def task(path: Path, block: int, *options: str, **env: str) -> "subprocess.Popen[str]":
    """A process that measures one block, in a group of its own; it is given a new interpreter."""
    argv = [sys.executable, "-m", "benchctl", "run", "--block", str(block), "--into", str(path), *options]
    return subprocess.Popen(
        argv,
        env={**os.environ, "CI": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_task(path: Path, block: int, *options: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """The same to its end, with modules that are loaded already."""
    return benchctl("run", "--block", block, "--into", path, *options, cwd=path.parent, CI="1", **env)


@contextmanager
def task_in_mid_run(path: Path, block: int, *options: str, **env: str) -> Iterator["subprocess.Popen[str]"]:
    """A task whose first run sends its load; inside it can be stopped, killed or awaited."""
    with task(path, block, *options, **env) as process:
        try:
            wait_until("a load", lambda: sends(path, block) or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()


def sends(path: Path, block: int) -> bool:
    """True when a run of ``block`` has been sending its load for a moment."""
    results = ResultDirectory(path)
    samples = (results.run(run.run_id).path / "client.jsonl" for run in results.plan().runs if run.block == block)
    return any(each.exists() and each.stat().st_size for each in samples)


def records(path: Path, block: int | None = None) -> list[RunRecord]:
    """The records of all runs that were begun, or of those of one block."""
    results = ResultDirectory(path)
    found = [run.read() for run in results.begun_runs(results.plan())]
    return [record for record in found if block is None or record.block == block]


def foreign_owner(path: Path, block: int, node: str = "n9") -> None:
    """Begin a block as a process of another host does that has not ended."""
    of_block = begin_block(ResultDirectory(path), block)
    owner = msgspec.structs.replace(this_owner(), node=node, boot_id="another", pid=4711, job="slurm 17_3")
    (of_block.path / OWNER_FILE).write_bytes(encode(owner))


def assert_whole(path: Path) -> None:
    """Every planned run is done and recorded, no file differs from its digest, and nobody owns a block."""
    results = ResultDirectory(path)
    states = {record.run_id: record.state for record in records(path)}
    assert states == {planned.run_id: "done" for planned in results.plan().runs}
    assert current_manifest(results).state == "done"
    assert not any(owner_of(results, block) for block in results.begun_blocks())
    assert not list((path / "blocks").glob(".*"))
    verified = benchctl("verify", path, "--json", cwd=path.parent)
    document = json.loads(verified.stdout)
    assert verified.returncode == 0, verified.stdout
    assert document["unrecorded"] == []


def users(path: Path) -> list[psutil.Process]:
    """The processes whose command line names a directory."""
    listed = psutil.process_iter(["cmdline"])
    return [process for process in listed if str(path) in " ".join(process.info["cmdline"] or [])]


def block_processes(path: Path) -> dict[int, psutil.Process]:
    """The living processes that measure a block, by their block; of any command."""
    commands = {process: process.info["cmdline"] for process in users(path)}
    return {
        int(words[words.index("--block") + 1]): process
        for process, words in commands.items()
        if "--block" in words and "launcher.py" not in " ".join(words)
    }


def loads(path: Path) -> list[str]:
    """The runs whose servers have computed steps of the load."""
    logs = path.glob("**/runs/*/steps.raw.jsonl")
    return [
        log.parent.name for log in logs if any(b'"is_warmup"' not in line for line in log.read_bytes().splitlines())
    ]
