"""Times of guided steps: a line for each step, sections within sections, nothing at all when off."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.guided.fake_events import device
from support.guided.tensors import torch  # noqa: F401 - skips these tests where there is none
from support.waiting import wait_until

from benchctl.guided.params import GuidanceError, GuideStep
from benchctl.guided.timing import StepTimer


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
        assert sections["lvm_forward"] >= 2_000_000
        inner = sections["lvm_forward"] + sections["lvm_apply_guidance"]
        assert inner <= sections["lvm_apply_outer"] <= line["end_ns"] - line["start_ns"]


def test_sections_are_summed_dropped_with_their_step_and_timed_where_they_fail(tmp_path):
    timer = StepTimer(tmp_path / "steps.jsonl")
    for _ in range(2):
        with timer.section("lvm_apply_guidance"):
            time.sleep(0.002)
    timer.end_step()
    with timer.section("sample"):
        pass
    timer.drop_step()
    with pytest.raises(ValueError, match="no"), timer.section("lvm_forward"):
        raise ValueError("no")
    timer.end_step()
    first, second = lines(tmp_path / "steps.jsonl")
    assert first["sections_ns"]["lvm_apply_guidance"] >= 4_000_000
    assert second["sections_ns"].keys() == {"lvm_forward"}
    assert second["start_ns"] >= first["end_ns"]


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
    wait_until("the lines are written", lambda: len(lines(path)) == 3)  # though no step follows
    for _ in range(1030):  # a device that falls far behind is waited for, so that memory does not grow
        with timer.section("sample"):
            pass
        timer.end_step()
    assert [line["step"] for line in lines(path)] == list(range(3 + 6))
    timer.close()  # waits for the device
    assert [line["step"] for line in lines(path)] == list(range(3 + 1030))


def test_a_line_waits_for_its_numbers_as_it_does_for_its_times(tmp_path):
    timer, counts = (
        StepTimer(tmp_path / "steps.jsonl"),
        SimpleNamespace(is_known=False, step=GuideStep(candidates=5)),
    )
    timer.end_step(counts, num_seqs=2)
    assert lines(tmp_path / "steps.jsonl") == []
    counts.is_known = True
    timer.end_step(step=9)
    first, second = lines(tmp_path / "steps.jsonl")
    assert (first["step"], first["num_seqs"], first["candidates"], second["step"]) == (0, 2, 5, 9)


def test_without_a_path_nothing_is_made_for_a_section_and_an_unknown_clock_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    timer = StepTimer(None, "device")
    with timer.section("sample"), timer.section("sample"):
        pass
    timer.end_step(guided_rows=1)
    timer.close()
    with pytest.raises(GuidanceError, match="clock is 'wall'; take one of host, device"):
        StepTimer(tmp_path / "steps.jsonl", "wall")
    assert list(tmp_path.iterdir()) == []


LAST_WORDS = """
from multiprocessing import get_context
from benchctl.guided.params import GuideStep
from benchctl.guided.timing import PendingStep
from benchctl.guided.vllm.steps import GuidedStepLog
import sys
from support.guided.fake_events import Event
from pathlib import Path

def work(path):
    log = GuidedStepLog(path, "device", make_event=Event)
    with log.section("lvm_forward"):
        pass
    log.record(step=5, num_seqs=1, did=PendingStep(GuideStep(guided_rows=1)))
    assert path.read_text() == "", "the device is not there yet"
    sys.exit(0)

if __name__ == "__main__":
    process = get_context("fork").Process(target=work, args=(Path(sys.argv[1]),))
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def test_a_worker_that_ends_in_order_writes_what_waited_for_the_device(tmp_path):
    (tmp_path / "last_words.py").write_text(LAST_WORDS)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "last_words.py"), str(tmp_path / "steps")],
        capture_output=True, text=True, check=False, timeout=120,
        env={"PYTHONPATH": f"{root}:{root / 'tests'}", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, (tmp_path / "steps").read_text().splitlines())
    assert (line["step"], line["guided_rows"], line["sections_ns"]) == (5, 1, {"lvm_forward": 1_000_000})
