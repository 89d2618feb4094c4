"""Models of random weights in the engines that they are made for; skipped where an engine is not installed."""

import json
import subprocess

import pytest
from support.servers.real_engines import needs, served
from tokenizers import Tokenizer

from benchctl.costs.shapes import ModelShape
from benchctl.engines.environment import engines_directory
from benchctl.engines.llamacpp import LlamaCppEngine, LlamaCppOptions
from benchctl.engines.tiny_models.make import make_model
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.profile.model import Sampling, VariantSettings

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, needs("transformers")]

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
        shape = ModelShape(
            name="tiny", layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=600,
            tied_embeddings=True, qkv_bias=arch == "qwen2",
        )  # fmt: skip
        recipe = Recipe(arch=arch, shape=shape, context=512, dtype="float32", seed=0)
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


def test_transformers_loads_every_tensor_and_generates(models, generated):
    for arch, told in generated.items():
        assert told["model"] == f"{arch.capitalize()}ForCausalLM"
        assert told["prompt"] == told["decoded"] == PROMPT
        assert told["ids"] == Tokenizer.from_file(str(models / arch / "tokenizer.json")).encode(PROMPT).ids
        assert len(set(told["output"])) > NUM_TOKENS // 4


@needs("llamacpp")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_llama_cpp_cuts_and_continues_a_text_as_transformers_does(tmp_path, models, generated, arch):
    exact = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
    server = LlamaCppOptions(max_model_len=512, extra_args=exact)
    settings = VariantSettings(
        variant="v", model=str(models / arch), server=server, sampling=Sampling(), guidance=None
    )
    asked = {"prompt": PROMPT, "n_predict": NUM_TOKENS, "temperature": 0, "return_tokens": True, "ignore_eos": True}
    with served(LlamaCppEngine(), settings, tmp_path) as client:
        cut = client.post("/tokenize", json={"content": PROMPT, "parse_special": True}).json()
        output = client.post("/completion", json=asked).json()["tokens"]
    assert cut["tokens"] == generated[arch]["ids"]
    assert output == generated[arch]["output"]
