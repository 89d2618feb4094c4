"""A real vLLM from end to end, and its speculative decoding: with a draft of known acceptance, and with its own."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare
from support.known_draft import draw_waves, make_known_pair, write_circle_model
from support.servers.real_engines import assert_accounts_agree, measured, needs
from support.steps import records_of

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.analysis.metrics.run import draft_counts
from benchctl.costs.shapes import ModelShape
from benchctl.engines.tiny_models.recipe import Recipe

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, needs("vllm")]

NUM_DRAFTED = 3
NUM_REQUESTS, OUTPUT_TOKENS = 48, 97
"""Each answer has its first token from the prompt, and 24 steps of four tokens if all drafts are accepted."""
LOAD = ("engine.options.dtype=float32", f"workload.output_len={OUTPUT_TOKENS}")
IN_ENGINE = (
    "engine.options.extra_args=[--distributed-executor-backend=uni]",
    'engine.options.env.VLLM_ENABLE_V1_MULTIPROCESSING="0"',
    'engine.options.env.OMP_NUM_THREADS="1"',
)
"""Computes in one thread of the engine's process: another process takes a third of the start, for its imports."""
PERIOD = 16
GREEDY = f"""
extends: speculation
workload:
  dataset: synthetic  # prompts that end differently, so that no two answers are equal
  input_len: 64
  num_prompts: {NUM_REQUESTS}
  samples_per_prompt: 1
sampling:
  temperature: 0
variants:
  speculative: null
  again: {{}}
  own:
    description: the model drafts for itself
    server: {{draft_model: MODEL, num_speculative_tokens: {NUM_DRAFTED}}}
  repeated:
    description: drafts are what followed the last tokens before
    server: {{speculative_method: ngram, prompt_lookup_max: 1, num_speculative_tokens: {NUM_DRAFTED}}}
sweep:
  num_speculative_tokens: null
"""


SHAPE = ModelShape(
    name="tiny", layers=1, hidden=64, q_heads=2, kv_heads=2, head_dim=32, ffn=64, vocab=1024,
    tied_embeddings=False, qkv_bias=True,
)  # fmt: skip
RECIPE = Recipe(arch="qwen2", shape=SHAPE, context=1024, dtype="float32", seed=5)


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory):
    """A base model and a draft of which seven of ten tokens are accepted."""
    directory = tmp_path_factory.mktemp("pair")
    make_known_pair(directory, RECIPE, RECIPE, acceptance=0.7)
    return directory


