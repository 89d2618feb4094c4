"""The simulated server as clients meet it: a real process, real HTTP."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers.simulator import VALUE_MODEL, SimServer, events, sim_server
from support.waiting import wait_until

from benchctl.sim.__main__ import main

COMPLETION = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True, "seed": 1}
GUIDED = {"top_k": 5, "min_p": 0.01, "custom_params": {"mode": "centered_exp", "value_scale": 0.0}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimServer]:
    with sim_server(tmp_path_factory.mktemp("sim"), value_model=VALUE_MODEL) as running:
        yield running


def complete(server: SimServer, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/completions", json={**COMPLETION, **fields})


def chat(server: SimServer, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Say \\boxed{}"}], "max_tokens": 6, "seed": 1}
    return server.client.post("/v1/chat/completions", json={**body, **fields})


WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def assert_stream_is(chunks: list[dict[str, Any]], choices: list[dict[str, Any]]) -> list[list[int]]:
    """Whether chunks put together are the choices of a whole answer; returns the sizes of their parts."""
    sizes = []
    for choice in choices:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [token for c in own for token in c["token_ids"]] == choice["token_ids"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        sizes.append([len(c["token_ids"]) for c in own])
    return sizes


def test_a_stream_says_the_same_as_a_whole_answer(server: SimServer) -> None:
    answer = complete(server, n=2, return_token_ids=True).json()
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}
    assert [len(choice["text"].split()) for choice in answer["choices"]] == [12, 12]
    chunks = events(complete(server, n=2, return_token_ids=True, **WITH_USAGE).text)
    usage = chunks.pop()
    assert (usage["choices"], usage["usage"]) == ([], answer["usage"])
    assert assert_stream_is(chunks, answer["choices"]) == [[1] * 12] * 2
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = events(complete(server, stream=True, stream_options=options).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in counted] == [*range(1, 13), 12]


def test_a_stream_with_speculation_has_the_tokens_of_a_step_in_one_chunk(tmp_path: Path) -> None:
    drafting = {"num_speculative_tokens": 3, "acceptance": [0.9, 0.6, 0.3], "draft_cost": 0.1}
    with sim_server(tmp_path, **drafting) as server:
        fields = {"n": 3, "max_tokens": 40, "return_token_ids": True}
        choices = complete(server, **fields).json()["choices"]
        chunks = events(complete(server, **fields, **WITH_USAGE).text)
        assert chunks.pop()["usage"]["completion_tokens"] == 120
        assert {size for sizes in assert_stream_is(chunks, choices) for size in sizes} == {1, 2, 3, 4}
        assert server.metric("vllm:generation_tokens_total") == sum(s.output_tokens for s in server.steps()) == 240
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            total = sum(getattr(step, name) for step in server.steps())
            assert server.metric(f"vllm:spec_decode_num_{name}_total") == total > 0
        page = server.client.get("/metrics").text
        for position in range(3):
            accepted = sum(step.accepted_by_position[position] for step in server.steps())
            label = f'accepted_tokens_per_pos_total{{model_name="qwen2.5-7b",position="{position}"}}'
            assert f"{label} {accepted}.0" in page


def test_prompts_are_texts_token_ids_and_chats_in_parts_and_natural_answers_end_in_a_box(server: SimServer) -> None:
    for prompt, num_tokens in (([5, 6, 7], 3), (["Once upon a time"], 4)):
        assert complete(server, prompt=prompt).json()["usage"]["prompt_tokens"] == num_tokens
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "\\boxed{}"}]
    answer = chat(server, messages=[{"role": "user", "content": parts}], max_tokens=None).json()
    assert answer["usage"]["prompt_tokens"] == chat(server).json()["usage"]["prompt_tokens"]
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].rsplit("\n", 1)[1].startswith("\\boxed{")


def test_each_choice_of_a_chat_stream_opens_with_its_role(server: SimServer) -> None:
    chunks = events(chat(server, n=2, stream=True, ignore_eos=True).text)
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    for index in (0, 1):
        opening, *deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert opening == {"role": "assistant", "content": ""}
        assert [set(delta) for delta in deltas] == [{"content"}] * 6


BAD_REQUESTS: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": ""}, 400, "prompt is empty"),
    ({"prompt": ["a", "b"]}, 400, "2 prompts in one request"),
    ({"prompt": 5}, 400, "$.prompt"),
    ({"n": 0}, 400, "$.n"),
    ({"max_tokens": "many"}, 400, "$.max_tokens"),
    ({"temperature": -1}, 400, "$.temperature"),
    ({"max_tokens": 40_000}, 400, "exceed the context of 32768 tokens"),
    ({"model": "gpt-9"}, 404, "the model 'gpt-9' does not exist; this server has 'qwen2.5-7b'"),
    ({"custom_params": {"mode": "harder"}}, 400, "mode is 'harder'"),
    ({"custom_params": {"mode": "centered_exp"}}, 400, "with top_k -1"),
]


def test_a_bad_request_is_answered_in_openai_shape(server: SimServer) -> None:
    for fields, status, message in BAD_REQUESTS:
        response = complete(server, **fields)
        error = response.json()["error"]
        assert response.status_code == status == error["code"], fields
        assert message in error["message"]
        assert error["type"] in {"BadRequestError", "NotFoundError"}
    broken = server.client.post("/v1/completions", content=b'{"prompt": ')
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "BadRequestError")
    unknown = server.client.get("/v2/models")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    before = len(server.steps())
    assert complete(server, **GUIDED).status_code == 200
    assert sum(step.guided_rows or 0 for step in server.steps()[before:]) > 0


def test_the_server_says_what_it_is_and_counts_what_it_served(server: SimServer) -> None:
    info = server.client.get("/server_info").json()
    expected = {"value_model": VALUE_MODEL, "clock": "virtual", "time_scale": 100.0}
    assert {name: info[name] for name in expected} == expected
    assert not {"port", "host", "step_log", "noise_seed"} & set(info)
    assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == ["qwen2.5-7b"]
    counters = {"generation_tokens": 36, "prompt_tokens": 4, "request_success": 3}
    before = {name: server.metric(f"vllm:{name}_total") for name in counters}
    complete(server, n=3)
    assert {name: server.metric(f"vllm:{name}_total") - before[name] for name in counters} == counters
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:e2e_request_latency_seconds_count") > 0
    assert server.metric("benchctl_sim:virtual_seconds") > 0


def test_nobody_waits_for_the_steps_of_a_warm_up(server: SimServer) -> None:
    announced = {"requests": [{"request_id": "warmup-0", "arrival_ns": 0}], "is_warmup": True}
    server.client.post("/sim/schedule", json=announced)
    own = {"X-Request-Id": "warmup-0"}
    answer = server.client.post("/v1/completions", json={**COMPLETION, "max_tokens": 500}, headers=own)
    assert answer.json()["usage"]["completion_tokens"] == 500
    assert [step.is_warmup for step in server.steps()[-500:]] == [True] * 500
    assert server.metric("benchctl_sim:phase_wall_seconds") == 0
    complete(server)
    assert server.metric("benchctl_sim:phase_wall_seconds") > 0


def test_a_path_has_one_method_and_a_body_is_limited(server: SimServer) -> None:
    assert server.client.get("/v1/completions").json()["error"]["code"] == 405
    assert server.client.post("/tokenize", content=b" " * (65 << 20)).json()["error"]["code"] == 413
    assert server.client.get("/health").status_code == 200


HEALTH = b"GET /health HTTP/1.1\r\nHost: sim\r\n"
LAST = HEALTH + b"Connection: close\r\n\r\n"
TOKENIZE = b"POST /tokenize HTTP/1.1\r\nContent-Length: 17\r\nExpect: 100-continue\r\n\r\n"
BYTES = {
    "requests that come together are answered in turn": (HEALTH + b"\r\n" + LAST, [b"200", b"200"]),
    "a client may wait for a word before its body": (
        TOKENIZE + b'{"prompt": "one"}' + LAST,
        [b"100", b"200", b"200"],
    ),
    "an old client is left after one answer": (b"GET /v1/models HTTP/1.0\r\n\r\n", [b"200"]),
    "another protocol is not spoken": (HEALTH + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n", [b"200"]),
    "what is no request is refused": (b"good morning\r\n\r\n", [b"400"]),
    "a header is asked for without its body": (LAST.replace(b"GET /health", b"HEAD /v1/models"), [b"200"]),
}


@pytest.mark.parametrize("case", BYTES)
def test_a_connection_is_served_as_http_1_1_says(server: SimServer, case: str) -> None:
    sent, statuses = BYTES[case]
    with socket.create_connection(("127.0.0.1", server.client.base_url.port)) as client:
        client.sendall(sent)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == statuses
    assert received.endswith(b"\r\n\r\n") or b"HEAD" not in sent


def test_a_client_that_leaves_frees_its_place(server: SimServer) -> None:
    def num_aborted() -> float:
        page = server.client.get("/metrics").text
        return float(re.search(r'request_success_total{finished_reason="abort".*} (.*)', page)[1])

    before = num_aborted()
    body = {**COMPLETION, "max_tokens": 30_000, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until("its end", lambda: server.metric("vllm:num_requests_running") == 0)
    assert num_aborted() - before == 1
    assert complete(server).status_code == 200


def test_cached_prompt_tokens_are_reported_with_prefix_caching_and_custom_params_refused_without_a_value_model(
    tmp_path: Path,
) -> None:
    with sim_server(tmp_path, enable_prefix_caching=True, tokens_per_chunk=5) as caching:
        prompt = " ".join(f"word{chr(97 + i % 26)}" for i in range(64))
        usages = [complete(caching, prompt=prompt).json()["usage"] for _ in range(2)]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached[0] == 0
        assert cached[1] >= 48
        assert caching.metric("vllm:prefix_cache_hits_total") == cached[1]
        chunks = events(complete(caching, stream=True, return_token_ids=True).text)
        assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [5, 5, 2]
        response = complete(caching, **GUIDED)
    assert response.status_code == 400
    assert "this server has no value model; start it with value_model" in response.json()["error"]["message"]


def test_a_server_is_ready_after_its_start_delay_paces_its_tokens_and_ends_at_once_in_mid_stream(
    tmp_path: Path,
) -> None:
    with sim_server(tmp_path, time_scale=2.0, start_delay_s=0.3, wait=False) as server:
        statuses = [status for status in iter(server.health, 200) if status is not None]
        assert set(statuses) == {503}
        start = time.monotonic()
        complete(server, max_tokens=40)
        assert time.monotonic() - start >= sum(step.dur_ns for step in server.steps()) / 2e9
        body = {**COMPLETION, "max_tokens": 5000, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=50) == 0  # the stream would go on for a minute


def test_a_server_that_runs_step_by_step_imports_nothing_large_that_it_does_not_use() -> None:
    code = "import sys, benchctl.sim.__main__ as server\nfrom benchctl.sim.config import SimConfig\n"
    code += "server.Server(SimConfig(value_model='qwen2.5-1.5b'), None)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "scipy", "uvicorn", "httpx", "rich", "benchctl.profile.model"} & set(done.stdout.split())


def test_a_taken_port_is_said_in_one_line(caplog) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}: address already in use" in caplog.text


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ('{"model": "qwen9"}', 1, "unknown model 'qwen9'"),
        ('{"hardware": "abacus"}', 1, "unknown hardware 'abacus'"),
        ('{"max_num_seqs": 0}', 2, "max_num_seqs: Input should be greater than or equal to 1"),
        ('{"cost_model": "guess"}', 2, "cost_model: Input should be 'lenvm-h100', 'roofline'"),
        ('{"max_num_seqs": 9, "max_num_batched_tokens": 8}', 2, "tokens is 8, below max_num_seqs 9"),
        ('{"speed": 9}', 2, "speed: Extra inputs are not permitted"),
        ("[", 2, "Invalid JSON"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path, capsys, caplog, settings, code, message) -> None:
    (tmp_path / "config.json").write_text(settings)
    try:
        ended = main(["--port", "1", "--config", str(tmp_path / "config.json")])
    except SystemExit as error:
        ended = error.code
    assert ended == code
    assert message in capsys.readouterr().err + caplog.text
