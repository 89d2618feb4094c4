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

from benchmarks.common.measured_process import run_measured
from benchmarks.common.paced_answer import Truth
from benchmarks.common.truth import Seen, arrivals_ns, errors, paced_server
from benchmarks.load.schedule_accuracy import ks_distance

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


def test_the_cost_bench_names_what_is_not_installed_and_what_failed_beside_what_it_measured(tmp_path):
    env = failing_peer(tmp_path / "peers")
    small = ["--streams", 2, "--phases", "common", "--output-len", 2, 12, "--rounds", 1, "--tick-ms", 1]
    tools = ["--tools", "limit", "benchctl", "guidellm", "aiperf", "--json", tmp_path / "cost.json"]
    said = run_script("load.client_cost", *small, *tools, env=env)
    assert "AIPerf: not installed" in said
    assert "GuideLLM: ended with 3: out of luck" in said
    found = json.loads((tmp_path / "cost.json").read_text())
    (tokens, smallest) = found["cases"].values()
    assert [row["tool"] for row in tokens if "us/token" in row] == ["limit (uvloop)", "benchctl"]
    assert [row["tool"] for row in smallest if "wall s" in row] == ["limit (uvloop)", "benchctl"]
    assert [run["server"]["tokens"] for run in found["runs"] if run["tool"] == "limit"] == [4, 24, 1]


def test_the_accuracy_bench_matches_every_request_in_every_scenario(tmp_path):
    small = ["--scale", 0.05, "--output-len", 8, "--tick-ms", 2, "--tools", "limit-stamps", "benchctl", "vllm"]
    said = run_script("load.client_accuracy", *small, "--json", tmp_path / "accuracy.json", env=NO_PEERS)
    assert said.count("vllm bench serve: not installed") == 5
    found = json.loads((tmp_path / "accuracy.json").read_text())
    streams = {"plain": 3, "busy-core": 3, "burst": 13, "multi-token": 3, "coalesced": 3}
    for scenario, num_streams in streams.items():
        measured = [row for row in found[scenario] if "failed" not in row]
        assert {row["tool"] for row in measured} >= {"limit (uvloop)", "benchctl"}
        assert {row["matched"] for row in measured} == {f"{num_streams}/{num_streams}"}
        assert {row["wrong tokens"] for row in measured} == {None, 0}  # the limit counts none
        assert all(row["ttft max"] > 0 for row in measured)


def test_the_schedule_bench_finds_every_request_of_a_poisson_process(tmp_path):
    small = ["--rate", 100, "--duration-s", 0.2, "--output-len", 2, "--tick-ms", 1, "--tools", "benchctl", "aiperf"]
    said = run_script("load.schedule_accuracy", *small, "--json", tmp_path / "schedule.json", env=NO_PEERS)
    assert "AIPerf: not installed" in said
    ours, _ = json.loads((tmp_path / "schedule.json").read_text())
    assert ours["requests"] == 20
    assert 0 < ours["KS distance"] < 1
    assert ours["sent late max"] >= ours["sent late p50"] >= 0


def test_the_compare_bench_judges_long_logs_and_says_what_the_least_would_take(tmp_path):
    said = run_script(
        "analysis.compare_speed",
        "--steps",
        3000,
        "--blocks",
        6,
        "--repeats",
        1,
        "--json",
        tmp_path / "compare.json",
    )
    assert "what it found: " in said
    found = json.loads((tmp_path / "compare.json").read_text())
    assert [row["what"] for row in found["rows"]] == [
        "benchctl compare",
        "limit: decoding alone",
    ]
    assert found["rows"][1]["of limit"] == 1
    assert all(row["wall s"] > 0 and row["peak MiB"] > 10 for row in found["rows"])
    assert "INVALID" not in found["said"]
    assert "b against a" in found["said"]


def test_the_show_bench_reads_many_runs_twice_and_says_what_both_take(tmp_path):
    small = ["--blocks", 6, "--requests", 4, "--tokens", 8, "--repeats", 1, "--json", tmp_path / "show.json"]
    assert "a directory of 12 runs and 768 tokens" in run_script("analysis.show_speed", *small)
    found = json.loads((tmp_path / "show.json").read_text())
    assert [row["what"] for row in found["rows"]] == ["first reading", "benchctl show"]
    assert all(row["wall s"] > 0 and row["peak MiB"] > 10 for row in found["rows"])


def test_the_report_bench_builds_a_page_and_says_what_it_costs_beside_vega_alone(tmp_path):
    small = ["--runs", 16, "--steps", 50, "--repeats", 1, "--json", tmp_path / "report.json"]
    said = run_script("analysis.report_speed", *small)
    found = json.loads((tmp_path / "report.json").read_text())
    assert (found["runs"], found["steps"]) == (16, 800)
    assert found["vega.js bytes"] > 500_000
    assert 500_000 < found["bytes"] < 2_000_000
    assert "size / vega.js" in said
    if "failed" not in found:
        assert 0 < found["verdict s"] <= found["first charts s"] <= found["all charts s"]
        assert "open / vega.js" in said


def test_the_verdict_bench_says_the_same_every_time_and_demands_something_of_every_section():
    sections = ["equivalence", "unpaired", "stopping"]
    said = run_script("verdict.verdict_truth", "--experiments", 30, "--sections", *sections)
    told = dict(part.strip().split(": ", 1) for part in said.split("\n\n")[1:-1])
    assert list(told) == sections
    assert all(" ok" in text and "FAIL" not in text for text in told.values())
    assert said.endswith("no demand is refuted\n")
    again = run_script("verdict.verdict_truth", "--experiments", 30, "--sections", "stopping")
    assert told["stopping"] in again