def sure_model(directory):
    """A model whose likeliest token leads by more than any processor rounds, and whose text has a period.

    Random weights would leave some of thousands of tokens to the rounding of the last digit.
    """
    waves = draw_waves(SHAPE.vocab, SHAPE.hidden, RECIPE.seed, name="base")
    angles = 2 * np.pi * waves.frequencies * (SHAPE.vocab // PERIOD) / SHAPE.vocab
    sure = replace(waves, coefficients=20 / len(angles) * np.exp(1j * angles))
    second, first = np.sort(sure.logits())[-2:]
    assert first - second > 1
    write_circle_model(directory, RECIPE, sure)
    return directory


@pytest.fixture(name="drawn", scope="module")
def _drawn(pair):
    """The profile's baseline and its cell of three drafted tokens, with the known pair at temperature 1."""
    draft = f"variants.speculative.server.draft_model={pair / 'draft'}"
    cell = f"sweep.num_speculative_tokens=[{NUM_DRAFTED}]"
    return measured(
        "speculation", "vllm", "vllm-cpu", pair, f"model={pair / 'base'}", draft, cell, *LOAD, *IN_ENGINE
    )


@pytest.fixture(name="greedy", scope="module")
def _greedy(tmp_path_factory):
    """At temperature 0: the baseline twice, drafts of the model itself, and drafts from the text before."""
    directory = tmp_path_factory.mktemp("greedy")
    (directory / "sure").mkdir()
    model = str(sure_model(directory / "sure"))
    (directory / "greedy.yaml").write_text(GREEDY.replace("MODEL", model))
    return measured("greedy.yaml", "vllm", "vllm-cpu", directory, f"model={model}", *LOAD)


def runs_of(results):
    return {run.record.variant: run for run in results.runs}


def measured_requests(run):
    return [request for request in run.requests if not request.is_warmup]


def measured_steps(run):
    return [step for step in records_of(run) if not step.is_warmup]


def assert_drafts_agree(results):
    """Every record of drafts agrees by steps, counters, usage and client, and no token is missing."""
    assert_accounts_agree(results, {"client-tokens", "step-tokens", "counters", "forced-stop"})
    experiment = experiment_of(results)
    for run in results.runs:
        usage = sum(request.completion_tokens for request in measured_requests(run))
        assert usage == NUM_REQUESTS * OUTPUT_TOKENS
        if run.record.variant not in {"baseline", "again"}:
            confirmed = {check.name for check in experiment.checks(run) if check.ok}
            assert {"draft-counters", "accepted-drafts", "speculation"} <= confirmed
        if run.record.variant in {"speculative", "own"}:  # every decoding sequence of every step has drafts
            counts = draft_counts(run.columns)
            sampled = NUM_REQUESTS + counts.drafts + counts.accepted_tokens
            assert usage <= sampled <= usage + NUM_REQUESTS * NUM_DRAFTED  # but for what the end cut off
            assert counts.draft_tokens == counts.drafts * NUM_DRAFTED


def test_all_accounts_of_a_run_and_of_its_drafts_agree_and_leave_no_secret(drawn):
    assert_drafts_agree(drawn)
    for run in drawn.runs:
        directory = Path(drawn.path) / "runs" / run.record.run_id
        assert not re.search(r"Iteration\(|benchctl records no more", (directory / "server.log").read_text())
        described = json.loads((directory / "server.json").read_text())
        assert described["model_config"].get("hf_token") is None


def test_acceptance_by_position_follows_the_law_of_the_pair_and_every_context_is_known(drawn):
    law = 0.7 ** np.arange(NUM_DRAFTED + 1)
    run = runs_of(drawn)["speculative"]
    counts = draft_counts(run.columns)
    survivors = [counts.drafts, *counts.accepted_by_position]
    assert counts.drafts > 1500
    assert chisquare(lengths_of(survivors), lengths_of(law * counts.drafts)).pvalue > 1e-4
    other = 0.62 ** np.arange(NUM_DRAFTED + 1)
    assert chisquare(lengths_of(survivors), lengths_of(other * counts.drafts)).pvalue < 1e-4, "too few to tell"
    # although drafts go beyond the end of answers
    assert all(step.context_tokens for step in measured_steps(run))


def lengths_of(survivors):
    """Drafts of which exactly 0, 1, ... tokens were accepted."""
    return -np.diff(np.append(survivors, 0.0))


def test_the_configuration_says_what_is_speculated_and_that_the_cpu_was_put_right(drawn):
    baseline, config = (runs_of(drawn)[name].record.effective_config for name in ("baseline", "speculative"))
    assert config.items() >= {
        "server.speculative.num_speculative_tokens": NUM_DRAFTED,
        "server.speculative.method": "draft_model",
        "server.speculative.draft_sample_method": "probabilistic",
        "server.speculative.cpu_sampling": "corrected by benchctl",
    }.items()  # fmt: skip
    assert not [key for key in baseline if "speculative" in key]
    assert (baseline["server.enable_prefix_caching"], baseline["server.enforce_eager"]) == (False, True)


@pytest.mark.nightly
def test_greedy_answers_are_the_baselines_and_a_model_that_drafts_for_itself_gains_every_draft(greedy):
    assert_drafts_agree(greedy)
    runs = runs_of(greedy)
    texts = {
        variant: {request.request_id: request.choices[0].text for request in measured_requests(run)}
        for variant, run in runs.items()
    }
    assert len({*texts["baseline"].values()}) > NUM_REQUESTS / 2
    assert texts["again"] == texts["own"] == texts["repeated"] == texts["baseline"]
    repeated, own = draft_counts(runs["repeated"].columns), draft_counts(runs["own"].columns)
    assert 0 < repeated.accepted_tokens < repeated.draft_tokens, "the text repeats too little or too much"
    assert own.drafts == NUM_REQUESTS * ((OUTPUT_TOKENS - 1) // (NUM_DRAFTED + 1))
    assert own.accepted_tokens == own.draft_tokens == NUM_DRAFTED * own.drafts
    assert own.accepted_by_position == (own.drafts,) * NUM_DRAFTED
    steady = [step for step in measured_steps(runs["own"]) if not step.num_prefill_tokens]
    assert all(step.output_tokens == (NUM_DRAFTED + 1) * step.num_seqs for step in steady)
