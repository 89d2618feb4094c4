"""Prompts are counted by the best tokenizer that is to be had, and every count says by which."""

import json
import shutil
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from support.cli import benchctl
from support.servers.handler_server import handled_by
from support.servers.real_engines import tiny_model
from support.servers.simulator import sim_server

from benchctl.errors import UsageError
from benchctl.measure.tokens import planning_tokenizer, prepare_counted, tokenizer_for
from benchctl.profile.load import profile_from_plain
from benchctl.records.files import read_jsonl
from benchctl.records.record import Message, PreparedRequest, RequestRecord
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
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("1111")
    return shutil.copytree(model, repository / "snapshots/1111")


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


@contextmanager
def questions(*, counts_chats: bool = True):
    """A server that counts the characters of prompts, and perhaps of chats; its address and what it was asked."""
    asked: list[tuple[dict, str | None]] = []

    class Questions(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((body, self.headers.get("Authorization")))
            if self.path != "/tokenize" or ("messages" in body and not counts_chats):
                self.send_error(404)
                return
            text = body["prompt"] if "prompt" in body else "".join(each["content"] for each in body["messages"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"count": len(text), "max_model_len": 9}).encode())

        def log_message(self, *_args: object) -> None:
            """Be silent."""

    with handled_by(Questions) as url:
        yield url, asked


def test_the_tokenizer_that_is_named_beside_the_model_or_in_the_hubs_cache_counts(model, hub, tmp_path):
    named = shutil.copytree(model, tmp_path / "named")
    other = json.loads((model / "tokenizer.json").read_text()) | {"post_processor": None}
    (named / "tokenizer.json").write_text(json.dumps(other))
    for served, workload, directory in (
        (model, {}, model),
        ("qwen2.5-1.5b", {}, hub),
        ("Qwen/Qwen2.5-1.5B-Instruct", {}, hub),
        (model, {"tokenizer": str(named)}, named),
        (model, {"tokenizer": "Qwen/Qwen2.5-1.5B-Instruct"}, hub),
    ):
        expected, profile = LocalTokenizer(directory), profile_of("vllm", served, workload=workload)
        with tokenizer_for(profile) as tokenizer:
            assert tokenizer.count_texts(TEXTS) == expected.count_texts(TEXTS)
            assert tokenizer.count_chats(CHATS) == expected.count_chats(CHATS)
            assert tokenizer.source == planning_tokenizer(profile).source == expected.source


def test_a_named_tokenizer_that_is_not_to_be_had_is_an_error(hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for named, message in (
        ("/no/such/place", "which is not a directory"),
        (".", r"which has no tokenizer\.json"),
        ("nobody/nothing", "neither a directory nor a repository"),
        ("not a name", "neither a directory nor a repository"),
    ):
        with pytest.raises(UsageError, match=rf"workload\.tokenizer is '{named}', .*{message}"):
            tokenizer_for(profile_of("vllm", "qwen2.5-7b", workload={"tokenizer": named}))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="-m pip install huggingface_hub"):
        tokenizer_for(profile_of("vllm", "qwen2.5-7b", workload={"tokenizer": "owner/name"}))


def warning_of(profile, tokenizer):
    """The message of the warning that prompts are counted by an estimate."""
    prepared = prepare_counted(profile, tokenizer)
    (warning,) = prepared.warnings
    assert warning.code == "prompt-lengths-estimated"
    assert {request.prompt_tokens_from for request in prepared.requests} == {"estimate"}
    return warning.message


def test_without_the_package_or_a_tokenizer_a_plan_is_an_estimate_that_says_what_to_do(model, monkeypatch):
    with questions() as (url, asked):
        for profile in (profile_of("vllm", "nobody/nothing"), profile_of("attach", "unknown", {"url": url})):
            message = warning_of(profile, planning_tokenizer(profile))
            assert "a plan asks no server; the run will, or name one in workload.tokenizer" in message
    assert not asked
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with tokenizer_for(profile_of("vllm", model)) as tokenizer:
        assert "-m pip install tokenizers" in warning_of(profile_of("vllm", model), tokenizer)


