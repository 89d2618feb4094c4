"""Models of random weights in the engines that they are made for: text, tokens, and prompts counted before."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest
from support.engine_settings import settings_of
from support.servers.real_engines import TINY, answer_of, needs, served, turn_of
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from benchctl.engines.engine import engine_for
from benchctl.engines.environment import engines_directory
from benchctl.engines.llamacpp import LlamaCppEngine
from benchctl.engines.tiny_models.make import make_model
from benchctl.measure.tokens import launched_server, tokenizer_for
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.workload.prepare import prepare_requests
from benchctl.workload.tokenizers import LocalTokenizer

pytestmark = [pytest.mark.real_engine, pytest.mark.slow]

ARCHITECTURES = ["qwen2", "qwen3", "llama"]
TEXT = 'Ada buys 12 apples — "für 3 €"\n\n\tand  says: 你好 😀, it\'s\x01 fine'
PROMPT = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"
NUM_TOKENS = 24

GENERATE = f"""
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
text, *directories = sys.argv[1:]
told = []
for directory in directories:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    chat = [{{"role": "user", "content": text}}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt)["input_ids"]
    limits = dict(min_new_tokens={NUM_TOKENS}, max_new_tokens={NUM_TOKENS})
    output = model.generate(torch.tensor([ids]), do_sample=False, **limits)[0][len(ids):].tolist()
    decoded = tokenizer.decode(ids)
    told.append(dict(model=type(model).__name__, prompt=prompt, ids=ids, decoded=decoded, output=output))
print(json.dumps(told))
"""


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory):
    """A model of each architecture, in float32: engines differ by less than what decides between two tokens."""
    directory = tmp_path_factory.mktemp("models")
    for arch in ARCHITECTURES:
        shape = replace(TINY.shape, hidden=64, head_dim=16, ffn=96, vocab=600, qkv_bias=arch == "qwen2")
        recipe = replace(TINY, arch=arch, shape=shape, context=512, dtype="float32")
        make_model(directory / arch, recipe, gguf=True)
    return directory


@pytest.fixture(name="generated", scope="module")
def _generated(models):
    """What transformers reads and generates, by architecture."""
    argv = [engines_directory() / "transformers/bin/python", "-c", GENERATE, TEXT]
    done = subprocess.run(
        [*argv, *(models / arch for arch in ARCHITECTURES)],
        env={"HF_HUB_OFFLINE": "1", "HOME": str(models)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(ARCHITECTURES, json.loads(done.stdout), strict=True))


@needs("transformers")
def test_transformers_loads_every_tensor_and_generates(models, generated):
    for arch, told in generated.items():
        assert told["model"] == f"{arch.capitalize()}ForCausalLM"
        assert told["prompt"] == told["decoded"] == PROMPT
        assert told["ids"] == Tokenizer.from_file(str(models / arch / "tokenizer.json")).encode(PROMPT).ids
        assert len(set(told["output"])) > NUM_TOKENS // 4


@needs("transformers")
@needs("llamacpp")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_llama_cpp_cuts_and_continues_a_text_as_transformers_does(tmp_path, models, generated, arch):
    exact = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
    settings = settings_of("llamacpp", models / arch, max_model_len=512, extra_args=exact)
    asked = {"prompt": PROMPT, "n_predict": NUM_TOKENS, "temperature": 0, "return_tokens": True, "ignore_eos": True}
    with served(LlamaCppEngine(), settings, tmp_path) as client:
        cut = client.post("/tokenize", json={"content": PROMPT, "parse_special": True}).json()
        output = client.post("/completion", json=asked).json()["tokens"]
    assert cut["tokens"] == generated[arch]["ids"]
    assert output == generated[arch]["output"]


TEXTS = ("a", "  two blanks, 12345 digits\r\n\r\n", "Größe, 数学, 🧮 and <|im_end|> in the middle", "word " * 60)


def let_completions_begin_with_a_token(path: Path) -> None:
    """Have a tokenizer put <|endoftext|> before each completion, which a chat does not get."""
    tokenizer, begin = Tokenizer.from_file(str(path)), "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    tokenizer.save(str(path))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("preset", "begins"),
    [
        pytest.param("llamacpp-cpu", False, marks=needs("llamacpp")),
        pytest.param("transformers-cpu", True, marks=needs("transformers")),
        pytest.param("vllm-cpu", True, marks=needs("vllm")),
    ],
)
def test_prompts_are_counted_beforehand_exactly_as_the_server_computes_them(tmp_path, preset, begins):
    model = tmp_path / "tiny"
    make_model(model, TINY, gguf=True)
    if begins:
        let_completions_begin_with_a_token(model / "tokenizer.json")
    overrides = [f"model={model}", "workload.output_len=8", "workload.num_prompts=12"]
    profile = load_profile("ci-smoke", engine=preset, overrides=overrides)
    engine, settings = engine_for(profile.engine.kind), variant_settings(profile, "baseline", {})
    asked = [msgspec.structs.replace(each, max_tokens=1) for each in prepare_requests(profile).requests]
    chats = [each.messages for each in asked]
    asked += [
        msgspec.structs.replace(asked[0], request_id=f"text-{i}", messages=None, prompt=text)
        for i, text in enumerate(TEXTS)
    ]
    with turn_of(engine.kind), launched_server(engine, settings, profile.timeouts, print) as url:
        with httpx.Client(base_url=url, timeout=120) as client:
            answers = [answer_of(client, engine, settings, each).json() for each in asked]
        usage = tuple(answer["usage"]["prompt_tokens"] for answer in answers)
        local = LocalTokenizer(model)
        assert (*local.count_chats(chats), *local.count_texts(TEXTS)) == usage
        overrides = ["model=unknown", f"engine.options.url={url}", f"engine.options.dialect={engine.kind}"]
        with tokenizer_for(load_profile("ci-smoke", engine="attach", overrides=overrides)) as tokenizer:
            counts = (*tokenizer.count_chats(chats), *tokenizer.count_texts(TEXTS))
        expected = "estimate" if engine.kind == "transformers" else "server"
        assert (tokenizer.source, counts == usage) == (expected, expected == "server")
