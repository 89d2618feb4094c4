"""The parts of the measurement of one GPU: time, order, what is skipped, what a page says of a failed part."""

import contextlib
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.gpu_scripts import importable
from support.servers.real_engines import needs

from benchctl.engines.environment import engines_directory

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _gpu_scripts(monkeypatch):
    with importable(monkeypatch):
        yield


def part(code, *, name="trial", limit_s=30, **more):
    from parts import Part

    times = {"estimate_s": 1, "limit_s": limit_s}
    return Part(name=name, title="A trial", commands=lambda _: [(sys.executable, "-c", code)], **times, **more)


def runs_in(directory, *, key="commit on device", has_benchctl=True):
    from part_runs import Parts
    from parts import Setup

    setup = Setup(directory=directory, torch_python=sys.executable, has_benchctl=has_benchctl, device="cpu")
    return Parts(setup, key, "0")


@pytest.mark.parametrize(("parts", "minutes"), [("QUICK", 8), ("FULL", 25)])
def test_the_limits_of_all_parts_fit_into_the_time_of_the_whole_and_estimates_into_the_limits(parts, minutes):
    import parts as table

    chosen, whole_s = getattr(table, parts), getattr(table, f"{parts}_S")
    assert sum(each.limit_s for each in chosen) <= whole_s == minutes * 60
    assert all(each.estimate_s < each.limit_s for each in chosen)
    assert len({each.name for each in chosen}) == len(chosen)


def test_the_quick_parts_come_first_and_need_nothing_and_every_file_that_a_part_runs_is_there(tmp_path):
    from parts import FULL, QUICK, Setup

    assert FULL[: len(QUICK)] == QUICK
    assert ([need for each in QUICK for need in each.needs], QUICK[0].name) == ([], "goal")
    setup = Setup(directory=tmp_path, torch_python="python", has_benchctl=True)
    words = {word for each in FULL for command in each.commands(setup) for word in command}
    assert [Path(word).is_file() for word in words if word.endswith(".py")] == [True, True]


def test_a_part_that_is_done_is_known_to_the_next_call_unless_commit_or_device_changed(tmp_path):
    trial = part("print('| 1 |')", writes_markdown=True)
    assert runs_in(tmp_path).run(trial, 100).ending == "done"
    assert runs_in(tmp_path).outcome(trial).ending == "done"
    assert runs_in(tmp_path, key="other commit on device").outcome(trial) is None
    assert runs_in(tmp_path).outcome(part("print(2)", writes_markdown=True)) is None
    assert "## A trial\n\n| 1 |\n" in runs_in(tmp_path).section(trial, runs_in(tmp_path).outcome(trial))


def test_a_part_that_fails_is_told_with_the_end_of_its_log_and_one_that_could_decide_nothing_is_done(tmp_path):
    trial = part("print('some of it'); import sys; sys.exit('memory is gone')")
    runs = runs_in(tmp_path)
    outcome = runs.run(trial, 100)
    assert (outcome.ending, outcome.is_bad) == ("failed", True)
    told = ("ended with exit code 1", "some of it", "memory is gone")
    assert [words for words in told if words not in runs.section(trial, outcome)] == []
    assert runs_in(tmp_path).run(part("raise SystemExit(3)"), 100).ending == "done"


def test_a_part_beyond_its_time_is_ended_with_all_that_it_started(tmp_path):
    started = tmp_path / "child"
    code = (
        "import subprocess; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(started)!r}, 'w').write(str(child.pid)); print('begun', flush=True); child.wait()"
    )
    trial, runs = part(code, limit_s=5), runs_in(tmp_path)
    outcome = runs.run(trial, 100)
    assert (outcome.ending, "begun" in runs.section(trial, outcome)) == ("timed out", True)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(started.read_text())).wait(timeout=50)


