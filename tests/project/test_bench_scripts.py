"""The benches that hold load generators against a known truth: the truth is right, and nothing is hidden.

At sizes at which they measure nothing worth reading.
"""

import json
import math
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
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


@contextmanager
def paced(directory, *flags):
    with paced_server(directory, ("--tick-ms", "2", *flags)) as server:
        yield server


def test_what_the_server_wrote_down_encloses_what_a_client_on_the_same_clock_saw(tmp_path):
    with paced(tmp_path) as server:
        counted = limit(server.url, "--streams", 3, "--output-len", 7, "--reads", tmp_path / "reads.json")
    true = {request.request_id: request for request in server.requests()}
    assert counted["complete"] == len(true) == 3
    for request in json.loads((tmp_path / "reads.json").read_text()):
        truth = true[request["request_id"]]
        assert truth.is_complete
        assert truth.event_tokens == [1] * 7
        assert truth.send_events == [1] * 7
        assert request["sent_ns"] - 20_000 <= truth.arrived_ns  # the clocks are related to some microseconds
        assert truth.arrived_ns - 20_000 <= truth.read_ns <= truth.sends_ns[0]
        assert truth.sends_ns[0] <= request["stamps_ns"][0]
        assert truth.sends_ns[-1] <= request["stamps_ns"][-1]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_limit_counts_every_token_only_when_it_decodes(tmp_path, loop):
    with paced(tmp_path, "--phase", "spread") as server:
        blind = limit(server.url, "--streams", 4, "--output-len", 9, "--loop", loop)
        decoding = limit(server.url, "--streams", 4, "--output-len", 9, "--loop", loop, "--decode")
    assert blind["tokens"] is None
    assert decoding["tokens"] == 36
    assert decoding["bytes"] == blind["bytes"]
    assert server.stats["tokens"] == 72


@pytest.mark.parametrize(
    ("flags", "tokens", "events"),
    [
        (["--tokens-per-chunk", "4"], [4, 4, 2], [1, 1, 1]),
        (["--coalesce", "4"], [1] * 10, [4, 4, 2]),
        (["--coalesce", "2", "--tokens-per-chunk", "3"], [3, 3, 3, 1], [2, 2]),
    ],
)
def test_several_tokens_in_an_event_and_several_events_in_a_send_are_written_down(tmp_path, flags, tokens, events):
    with paced(tmp_path, *flags) as server:
        limit(server.url, "--streams", 1, "--output-len", 10)
    (truth,) = server.requests()
    assert truth.event_tokens == tokens
    assert truth.send_events == events
    assert len(truth.sends_ns) == len(events)
    assert len(arrivals_ns(truth)) == len(tokens)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "one two three", "max_tokens": 5}),
        ("/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 5}),
    ],
)
def test_an_answer_says_the_same_streamed_and_whole(tmp_path, path, asked):
    with paced(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        whole = client.post(path, json=asked).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = client.post(path, json=asked | options).text
    lines = body.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    said = "".join(
        choice.get("text") or choice["delta"]["content"] for event in events for choice in event["choices"]
    )
    assert said == whole["choices"][0].get("text", whole["choices"][0].get("message", {}).get("content"))
    assert said.split() == [f"t{token}" for token in range(5)]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 5
    assert "data: [DONE]" in lines
    (truth,) = server.requests()  # only what is streamed takes time
    assert truth.request_id == truth.prompt_digest


def test_what_the_server_does_not_do_it_refuses(tmp_path):
    with paced(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        several = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "n": 2})
        nothing = client.post("/v1/completions", content=b"{")
        nowhere = client.get("/v1/embeddings")
        model = client.get("/v1/models").json()["data"][0]["id"]
    assert (several.status_code, nothing.status_code, nowhere.status_code) == (400, 400, 404)
    assert "n has to be 1" in several.json()["error"]["message"]
    assert model == "paced"


def test_a_request_whose_client_hangs_up_is_no_complete_one(tmp_path):
    body = json.dumps({"prompt": "x", "max_tokens": 100_000, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nx-request-id: gone\r\ncontent-length: {len(body)}\r\n\r\n"
    with paced(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
            client.sendall(head.encode() + body.encode())
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
        limit(server.url, "--streams", 1, "--output-len", 3)
    true = {request.request_id: request.is_complete for request in server.requests()}
    assert true == {"gone": False, "limit-0": True}


def made_truth(**changed):
    fields = {
        "request_id": "a",
        "prompt_digest": "d",
        "arrived_ns": 1000,
        "read_ns": 1100,
        "sends_ns": [2000, 3000, 5000],
        "send_events": [1, 2, 1],
        "event_tokens": [1, 1, 1, 1],
        "is_complete": True,
    }
    return Truth(**fields | changed)


def test_errors_are_what_was_said_less_what_was():
    seen = Seen(request_id="a", ttft_ns=1005, itl_ns=(1003, 0, 1990), tpot_ns=1010, output_tokens=4, num_bound=1)
    found = errors([seen], [made_truth()])
    assert found.ttft_ns == [5]
    assert found.itl_ns == [3, 0, -10]
    assert found.tpot_ns == [10]
    assert found.bound_share == pytest.approx(1 / 4)
    assert (found.num_matched, found.num_unknown, found.num_wrong_tokens, found.num_itl_missing) == (1, 0, 0, 0)


def test_requests_are_matched_by_id_or_prompt_and_never_by_guess():
    seen = [Seen(request_id=name, output_tokens=3) for name in ("a", "d", "neither", "broken")]
    truths = [made_truth(), made_truth(request_id="broken", prompt_digest="e", is_complete=False)]
    found = errors(seen, truths)
    assert (found.num_matched, found.num_unknown, found.num_wrong_tokens) == (2, 2, 2)
    assert found.num_itl_missing == 2
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


def test_a_command_that_takes_too_long_or_fails_says_how_it_ended(tmp_path):
    slow = run_measured(["sleep", "600"], tmp_path / "log", timeout_s=0.1, environment={})
    assert slow.failure.startswith("ended with -9")
    said = [sys.executable, "-c", "raise SystemExit('no luck')"]
    failed = run_measured(said, tmp_path / "log", timeout_s=60, environment={})
    assert failed.failure == "ended with 1: no luck"


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


def test_the_client_bench_measures_each_tool_and_names_what_is_missing_or_failed(tmp_path):
    small = [
        "--scale",
        0.04,
        "--sections",
        "smallest",
        "accuracy",
        "coalescing",
        "--json",
        tmp_path / "clients.json",
    ]
    tools = ["--tools", "limit", "benchctl", "guidellm", "aiperf"]
    said = run_script("load.clients", *small, *tools, env=failing_peer(tmp_path / "peers"))
    assert "aiperf: not installed" in said
    assert "guidellm: ended with 3: out of luck" in said
    tables = json.loads((tmp_path / "clients.json").read_text())
    assert [title.partition(":")[0] for title in tables] == ["smallest", *["accuracy"] * 5, "coalescing"]
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


def test_the_verdict_bench_says_the_same_every_time_and_demands_something_of_every_section():
    sections = ["equivalence", "unpaired", "stopping"]
    said = run_script("verdict.verdict_truth", "--experiments", 30, "--sections", *sections)
    told = dict(part.strip().split(": ", 1) for part in said.split("\n\n")[1:-1])
    assert list(told) == sections
    assert all(" ok" in text and "FAIL" not in text for text in told.values())
    assert said.endswith("no demand is refuted\n")
    again = run_script("verdict.verdict_truth", "--experiments", 30, "--sections", "stopping")
    assert told["stopping"] in again
