"""What all engines have in common: their table, what logs say of failures, fields of requests in their words."""

import json
import subprocess
import sys
from typing import Any, get_args

import httpx
import pytest
from support import engine_settings
from support.engine_settings import asked
from support.servers.openai_server import OpenAIServer, SentRequest

from benchctl.engines.engine import engine_for
from benchctl.errors import EngineUnavailableError, UnsupportedError
from benchctl.profile.choices import ServerOptions
from benchctl.profile.engine_table import ENGINES, dialects, guiding_kinds, options_class
from benchctl.profile.model import EngineKind, Sampling, VariantSettings
from benchctl.profile.sections import RequestOptions
from benchctl.records.record import PreparedRequest

METHODS = ("argv", "env", "request_call", "effective_config", "check_available", "check_requests", "diagnose")


def test_a_spec_names_classes_and_options_that_exist_and_guides_when_it_has_options_of_a_value_model() -> None:
    assert set(get_args(EngineKind)) == set(ENGINES)
    for kind, spec in ENGINES.items():
        options, engine = options_class(kind), engine_for(kind)
        assert spec.kind == engine.kind == kind
        assert issubclass(options, ServerOptions)
        assert all(callable(getattr(engine, method)) for method in METHODS)
        assert bool(options.VALUE_MODEL_OPTIONS) == spec.guides == (kind in guiding_kinds())
        coded = {option for options in spec.coded_options.values() for option in options}
        assert coded | options.flags().keys() | options.VALUE_MODEL_OPTIONS <= options.model_fields.keys()
    with pytest.raises(EngineUnavailableError, match="unknown engine 'abacus'; choose one of sim"):
        engine_for("abacus")


def test_a_dialect_can_state_the_configuration_of_a_server() -> None:
    assert dialects() == (*(spec.kind for spec in ENGINES.values() if spec.is_dialect), "openai")
    assert all(hasattr(engine_for(kind), "attached_config") for kind in dialects() if kind in ENGINES)


def test_the_table_is_read_without_options_or_code_of_an_engine() -> None:
    show = "print([name for name in sys.modules if name.startswith('benchctl.engines')])"
    code = f"import sys, benchctl.profile.engine_table; {show}"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded == "[]\n"


