"""Pairs for speculative decoding: the law that they are built for is that of the weights on disk."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.engines.tiny_models.circle import draw_waves, with_peak
from benchctl.engines.tiny_models.draft_law import draft_law
from benchctl.engines.tiny_models.draft_pair import make_draft_pair, share_for
from benchctl.engines.tiny_models.make import make_model
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.errors import UsageError

VOCAB, HIDDEN = 300, 48


def recipe(arch="qwen2", *, dtype="float32", layers=2, vocab=VOCAB):
    shape = ModelShape(
        name="tiny", layers=layers, hidden=HIDDEN, q_heads=4, kv_heads=2, head_dim=12, ffn=64, vocab=vocab,
        tied_embeddings=True, qkv_bias=arch == "qwen2", qk_norm=arch == "qwen3",
    )  # fmt: skip
    return Recipe(arch=arch, shape=shape, context=256, dtype=dtype, seed=3)


def written_pair(directory, *, acceptance=0.6, arch="qwen2", dtype="float32"):
    base = recipe(arch, dtype=dtype)
    drafting = replace(base, shape=replace(base.shape, layers=1))
    return make_draft_pair(directory, base, drafting, acceptance=acceptance)


def distribution(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


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
    return distribution(normed(states, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T)


def test_the_law_of_the_weights_is_that_of_a_whole_forward_pass(tmp_path):
    written_pair(tmp_path)
    p, q = next_tokens(tmp_path / "base"), next_tokens(tmp_path / "draft")
    law = draft_law(tmp_path / "base", tmp_path / "draft", 2)
    accepted = np.minimum(p, q)
    assert law.sampled[0].survival == pytest.approx(accepted.sum(axis=1).mean(), abs=1e-12)
    assert law.sampled[1].highest == pytest.approx((accepted @ accepted.sum(axis=1)).max(), abs=1e-12)
    proposed = p[np.arange(VOCAB), q.argmax(axis=1)]
    assert law.greedy_draft[0].survival == pytest.approx(proposed.mean(), abs=1e-12)
    assert law.greedy_draft[1].lowest == pytest.approx((proposed * proposed[q.argmax(axis=1)]).min(), abs=1e-12)
    assert law.temperature_0[0].survival == (p.argmax(axis=1) == q.argmax(axis=1)).mean()


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_a_draft_is_accepted_as_often_as_asked_for_whatever_the_text_and_the_drafts_before(tmp_path, arch):
    written_pair(tmp_path, arch=arch)
    for number, position in enumerate(draft_law(tmp_path / "base", tmp_path / "draft", 5).sampled, start=1):
        assert position.lowest == pytest.approx(0.6**number, abs=1e-6)
        assert position.highest == pytest.approx(0.6**number, abs=1e-6)


def test_rounded_weights_keep_the_law_but_for_their_rounding(tmp_path):
    written_pair(tmp_path, dtype="bfloat16")
    (first,) = draft_law(tmp_path / "base", tmp_path / "draft", 1).sampled
    assert first.survival == pytest.approx(0.6, abs=2e-3)
    assert first.lowest < first.survival < first.highest


def test_a_model_that_drafts_for_itself_is_always_right(tmp_path):
    written_pair(tmp_path)
    law = draft_law(tmp_path / "base", tmp_path / "base", 3)
    assert [position.lowest for position in law.sampled] == pytest.approx([1, 1, 1], abs=1e-12)
    assert [position.lowest for position in law.temperature_0] == [1, 1, 1]


def test_a_greedy_text_visits_every_token(tmp_path):
    written_pair(tmp_path)
    likeliest = next_tokens(tmp_path / "base").argmax(axis=1)
    token, visited = 0, set()
    for _ in range(VOCAB):
        token = int(likeliest[token])
        visited.add(token)
    assert len(visited) == VOCAB


@given(seed=st.integers(0, 1000), acceptance=st.floats(0.5, 1.0))
@settings(max_examples=30)
def test_any_acceptance_above_that_of_unrelated_models_can_be_had(seed, acceptance):
    base = with_peak(draw_waves(VOCAB, HIDDEN, seed, name="base"), seed)
    other = draw_waves(VOCAB, HIDDEN, seed, name="draft")
    mixed = base.mixed_with(other, share_for(base, other, acceptance))
    reached = np.minimum(distribution(base.logits()), distribution(mixed.logits())).sum()
    assert reached == pytest.approx(acceptance, abs=1e-9)


@given(seed=st.integers(0, 1000), last=st.integers(0, VOCAB - 1))
@settings(max_examples=30)
def test_logits_follow_the_distance_from_the_last_token_alone(seed, last):
    waves = draw_waves(VOCAB, HIDDEN, seed, name="base")
    state = waves.embedding()[last] * np.sqrt(2)
    np.testing.assert_allclose(waves.head() @ state, np.roll(waves.logits(), last), atol=1e-9)


def test_the_file_beside_the_draft_holds_the_law_that_the_command_prints(tmp_path):
    names = {path.name for path in written_pair(tmp_path)}
    assert {"acceptance.json", "model.safetensors", "tokenizer.json"} <= names
    written = json.loads((tmp_path / "draft" / "acceptance.json").read_text())
    command = [sys.executable, "-m", "benchctl", "models", "acceptance", tmp_path / "base", tmp_path / "draft"]
    printed = subprocess.run(
        [*command, "--draft-tokens", "8", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(printed.stdout) == written
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "4  0.12960 (0.12960 to 0.12960)" in table


def test_both_models_are_untied_and_share_their_tokens(tmp_path):
    written_pair(tmp_path)
    base, draft = tmp_path / "base", tmp_path / "draft"
    assert not shape_for(str(base)).tied_embeddings
    assert (shape_for(str(base)).layers, shape_for(str(draft)).layers) == (2, 1)
    assert (base / "tokenizer.json").read_bytes() == (draft / "tokenizer.json").read_bytes()


def test_a_pair_of_unknown_law_is_refused_with_the_tensor_that_is_in_the_way(tmp_path):
    make_model(tmp_path / "plain", recipe())
    with pytest.raises(UsageError, match=r"layers\.0\.self_attn\.o_proj\.weight is not zero.*make-tiny --draft"):
        draft_law(tmp_path / "plain", tmp_path / "plain", 1)


def test_models_of_two_vocabularies_and_directories_without_weights_are_refused(tmp_path):
    written_pair(tmp_path / "a")
    other = recipe(vocab=310)
    make_draft_pair(tmp_path / "b", other, other, acceptance=0.6)
    with pytest.raises(UsageError, match=r"310 tokens and .* 300"):
        draft_law(tmp_path / "a" / "base", tmp_path / "b" / "draft", 1)
    with pytest.raises(UsageError, match=r"config\.json and model\.safetensors"):
        draft_law(tmp_path, tmp_path, 1)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (["--draft-layers", "1"], "add --draft"),
        (["--draft", "--gguf"], "--draft and --gguf exclude each other"),
        (["--draft", "--no-weights"], "--draft and --no-weights exclude each other"),
        (["--draft", "--value-model"], "--draft and --value-model exclude each other"),
        (["--draft", "--like", "qwen2.5-0.5b"], "smaller one with --vocab"),
        (["--draft", "--draft-acceptance", "0.01"], "name a number from there to 1"),
        (["--draft", "--draft-acceptance", "1.5"], "name a number from there to 1"),
    ],
)
def test_what_makes_no_pair_is_refused_and_leaves_nothing(tmp_path, options, remedy):
    command = [sys.executable, "-m", "benchctl", "models", "make-tiny", tmp_path / "pair", *options]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert remedy in refused.stderr
    assert not (tmp_path / "pair").exists()