def test_the_simulator_counts_by_its_own_rule_and_nothing_is_warned_of(model):
    profile = profile_of("sim", "qwen2.5-7b", workload={"tokenizer": str(model)})
    with tokenizer_for(profile) as tokenizer:
        assert tokenizer.count_texts(TEXTS) == tuple(map(count_tokens, TEXTS))
        assert not prepare_counted(profile, tokenizer).warnings


def test_a_running_server_counts_exactly_as_its_usage_will(tmp_path, model):
    with sim_server(tmp_path) as server:
        url = str(server.client.base_url).rstrip("/")
        for dialect in ("vllm", "sglang", "openai"):
            with tokenizer_for(profile_of("attach", model, {"url": url, "dialect": dialect})) as tokenizer:
                assert tokenizer.count_texts(TEXTS) == tuple(map(count_tokens, TEXTS))
                counts = (tokenizer.count_chats(CHATS), tokenizer.source)
                assert counts == (tuple(map(count_chat_tokens, CHATS)), "server")
        done = benchctl("load", url, "--num-prompts", "4", "--output-len", "2", "-o", "out", "--json", cwd=tmp_path)
    assert done.returncode in {0, 4}, done.stderr
    planned = list(read_jsonl(tmp_path / "out/requests.jsonl", PreparedRequest))
    assert {request.prompt_tokens_from for request in planned} == {"server"}
    (sent,) = (tmp_path / "out").glob("runs/*/requests.jsonl")
    usage = {request.request_id: request.prompt_tokens for request in read_jsonl(sent, RequestRecord)}
    assert {request.request_id: request.prompt_tokens for request in planned}.items() <= usage.items()


def test_a_server_is_asked_once_for_each_prompt_with_the_key_and_the_variables_of_the_template(model, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "a-key")
    with questions() as (url, asked):
        request = {"chat_template_kwargs": {"enable_thinking": False}}
        profile = profile_of("attach", model, {"url": url, "api_key_env": "SERVER_KEY"}, request=request)
        with tokenizer_for(profile) as tokenizer:
            tokenizer.count_chats(CHATS[:1])
            for texts in (TEXTS, TEXTS[::-1], TEXTS[:1]):
                assert tokenizer.count_texts(texts) == tuple(map(len, texts))
    assert all("a-key" in key for _, key in asked)
    bodies = [body for body, _ in asked]
    prompts = [body["prompt"] for body in bodies if "prompt" in body]
    assert sorted(prompts) == sorted({*TEXTS, "a"})  # "a" tries whether the server counts at all
    assert {"prompt": TEXTS[0], "add_special_tokens": True} in bodies
    assert {
        "messages": [{"role": "user", "content": "hello world"}],
        "add_generation_prompt": True,
        "add_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
    } in bodies


def test_a_server_that_counts_no_chats_leaves_them_to_the_tokenizer_of_the_model(model):
    local = LocalTokenizer(model)
    with (
        questions(counts_chats=False) as (url, _),
        tokenizer_for(profile_of("attach", model, {"url": url})) as mixed,
    ):
        assert (mixed.count_texts(["four"]), mixed.source) == ((4,), "server")
        assert (mixed.count_chats(CHATS), mixed.source) == (local.count_chats(CHATS), local.source)


def test_a_server_that_is_not_there_or_counts_nothing_leaves_an_estimate_with_a_warning():
    profile = profile_of("attach", "unknown", {"url": "http://127.0.0.1:9", "dialect": "openai"})
    with tokenizer_for(profile) as tokenizer:
        assert tokenizer.count_texts(TEXTS) == tuple(map(count_tokens, TEXTS))
        message = warning_of(profile, tokenizer)
    assert "the server does not count them, and no tokenizer of model 'unknown' is on this machine" in message