LOGS: dict[str, list[tuple[str, str, int | None]]] = {
    "sim": [
        ("ERROR cannot listen on 127.0.0.1 port 1: address already in use", "port-taken", False),
        ("ERROR unknown model 'x': Built-in shapes are", "bad-model", True),
        ("ERROR unknown hardware 'x': name one of", "bad-model", True),
        ("python -m benchctl.sim: error: argument --noise: invalid choice", "bad-flag", True),
        ("MemoryError", "out-of-memory", False),
    ],
    "vllm": [
        ("api_server.py: error: unrecognized arguments: --frobnicate", "bad-flag", True),
        ("OSError: [Errno 98] Address already in use", "port-taken", False),
        ("HFValidationError: Repo id must be in the form 'repo_name'", "bad-model", True),
        ("RuntimeError: Cannot find any model weights with `/x`", "no-weights", True),
        ("SafetensorError: Error while deserializing header", "damaged-weights", True),
        ("but Transformers does not recognize this architecture", "unsupported-model", True),
        ("ValueError: Target and draft model should have the same vocabulary size.", "bad-draft", True),
        ("max_model_len (9) is greater than the derived max_model_len", "context-too-long", True),
        ("Available memory on node 0 is less than desired CPU memory utilization", "out-of-memory", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "out-of-memory", False),
        ("ValueError: Free memory on device cuda:0 (1/80 GiB) on startup", "out-of-memory", False),
        ("Failed to load 0th LogitsProcessor plugin nowhere:Nothing", "bad-plugin", True),
        ("RuntimeError: Found no NVIDIA driver on your system", "no-device", False),
    ],
    "sglang": [
        (
            "ERROR:    [Errno 98] error while attempting to bind on address: address already in use",
            "port-taken",
            False,
        ),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "out-of-memory", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB", "out-of-memory", False),
        (
            "Scheduler hit an exception: Traceback\nRuntimeError: Cannot find any model weights",
            "bad-model",
            True,
        ),
        ("sglang serve: error: unrecognized arguments: --no-such-flag", "bad-flag", True),
        (
            "sglang serve: error: argument --dtype: invalid choice: 'nonsense' (choose from 'auto')",
            "bad-flag",
            True,
        ),
        (
            "context_length (9999) is too great; set the env var SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
            "bad-flag",
            True,
        ),
        ("launch_server.py: error: argument --dtype: invalid choice: 'x'", "bad-flag", True),
        ("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name'", "bad-model", True),
        ("Initialization failed. warmup error: Traceback", "warm-up-failed", False),
        ("Scheduler hit an exception: Traceback\nValueError: odd", "engine-died", False),
    ],
    "sglang-lenvm": [
        ("Exception: Not implemented, cpu should not be used", "unguidable-request", None),
        ("RuntimeError: Missing key(s): v_head.fc.weight", "bad-value-model", None),
        ("ValueError: Failed to load guidance function from file: /x.py", "bad-flag", None),
        ("RuntimeError: LenVM GPU guidance path failed", "guidance-failed", None),
        ("torch.OutOfMemoryError: CUDA out of memory.", "out-of-memory", None),
    ],
    "llamacpp": [
        (
            "E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9",
            "out-of-memory",
            False,
        ),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory", "out-of-memory", False),
        ("llama-server: error while loading shared libraries: libggml.so.0: cannot open", "broken-install", False),
        ("ggml.c:123: GGML_ASSERT(a != b) failed", "server-bug", False),
        ("E srv load_model: failed to load model, 'x.gguf'", "bad-model", True),
    ],
    "transformers": [
        (
            "ERROR:    [Errno 98] error while attempting to bind on address: address already in use",
            "port-taken",
            False,
        ),
        ("OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no'", "bad-model", True),
        ("OSError: Error no file named model.safetensors, or pytorch_model.bin, found in", "bad-model", True),
        ("safetensors._safetensors_rust.SafetensorError: Error while deserializing header", "bad-model", True),
        ("Run 'transformers serve --help' for full details.", "bad-flag", True),
        ("Try 'transformers serve --help' for help.\n\nError: Invalid value for '--port': 'abc'", "bad-flag", True),
        ("ModuleNotFoundError: No module named 'requests'", "missing-package", True),
        ("ValueError: this requires `sentencepiece`. You can install it with `pip", "missing-package", True),
        ("AssertionError: Torch not compiled with CUDA enabled", "bad-device", True),
        ("Error in generation loop: x\ntorch.OutOfMemoryError: CUDA out of memory.", "out-of-memory", False),
        ("Error in generation loop: x\nMemoryError: Memory footprint 2 is more than", "out-of-memory", False),
        ("RuntimeError: No requests can be scheduled and no requests can be offloaded.", "kv-cache-full", False),
        ("Error in generation loop: cannot reshape tensor", "generation-died", False),
    ],
}
ORDINARY = {
    "sim": "INFO serving qwen2.5-7b on http://127.0.0.1:1",
    "vllm": "WARNING Found ulimit of 20000: can cause errors like `OSError: [Errno 24] Too many open files`",
    "sglang": "[2026-01-01 00:00:00] Decode batch, #running-req: 4, #token: 900, cuda graph: True",
    "sglang-lenvm": "[2026-01-01 00:00:00] Decode batch, #running-req: 4, #token: 900",
    "llamacpp": "I srv  llama_server: listening on http://127.0.0.1:8431",
    "transformers": "INFO:     Uvicorn running on http://127.0.0.1:8262 (Press CTRL+C to quit)",
}
FRAMES = {
    "vllm": "{}\n...\nRuntimeError: Engine core initialization failed. See root cause above.",
    "sglang-lenvm": "[2026-01-01 00:00:00] Scheduler hit an exception: Traceback\n{}\n",
}
FINAL = {"sglang": {"port-taken"}, "transformers": {"out-of-memory", "kv-cache-full", "generation-died"}}
"""Failures after which a server lives on without ever becoming ready, or answering again."""
REMEDIES = {
    "seeded-parts": (
        "RuntimeError: CPU Generator does not use offset\nvllm.v1.engine.exceptions.EngineDeadError: an issue.",
        "engine.options.enable_chunked_prefill to false",
    ),
    "out-of-memory": (
        "Available memory on node 0 (20/23 GiB) is less than requested memory for kv (400 GiB)",
        "lower kv_cache_memory_bytes",
    ),
    "engine-died": ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", ""),
}
"""Failures of vLLM, whose frames differ."""


