"""``run --on local --parallel N`` on the simulator: real processes, real servers, real files."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from support.cli import benchctl
from support.local_commands import (
    SLOW,
    SMALL,
    assert_no_process_is_left,
    block_processes,
    command,
    loads,
    wait_until,
)
from support.nvidia_smi import FakeSmi, devices

from benchctl.cluster.blocks import begin_block, this_owner
from benchctl.records.directory import ResultDirectory
from benchctl.records.writers import current_manifest, owned_block

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be bound to cores"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two blocks at a time need two cores"),
]
TWO = ("--on", "local", "--parallel", "2", "--output", "experiment")


@pytest.fixture(autouse=True)
def _own_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path_factory.mktemp("locks")))


def states(results: Path) -> dict[str, str]:
    return {
        path.parent.name: json.loads(path.read_bytes())["state"]
        for path in sorted(results.glob("blocks/*/runs/*/run.json"))
    }


def files(results: Path, pattern: str) -> dict[str, bytes]:
    return {str(path.relative_to(results)): path.read_bytes() for path in sorted(results.glob(pattern))}


def interrupted(results: Path) -> list[int]:
    """The blocks of which a run is recorded as interrupted."""
    records = [json.loads(path.read_bytes()) for path in results.glob("blocks/*/runs/*/run.json")]
    return [record["block"] for record in records if (record.get("failure") or {}).get("cause") == "interrupted"]


def both_blocks(results: Path) -> bool:
    """True when servers of both blocks have computed steps of their load."""
    return {run.split("-")[1] for run in loads(results)} >= {"b0", "b1"}


def test_two_at_a_time_give_the_plan_requests_steps_and_verdict_of_one(tmp_path: Path) -> None:
    blocks = ("--blocks", "6")
    one = benchctl(*SMALL, *blocks, "--output", "one", cwd=tmp_path)
    two = benchctl(*SMALL, *blocks, *TWO, "--json", cwd=tmp_path)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    alone, beside = tmp_path / "one", tmp_path / "experiment"
    for pattern in ("plan.json", "requests.jsonl"):
        assert files(alone, pattern) == files(beside, pattern), pattern
    steps = list(files(beside, "blocks/*/runs/*/steps.jsonl").values())
    assert list(files(alone, "runs/*/steps.jsonl").values()) == steps
    assert len(steps) == 12
    verdicts = []
    for path in (alone, beside):
        compared = benchctl("compare", f"{path}:baseline", f"{path}:guided", "--json", cwd=tmp_path)
        document = json.loads(compared.stdout)
        (step,) = (metric for metric in document["metrics"] if metric["name"] == "step_ms")
        numbers = [step[name] for name in ("a", "b", "ratio", "ci_low", "ci_high", "verdict")]
        verdicts.append((compared.returncode, document["verdict"], numbers))
    assert verdicts[0] == verdicts[1]
    printed = json.loads(two.stdout)
    assert printed["runs"]["done"] == 12
    assert current_manifest(ResultDirectory(beside)).state == "done"
    assert benchctl("verify", str(beside), cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_signal_ends_all_blocks_with_130_and_resume_completes_them(
    tmp_path: Path, number: signal.Signals
) -> None:
    with command(tmp_path, *SLOW, "--blocks", "3", *TWO) as begun:
        wait_until("two loads", lambda: both_blocks(begun.results))
        begun.process.send_signal(number)
        code, _, error = begun.end(30)
        assert code == 130, error
        assert not begun.blocks(), "it waits for them"
    assert_no_process_is_left(begun.results)
    assert "Traceback" not in error
    assert "benchctl run --resume experiment --on local --parallel 2" in error
    assert sorted(interrupted(begun.results)) == [0, 1]
    assert not any("-b2-" in run for run in states(begun.results)), "nothing else was begun"
    fast = benchctl("run", "--resume", "experiment", "--on", "local", "--parallel", "2", cwd=tmp_path)
    assert fast.returncode == 0, fast.stderr
    assert list(states(begun.results).values()) == ["done"] * 6
    log = (begun.results / "logs/b000.log").read_text()
    assert "block 0: 2 done" in log or "block 0: 1 done, 1 done before" in log, "the signal came in run 1 or 2"


def test_blocks_end_when_the_process_that_hands_them_out_is_killed(tmp_path: Path) -> None:
    with command(tmp_path, *SLOW, "--blocks", "2", *TWO) as begun:
        wait_until("two loads", lambda: both_blocks(begun.results))
        begun.process.kill()
        begun.end()
        wait_until("the end of both blocks", lambda: not begun.blocks(), timeout_s=20)
    assert_no_process_is_left(begun.results)
    assert sorted(interrupted(begun.results)) == [0, 1], "they recorded that they were interrupted"
    resumed = benchctl("run", "--resume", "experiment", "--on", "local", "--parallel", "2", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert list(states(begun.results).values()) == ["done"] * 4


def test_the_block_of_a_killed_process_is_measured_by_another_one(tmp_path: Path) -> None:
    with command(tmp_path, *SLOW, "--blocks", "2", *TWO) as begun:
        wait_until("two loads", lambda: both_blocks(begun.results))
        begun.blocks()[1].kill()
        code, _, error = begun.end()
    assert code == 0, error
    assert list(states(begun.results).values()) == ["done"] * 4
    attempts = [
        json.loads(path.read_bytes())["attempt"] for path in begun.results.glob("blocks/b001/runs/*/run.json")
    ]
    assert 2 in attempts
    assert_no_process_is_left(begun.results)


def test_each_block_has_its_own_core_and_a_server_that_is_killed_fails_its_run_and_no_other(tmp_path: Path) -> None:
    with command(tmp_path, *SLOW, "--blocks", "2", *TWO) as begun:
        wait_until("two loads", lambda: both_blocks(begun.results))
        cores = []
        for process in begun.blocks().values():
            family = [process, *process.children(recursive=True)]
            cores.append(frozenset(core for each in family for core in each.cpu_affinity()))
        assert [len(each) for each in cores] == [len(os.sched_getaffinity(0)) // 2] * 2
        assert not cores[0] & cores[1]
        (server,) = (
            each
            for each in begun.blocks()[1].children(recursive=True)
            if "benchctl.sim" in " ".join(each.cmdline())
        )
        server.kill()
        code, out, error = begun.end()
    assert code == 5, error
    assert "3 done, 1 failed" in out
    assert sorted(states(begun.results).values()) == ["done", "done", "done", "failed"]
    records = (json.loads(path.read_bytes()) for path in begun.results.glob("blocks/*/runs/*/run.json"))
    assert {record["attempt"] for record in records} == {1}, "a failed run is a result, not tried again by itself"


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


@pytest.mark.nightly
def test_a_block_that_another_process_measures_is_left_to_it_and_named(tmp_path: Path) -> None:
    assert benchctl(*SMALL, "--blocks", "2", "--prepare", "--output", "experiment", cwd=tmp_path).returncode == 0
    resume = ("run", "--resume", "experiment", "--on", "local", "--parallel", "1", "--quiet")
    results = ResultDirectory(tmp_path / "experiment")
    begin_block(results, 0)
    with owned_block(results, 0, this_owner()):
        done = benchctl(*resume, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "block 0 is measured by another process" in done.stderr
        assert all("-b1-" in run for run in states(results.path))
        again = benchctl(*resume, cwd=tmp_path)
        assert again.returncode == 2
        assert "every block that is left is being measured by other processes" in again.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--on", "local", "--parallel", "4096"), "blocks at a time need 4096 processor cores"),
        (("--on", "local"), "--on local needs --parallel N"),
        (("--on", "local", "--parallel", "2", "--blocks", "6", "--until-precision", "5%"), "stopping rule"),
        (("--on", "local", "--parallel", "1", "--set", "cluster.gpus_per_block=3"), "GPU"),
    ],
)
def test_what_this_host_cannot_do_is_refused_before_anything_is_written(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    done = benchctl(*SMALL, "--output", "experiment", *words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert not (tmp_path / "experiment").exists()


def test_a_dry_run_shows_the_slots_and_the_duration_with_so_many_at_a_time(tmp_path: Path) -> None:
    done = benchctl(*SMALL, "--blocks", "5", "--on", "local", "--parallel", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 blocks at a time on this host:" in done.stdout
    assert "slot 1: 1 core (" in done.stdout
    assert "with 2 at a time" in done.stdout
    assert "3 rounds of" in done.stdout


class TestOnTwoDevices:
    """A host that shows two devices, by a program named nvidia-smi."""

    @pytest.fixture(name="env")
    def _env(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        FakeSmi(tmp_path / "bin").behave(devices=devices(2))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    GPU = ("--set", "cluster.gpus_per_block=1")

    @staticmethod
    def visible(results: Path) -> list[str]:
        found = []
        for _, process in block_processes(results):
            try:
                if "--on" in process.parent().cmdline():  # else a moment of a process that it starts
                    found.append(process.environ()["CUDA_VISIBLE_DEVICES"])
            except (psutil.Error, KeyError, AttributeError):
                continue
        return found

    def test_no_two_blocks_are_ever_on_one_device_and_each_sees_its_own_alone(
        self, tmp_path: Path, env: dict[str, str]
    ) -> None:
        moments = []
        with command(tmp_path, *SMALL, *self.GPU, "--blocks", "5", *TWO, **env) as begun:
            while begun.process.poll() is None:
                moments.append(self.visible(begun.results))
                time.sleep(0.02)
            code, _, error = begun.end()
        assert code == 0, error
        assert all(len(moment) == len(set(moment)) for moment in moments)
        assert {gpu for moment in moments for gpu in moment} == {"GPU-aa", "GPU-bb"}

    def test_two_commands_share_the_devices_and_a_third_is_told_who_has_them(
        self, tmp_path: Path, env: dict[str, str]
    ) -> None:
        alone = (*SLOW, *self.GPU, "--blocks", "2", "--on", "local", "--parallel", "1", "--output")
        with command(tmp_path, *alone, "experiment", **env) as first:
            wait_until("the first block", lambda: bool(self.visible(first.results)))
            (tmp_path / "second").mkdir()
            with command(tmp_path / "second", *alone, "experiment", **env) as second:
                wait_until("the second block", lambda: bool(self.visible(second.results)))
                assert self.visible(first.results) == ["GPU-aa"]
                assert self.visible(second.results) == ["GPU-bb"]
                third = benchctl(*SMALL, *self.GPU, *TWO[:-1], "third", cwd=tmp_path, **env)
                assert third.returncode == 2, third.stderr
                assert f"GPU-aa is held by process {first.process.pid} (benchctl run" in third.stderr
                assert not (tmp_path / "third").exists()

    def test_more_blocks_than_devices_are_refused(self, tmp_path: Path, env: dict[str, str]) -> None:
        done = benchctl(*SMALL, *self.GPU, "--on", "local", "--parallel", "3", cwd=tmp_path, **env)
        assert done.returncode == 2
        assert "3 blocks at a time, each on 1 GPU, need 3, and of 2 here 2 may be used" in done.stderr

    def test_devices_that_the_variable_leaves_out_are_not_used(self, tmp_path: Path, env: dict[str, str]) -> None:
        hidden = {**env, "CUDA_VISIBLE_DEVICES": "1"}
        done = benchctl(*SMALL, *self.GPU, *TWO, "--dry-run", cwd=tmp_path, **hidden)
        assert "of 2 here 1 may be used (CUDA_VISIBLE_DEVICES" in done.stderr
        shown = benchctl(*SMALL, *self.GPU, "--on", "local", "--parallel", "1", "--dry-run", cwd=tmp_path, **hidden)
        assert "slot 0: GPU-bb, " in shown.stdout
