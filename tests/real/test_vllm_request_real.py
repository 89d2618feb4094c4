"""Fields of requests on a real vLLM: grammars, adapters, what it refuses and what it ignores."""

import asyncio
import json

import httpx
import pytest
from support.servers.real_engines import answer_of, needs, served

from benchctl.analysis.compare.judge import judge_named
from benchctl.costs.shapes import ModelShape
from benchctl.engines.engine import engine_for
from benchctl.engines.tiny_models.make import make_lora_pair
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.measure.sending import undescribed_fields
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.workload.prepare import prepare_requests

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
workload: {num_prompts: 4, output_len: 96}
variants:
  baseline: {request: {extra_body: {priority: 0, no_such_field: 1}}}
  adapter: {request: {model: adapter}}
  refused: {request: {structured_outputs: {json: {type: objekt}}}}
"""


async def unknown_fields(url, fields):
    async with httpx.AsyncClient(base_url=url) as control:
        return list(await undescribed_fields(control, fields))


def test_a_server_answers_as_the_fields_of_each_variant_say(tmp_path):
    shape = ModelShape(
        name="tiny", layers=1, hidden=128, q_heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=2048,
        tied_embeddings=True, qkv_bias=True,
    )  # fmt: skip
    make_lora_pair(tmp_path, Recipe(arch="qwen2", shape=shape, context=4096, dtype="bfloat16", seed=0), rank=8)
    (tmp_path / "own.yaml").write_text(PROFILE.replace("MODELS", str(tmp_path)))
    profile = load_profile(str(tmp_path / "own.yaml"))
    engine, requests = engine_for(profile.engine.kind), prepare_requests(profile).requests
    variants = {name: variant_settings(profile, name, {}) for name in profile.variants}
    with served(engine, variants["baseline"], tmp_path) as client:
        answers = {
            name: [answer_of(client, engine, settings, request) for request in requests]
            for name, settings in variants.items()
        }
        asked = variants["baseline"].request.extra_body
        assert asyncio.run(unknown_fields(str(client.base_url), asked)) == ["no_such_field"]
    refused = answers.pop("refused")
    assert {answer.status_code for answer in refused} == {400}
    assert all("objekt" in answer.text for answer in refused)
    texts = {name: [each.json()["choices"][0]["text"] for each in of_name] for name, of_name in answers.items()}
    is_valid = judge_named("json", runs_on=True).is_correct
    assert all(is_valid(text, "") for text in texts["json"])
    assert not any(is_valid(text, "") for text in texts["baseline"])
    document, _ = json.JSONDecoder().raw_decode(texts["json"][0].lstrip())
    assert document.keys() == {"answer", "score", "sure"}
    for text in texts["json-throughout"]:  # an array that cannot end is constrained to the last token
        rest = text.replace('"yes"', "").replace('"no"', "")
        assert set(rest) <= set('[, \t\n\r"yesno'), text
    assert all(text != plain for text, plain in zip(texts["adapter"], texts["baseline"], strict=True))
