"""Pairs for speculative decoding: those that are made for trying it, and those of a known law that tests use."""

import subprocess
import sys

import numpy as np
import pytest
import safetensors
from support.known_draft import distribution, make_known_pair

from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.engines.tiny_models.recipe import Recipe

VOCAB, HIDDEN = 300, 48


def recipe(arch="qwen2", *, layers=2):
    shape = ModelShape(
        name="tiny", layers=layers, hidden=HIDDEN, q_heads=4, kv_heads=2, head_dim=12, ffn=64, vocab=VOCAB,
        tied_embeddings=True, qkv_bias=arch == "qwen2", qk_norm=arch == "qwen3",
    )  # fmt: skip
    return Recipe(arch=arch, shape=shape, context=256, dtype="float32", seed=3)


def known_pair(directory, arch="qwen2"):
    return make_known_pair(directory, recipe(arch), recipe(arch, layers=1), acceptance=0.6)


def tensors_of(directory):
    raw = dict(safetensors.deserialize((directory / "model.safetensors").read_bytes()))
    return {
        name: np.frombuffer(each["data"], np.float32).reshape(each["shape"]).astype(float)
        for name, each in raw.items()
    }


def next_tokens(directory):
    """The whole model in numpy, for texts of one token: attention and feed-forward included."""
    tensors = tensors_of(directory)
    states = tensors["model.embed_tokens.weight"]

    def normed(values, weight):
        return values / np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-6) * weight

    for layer in range(shape_for(str(directory)).layers):
        own = {name.split(f"layers.{layer}.")[-1]: each for name, each in tensors.items() if f".{layer}." in name}
        inputs = normed(states, own["input_layernorm.weight"])
        values = inputs @ own["self_attn.v_proj.weight"].T + own["self_attn.v_proj.bias"]
        # With one token attention gives its value; each of two heads serves two queries.
        heads = np.repeat(values.reshape(VOCAB, 2, 12), 2, axis=1).reshape(VOCAB, HIDDEN)
        states = states + heads @ own["self_attn.o_proj.weight"].T
        inputs = normed(states, own["post_attention_layernorm.weight"])
        gate, up = inputs @ own["mlp.gate_proj.weight"].T, inputs @ own["mlp.up_proj.weight"].T
        states = states + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return distribution(normed(states, tensors["model.norm.weight"]) @ head.T)


def test_the_known_law_is_that_of_a_whole_forward_pass_after_every_token(tmp_path):
    law = known_pair(tmp_path)
    assert law.drawn == pytest.approx(0.6)
    p, q = next_tokens(tmp_path / "base"), next_tokens(tmp_path / "draft")
    np.testing.assert_allclose(np.minimum(p, q).sum(axis=1), law.drawn, atol=1e-5)
    np.testing.assert_allclose(p[np.arange(VOCAB), q.argmax(axis=1)], law.likeliest, atol=1e-5)


def test_a_greedy_text_of_a_known_pair_visits_every_token(tmp_path):
    known_pair(tmp_path)
    likeliest = next_tokens(tmp_path / "base").argmax(axis=1)
    token, visited = 0, set()
    for _ in range(VOCAB):
        token = int(likeliest[token])
        visited.add(token)
    assert len(visited) == VOCAB


def make_tiny(*words):
    command = [sys.executable, "-m", "benchctl", "models", "make-tiny", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_draft_is_the_first_layers_of_its_base(tmp_path):
    made = make_tiny(tmp_path, "--draft", "--vocab", str(VOCAB), "--hidden", "48", "--dtype", "float32")
    assert made.returncode == 0, made.stderr
    base, draft = tmp_path / "base", tmp_path / "draft"
    assert (shape_for(str(base)).layers, shape_for(str(draft)).layers) == (2, 1)
    assert (base / "tokenizer.json").read_bytes() == (draft / "tokenizer.json").read_bytes()
    of_base = tensors_of(base)
    assert all(np.array_equal(values, of_base[name]) for name, values in tensors_of(draft).items())


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (["--draft-layers", "1"], "add --draft"),
        (["--draft", "--draft-layers", "3"], "3 layers of the 2"),
        (["--draft", "--gguf"], "--draft and --gguf exclude each other"),
        (["--draft", "--value-model"], "--draft and --value-model exclude each other"),
    ],
)
def test_what_makes_no_pair_is_refused_and_leaves_nothing(tmp_path, options, remedy):
    refused = make_tiny(tmp_path / "pair", *options)
    assert refused.returncode == 2
    assert remedy in refused.stderr
    assert not (tmp_path / "pair").exists()