@pytest.mark.parametrize("kind", LOGS)
def test_the_end_of_a_log_tells_the_cause_and_an_ordinary_log_nothing(kind: str) -> None:
    engine = engine_for(kind)
    assert engine.diagnose(ORDINARY[kind]) is None
    for log, cause, blames_profile in LOGS[kind]:
        told = engine.diagnose(FRAMES.get(kind, "INFO something\n{}\nINFO bye").format(log))
        assert told is not None, log
        assert (told.cause, bool(told.remedy)) == (cause, True), log
        assert blames_profile in {told.is_profile_error, None}, log
        assert kind not in FINAL or told.is_final is (cause in FINAL[kind]), log
    for cause, (log, remedy) in REMEDIES.items() if kind == "vllm" else ():
        told = engine.diagnose(log)
        assert (told.cause, remedy in told.remedy) == (cause, True)


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
REQUEST, CHAT = asked(max_tokens=3), asked(max_tokens=3, chat=True)


def settings_of(kind: str, request: dict[str, Any], **sampling: float) -> VariantSettings:
    own = {"url": "http://127.0.0.1:1"} if kind == "attach" else {}
    own |= {"value_model": "value"} if kind == "vllm-lenvm" else {}
    own |= {"python": sys.executable} if kind in {"transformers", "vllm", "vllm-lenvm"} else {}
    settings = engine_settings.settings_of(kind, "base", sampling=Sampling(**sampling), **own)
    return settings.model_copy(update={"request": RequestOptions(**request)})


def sent(kind: str, fields: dict[str, Any], request: PreparedRequest = REQUEST, **sampling: float) -> SentRequest:
    """The request as a server receives it."""
    call = engine_for(kind).request_call(request, settings_of(kind, fields, **sampling))
    with OpenAIServer().running() as server:
        httpx.post(server.url + call.path, content=call.body, headers=dict(call.headers))
        (received,) = server.requests
    return received


@pytest.mark.parametrize("kind", sorted(ENGINES.keys() - {"micro"}))
def test_fields_and_headers_of_the_profile_go_over_those_of_benchctl_and_leave_the_measurement_alone(
    kind, monkeypatch
):
    monkeypatch.setenv("TEAM_KEY", "s3cret-4711")
    own = {"repetition_penalty": 1.25, "cache_prompt": True, "priority": {"level": 2}}
    headers = {"Authorization": "Bearer ${TEAM_KEY}", "X-Team": "blue"}
    received = sent(kind, {"model": "adapter", "extra_body": own, "headers": headers})
    expected = {**own, "model": "adapter", "max_tokens": 3, "stream": True, "prompt": "Hello there"}
    assert received.body.items() >= expected.items()
    expected = {"authorization": "Bearer s3cret-4711", "x-team": "blue", "x-request-id": "r"}
    assert received.headers.items() >= expected.items()
    settings = settings_of(kind, {"chat_template_kwargs": {"thinking": True}})
    with pytest.raises(UnsupportedError, match="requests are plain prompts, which no chat template renders"):
        engine_for(kind).check_requests([REQUEST], settings)


@pytest.mark.parametrize(
    ("kind", "request_", "fields", "expected"),
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
def test_the_form_of_an_answer_is_spelt_as_each_server_takes_it(kind, request_, fields, expected):
    body = sent(kind, fields, request_).body
    forms = {"structured_outputs", "response_format", "regex", "ebnf", "json_schema", "grammar"}
    assert {name: body[name] for name in body.keys() & (forms | {"chat_template_kwargs"})} == expected


def test_penalties_are_sent_only_where_they_change_something():
    for kind in ("vllm", "sim"):
        assert not {"presence_penalty", "frequency_penalty", "repetition_penalty"} & sent(kind, {}).body.keys()
    for kind in ("vllm", "sglang", "attach"):
        body = sent(kind, {}, presence_penalty=0.5, repetition_penalty=1.1).body
        assert (body["presence_penalty"], body["repetition_penalty"]) == (0.5, 1.1), kind
    config = json.loads(sent("transformers", {}, repetition_penalty=1.1).body["generation_config"])
    assert config["repetition_penalty"] == 1.1
    body = sent("llamacpp", {}, frequency_penalty=0.5, repetition_penalty=1.1).body
    assert body["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]
    assert (body["repeat_penalty"], body["frequency_penalty"], body["repeat_last_n"]) == (1.1, 0.5, 5 + 3)


def test_a_variable_that_cannot_be_sent_is_refused_without_its_value(monkeypatch):
    options = RequestOptions(headers={"X-Key": "${ABSENT_KEY}"})
    with pytest.raises(EngineUnavailableError, match="ABSENT_KEY is not set in the environment; export ABSENT_KEY"):
        options.sent_headers()
    monkeypatch.setenv("ABSENT_KEY", "a\nb")
    with pytest.raises(EngineUnavailableError, match="holds line breaks") as error:
        options.sent_headers()
    assert "a\nb" not in str(error.value)
