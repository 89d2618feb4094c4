"""``run --on local --parallel N`` on the simulator: real processes, real servers, real files."""

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.cli import benchctl, document, printed, refusal, started
from support.nvidia_smi import FakeSmi, devices
from support.shared_directory import assert_whole, block_processes, loads, records, users
from support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be bound to cores"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two blocks at a time need two cores"),
]
EXACT = ("run", "ci-smoke", "--engine", "sim-exact", "--quiet", "--set", "workload.num_prompts=2")
SMALL = (*EXACT, "--set", "workload.output_len=24")
SLOW = (*EXACT, "--set", "workload.output_len=12", "--set", "engine.options.time_scale=1")
"""So slow that a signal surely finds the loads under way."""
TWO = ("--on", "local", "--parallel", "2", "--output", "experiment")


@pytest.fixture(autouse=True)
def _own_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path_factory.mktemp("locks")))


def both_blocks(results: Path) -> bool:
    """True when servers of both blocks have computed steps of their load."""
    return {run.split("-")[1] for run in loads(results)} >= {"b0", "b1"}


def test_two_at_a_time_give_the_plan_requests_steps_and_verdict_of_one(tmp_path: Path) -> None:
    printed(*SMALL, "--blocks", "2", "--output", "one", cwd=tmp_path)
    said = document(*SMALL, "--blocks", "2", *TWO, cwd=tmp_path)
    assert said["runs"]["done"] == 4
    alone, beside = tmp_path / "one", tmp_path / "experiment"
    for name in ("plan.json", "requests.jsonl"):
        assert (alone / name).read_bytes() == (beside / name).read_bytes()
    steps = {path.parent.name: path.read_bytes() for path in beside.glob("blocks/*/runs/*/steps.jsonl")}
    assert {path.parent.name: path.read_bytes() for path in alone.glob("runs/*/steps.jsonl")} == steps
    assert len(steps) == 4
    verdicts = []
    for path in (alone, beside):
        compared = benchctl("compare", f"{path}:baseline", f"{path}:guided", "--json")
        comparison = json.loads(compared.stdout)
        (step,) = (metric for metric in comparison["metrics"] if metric["name"] == "step_ms")
        numbers = [step[name] for name in ("a", "b", "ratio", "ci_low", "ci_high", "verdict")]
        verdicts.append((compared.returncode, comparison["verdict"], numbers))
    assert verdicts[0] == verdicts[1]
    assert_whole(beside)


def test_lost_processes_signals_and_the_end_of_the_command_cost_no_block(tmp_path: Path) -> None:
    results, resume = tmp_path / "experiment", ("run", "--resume", "experiment", "--on", "local", "--parallel", "2")
    with started(*SLOW, "--blocks", "3", *TWO, cwd=tmp_path) as command:
        wait_until("two loads", lambda: both_blocks(results))
        families = [[each, *each.children(recursive=True)] for each in block_processes(results).values()]
        cores = [frozenset(core for each in family for core in each.cpu_affinity()) for family in families]
        assert [len(each) for each in cores] == [len(os.sched_getaffinity(0)) // 2] * 2
        assert not cores[0] & cores[1]
        block_processes(results)[0].kill()
        wait_until("block 0 again", lambda: any(each.attempt == 2 for each in records(results, 0)))
        command.kill()
        assert "block 0: its process was killed by SIGKILL; experiment/logs/b000.log" in command.communicate()[1]
    wait_until("the end of all", lambda: not users(results))
    causes = {each.failure.cause for each in records(results, 0) if each.failure is not None}
    assert causes == {"interrupted"}, "it recorded that it was interrupted"
    with started(*resume, cwd=tmp_path) as command:
        wait_until("two loads", lambda: both_blocks(results) and len(block_processes(results)) == 2)
        command.send_signal(signal.SIGINT)
        _, error = command.communicate(timeout=60)
        assert (command.returncode, block_processes(results)) == (130, {}), "it waits for them"
    wait_until("the end of all", lambda: not users(results))
    assert "Traceback" not in error
    assert "benchctl run --resume experiment --on local --parallel 2" in error
    printed(*resume, cwd=tmp_path)
    assert_whole(results)
    assert re.search("block 0: (2 done|1 done, 1 done before)", (results / "logs/b000.log").read_text())


def test_a_server_that_is_killed_fails_its_run_and_no_other(tmp_path: Path) -> None:
    results = tmp_path / "experiment"
    with started(*SLOW, "--blocks", "2", *TWO, cwd=tmp_path) as command:
        wait_until("two loads", lambda: both_blocks(results))
        family = block_processes(results)[1].children(recursive=True)
        (server,) = (each for each in family if "benchctl.sim" in " ".join(each.cmdline()))
        server.kill()
        out, error = command.communicate(timeout=120)
    assert (command.returncode, "3 done, 1 failed" in out) == (5, True), error
    ends = sorted((record.state, record.attempt) for record in records(results))
    assert ends == [("done", 1)] * 3 + [("failed", 1)], "a failed run is a result, not tried again by itself"


def test_a_block_that_its_process_refuses_ends_the_command_with_what_it_said(tmp_path: Path) -> None:
    printed(*SMALL, "--blocks", "2", "--prepare", "--output", "experiment", cwd=tmp_path)
    requests = tmp_path / "experiment/requests.jsonl"
    with started("run", "--resume", "experiment", "--on", "local", "--parallel", "1", cwd=tmp_path) as command:
        wait_until("the first block", lambda: 0 in block_processes(requests.parent))
        requests.write_bytes(requests.read_bytes().replace(b"user", b"User"))
        _, error = command.communicate(timeout=120)
    assert command.returncode == 4, error
    assert "could not be measured, and no other was begun after it" in error
    assert "requests.jsonl was changed" in error


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
    refused = (*SMALL, "-o", "experiment", "--on", "local", *words)
    assert says in refusal(*refused, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert not (tmp_path / "experiment").exists()


def test_a_dry_run_shows_the_slots_and_the_duration_with_so_many_at_a_time(tmp_path: Path) -> None:
    planned = printed(*SMALL, "--blocks", "5", "--on", "local", "--parallel", "2", "--dry-run", cwd=tmp_path)
    for text in ("2 blocks at a time on this host:", "slot 1: 1 core (", "with 2 at a time", "3 rounds of"):
        assert text in planned


def test_commands_share_the_devices_that_are_free_and_one_without_enough_is_told_who_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host that shows two devices, by a program named nvidia-smi."""
    FakeSmi(tmp_path / "bin").behave(devices=devices(2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    gpu = ("--set", "cluster.gpus_per_block=1", "--blocks", "2", "--on", "local", "--parallel")
    with started(*SLOW, *gpu, "1", "-o", "experiment", cwd=tmp_path, **env) as first:
        assert wait_until("the first block", lambda: visible(tmp_path / "experiment")) == ["GPU-aa"]
        held = f"GPU-aa is held by process {first.pid} (benchctl run"
        assert held in refusal(*SMALL, *gpu, "2", "-o", "second", cwd=tmp_path, **env)
        assert "slot 0: GPU-bb, " in printed(
            *SMALL, *gpu, "1", "--dry-run", cwd=tmp_path, CUDA_VISIBLE_DEVICES="1", **env
        )


def visible(results: Path) -> list[str]:
    """What each process sees that measures a block."""
    seen = []
    for process in block_processes(results).values():
        with suppress(psutil.Error, KeyError, AttributeError):
            if "--on" in process.parent().cmdline():  # else a moment of a process that it starts
                seen.append(process.environ()["CUDA_VISIBLE_DEVICES"])
    return seen
