"""FLOPs of measured runs that speculate: what their records count, and what their options say of the draft."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.results.drafted import NUM_SEQS, write_drafted
from support.steps import records_of, with_steps

from benchctl.analysis.attribution.flops import RunFlops, count_run_flops
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.metrics.speculation import Drafter, drafter_of
from benchctl.costs.flops import observed_flops
from benchctl.costs.run_work import Lengths, StepLogCounts
from benchctl.costs.shapes import shape_for
from benchctl.engines.sim.options import SimOptions
from benchctl.engines.vllm_options import VllmOptions
from benchctl.profile.engine_options import ServerOptions
from benchctl.records.loaded import LoadedRun, load_results

BASE, DRAFT = shape_for("llama-160m"), shape_for("llama-68m")
ACCEPTED = (3, 1, 3, 0)
SEQUENCES = (Lengths(20, 1 + sum(ACCEPTED) + len(ACCEPTED)),) * NUM_SEQS
COUNTS = StepLogCounts(base_prefill_tokens=20 * NUM_SEQS, verification_tokens=len(ACCEPTED) * 4 * NUM_SEQS)
PASSES = replace(
    COUNTS,
    draft_prefill_tokens=20 * NUM_SEQS,
    draft_tokens=len(ACCEPTED) * 3 * NUM_SEQS,
    backfill_tokens=2 * NUM_SEQS,
)


@pytest.fixture
def run(tmp_path: Path) -> LoadedRun:
    loaded = load_results(write_drafted(tmp_path / "results", [ACCEPTED]).path)
    return next(run for run in loaded.runs if run.record.variant == "guided")


def count(run: LoadedRun, drafter: Drafter | None) -> RunFlops:
    return count_run_flops(run, base=BASE, value_model=None, top_k=0, prepared=(), drafter=drafter)


def codes(found: RunFlops) -> list[str]:
    return [warning.code for warning in found.warnings]


def test_verification_and_the_passes_of_a_known_draft_model_are_charged(run: LoadedRun) -> None:
    found = count(run, Drafter(shape=DRAFT))
    assert found.observed == observed_flops(SEQUENCES, PASSES, base=BASE, draft_model=DRAFT)
    assert found.published is not None
    assert found.published.total + sum(step.flops for step in found.corrections) == found.observed.total
    assert found.warnings == ()


def test_a_draft_without_backfill_is_charged_its_proposals_alone(run: LoadedRun) -> None:
    found = count(run, Drafter(shape=DRAFT, has_backfill=False))
    counts = replace(PASSES, backfill_tokens=0)
    assert found.observed == observed_flops(SEQUENCES, counts, base=BASE, draft_model=DRAFT)


@pytest.mark.parametrize(
    ("drafter", "code"),
    [
        (Drafter(), "drafts-without-model"),
        (Drafter(problem="unknown model 'nobody/knows'"), "drafts-not-charged"),
        (None, "drafts-not-charged"),
    ],
)
def test_verification_is_charged_without_a_known_model_and_the_result_says_what_drafted(
    run: LoadedRun, drafter: Drafter | None, code: str
) -> None:
    found = count(run, drafter)
    assert found.observed == observed_flops(SEQUENCES, COUNTS, base=BASE)
    assert codes(found) == [code]
    assert found.charges_drafts == (code == "drafts-without-model")


def test_counters_of_the_server_stand_for_a_step_log_that_counts_no_drafts(run: LoadedRun) -> None:
    steps = tuple(msgspec.structs.replace(step, draft_tokens=None, drafts=None) for step in records_of(run))
    found = count(with_steps(run, steps), Drafter(shape=DRAFT))
    # No draft reaches beyond the end of its output, so both ways to count agree.
    assert found.observed == observed_flops(SEQUENCES, PASSES, base=BASE, draft_model=DRAFT)


def test_a_server_that_speculates_and_counts_nothing_is_said_to_be_undercharged(run: LoadedRun) -> None:
    steps = tuple(msgspec.structs.replace(step, draft_tokens=None, drafts=None) for step in records_of(run))
    silent = replace(with_steps(run, steps), prometheus=())
    assert codes(count(silent, Drafter(shape=DRAFT))) == ["drafts-not-charged"]
    assert codes(count(silent, Drafter(problem="unknown", is_in_use=False))) == []
    assert codes(count(silent, None)) == []


def test_the_draft_model_of_a_profile_is_charged_in_its_results(tmp_path: Path) -> None:
    results = write_drafted(tmp_path / "results", [ACCEPTED])
    profile = (results.path / "profile.yaml").read_text()
    results.write_profile(profile.replace("draft_cost: 0.05", "draft_model: llama-68m, backfill: prefill"))
    experiment = load_experiment(results.path)
    by_variant = {run.record.variant: experiment.flops(run) for run in experiment.results.runs}
    drafted, plain = by_variant["guided"], by_variant["baseline"]
    assert drafted is not None
    assert plain is not None
    base = shape_for("qwen2.5-7b")
    assert drafted.observed == observed_flops(SEQUENCES, PASSES, base=base, draft_model=DRAFT)
    assert plain.observed == observed_flops(SEQUENCES, StepLogCounts(base_prefill_tokens=160), base=base)
    assert drafted.warnings == ()


def test_a_draft_cost_names_no_model(run: LoadedRun, tmp_path: Path) -> None:
    experiment = load_experiment(write_drafted(tmp_path / "more", [ACCEPTED]).path)
    warnings = [w for run in experiment.results.runs for w in experiment.flops(run).warnings]
    assert [warning.code for warning in warnings] == ["drafts-not-charged"]
    assert "draft_cost states the time of its passes alone" in warnings[0].message


SIM = {"num_speculative_tokens": 3, "acceptance": 0.8, "cost_model": "roofline"}


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        (SimOptions(), None),
        (SimOptions(**SIM, draft_model="llama-68m"), Drafter(shape=DRAFT, has_backfill=False)),
        (SimOptions(**SIM, draft_model="llama-68m", backfill="expansion"), Drafter(shape=DRAFT)),
        (
            SimOptions(**SIM, draft_model="llama-68m", backfill="expansion", bonus_token=False),
            Drafter(shape=DRAFT, has_backfill=False),
        ),
        (VllmOptions(), None),
        (VllmOptions(num_speculative_tokens=2, draft_model="JackFram/llama-68m"), Drafter(shape=DRAFT)),
        (VllmOptions(num_speculative_tokens=2, speculative_method="ngram"), Drafter()),
        (VllmOptions(speculative_config={"method": "ngram", "num_speculative_tokens": 2}), Drafter()),
        (
            VllmOptions(speculative_config={"method": "draft_model", "model": "llama-68m"}),
            Drafter(shape=DRAFT),
        ),
        (
            VllmOptions(num_speculative_tokens=2, speculative_method="eagle", draft_model="d"),
            Drafter(problem="eagle names no model of its own"),
        ),
        (ServerOptions(), Drafter(problem="the options do not say what drafts", is_in_use=False)),
    ],
)
def test_what_drafts_follows_from_the_options(options: ServerOptions, drafter: Drafter | None) -> None:
    assert drafter_of(options) == drafter


def test_a_draft_model_of_the_hub_that_cannot_be_read_here_is_unknown() -> None:
    found = drafter_of(VllmOptions(num_speculative_tokens=2, draft_model="nobody/knows"))
    assert found is not None
    assert found.shape is None
    assert "unknown model 'nobody/knows'" in str(found.problem)


def test_a_directory_with_a_config_is_a_known_draft_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1, **sizes}))
    found = drafter_of(VllmOptions(num_speculative_tokens=2, draft_model=str(tmp_path)))
    assert found is not None
    assert found.shape is not None
    assert found.shape.layers == 1
