"""Prompts are counted by the best tokenizer that is to be had, and every count says by which."""

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from support.servers.handler_server import handled_by
from support.servers.real_engines import tiny_model
from support.servers.simulator import sim_server

from benchctl.errors import UsageError
from benchctl.measure.tokens import planning_tokenizer, prepare_counted, tokenizer_for
from benchctl.profile.load import profile_from_plain
from benchctl.records.record import Message
from benchctl.workload.tokenizers import LocalTokenizer, count_chat_tokens, count_tokens

pytest.importorskip("tokenizers")
TEXTS = ("hello world", "", "12345 and 1 more", "hello world")
CHATS = ((Message(role="user", content="hello world"),), (Message(role="user", content="again"),))


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(name="hub")
def _hub(model, tmp_path, monkeypatch) -> Path:
    """The cache of the model hub with the tokenizer of one repository, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub/models--Qwen--Qwen2.5-1.5B-Instruct"
    snapshot = repository / "snapshots/1111"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("1111")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, snapshot)
    return snapshot


def profile_of(kind: str, model: object, options: dict | None = None, workload: dict | None = None, **keys: object):
    return profile_from_plain(
        {
            "name": "counted",
            "engine": {"kind": kind, "options": options or {}},
            "model": str(model),
            "workload": {
                "dataset": "generated", "output_len": 8, "num_prompts": 3, "arrival": {"kind": "burst"},
                "warmup_shapes": False, **(workload or {}),
            },
            "variants": {"baseline": {}},
            **keys,
        },
        source="a test",
    )  # fmt: skip


class Questions(BaseHTTPRequestHandler):
    """A server that counts the characters of prompts and notes what it was asked; it may refuse chats."""

    asked: list[tuple[str, dict, str | None]]
    counts_chats = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body, self.headers.get("Authorization")))
        if self.path != "/tokenize" or ("messages" in body and not self.counts_chats):
            self.send_error(404)
            return
        text = body["prompt"] if "prompt" in body else "".join(each["content"] for each in body["messages"])
        answer = json.dumps({"count": len(text), "max_model_len": 9}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_args: object) -> None:
        """Be silent."""


@contextmanager
def questions(*, counts_chats: bool = True):
    handler = type("Asked", (Questions,), {"asked": [], "counts_chats": counts_chats})
    with handled_by(handler) as url:
        yield url, handler.asked


def test_the_tokenizer_in_the_directory_of_the_model_counts(model):
    with tokenizer_for(profile_of("vllm", model)) as tokenizer:
        assert tokenizer.source == LocalTokenizer(model).source
        assert tokenizer.count_texts(TEXTS) == LocalTokenizer(model).count_texts(TEXTS)
    assert planning_tokenizer(profile_of("vllm", model)).source == tokenizer.source


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct"])
def test_the_hubs_cache_has_the_tokenizer_of_a_model_that_was_served_before(hub, name):
    with tokenizer_for(profile_of("vllm", name)) as tokenizer:
        assert tokenizer.source == LocalTokenizer(hub).source
        assert tokenizer.count_chats(CHATS) == LocalTokenizer(hub).count_chats(CHATS)


def test_a_tokenizer_that_is_named_takes_precedence(model, hub, tmp_path):
    other = json.loads((model / "tokenizer.json").read_text()) | {"post_processor": None}
    (tmp_path / "named").mkdir()
    (tmp_path / "named/tokenizer.json").write_text(json.dumps(other))
    for named in (tmp_path / "named", "Qwen/Qwen2.5-1.5B-Instruct"):
        directory = hub if isinstance(named, str) else named
        profile = profile_of("vllm", model, workload={"tokenizer": str(named)})
        with tokenizer_for(profile) as tokenizer:
            assert tokenizer.source == LocalTokenizer(directory).source


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("/no/such/place", "which is not a directory"),
        (".", r"which has no tokenizer\.json"),
        ("nobody/nothing", "neither a directory nor a repository"),
        ("not a name", "neither a directory nor a repository"),
    ],
)
def test_a_named_tokenizer_that_is_not_to_be_had_is_an_error(hub, named, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=rf"workload\.tokenizer is '{named}', .*{message}"):
        tokenizer_for(profile_of("vllm", "qwen2.5-7b", workload={"tokenizer": named}))


def test_the_package_that_finds_repositories_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="-m pip install huggingface_hub"):
        tokenizer_for(profile_of("vllm", "qwen2.5-7b", workload={"tokenizer": "owner/name"}))


def test_without_the_package_a_plan_is_an_estimate_that_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    profile = profile_of("vllm", model)
    with tokenizer_for(profile) as tokenizer:
        prepared = prepare_counted(profile, tokenizer)
    (warning,) = prepared.warnings
    assert warning.code == "prompt-lengths-estimated"
    assert "-m pip install tokenizers" in warning.message
    assert {request.prompt_tokens_from for request in prepared.requests} == {"estimate"}


def test_without_a_tokenizer_the_warning_of_a_plan_says_that_the_run_will_ask_a_server():
    profile = profile_of("vllm", "nobody/nothing")
    (warning,) = prepare_counted(profile, planning_tokenizer(profile)).warnings
    assert "a plan asks no server; the run will, or name one in workload.tokenizer" in warning.message


def test_the_simulator_counts_by_its_own_rule_and_nothing_is_warned_of(model):
    profile = profile_of("sim", "qwen2.5-7b", workload={"tokenizer": str(model)})
    with tokenizer_for(profile) as tokenizer:
        assert tokenizer.count_texts(TEXTS) == tuple(map(count_tokens, TEXTS))
        assert not prepare_counted(profile, tokenizer).warnings


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "openai"])
def test_a_running_server_counts_exactly_as_its_usage_will(tmp_path, dialect, model):
    with sim_server(tmp_path) as server:
        url = str(server.client.base_url).rstrip("/")
        profile = profile_of("attach", model, {"url": url, "dialect": dialect})
        with tokenizer_for(profile) as tokenizer:
            assert tokenizer.count_texts(TEXTS) == tuple(map(count_tokens, TEXTS))
            assert tokenizer.count_chats(CHATS) == tuple(map(count_chat_tokens, CHATS))
            assert tokenizer.source == "server"
        for chat, count in zip(CHATS, tokenizer.count_chats(CHATS), strict=True):
            body = {"messages": [{"role": each.role, "content": each.content} for each in chat], "max_tokens": 1}
            usage = server.client.post("/v1/chat/completions", json=body).json()["usage"]
            assert usage["prompt_tokens"] == count


def test_a_plan_asks_no_server():
    with questions() as (url, asked):
        profile = profile_of("attach", "unknown", {"url": url})
        (warning,) = prepare_counted(profile, planning_tokenizer(profile)).warnings
    assert not asked
    assert "a plan asks no server" in warning.message


def test_a_server_is_asked_once_for_each_prompt(model):
    with questions() as (url, asked):
        profile = profile_of("attach", model, {"url": url})
        with tokenizer_for(profile) as tokenizer:
            assert tokenizer.count_texts(TEXTS) == tuple(map(len, TEXTS))
            assert tokenizer.count_texts(TEXTS[::-1]) == tuple(map(len, TEXTS[::-1]))
        with tokenizer as again:
            assert again.count_texts(TEXTS[:1]) == (len(TEXTS[0]),)
    prompts = [body["prompt"] for _, body, _ in asked]
    assert sorted(prompts) == sorted({*TEXTS, "a"})  # "a" tries whether the server counts at all


def test_questions_carry_the_key_and_the_variables_of_the_template(model, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "a-key")
    with questions() as (url, asked):
        request = {"chat_template_kwargs": {"enable_thinking": False}}
        profile = profile_of("attach", model, {"url": url, "api_key_env": "SERVER_KEY"}, request=request)
        with tokenizer_for(profile) as tokenizer:
            tokenizer.count_chats(CHATS[:1])
            tokenizer.count_texts(["b"])
    bodies = {json.dumps(body.get("messages") or body["prompt"]): body for _, body, key in asked if "a-key" in key}
    assert len(bodies) == len(asked)
    assert bodies['"b"'] == {"prompt": "b", "add_special_tokens": True}
    assert bodies['[{"role": "user", "content": "hello world"}]'] == {
        "messages": [{"role": "user", "content": "hello world"}],
        "add_generation_prompt": True,
        "add_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_a_server_that_counts_no_chats_leaves_them_to_the_tokenizer_of_the_model(model):
    with (
        questions(counts_chats=False) as (url, _),
        tokenizer_for(profile_of("attach", model, {"url": url})) as tokenizer,
    ):
        assert tokenizer.count_texts(["four"]) == (4,)
        assert tokenizer.source == "server"
        assert tokenizer.count_chats(CHATS) == LocalTokenizer(model).count_chats(CHATS)
        assert tokenizer.source == LocalTokenizer(model).source


def test_a_server_that_is_not_there_or_counts_nothing_leaves_an_estimate_with_a_warning():
    profile = profile_of("attach", "unknown", {"url": "http://127.0.0.1:9", "dialect": "openai"})
    with tokenizer_for(profile) as tokenizer:
        assert tokenizer.count_texts(TEXTS) == tuple(map(count_tokens, TEXTS))
        prepared = prepare_counted(profile, tokenizer)
    (warning,) = prepared.warnings
    assert "the server does not count them, and no tokenizer of unknown is on this machine" in warning.message


def test_a_load_records_who_counted_its_prompts(tmp_path):
    with sim_server(tmp_path) as server:
        url = str(server.client.base_url).rstrip("/")
        command = [sys.executable, "-m", "benchctl", "load", url, "--num-prompts", "4", "--output-len", "2"]
        done = subprocess.run(
            [*command, "-o", "out", "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert done.returncode in {0, 4}, done.stderr
    planned = [json.loads(line) for line in (tmp_path / "out/requests.jsonl").read_text().splitlines()]
    (sent,) = (tmp_path / "out").glob("runs/*/requests.jsonl")
    seen = {each["request_id"]: each["prompt_tokens"] for each in map(json.loads, sent.read_text().splitlines())}
    assert {each["prompt_tokens_from"] for each in planned} == {"server"}
    assert {each["request_id"]: each["prompt_tokens"] for each in planned}.items() <= seen.items()
