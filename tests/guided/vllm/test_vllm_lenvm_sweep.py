"""A sweep of guided decoding on a real vLLM, as a newcomer starts it: small models, one command, true accounts."""

import os
import subprocess
import sys

import pytest
from support.servers.real_engines import assert_compared, assert_ended, needs, turn_of
from support.steps import records_of

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.records.loaded import load_results

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, needs("vllm")]

OUTPUT, ANSWERS = 24, 4
SETTINGS = [
    "sweep.top_k=[1,3]", "workload.num_prompts=2", "workload.samples_per_prompt=2", f"workload.output_len={OUTPUT}",
]  # fmt: skip


def benchctl(directory, *words):
    return subprocess.run(
        [sys.executable, "-m", "benchctl", *words],
        cwd=directory,
        env={**os.environ, "BENCHCTL_DATA_DIR": str(directory / "no-data")},
        capture_output=True,
        text=True,
        timeout=1800,  # ends what hangs; a server starts in seconds, or in minutes on a busy machine
        check=False,
    )


@pytest.fixture(name="swept", scope="module")
def _swept(tmp_path_factory):
    """A baseline, a cell that is greedy and one that is guided, each on a fresh server."""
    directory = tmp_path_factory.mktemp("sweep")
    made = benchctl(directory, "models", "make-tiny", "--value-model", "models/tiny-pair")
    assert made.returncode == 0, made.stderr
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    with turn_of("vllm"):
        done = benchctl(
            directory, "run", "--profile", "topk-sweep", "--engine", "vllm-lenvm", "--blocks", "1", *settings
        )
    path = directory / "results" / "topk-sweep" / "latest"
    assert_ended(done, path)
    assert_compared(path)
    return load_results(path), done.stdout


@pytest.fixture(name="runs")
def _runs(swept):
    results, _ = swept
    return {(run.record.variant, run.record.cell.get("top_k")): run for run in results.runs}


def test_all_accounts_of_tokens_agree_exactly(swept):
    results, _ = swept
    experiment = experiment_of(results)
    for run in results.runs:
        checks = experiment.checks(run)
        assert [str(check) for check in checks if check.ok is False] == []
        requests = [request for request in run.requests if not request.is_warmup]
        usage = sum(request.completion_tokens for request in requests)
        assert usage == ANSWERS * OUTPUT
        assert usage == sum(sum(choice.chunk_tokens) for request in requests for choice in request.choices)
        assert usage == sum(step.output_tokens for step in records_of(run) if not step.is_warmup)


def test_every_token_of_a_guided_cell_was_chosen_among_scored_candidates(runs):
    steps = [step for step in records_of(runs["guided", 3]) if not step.is_warmup]
    assert all(step.guided_rows == step.output_tokens for step in steps)
    assert sum(step.candidates for step in steps) == 3 * ANSWERS * OUTPUT
    assert all(step.sections_ns["lvm_forward"] > 0 for step in steps if step.guided_rows)
    grown = sum((step.value_extend_tokens or 0) + (step.value_reuse_tokens or 0) for step in steps)
    assert grown >= ANSWERS * (OUTPUT - 2)
    assert all(step.fused for step in steps if step.phase == "decode")


def test_the_sections_of_a_guided_step_lie_within_it(runs):
    for step in records_of(runs["guided", 3]):
        sections = step.sections_ns
        assert sections["lvm_forward"] <= sections["lvm_apply_outer"] <= sections["sampler_total"] <= step.dur_ns


def test_the_cell_of_one_candidate_is_found_to_be_greedy(swept, runs):
    steps = [step for step in records_of(runs["guided", 1]) if not step.is_warmup]
    assert not any(step.guided_rows for step in steps)
    assert "guided top_k=1 took the greedy path" in swept[1]


def test_the_baseline_is_vllm_without_a_value_model(runs):
    baseline, guided = runs["baseline", None], runs["guided", 3]
    assert not any(step.guided_rows or step.candidates for step in records_of(baseline))
    assert "--logits-processors" not in baseline.record.argv
    assert guided.record.effective_config["server.value_model.layers"] == 2
    assert {run.record.effective_config["server.version"] for run in runs.values()} == {
        baseline.record.engine_version
    }
