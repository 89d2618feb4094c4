"""Fields of requests on a real vLLM: grammars, adapters, what it refuses and what it ignores."""

import json

import pytest
from support import cli
from support.servers.real_engines import needs

from benchctl.analysis.compare.judge import judge_named
from benchctl.costs.shapes import ModelShape
from benchctl.engines.tiny_models.make import make_lora_pair
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.records.loaded import load_results

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, needs("vllm")]

PROFILE = """
extends: structured-output
engine:
  options:
    enable_lora: true
    max_lora_rank: 8
    lora_modules: {adapter: MODELS/adapter}
    # Random weights may fill an answer with white space, which is JSON between tokens, and never end the document.
    extra_args: [--structured-outputs-config, '{"backend": "xgrammar", "disable_any_whitespace": true}']
model: MODELS/base
blocks: 1
workload: {num_prompts: 4, output_len: 96}
variants:
  baseline: {request: {extra_body: {priority: 0, no_such_field: 1}}}
  adapter: {request: {model: adapter}}
  refused: {request: {structured_outputs: {json: {type: objekt}}}}
"""


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory):
    """One block of five arms on a model with an adapter; the runs by variant."""
    directory = tmp_path_factory.mktemp("request")
    shape = ModelShape(
        name="tiny", layers=2, hidden=128, q_heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=2048,
        tied_embeddings=True, qkv_bias=True,
    )  # fmt: skip
    make_lora_pair(directory, Recipe(arch="qwen2", shape=shape, context=4096, dtype="bfloat16", seed=0), rank=8)
    (directory / "own.yaml").write_text(PROFILE.replace("MODELS", str(directory)))
    done = cli.benchctl("run", "own.yaml", "--quiet", cwd=directory, timeout_s=900)
    assert done.returncode == 5, done.stdout + done.stderr
    return {run.record.variant: run for run in load_results(directory / "results/own/latest").runs}


def texts(run):
    return {r.request_id: r.choices[0].text for r in run.requests if not r.is_warmup}


def test_a_schema_makes_the_beginning_of_forced_answers_valid_json_and_nothing_else_does(run):
    is_valid = judge_named("json", runs_on=True).is_correct
    assert all(is_valid(text, "") for text in texts(run["json"]).values())
    assert not any(is_valid(text, "") for text in texts(run["baseline"]).values())
    document, _ = json.JSONDecoder().raw_decode(next(iter(texts(run["json"]).values())).lstrip())
    assert document.keys() == {"answer", "score", "sure"}


def test_a_document_that_cannot_end_is_constrained_to_the_last_token(run):
    for text in texts(run["json-throughout"]).values():
        rest = text.replace('"yes"', "").replace('"no"', "")
        assert set(rest) <= set('[, \t\n\r"yesno'), text


def test_an_adapter_changes_the_answers(run):
    assert all(text != texts(run["baseline"])[name] for name, text in texts(run["adapter"]).items())


def test_a_schema_that_vllm_refuses_is_the_profile_s_fault_in_vllm_s_words(run):
    failure = run["refused"].record.failure
    assert failure.cause == "request-refused"
    assert "objekt" in failure.message
    assert "request.structured_outputs.json" in failure.message


def test_a_field_that_vllm_ignores_without_a_word_is_warned_of(run):
    messages = [w.message for w in run["baseline"].record.warnings if w.code == "request-field-unknown"]
    assert len(messages) == 1
    assert "request.extra_body.no_such_field:" in messages[0]
