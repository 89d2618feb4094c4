"""The simulated server as clients meet it: a real process, real HTTP."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.servers.simulator import VALUE_MODEL, SimServer, events, sim_server, wait_ready

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


def test_a_completion_has_text_usage_and_finish_reason(server: SimServer) -> None:
    answer = complete(server).json()
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["text"].split()) == 12


def test_a_stream_says_the_same_as_a_whole_answer(server: SimServer) -> None:
    whole = complete(server, n=2, return_token_ids=True).json()["choices"]
    chunks = events(
        complete(server, n=2, return_token_ids=True, stream=True, stream_options={"include_usage": True}).text
    )
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}
    assert len(chunks) == 24
    for choice in whole:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [token for c in own for token in c["token_ids"]] == choice["token_ids"]
        assert [c["finish_reason"] for c in own] == [None] * 11 + ["length"]


def test_a_stream_with_speculation_has_the_tokens_of_a_step_in_one_chunk(tmp_path: Path) -> None:
    drafting = {"num_speculative_tokens": 3, "acceptance": [0.9, 0.6, 0.3], "draft_cost": 0.1}
    with sim_server(tmp_path, **drafting) as server:
        fields = {"n": 3, "max_tokens": 40, "return_token_ids": True}
        whole = complete(server, **fields).json()["choices"]
        chunks = events(complete(server, **fields, stream=True, stream_options={"include_usage": True}).text)
        steps = server.steps()
        usage = chunks.pop()["usage"]
        assert usage == {"prompt_tokens": 4, "completion_tokens": 120, "total_tokens": 124}
        sizes = set()
        for choice in whole:
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in own) == choice["text"]
            assert [token for c in own for token in c["token_ids"]] == choice["token_ids"]
            sizes |= {len(c["token_ids"]) for c in own}
        assert sizes == {1, 2, 3, 4}
        assert (
            sum(step.output_tokens or 0 for step in steps)
            == 2 * 120
            == server.metric("vllm:generation_tokens_total")
        )
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            total = sum(getattr(step, name) for step in steps)
            assert server.metric(f"vllm:spec_decode_num_{name}_total") == total > 0
        page = server.client.get("/metrics").text
        for position in range(3):
            accepted = sum((step.accepted_by_position or ())[position] for step in steps)
            assert (
                f'accepted_tokens_per_pos_total{{model_name="qwen2.5-7b",position="{position}"}} {accepted}.0'
                in page
            )


def test_each_choice_of_a_chat_stream_opens_with_its_role(server: SimServer) -> None:
    chunks = events(chat(server, n=2, stream=True, ignore_eos=True).text)
    for index in (0, 1):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert len(deltas) == 7
        assert all(set(delta) == {"content"} for delta in deltas[1:])
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert not any("usage" in chunk for chunk in chunks)


def test_a_chat_answer_of_natural_length_ends_in_a_box(server: SimServer) -> None:
    (choice,) = chat(server, max_tokens=None, max_completion_tokens=2000).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].rsplit("\n", 1)[1].startswith("\\boxed{")


def test_chat_content_may_come_in_parts_and_without_a_limit(server: SimServer) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "\\boxed{}"}]
    answer = chat(server, messages=[{"role": "user", "content": parts}], max_tokens=None).json()
    assert answer["usage"]["prompt_tokens"] == chat(server).json()["usage"]["prompt_tokens"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_usage_can_come_with_every_chunk(server: SimServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(complete(server, stream=True, stream_options=options).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*range(1, 13), 12]


def test_a_prompt_may_be_token_ids_or_a_list_of_one(server: SimServer) -> None:
    assert complete(server, prompt=[5, 6, 7]).json()["usage"]["prompt_tokens"] == 3
    assert complete(server, prompt=["Once upon a time"]).json()["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
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
    ],
)
def test_a_bad_request_is_answered_in_openai_shape(
    server: SimServer, fields: dict[str, Any], status: int, message: str
) -> None:
    response = complete(server, **fields)
    error = response.json()["error"]
    assert response.status_code == status == error["code"]
    assert message in error["message"]
    assert error["type"] in {"BadRequestError", "NotFoundError"}
    assert complete(server).status_code == 200


def test_broken_json_and_unknown_paths_are_answered(server: SimServer) -> None:
    broken = server.client.post("/v1/completions", content=b'{"prompt": ')
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "BadRequestError")
    unknown = server.client.get("/v2/models")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")


def test_guided_requests_reach_the_value_model(server: SimServer) -> None:
    before = len(server.steps())
    assert complete(server, **GUIDED).status_code == 200
    assert sum(step.guided_rows or 0 for step in server.steps()[before:]) > 0


def test_custom_params_on_a_stock_server_are_refused(tmp_path: Path) -> None:
    with sim_server(tmp_path) as stock:
        response = complete(stock, **GUIDED)
        assert response.status_code == 400
        assert "this server has no value model; start it with value_model" in response.json()["error"]["message"]


def test_the_server_says_what_it_is(server: SimServer) -> None:
    info = server.client.get("/server_info").json()
    assert info["value_model"] == VALUE_MODEL
    assert info["clock"] == "virtual"
    assert info["time_scale"] == 100.0
    assert not {"port", "host", "step_log", "noise_seed"} & set(info)
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "qwen2.5-7b"


def test_metrics_count_what_was_served(server: SimServer) -> None:
    before = {
        name: server.metric(name)
        for name in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
    }
    complete(server, n=3)
    assert server.metric("vllm:generation_tokens_total") - before["vllm:generation_tokens_total"] == 36
    assert server.metric("vllm:prompt_tokens_total") - before["vllm:prompt_tokens_total"] == 4
    assert server.metric("vllm:request_success_total") - before["vllm:request_success_total"] == 3
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:e2e_request_latency_seconds_count") > 0
    assert server.metric("benchctl_sim:virtual_seconds") > 0


def test_a_client_that_leaves_frees_its_place(server: SimServer) -> None:
    aborted = 'vllm:request_success_total{finished_reason="abort"'

    def num_aborted() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(aborted))

    before = num_aborted()
    body = {**COMPLETION, "max_tokens": 30_000, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 30
    while server.metric("vllm:num_requests_running") > 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.metric("vllm:num_requests_running") == 0
    assert num_aborted() - before == 1
    assert complete(server).status_code == 200


def test_tokens_may_come_several_in_an_event(tmp_path: Path) -> None:
    with sim_server(tmp_path, tokens_per_chunk=5) as chunky:
        chunks = events(complete(chunky, stream=True, return_token_ids=True).text)
        assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [5, 5, 2]


def test_llm_mock_ends_a_stream_with_an_event_that_holds_no_token(tmp_path: Path) -> None:
    with sim_server(tmp_path, cost_model="llm-mock", time_scale=10_000) as mock:
        chunks = events(complete(mock, stream=True, return_token_ids=True, max_tokens=3).text)
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks[:3]] == [[i] for i in _ids(chunks[:3])]
        assert chunks[3]["choices"][0]["finish_reason"] == "length"
        assert chunks[3]["choices"][0]["token_ids"] == []


def _ids(chunks: list[dict[str, Any]]) -> list[int]:
    return [chunk["choices"][0]["token_ids"][0] for chunk in chunks]


def test_cached_prompt_tokens_are_reported_with_prefix_caching(tmp_path: Path) -> None:
    with sim_server(tmp_path, enable_prefix_caching=True) as caching:
        prompt = " ".join(f"word{chr(97 + i % 26)}" for i in range(64))
        usages = [complete(caching, prompt=prompt).json()["usage"] for _ in range(2)]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached[0] == 0
        assert cached[1] >= 48
        assert caching.metric("vllm:prefix_cache_hits_total") == cached[1]


def test_tokens_are_released_when_wall_time_reaches_their_step(tmp_path: Path) -> None:
    def wall_s() -> float:
        start = time.monotonic()
        complete(slow, max_tokens=40)
        return time.monotonic() - start

    with sim_server(tmp_path, time_scale=2.0) as slow:
        walls = [wall_s() for _ in range(3)]
    virtual_s = sum(step.dur_ns for step in slow.steps()) / len(walls) / 1e9
    # A busy machine may delay any of them, but hardly all.
    assert virtual_s / 2 <= min(walls) < virtual_s / 2 + 0.15


def test_a_server_is_not_ready_before_its_start_delay(tmp_path: Path) -> None:
    with sim_server(tmp_path, start_delay_s=0.6, wait=False) as late:
        statuses = set()
        deadline = time.monotonic() + 10
        while 200 not in statuses and time.monotonic() < deadline:
            try:
                response = late.client.get("/health")
            except httpx.ConnectError:
                continue
            statuses.add(response.status_code)
            time.sleep(0.02)
        assert statuses == {200, 503}


def test_sigterm_ends_the_server_at_once_even_in_mid_stream(tmp_path: Path) -> None:
    with sim_server(tmp_path, time_scale=1.0) as server:
        body = {**COMPLETION, "max_tokens": 5000, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=5) == 0  # the stream would go on for a minute


def test_a_killed_server_leaves_a_readable_log(tmp_path: Path) -> None:
    with sim_server(tmp_path, time_scale=20.0) as server:
        body = {**COMPLETION, "max_tokens": 5000, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(40):
                next(lines)
            server.process.kill()
            server.process.wait(timeout=5)
        whole = server.step_log.read_bytes().rpartition(b"\n")[0].splitlines()
        assert len(whole) >= 19
        assert [json.loads(line)["step"] for line in whole] == list(range(1, len(whole) + 1))


def test_a_taken_port_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "benchctl.sim", "--port", port],
            check=False,
            capture_output=True,
            text=True,
            timeout=20,
        )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert f"cannot listen on 127.0.0.1 port {port}: address already in use" in line


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
def test_a_server_that_cannot_start_says_why(tmp_path: Path, settings: str, code: int, message: str) -> None:
    (tmp_path / "config.json").write_text(settings)
    ended = subprocess.run(
        [sys.executable, "-m", "benchctl.sim", "--port", "1", "--config", str(tmp_path / "config.json")],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert ended.returncode == code
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_server_is_ready_soon(tmp_path: Path) -> None:
    with sim_server(tmp_path, wait=False) as server:
        wait_ready(server.client, server.process)
        used = psutil.Process(server.process.pid).cpu_times()
    assert used.user + used.system < 2.0  # in CPU seconds, because the machine may be busy; 0.2 are usual
