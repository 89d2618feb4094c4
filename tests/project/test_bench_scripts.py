"""The benches that hold load generators against a known truth: the truth is right, and nothing is hidden.

At sizes at which they measure nothing worth reading.
"""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.common.harness import FailedError, compared
from benchmarks.common.measured_process import run_measured
from benchmarks.common.paced_server import Truth
from benchmarks.common.truth import Seen, arrivals_ns, errors, paced_server
from benchmarks.load.clients import ks_distance

ROOT = Path(__file__).parents[2]
NO_PEERS = {"BENCHCTL_PEERS": "/nonexistent", "BENCHCTL_ENGINES_DIR": "/nonexistent"}


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
        assert truth.is_complete
        assert truth.event_tokens == truth.send_events == [1] * 7
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
    assert cost.cpu_s >= 0.3
    assert cost.most_processes >= 2
    assert cost.peak_bytes > 5_000_000
    left = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def failing_peer(directory):
    program = directory / "guidellm" / "bin" / "guidellm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    program.chmod(0o755)
    return {**NO_PEERS, "BENCHCTL_PEERS": str(directory)}


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


@pytest.mark.parametrize(
    "accuracy", [pytest.param([], id="speed"), pytest.param(["accuracy"], id="all", marks=pytest.mark.nightly)]
)
def test_the_client_bench_measures_each_tool_and_names_what_is_missing_or_failed(tmp_path, accuracy):
    small = [
        "--scale",
        0.04,
        "--sections",
        "smallest",
        *accuracy,
        "coalescing",
        "--json",
        tmp_path / "clients.json",
    ]
    tools = ["--tools", "limit", "benchctl", "guidellm", "aiperf"]
    said = run_script("load.clients", *small, *tools, env=failing_peer(tmp_path / "peers"))
    assert "aiperf: not installed" in said
    assert "guidellm: ended with 3: out of luck" in said
    tables = json.loads((tmp_path / "clients.json").read_text())
    assert [title.partition(":")[0] for title in tables] == ["smallest", *accuracy * 5, "coalescing"]
    measured = {title: [row for row in rows if "failed" not in row] for title, rows in tables.items()}
    assert all([row["way"] for row in rows] == ["limit", "benchctl"] for rows in measured.values())
    for title, (limit, ours) in measured.items():
        if title.startswith("accuracy"):
            count = 10 if "256" in title else 3
            assert limit["matched"] == ours["matched"] == f"{count}/{count}"
            assert ours["wrong tokens"] == 0
            assert ours["ttft max"] > 0
    (slots,) = (rows for title, rows in measured.items() if title.startswith("coalescing"))
    assert [0 < row["open"] <= 3 for row in slots] == [True, True]
    assert slots[1]["by itself"].split()[0] in {"done", "suspect"}


def test_the_client_bench_finds_every_request_of_a_poisson_process(tmp_path):
    small = [
        "--scale",
        0.005,
        "--sections",
        "schedule",
        "--tools",
        "benchctl",
        "--json",
        tmp_path / "schedule.json",
    ]
    run_script("load.clients", *small)
    ((ours,),) = json.loads((tmp_path / "schedule.json").read_text()).values()
    assert ours["requests"] == 30
    assert 0 < ours["KS distance"] < 1
    assert ours["sent late max"] >= ours["sent late p50"] >= 0


def test_the_analysis_bench_reads_large_directories_beside_the_least_that_it_would_take(tmp_path):
    small = ["--blocks", 6, "--requests", 4, "--tokens", 8, "--steps", 3200, "--runs", 16, "--run-steps", 50]
    said = run_script("analysis.speed", *small, "--rounds", 1, "--json", tmp_path / "speed.json")
    assert "show: 12 runs and 768 tokens" in said
    tables = json.loads((tmp_path / "speed.json").read_text())
    assert [row["way"] for row in tables["show"]] == ["first reading", "benchctl show"]
    assert [row["way"] for row in tables["compare"]] == ["limit: decoding alone", "benchctl compare"]
    assert all(row["wall s"] > 0 and row["peak MiB"] > 10 for row in tables["show"] + tables["compare"])
    built, *opened = tables["report"]
    assert (built["runs"], built["vega.js bytes"] > 500_000) == (16, True)
    assert 500_000 < built["bytes"] < 2_000_000
    for row in opened:
        assert 0 < row["verdict s"] <= row["first charts s"] <= row["all charts s"]


def test_the_verdict_bench_demands_something_of_every_section():
    sections = ["equivalence", "unpaired", "stopping"]
    said = run_script("verdict.verdict_truth", "--experiments", 12, "--sections", *sections)
    told = dict(part.strip().split(": ", 1) for part in said.split("\n\n")[1:-1])
    assert list(told) == sections
    assert all(" ok" in text and "FAIL" not in text for text in told.values())
    assert said.endswith("no demand is refuted\n")