def test_a_part_without_time_or_without_what_it_needs_does_not_begin(tmp_path, monkeypatch):
    outcome = runs_in(tmp_path).run(part("print(1)", limit_s=30), 20)
    assert (outcome.ending, outcome.is_bad) == ("left out", True)
    assert not (tmp_path / "parts" / "trial.md").exists()
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path))
    outcome = runs_in(tmp_path).run(part("print(1)", needs=("benchctl", "vllm")), 100)
    reason = "vllm is not installed here: benchctl engines install vllm --device cuda"
    assert (outcome.ending, outcome.is_bad, outcome.reason) == ("skipped", False, reason)
    bare = runs_in(tmp_path, has_benchctl=False).run(part("print(1)", needs=("benchctl",)), 100)
    assert "pip install -e ." in bare.reason


def test_clocks_and_throttle_reasons_of_a_part_are_told_or_not_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    runs = runs_in(tmp_path)
    unread = part("print(1)")
    assert "Clocks and power: not known" in runs.section(unread, runs.run(unread, 100))
    written = tmp_path / "both readings are written"
    trial = part(f"import os, time\nwhile not os.path.exists({str(written)!r}): time.sleep(0.05)")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '345, 2619, 75.10, 30, 0, 512, 0x0000000000000001'\n"
        f"echo '1980, 2619, 690.00, 61, 99, 9000, 0x0000000000000004'\n: > '{written}'\nsleep 30\n"
    )
    program.chmod(0o755)
    section = runs.section(trial, runs.run(trial, 100))
    assert "2 readings, lowest / median / highest: clocks.sm 345 / 1162 / 1980 MHz" in section
    assert "power.draw 75 / 383 / 690 W" in section
    assert "Throttle reasons: 0x4." in section


@pytest.mark.parametrize("rounds", [6, 9, 12, 25])
def test_the_interval_of_a_ratio_holds_the_median_as_often_as_it_says(rounds):
    from paired import LEVEL, median_interval

    draw, held = random.Random(rounds), 0
    for _ in range(4000):
        low, high = median_interval([draw.expovariate(1) for _ in range(rounds)])
        held += low <= math.log(2) <= high
    assert held / 4000 >= LEVEL - 0.01
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None


def test_rounds_of_both_sides_alternate_and_the_first_pair_is_not_counted():
    from paired import paired_rounds

    order = []
    sides = [lambda name=name: order.append(name) or float(len(order)) for name in ("base", "guided")]
    paired = paired_rounds(*sides, 3)
    assert order == ["base", "guided", "base", "guided", "guided", "base", "base", "guided"]
    assert paired.base_ms == (3.0, 6.0, 7.0)
    assert paired.ratios == (4 / 3, 5 / 6, 8 / 7)


@pytest.mark.parametrize(
    ("guided", "said"), [((1.2, 1.3, 1.4), "met"), ((1.5, 1.6, 1.7), "missed"), ((1.3, 1.5, 1.7), "undecided")]
)
def test_a_mark_is_judged_by_the_interval(guided, said):
    from paired import Paired, judged

    assert judged(Paired(base_ms=(1.0,) * 6, guided_ms=guided * 2), 1.45) == said


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.real_engine
@needs("transformers")
def test_the_parts_that_need_benchctl_are_measured_on_a_cpu(tmp_path):
    import measure_all

    python = str(engines_directory() / "transformers" / "bin" / "python")
    options = [
        "--tiny", "--device", "cpu", "--torch-python", python, "--engine", "sim-exact", "--model", "qwen2.5-7b",
        "--value-model", "qwen2.5-0.5b", "--only", "machine,served,roofline,forward,bonus",
    ]  # fmt: skip
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "BENCHCTL_PEAKS_DIR": str(tmp_path / "peaks")}
    argv, env = [sys.executable, measure_all.__file__, *options, tmp_path / "out"], os.environ | variables
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=600)
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert done.returncode == 0, done.stderr + page
    texts = ("`benchctl doctor", "`benchctl run", "`benchctl show", "`benchctl micro roofline", "runs: 4 done")
    assert [text for text in texts if text not in page] == []
    assert json.loads((tmp_path / "out/parts/forward.json").read_text())["ending"] == "done"
