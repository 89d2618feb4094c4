"""Times of guided steps: a line for each step, sections within sections, nothing at all when off."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensors import torch

from benchctl.guided.errors import GuidanceError
from benchctl.guided.timing import SECTIONS, StepTimer

ROOT = Path(__file__).parents[1]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_a_line_whose_sections_lie_within_it(tmp_path):
    timer = StepTimer(tmp_path / "steps.jsonl")
    for number in range(3):
        with timer.section("lvm_apply_outer"):
            with timer.section("lvm_forward"):
                time.sleep(0.002)
            with timer.section("lvm_apply_guidance"):
                time.sleep(0.001)
        timer.end_step(guided_rows=number, fused=True, candidates=None)
        # It is there at once: a server that is killed leaves all steps that it finished.
        assert len(lines(tmp_path / "steps.jsonl")) == number + 1
    for number, line in enumerate(lines(tmp_path / "steps.jsonl")):
        assert (line["step"], line["clock"], line["guided_rows"], line["fused"]) == (number, "host", number, True)
        assert "candidates" not in line
        sections = line["sections_ns"]
        assert set(sections) <= set(SECTIONS)
        assert sections["lvm_forward"] >= 2_000_000
        inner = sections["lvm_forward"] + sections["lvm_apply_guidance"]
        assert inner <= sections["lvm_apply_outer"] <= line["end_ns"] - line["start_ns"]


def test_a_section_that_comes_twice_is_summed_and_the_next_step_starts_anew(tmp_path):
    timer = StepTimer(tmp_path / "steps.jsonl")
    for _ in range(2):
        with timer.section("lvm_apply_guidance"):
            time.sleep(0.002)
    timer.end_step()
    timer.end_step()
    first, second = lines(tmp_path / "steps.jsonl")
    assert first["sections_ns"]["lvm_apply_guidance"] >= 4_000_000
    assert second["sections_ns"] == {}
    assert second["start_ns"] >= first["end_ns"]


def test_a_section_that_fails_is_timed_and_the_error_goes_on(tmp_path):
    timer = StepTimer(tmp_path / "steps.jsonl")
    with pytest.raises(ValueError, match="no"), timer.section("lvm_forward"):
        raise ValueError("no")
    timer.end_step()
    assert lines(tmp_path / "steps.jsonl")[0]["sections_ns"]["lvm_forward"] > 0


def test_a_second_timer_appends(tmp_path):
    for _ in range(2):
        timer = StepTimer(tmp_path / "steps.jsonl")
        timer.end_step()
        timer.close()
        timer.close()
    assert [line["step"] for line in lines(tmp_path / "steps.jsonl")] == [0, 0]


def test_without_a_path_nothing_is_made_for_a_section(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    timer = StepTimer(None, "device")
    assert timer.section("sample") is timer.section("lvm_forward")
    with timer.section("sample"), timer.section("sample"):
        pass
    timer.end_step(guided_rows=1)
    timer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_the_clock_of_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(GuidanceError, match="no CUDA device here; take 'host'"):
        StepTimer(tmp_path / "steps.jsonl", "device")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_clock_of_the_device_a_section_lasts_as_long_as_its_work(tmp_path):
    timer = StepTimer(tmp_path / "steps.jsonl", "device")
    matrix = torch.randn(4096, 4096, device="cuda")
    for repeats in (1, 20):
        with timer.section("lvm_forward"):
            for _ in range(repeats):
                matrix @ matrix
        timer.end_step()
    timer.close()
    short, long = (line["sections_ns"]["lvm_forward"] for line in lines(tmp_path / "steps.jsonl"))
    assert 5 * short < long


def run_script(path, *arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / path), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
    )


@pytest.mark.slow
def test_the_bench_of_the_timer_says_what_it_costs():
    done = run_script("scripts/bench/guided_timing.py", "--rounds", 3, "--steps", 2)
    assert done.returncode == 0, done.stderr
    section, step = done.stdout.splitlines()
    assert section.startswith("one section, off: ")
    assert "on / off: " in step


@pytest.mark.slow
def test_the_script_for_gpus_runs_whole_on_a_cpu(tmp_path):
    done = run_script(
        *("scripts/gpu/guided_overhead.py", "--tiny", "--device", "cpu", "--json", tmp_path / "out.json"),
        *("--batch", 2, "--candidates", 1, 3),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert [(line["batch"], line["candidates"]) for line in document["lines"]] == [(2, 1), (2, 3)]
    for line in document["lines"]:
        times = [line[name]["host_ms"] for name in ("base", "fused", "two_phase", "candidates_only", "guided")]
        assert min(times) > 0
        assert line["ratio"] == pytest.approx(1 + line["guided"]["host_ms"] / line["base"]["host_ms"])
        assert line["floor"] is None
    assert done.stdout.count("tiny-value") == 2
