"""The benches at sizes at which they measure nothing worth reading: their truth is right, and nothing is hidden."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.waiting import wait_until

from benchmarks.common.harness import FailedError, compared
from benchmarks.common.measured_process import run_measured
from benchmarks.common.paced_server import Truth
from benchmarks.common.truth import Seen, arrivals_ns, errors, paced_server
from benchmarks.load.clients import ks_distance

ROOT = Path(__file__).parents[2]


def run_script(name, *arguments, env=None):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def limit(url, *arguments):
    return json.loads(run_script("load.peers.limit_client", url, *arguments))


def test_what_the_server_wrote_down_encloses_what_a_client_on_the_same_clock_saw(tmp_path):
    with paced_server(tmp_path, ("--tick-ms", "2")) as server:
        counted = limit(server.url, "--streams", 3, "--output-len", 7, "--reads", tmp_path / "reads.json")
    true = {request.request_id: request for request in server.requests()}
    assert counted["complete"] == len(true) == 3
    for request in json.loads((tmp_path / "reads.json").read_text()):
        truth = true[request["request_id"]]
        assert (truth.is_complete, truth.event_tokens, truth.send_events) == (True, [1] * 7, [1] * 7)
        assert request["sent_ns"] - 20_000 <= truth.arrived_ns  # the clocks are related to some microseconds
        assert truth.arrived_ns - 20_000 <= truth.read_ns <= truth.sends_ns[0] <= request["stamps_ns"][0]
        assert truth.sends_ns[-1] <= request["stamps_ns"][-1]


def test_several_tokens_in_an_event_and_several_events_in_a_send_are_written_down(tmp_path):
    with paced_server(tmp_path, ("--tick-ms", "2", "--coalesce", "2", "--tokens-per-chunk", "3")) as server:
        limit(server.url, "--streams", 1, "--output-len", 10)
    (truth,) = server.requests()
    assert (truth.event_tokens, truth.send_events) == ([3, 3, 3, 1], [2, 2])
    assert (len(truth.sends_ns), len(arrivals_ns(truth))) == (2, 4)


def made_truth(**changed):
    sends = {"sends_ns": [2000, 3000, 5000], "send_events": [1, 2, 1], "event_tokens": [1, 1, 1, 1]}
    fields = {"request_id": "a", "prompt_digest": "d", "arrived_ns": 1000, "read_ns": 1100, "is_complete": True}
    return Truth(**fields | sends | changed)


def test_errors_are_what_was_said_less_what_was():
    seen = Seen(request_id="a", ttft_ns=1005, itl_ns=(1003, 0, 1990), tpot_ns=1010, output_tokens=4, num_bound=1)
    found = errors([seen], [made_truth()])
    assert (found.ttft_ns, found.itl_ns, found.tpot_ns) == ([5], [3, 0, -10], [10])
    assert found.bound_share == pytest.approx(1 / 4)
    assert (found.num_matched, found.num_unknown, found.num_wrong_tokens, found.num_itl_missing) == (1, 0, 0, 0)


def test_requests_are_matched_by_id_or_prompt_and_never_by_guess():
    seen = [Seen(request_id=name, output_tokens=3) for name in ("a", "d", "neither", "broken")]
    truths = [made_truth(), made_truth(request_id="broken", prompt_digest="e", is_complete=False)]
    found = errors(seen, truths)
    assert (found.num_matched, found.num_unknown, found.num_wrong_tokens, found.num_itl_missing) == (2, 2, 2, 2)
    assert found.bound_share is None


def test_gaps_that_are_exponential_have_a_small_distance_and_even_ones_a_large():
    shares = [(index + 0.5) / 400 for index in range(400)]
    assert ks_distance([-math.log(1 - share) / 200 for share in shares], 200) < 0.002
    assert ks_distance([1 / 200] * 400, 200) == pytest.approx(1 - math.exp(-1))


def test_the_cost_of_a_command_is_that_of_its_whole_family_and_nothing_of_it_stays(tmp_path):
    program = (
        "import subprocess, sys; spin = 'import time\\nwhile time.process_time() < 0.3: pass'; "
        "subprocess.run([sys.executable, '-c', spin]); "
        f"left = subprocess.Popen(['sleep', '600']); open({str(tmp_path / 'pid')!r}, 'w').write(str(left.pid))"
    )
    cost = run_measured([sys.executable, "-c", program], tmp_path / "log", timeout_s=60, environment={})
    assert cost.failure is None
    assert (cost.cpu_s >= 0.3, cost.most_processes >= 2, cost.peak_bytes > 5_000_000) == (True, True, True)
    left = int((tmp_path / "pid").read_text())

    def is_gone():
        return not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE

    wait_until("the end of a process left behind", is_gone)


def test_ways_take_turns_and_the_table_has_their_ratios_and_why_one_is_missing(capsys):
    order = []

    def way(name, seconds):
        order.append(name)
        if seconds is None:
            raise FailedError("not installed")
        return {"wall s": seconds * len(order), "said": name}

    ways = {"limit": lambda: way("limit", 1.0), "ours": lambda: way("ours", 2.0), "peer": lambda: way("peer", None)}
    rows = compared("a title", ways, rounds=2, ratios=["wall s"])
    assert order == ["limit", "ours", "peer", "peer", "ours", "limit"]
    assert [row.get("wall s") for row in rows] == [3.5, 7.0, None]
    assert [row.get("x wall s") for row in rows] == [1.0, 2.0, None]
    assert "peer: not installed" in capsys.readouterr().out


def measured(tmp_path, bench, *options, env=None):
    """What a bench prints, and its tables."""
    said = run_script(bench, *options, "--json", tmp_path / "tables.json", env=env)
    return said, json.loads((tmp_path / "tables.json").read_text())


@pytest.mark.parametrize(
    "accuracy", [pytest.param([], id="speed"), pytest.param(["accuracy"], id="all", marks=pytest.mark.nightly)]
)
def test_the_client_bench_measures_each_tool_and_names_what_is_missing_or_failed(tmp_path, accuracy):
    program = tmp_path / "peers" / "guidellm" / "bin" / "guidellm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    program.chmod(0o755)
    env = {"BENCHCTL_PEERS": str(tmp_path / "peers"), "BENCHCTL_ENGINES_DIR": "/nonexistent"}
    small = ["--scale", 0.04, "--sections", "smallest", *accuracy, "coalescing"]
    tools = ["--tools", "limit", "benchctl", "guidellm", "aiperf"]
    said, tables = measured(tmp_path, "load.clients", *small, *tools, env=env)
    assert "aiperf: not installed" in said
    assert "guidellm: ended with 3: out of luck" in said
    assert [title.partition(":")[0] for title in tables] == ["smallest", *accuracy * 5, "coalescing"]
    for title, rows in tables.items():
        bound, ours = (row for row in rows if "failed" not in row)
        assert (bound["way"], ours["way"]) == ("limit", "benchctl")
        if title.startswith("accuracy"):
            count = 10 if "256" in title else 3
            assert bound["matched"] == ours["matched"] == f"{count}/{count}"
            assert (ours["wrong tokens"], ours["ttft max"] > 0) == (0, True)
    assert (0 < bound["open"] <= 3, 0 < ours["open"] <= 3) == (True, True), "the last table is of coalescing"
    assert ours["by itself"].split()[0] in {"done", "suspect"}


def test_the_analysis_bench_reads_large_directories_beside_the_least_that_it_would_take(tmp_path):
    small = ["--blocks", 6, "--requests", 4, "--tokens", 8, "--steps", 3200, "--runs", 16, "--run-steps", 50]
    said, tables = measured(tmp_path, "analysis.speed", *small, "--rounds", 1)
    assert "show: 12 runs and 768 tokens" in said
    for title, ways in (
        ("show", ["first reading", "benchctl show"]),
        ("compare", ["limit: decoding alone", "benchctl compare"]),
    ):
        assert [row["way"] for row in tables[title]] == ways
        assert all(row["wall s"] > 0 and row["peak MiB"] > 10 for row in tables[title])
    built, *opened = tables["report"]
    assert (built["runs"], 500_000 < built["bytes"] < 2_000_000) == (16, True)
    for row in opened:
        assert 0 < row["verdict s"] <= row["first charts s"] <= row["all charts s"]


def test_the_verdict_bench_demands_something_of_every_section():
    sections = ["equivalence", "unpaired", "stopping"]
    said = run_script("verdict.verdict_truth", "--experiments", 12, "--sections", *sections)
    told = dict(part.strip().split(": ", 1) for part in said.split("\n\n")[1:-1])
    outcomes = {title: " ok" in text and "FAIL" not in text for title, text in told.items()}
    assert outcomes == dict.fromkeys(sections, True)
    assert said.endswith("no demand is refuted\n")


TABLE = "arm       step ms  p50_ttft_ms\nbaseline    11.55       -3.2%\n"
DOCUMENT = {"arms": [{"name": "baseline", "step_ms": 11.55, "is_done": True}]}


def outputs_compared(tmp_path, table=TABLE, document=DOCUMENT):
    for name, text, values in (("old", TABLE, DOCUMENT), ("new", table, document)):
        folder = tmp_path / name / "outputs/flag"
        folder.mkdir(parents=True)
        (folder / "show.txt").write_text(text, encoding="utf-8")
        (folder / "show.json").write_text(json.dumps(values, indent=3 if name == "new" else None))
    argv = [sys.executable, "-m", "benchmarks.outputs.differences", str(tmp_path / "old"), str(tmp_path / "new")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_number_that_changed_or_left_is_told_and_a_layout_or_a_further_number_is_not(tmp_path):
    for number, (table, line) in enumerate(
        (
            (TABLE, None),
            ("p50_ttft_ms | -3.2%\nstep ms | 11.550\n3 blocks\n", None),
            (TABLE.replace("11.55", "11.56"), "- 11.55 (1 times)"),
            (TABLE.replace("-3.2%", "+3.2%"), "- -3.2 (1 times)"),
            ("arm | step ms\nbaseline | 11.55\n", "- -3.2 (1 times)"),
        )
    ):
        code, text = outputs_compared(tmp_path / f"text-{number}", table)
        assert (code, (line or "") in text) == (line is not None, True), table
    for changes, expected, line in (
        ({"step_ms": 12}, 1, "~ arms.0.step_ms: 11.55 -> 12"),
        ({"wall_s": 1.5}, 0, "+ arms.0.wall_s: None -> 1.5"),
    ):
        document = {"arms": [DOCUMENT["arms"][0] | changes]}
        code, text = outputs_compared(tmp_path / f"values-{expected}", document=document)
        assert (code, line in text) == (expected, True)
