"""Counts before a load against ``usage``: files of the model, the server's own tokenizer, and what it computed.

The model has a tokenizer that begins every completion with a token of its own, which a chat does not get.
"""

import json
from pathlib import Path

import httpx
import msgspec
import pytest
from support.datasets import GSM8K
from support.servers.real_engines import answer_of, needs, turn_of

from benchctl.costs.shapes import ModelShape
from benchctl.engines.engine import engine_for
from benchctl.engines.tiny_models.make import make_model
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.measure.tokens import launched_server, tokenizer_for
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.record import PreparedRequest
from benchctl.workload.prepare import prepare_requests
from benchctl.workload.tokenizers import LocalTokenizer

pytestmark = [pytest.mark.real_engine, pytest.mark.nightly]
TEXTS = ("a", "  two blanks, 12345 digits\r\n\r\n", "Größe, 数学, 🧮 and <|im_end|> in the middle", "word " * 60)


def tiny(directory: Path, *, begins: bool) -> Path:
    """A model for every engine; with ``begins`` its tokenizer puts <|endoftext|> before each completion."""
    shape = ModelShape(
        name="tiny", layers=2, hidden=128, q_heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=2048,
        tied_embeddings=True, qkv_bias=True,
    )  # fmt: skip
    make_model(directory, Recipe(arch="qwen2", shape=shape, context=4096, dtype="bfloat16", seed=0), gguf=True)
    if begins:
        path = directory / "tokenizer.json"
        document = json.loads(path.read_text())
        text, begin = {"Sequence": {"id": "A", "type_id": 0}}, {"id": "<|endoftext|>", "type_id": 0}
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": begin}, text],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {begin["id"]: {"id": begin["id"], "ids": [0], "tokens": [begin["id"]]}},
        }
        path.write_text(json.dumps(document))
    return directory


def questions(profile) -> list[PreparedRequest]:
    """Chats of GSM8K where the dataset is here, else of generated problems, and completions."""
    dataset = ["gsm8k", GSM8K] if GSM8K.is_file() else ["generated", None]
    workload = profile.workload.model_copy(update={"dataset": dataset[0], "num_prompts": 12})
    chats = prepare_requests(profile.model_copy(update={"workload": workload}), GSM8K.parent.parent).requests
    texts = (
        msgspec.structs.replace(chats[0], request_id=f"text-{i}", messages=None, prompt=text)
        for i, text in enumerate(TEXTS)
    )
    return [*chats, *texts]


def computed(client: httpx.Client, engine, settings, request: PreparedRequest) -> int:
    """The tokens of the prompt by ``usage`` of an answer of one token."""
    short = msgspec.structs.replace(request, max_tokens=1, ignore_eos=False)
    response = answer_of(client, engine, settings, short)
    assert response.is_success, response.text
    return response.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("preset", "begins"),
    [
        pytest.param("llamacpp-cpu", False, marks=needs("llamacpp")),
        pytest.param("transformers-cpu", True, marks=needs("transformers")),
        pytest.param("vllm-cpu", True, marks=needs("vllm")),
    ],
)
def test_prompts_are_counted_beforehand_exactly_as_the_server_computes_them(tmp_path, preset, begins):
    model = tiny(tmp_path / "tiny", begins=begins)
    profile = load_profile("ci-smoke", engine=preset, overrides=[f"model={model}", "workload.output_len=8"])
    engine, settings = engine_for(profile.engine.kind), variant_settings(profile, "baseline", {})
    requests = questions(profile)
    chats, texts = ([r.messages for r in requests if r.messages], [r.prompt for r in requests if r.prompt])
    with turn_of(profile.engine.kind), launched_server(engine, settings, profile.timeouts, print) as url:
        with httpx.Client(base_url=url, timeout=120) as client:
            usage = tuple(computed(client, engine, settings, request) for request in requests)
        local = LocalTokenizer(model)
        assert (*local.count_chats(chats), *local.count_texts(texts)) == usage
        dialect = profile.engine.kind
        attached = load_profile(
            "ci-smoke",
            engine="attach",
            overrides=["model=unknown", f"engine.options.url={url}", f"engine.options.dialect={dialect}"],
        )
        with tokenizer_for(attached) as tokenizer:
            counts = (*tokenizer.count_chats(chats), *tokenizer.count_texts(texts))
            assert tokenizer.source == ("estimate" if dialect == "transformers" else "server")
        assert (counts == usage) is (tokenizer.source == "server")
