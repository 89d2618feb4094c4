"""What a profile puts into requests arrives at a server in the words of its engine."""

import json
import sys
from typing import Any

import httpx
import msgspec
import pytest
from support import engine_settings
from support.servers.openai_server import OpenAIServer, SentRequest

from benchctl.engines.engine import engine_for
from benchctl.errors import EngineUnavailableError, UnsupportedError
from benchctl.profile.model import Sampling, VariantSettings
from benchctl.profile.sections import RequestOptions
from benchctl.records.record import Message, PreparedRequest

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
KINDS = ("sim", "vllm", "vllm-lenvm", "sglang", "sglang-lenvm", "llamacpp", "transformers", "attach")
REQUEST = PreparedRequest(
    request_id="r0", index=0, arrival_ns=0, prompt="Hi", prompt_tokens=2, max_tokens=3, ignore_eos=True, n=1,
    seed=3, source="test",
)  # fmt: skip
CHAT = msgspec.structs.replace(REQUEST, prompt=None, messages=(Message(role="user", content="Hi"),))


def settings_of(kind: str, request: dict[str, Any], **sampling: float) -> VariantSettings:
    own = {"url": "http://127.0.0.1:1"} if kind == "attach" else {}
    own |= {"value_model": "value"} if kind == "vllm-lenvm" else {}
    own |= {"python": sys.executable} if kind in {"transformers", "vllm", "vllm-lenvm"} else {}
    settings = engine_settings.settings_of(kind, "base", sampling=Sampling(**sampling), **own)
    return settings.model_copy(update={"request": RequestOptions(**request)})


def sent(kind: str, request: dict[str, Any], *, asked: PreparedRequest = REQUEST, **sampling: float) -> SentRequest:
    """The request as a server receives it."""
    call = engine_for(kind).request_call(asked, settings_of(kind, request, **sampling))
    with OpenAIServer().running() as server:
        httpx.post(server.url + call.path, content=call.body, headers=dict(call.headers))
        (received,) = server.requests
    return received


@pytest.mark.parametrize("kind", KINDS)
def test_fields_and_headers_of_the_profile_go_over_those_of_benchctl_and_leave_the_measurement_alone(
    kind, monkeypatch
):
    monkeypatch.setenv("TEAM_KEY", "s3cret-4711")
    own = {"repetition_penalty": 1.25, "cache_prompt": True, "priority": {"level": 2}}
    headers = {"Authorization": "Bearer ${TEAM_KEY}", "X-Team": "blue"}
    received = sent(kind, {"model": "adapter", "extra_body": own, "headers": headers})
    expected = {**own, "model": "adapter", "max_tokens": 3, "stream": True, "prompt": "Hi"}
    assert {name: received.body[name] for name in expected} == expected
    expected = {"authorization": "Bearer s3cret-4711", "x-team": "blue", "x-request-id": "r0"}
    assert {name: received.headers[name] for name in expected} == expected
    settings = settings_of(kind, {"chat_template_kwargs": {"thinking": True}})
    with pytest.raises(UnsupportedError, match="requests are plain prompts, which no chat template renders"):
        engine_for(kind).check_requests([REQUEST], settings)


@pytest.mark.parametrize(
    ("kind", "asked", "request_", "expected"),
    [
        ("vllm", REQUEST, {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
        ("vllm", REQUEST, {"response_format": FORM}, {"response_format": FORM}),
        ("vllm", CHAT, {"chat_template_kwargs": {"think": 0}}, {"chat_template_kwargs": {"think": 0}}),
        ("vllm-lenvm", REQUEST, {"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ("sglang", REQUEST, {"structured_outputs": {"json": SCHEMA}}, {"response_format": FORM}),
        ("sglang", CHAT, {"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ("sglang", CHAT, {"structured_outputs": {"choice": ["a.b", "c"]}}, {"regex": r"(a\.b|c)"}),
        ("sglang-lenvm", REQUEST, {"structured_outputs": {"grammar": "root ::= x"}}, {"ebnf": "root ::= x"}),
        ("llamacpp", REQUEST, {"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
        ("llamacpp", REQUEST, {"response_format": FORM}, {"json_schema": SCHEMA}),
        ("llamacpp", REQUEST, {"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ("llamacpp", CHAT, {"response_format": FORM}, {"response_format": FORM}),
        ("llamacpp", REQUEST, {"structured_outputs": {"choice": ["a", "b"]}}, {"grammar": 'root ::= "a" | "b"'}),
        ("llamacpp", REQUEST, {"structured_outputs": {"grammar": "root ::= x"}}, {"grammar": "root ::= x"}),
        ("attach", REQUEST, {"response_format": FORM}, {"response_format": FORM}),
        ("sim", REQUEST, {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
    ],
)  # fmt: skip
def test_the_form_of_an_answer_is_spelt_as_each_server_takes_it(kind, asked, request_, expected):
    body = sent(kind, request_, asked=asked).body
    forms = {"structured_outputs", "response_format", "regex", "ebnf", "json_schema", "grammar"}
    kwargs = {"chat_template_kwargs"}
    assert {name: body[name] for name in body.keys() & (forms | kwargs)} == expected


def test_penalties_are_sent_only_where_they_change_something():
    for kind in ("vllm", "sim"):
        assert not {"presence_penalty", "frequency_penalty", "repetition_penalty"} & sent(kind, {}).body.keys()
    body = sent("vllm", {}, presence_penalty=0.5, repetition_penalty=1.1).body
    assert (body["presence_penalty"], body["repetition_penalty"]) == (0.5, 1.1)
    assert sent("sglang", {}, repetition_penalty=1.1).body["repetition_penalty"] == 1.1
    assert sent("attach", {}, repetition_penalty=1.1).body["repetition_penalty"] == 1.1
    config = json.loads(sent("transformers", {}, repetition_penalty=1.1).body["generation_config"])
    assert config["repetition_penalty"] == 1.1
    body = sent("llamacpp", {}, frequency_penalty=0.5, repetition_penalty=1.1).body
    assert body["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]
    assert (body["repeat_penalty"], body["frequency_penalty"], body["repeat_last_n"]) == (1.1, 0.5, 5)


def test_a_variable_that_cannot_be_sent_is_refused_without_its_value(monkeypatch):
    monkeypatch.delenv("KEY", raising=False)
    with pytest.raises(EngineUnavailableError, match="KEY is not set in the environment; export KEY"):
        RequestOptions(headers={"X-Key": "${KEY}"}).sent_headers()
    monkeypatch.setenv("KEY", "a\nb")
    with pytest.raises(EngineUnavailableError, match="holds line breaks") as error:
        RequestOptions(headers={"X-Key": "${KEY}"}).sent_headers()
    assert "a\nb" not in str(error.value)
