"""``run --on local --parallel N`` on the simulator: real processes, real servers, real files."""

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cli import WITHOUT_PICTURES, benchctl
from support.local_commands import (
    SLOW,
    SMALL,
    assert_no_process_is_left,
    block_processes,
    command,
    loads,
)
from support.nvidia_smi import FakeSmi, devices
from support.waiting import wait_until

from benchctl.records.directory import ResultDirectory
from benchctl.records.writers import current_manifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be bound to cores"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two blocks at a time need two cores"),
]
TWO = ("--on", "local", "--parallel", "2", "--output", "experiment")


@pytest.fixture(autouse=True)
def _own_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path_factory.mktemp("locks")))


def records(results: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(results.glob("blocks/*/runs/*/run.json"))
    return {path.parent.name: json.loads(path.read_bytes()) for path in paths}


def states(results: Path) -> list[str]:
    return [record["state"] for record in records(results).values()]


def interrupted(results: Path) -> list[int]:
    """The blocks of which a run is recorded as interrupted."""
    failures = {each["block"]: each.get("failure") or {} for each in records(results).values()}
    return [block for block, failure in failures.items() if failure.get("cause") == "interrupted"]


def both_blocks(results: Path) -> bool:
    """True when servers of both blocks have computed steps of their load."""
    return {run.split("-")[1] for run in loads(results)} >= {"b0", "b1"}


def test_two_at_a_time_give_the_plan_requests_steps_and_verdict_of_one(tmp_path: Path) -> None:
    one = benchctl(*SMALL, "--blocks", "3", "--output", "one", cwd=tmp_path, **WITHOUT_PICTURES)
    two = benchctl(*SMALL, "--blocks", "3", *TWO, "--json", cwd=tmp_path, **WITHOUT_PICTURES)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    alone, beside = tmp_path / "one", tmp_path / "experiment"
    for name in ("plan.json", "requests.jsonl"):
        assert (alone / name).read_bytes() == (beside / name).read_bytes()
    steps = {path.parent.name: path.read_bytes() for path in beside.glob("blocks/*/runs/*/steps.jsonl")}
    assert {path.parent.name: path.read_bytes() for path in alone.glob("runs/*/steps.jsonl")} == steps
    assert len(steps) == 6
    verdicts = []
    for path in (alone, beside):
        compared = benchctl("compare", f"{path}:baseline", f"{path}:guided", "--json", cwd=tmp_path)
        document = json.loads(compared.stdout)
        (step,) = (metric for metric in document["metrics"] if metric["name"] == "step_ms")
        numbers = [step[name] for name in ("a", "b", "ratio", "ci_low", "ci_high", "verdict")]
        verdicts.append((compared.returncode, document["verdict"], numbers))
    assert verdicts[0] == verdicts[1]
    assert json.loads(two.stdout)["runs"]["done"] == 6
    assert current_manifest(ResultDirectory(beside)).state == "done"
    assert benchctl("verify", str(beside), cwd=tmp_path).returncode == 0


def test_lost_processes_signals_and_the_end_of_the_command_cost_no_block(tmp_path: Path) -> None:
    resume = ("run", "--resume", "experiment", "--on", "local", "--parallel", "2")
    with command(tmp_path, *SLOW, "--blocks", "3", *TWO) as begun:
        wait_until("two loads", lambda: both_blocks(begun.results))
        families = [[each, *each.children(recursive=True)] for each in begun.blocks().values()]
        cores = [frozenset(core for each in family for core in each.cpu_affinity()) for family in families]
        assert [len(each) for each in cores] == [len(os.sched_getaffinity(0)) // 2] * 2
        assert not cores[0] & cores[1]
        begun.blocks()[0].kill()
        wait_until("another process for block 0", lambda: is_measured_again(begun.results, 0))
        begun.process.kill()
        begun.end()
        wait_until("the end of both blocks", lambda: not begun.blocks())
    assert_no_process_is_left(begun.results)
    assert 0 in interrupted(begun.results), "it recorded that it was interrupted"
    with command(tmp_path, *resume) as begun:
        wait_until("two loads", lambda: both_blocks(begun.results) and len(begun.blocks()) == 2)
        begun.process.send_signal(signal.SIGINT)
        code, _, error = begun.end(30)
        assert code == 130, error
        assert not begun.blocks(), "it waits for them"
    assert_no_process_is_left(begun.results)
    assert "Traceback" not in error
    assert "benchctl run --resume experiment --on local --parallel 2" in error
    resumed = benchctl(*resume, cwd=tmp_path, **WITHOUT_PICTURES)
    assert resumed.returncode == 0, resumed.stderr
    assert states(begun.results) == ["done"] * 6
    assert re.search("block 0: (2 done|1 done, 1 done before)", (begun.results / "logs/b000.log").read_text())


def is_measured_again(results: Path, block: int) -> bool:
    return any(each["block"] == block and each["attempt"] == 2 for each in records(results).values())


def test_a_server_that_is_killed_fails_its_run_and_no_other(tmp_path: Path) -> None:
    with command(tmp_path, *SLOW, "--blocks", "2", *TWO) as begun:
        wait_until("two loads", lambda: both_blocks(begun.results))
        family = begun.blocks()[1].children(recursive=True)
        (server,) = (each for each in family if "benchctl.sim" in " ".join(each.cmdline()))
        server.kill()
        code, out, error = begun.end()
    assert code == 5, error
    assert "3 done, 1 failed" in out
    assert sorted(states(begun.results)) == ["done", "done", "done", "failed"]
    attempts = {record["attempt"] for record in records(begun.results).values()}
    assert attempts == {1}, "a failed run is a result, not tried again by itself"


def test_a_block_that_its_process_refuses_ends_the_command_with_what_it_said(tmp_path: Path) -> None:
    assert benchctl(*SMALL, "--blocks", "2", "--prepare", "--output", "experiment", cwd=tmp_path).returncode == 0
    path = tmp_path / "experiment/requests.jsonl"
    with command(tmp_path, "run", "--resume", "experiment", "--on", "local", "--parallel", "1") as begun:
        wait_until("the first block", lambda: 0 in begun.blocks())
        path.write_bytes(path.read_bytes().replace(b"user", b"User"))
        code, _, error = begun.end()
    assert code == 4, error
    assert "could not be measured, and no other was begun after it" in error
    assert "requests.jsonl was changed" in error
    assert not (begun.results / "logs/b001.log").exists() or not (begun.results / "logs/b000.log").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--parallel", "4096"), "blocks at a time need 4096 processor cores"),
        ((), "--on local needs --parallel N"),
        (("--parallel", "2", "--blocks", "6", "--until-precision", "5%"), "stopping rule"),
        (("--parallel", "1", "--set", "cluster.gpus_per_block=3"), "GPU"),
    ],
)
def test_what_this_host_cannot_do_is_refused_before_anything_is_written(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    done = benchctl(*SMALL, "-o", "experiment", "--on", "local", *words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert not (tmp_path / "experiment").exists()


def test_a_dry_run_shows_the_slots_and_the_duration_with_so_many_at_a_time(tmp_path: Path) -> None:
    done = benchctl(*SMALL, "--blocks", "5", "--on", "local", "--parallel", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("2 blocks at a time on this host:", "slot 1: 1 core (", "with 2 at a time", "3 rounds of"):
        assert text in done.stdout


def test_two_commands_share_two_devices_and_a_third_is_told_who_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host that shows two devices, by a program named nvidia-smi."""
    FakeSmi(tmp_path / "bin").behave(devices=devices(2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    gpu = ("--set", "cluster.gpus_per_block=1", "--blocks", "2", "--on", "local", "--parallel")
    (tmp_path / "second").mkdir()
    with command(tmp_path, *SLOW, *gpu, "1", "-o", "experiment", **env) as first:
        wait_until("the first block", lambda: bool(visible(first.results)))
        with command(tmp_path / "second", *SLOW, *gpu, "1", "-o", "experiment", **env) as second:
            wait_until("the second block", lambda: bool(visible(second.results)))
            assert [visible(each.results) for each in (first, second)] == [["GPU-aa"], ["GPU-bb"]]
            third = benchctl(*SMALL, *gpu, "2", "-o", "third", cwd=tmp_path, **env)
            assert third.returncode == 2, third.stderr
            assert f"GPU-aa is held by process {first.process.pid} (benchctl run" in third.stderr
            assert not (tmp_path / "third").exists()
    too_many = benchctl(*SMALL, *gpu, "3", cwd=tmp_path, **env)
    assert too_many.returncode == 2
    assert "3 blocks at a time, each on 1 GPU, need 3, and of 2 here 2 may be used" in too_many.stderr
    env["CUDA_VISIBLE_DEVICES"] = "1"
    hidden, usable = (benchctl(*SMALL, *gpu, n, "--dry-run", cwd=tmp_path, **env) for n in "21")
    assert "of 2 here 1 may be used (CUDA_VISIBLE_DEVICES" in hidden.stderr
    assert "slot 0: GPU-bb, " in usable.stdout


def visible(results: Path) -> list[str]:
    """What each process sees that measures a block."""
    seen = []
    for _, process in block_processes(results):
        with suppress(psutil.Error, KeyError, AttributeError):
            if "--on" in process.parent().cmdline():  # else a moment of a process that it starts
                seen.append(process.environ()["CUDA_VISIBLE_DEVICES"])
    return seen
