"""What a failing server does to an experiment and to the exit code of the command line."""

import re
import subprocess
import sys
from pathlib import Path

from support.cli import only_result

from benchctl.records.directory import open_results

HERE = Path(__file__).parents[2]
BENCHCTL = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
from dataclasses import replace

from benchctl.profile.engine_table import ENGINES
from support.servers.stubborn_engine import StubbornEngine

class Engine(StubbornEngine):
    def request_call(self, asked, settings):
        call = super().request_call(asked, settings)
        if "truncate" in FLAGS and asked.index == 1 and not asked.request_id.startswith("warmup"):
            body = call.body.replace(b'"{{}}"', b'"{{\\\\"mode\\\\": \\\\"truncate\\\\"}}"')
            return replace(call, body=body)
        return call

FLAGS = sys.argv.pop(1).split("|")
flags = {{"guided": tuple(FLAGS)}} if "truncate" not in FLAGS else {{}}

def engine():
    return Engine(truth=Path("truth.jsonl"), flags_of=flags)

ENGINES["sim"] = replace(ENGINES["sim"], implementation="__main__:engine")

from benchctl.cli import conduct, main
conduct._REPORT_INTERVAL_S = 0.5
main()
"""
SMALL = [
    *("run", "--profile", "ci-smoke", "--quiet"),
    *("--set", "workload.num_prompts=3", "--set", "workload.output_len=4"),
]


def benchctl(cwd, flags, *args):
    return subprocess.run(
        [sys.executable, "-c", BENCHCTL, flags, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def records_of(cwd, variant):
    results = open_results(only_result(cwd))
    runs = [results.run(run.run_id) for run in results.plan().runs if run.variant == variant]
    return [run.read() for run in runs if (run.path / "run.json").exists()]


def test_a_fault_of_the_profile_stops_the_experiment_with_a_sentence_and_the_log(tmp_path):
    done = benchctl(tmp_path, "--die-saying|error: unrecognized arguments: --frob", *SMALL)
    assert done.returncode == 2, done.stderr
    assert "(bad-flag); correct the flag" in done.stderr
    assert "the server's log ends:\n" in done.stderr
    assert "  | error: unrecognized arguments: --frob" in done.stderr
    assert "Traceback" not in done.stderr
    refused = [run for run in records_of(tmp_path, "guided") if run.failure is not None]
    assert [run.failure.cause for run in refused] == ["bad-flag"]


def test_a_server_that_fails_otherwise_fails_its_run_shows_its_log_and_the_experiment_goes_on(tmp_path):
    done = benchctl(
        tmp_path, "--start-delay-s|1.2|--die-saying|Segmentation fault in kernel 7", *SMALL, "--blocks", "1"
    )
    assert done.returncode == 5, done.stderr
    assert re.search(r"the server has been starting for \d+ s: paced server starting\n", done.stderr)
    assert done.stderr.count("  | Segmentation fault in kernel 7") == 1
    assert [run.failure.cause for run in records_of(tmp_path, "guided")] == ["server-died"]
    assert [run.num_completed for run in records_of(tmp_path, "baseline")] == [3]


def test_an_arm_that_runs_out_of_memory_is_not_tried_again_until_a_resume(tmp_path):
    done = benchctl(tmp_path, "--die-saying|CUDA out of memory", *SMALL)
    assert done.returncode == 5, done.stderr
    first, second = records_of(tmp_path, "guided")
    assert (first.state, first.failure.cause) == ("failed", "out-of-memory")
    assert (second.state, second.failure.cause) == ("failed", "infeasible")
    assert f"not tried, because {first.run_id} ran out of memory" in second.failure.message
    assert second.times.launch_ns is None
    assert all(run.num_sent == 3 for run in records_of(tmp_path, "baseline"))
    benchctl(tmp_path, "--start-delay-s|0", "run", "--resume", str(only_result(tmp_path)), "--quiet")
    again = records_of(tmp_path, "guided")
    assert [run.num_completed for run in again] == [3, 3]
    assert [run.attempt for run in again] == [2, 2]


def test_suspect_runs_are_an_invalid_measurement(tmp_path):
    done = benchctl(tmp_path, "truncate", *SMALL, "--blocks", "1")
    assert done.returncode == 4, done.stderr
    assert "runs are suspect (failed-requests in " in done.stderr
    assert "): their results are not reliable; see Notes" in done.stderr
    assert {run.state for run in records_of(tmp_path, "baseline")} == {"suspect"}
