"""Somebody sets the wall clock in mid-run, forth by an hour and back: no duration changes, and the run says so."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.set_clock import SetClock, needs_compiler

from benchctl.records.loaded import load_results

PROFILE = """\
name: set-clock
seed: 7
engine: {kind: sim}
model: qwen2.5-7b
hardware: h100-sxm
blocks: 1
stop: forced
workload:
  dataset: generated
  num_prompts: 12
  output_len: 100
  arrival: {kind: closed-loop, max_concurrency: 4}
variants:
  baseline: {}
"""


@pytest.mark.slow
@needs_compiler
def test_a_wall_clock_that_is_set_in_mid_run_changes_no_duration_and_is_told_with_its_size(tmp_path):
    clock = SetClock(tmp_path)
    (tmp_path / "profile.yaml").write_text(PROFILE)
    out = tmp_path / "out"
    argv = [sys.executable, "-m", "benchctl", "run", "-p", "profile.yaml", "-o", str(out)]
    with subprocess.Popen(
        argv,
        cwd=tmp_path,
        env={**os.environ, **clock.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        wait_for_load(process, out)
        for shift_s in (3600.0, 0.0):
            time.sleep(0.6)
            clock.set_by(shift_s)
        said, _ = process.communicate(timeout=120)
    (run,) = load_results(out).runs
    assert run.record.state == "done", said

    requests = [request for request in run.requests if not request.is_warmup]
    assert len(requests) == 12
    for request in requests:
        (choice,) = request.choices
        times = [request.sent_ns, *choice.chunk_ns, request.done_ns]
        assert times == sorted(times)
        assert times[-1] - times[0] < 20e9, "an hour went into no duration"
        assert request.stamps == "loop" or len(choice.chunk_ns) == 100
    assert {request.stamps for request in requests[-4:]} == {"loop"}, (
        "the kernel's times are not used again in a load in which the clock was set"
    )
    assert run.record.times.stop_ns - run.record.times.launch_ns < 120e9

    assert all(0 <= sample.t_ns - run.host[0].t_ns < 120e9 for sample in run.host)

    (warning,) = (warning for warning in run.warnings if warning.code == "wall-clock-set")
    assert "set 2 times during the load (by +3,600 s after " in warning.message
    assert ", by -3,600 s after " in warning.message


def wait_for_load(process: "subprocess.Popen[bytes]", out: Path) -> None:
    while process.poll() is None:
        if any(path.stat().st_size for path in out.glob("runs/*/client.jsonl")):
            return
        time.sleep(0.01)
    pytest.fail(f"the run ended before its load: {process.stdout.read()!r}")
