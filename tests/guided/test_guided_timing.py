"""Times of guided steps: a line for each step, sections within sections, nothing at all when off."""

import json
import time
from pathlib import Path

import pytest
from support.guided.fake_events import device
from support.guided.tensors import torch

from benchctl.guided.params import GuidanceError, GuideStep
from benchctl.guided.timing import SECTIONS, StepTimer

ROOT = Path(__file__).parents[2]


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


def test_a_step_that_is_dropped_leaves_nothing_to_the_next(tmp_path):
    timer = StepTimer(tmp_path / "steps.jsonl")
    with timer.section("sample"):
        pass
    timer.drop_step()
    timer.end_step()
    assert [line["sections_ns"] for line in lines(tmp_path / "steps.jsonl")] == [{}]


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_line_of_the_device_is_written_when_its_marks_have_passed_in_the_order_of_steps(tmp_path):
    path, marks = tmp_path / "steps.jsonl", device()
    timer = StepTimer(path, "device", marks)
    for _ in range(2):
        with timer.section("lvm_apply_outer"), timer.section("lvm_forward"):
            pass
        timer.end_step()
    assert lines(path) == [], "the device has reached none of the marks, and nobody waits for it"
    marks.reached = 4  # all of the first step
    timer.end_step()
    (first,) = lines(path)
    assert (first["step"], first["clock"]) == (0, "device")
    assert first["sections_ns"] == {"lvm_apply_outer": 3_000_000, "lvm_forward": 1_000_000}
    assert set(first["host_sections_ns"]) == set(first["sections_ns"])
    assert first["host_sections_ns"]["lvm_apply_outer"] <= first["end_ns"] - first["start_ns"]
    marks.reached = 7  # within the second step, whose outer section the device has not left
    time.sleep(0.3)
    assert len(lines(path)) == 1
    marks.reached = 8
    until(lambda: len(lines(path)) == 3)  # though no step follows
    assert [line["step"] for line in lines(path)] == [0, 1, 2]
    timer.close()


def test_closing_waits_for_the_device(tmp_path):
    timer = StepTimer(tmp_path / "steps.jsonl", "device", device())
    with timer.section("sample"):
        pass
    timer.end_step()
    timer.close()
    assert [line["sections_ns"] for line in lines(tmp_path / "steps.jsonl")] == [{"sample": 1_000_000}]


def test_a_device_that_falls_far_behind_is_waited_for_so_that_memory_does_not_grow(tmp_path):
    path, marks = tmp_path / "steps.jsonl", device()
    timer = StepTimer(path, "device", marks)
    for _ in range(1030):
        with timer.section("sample"):
            pass
        timer.end_step()
    assert [line["step"] for line in lines(path)] == list(range(6))
    timer.close()
    assert len(lines(path)) == 1030


class Counts:
    """Numbers of a step that come later."""

    is_known = False
    step = GuideStep(candidates=5)


def test_a_line_waits_for_its_numbers_as_it_does_for_its_times(tmp_path):
    timer, counts = StepTimer(tmp_path / "steps.jsonl"), Counts()
    timer.end_step(counts, num_seqs=2)
    timer.end_step()
    assert lines(tmp_path / "steps.jsonl") == []
    counts.is_known = True
    timer.end_step(step=9)
    told = lines(tmp_path / "steps.jsonl")
    assert [line["step"] for line in told] == [0, 1, 9]
    assert (told[0]["num_seqs"], told[0]["candidates"]) == (2, 5)
    assert "fused" not in told[0]


def test_a_clock_that_nobody_knows_is_refused(tmp_path):
    with pytest.raises(GuidanceError, match="clock is 'wall'; take one of host, device"):
        StepTimer(tmp_path / "steps.jsonl", "wall")


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_taking_times_of_the_device_does_not_wait_for_it(tmp_path):
    timer = StepTimer(tmp_path / "steps.jsonl", "device")
    matrix = torch.randn(8192, 8192, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    with timer.section("lvm_forward"):
        for _ in range(50):
            matrix @ matrix
    done.record()
    timer.end_step()
    assert not done.query(), "the step ended on the host long before the device was through"
    timer.close()
    (line,) = lines(tmp_path / "steps.jsonl")
    assert line["sections_ns"]["lvm_forward"] > line["host_sections_ns"]["lvm_forward"]
