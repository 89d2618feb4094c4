"""A sweep of guided decoding on a real vLLM, as a newcomer starts it: small models, one command, true accounts."""

import pytest
from support.cli import benchctl
from support.servers.real_engines import assert_accounts_agree, assert_compared, assert_ended, needs, turn_of
from support.steps import records_of

from benchctl.records.loaded import load_results

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, pytest.mark.nightly, needs("vllm")]

OUTPUT, ANSWERS = 24, 4
SETTINGS = [
    "sweep.top_k=[1,3]", "workload.num_prompts=2", "workload.samples_per_prompt=2", f"workload.output_len={OUTPUT}",
]  # fmt: skip


def test_a_sweep_that_a_newcomer_starts_ends_with_true_accounts(tmp_path):
    """A baseline, a cell that is greedy and one that is guided, each on a fresh server."""
    made = benchctl("models", "make-tiny", "--value-model", "models/tiny-pair", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    words = ("run", "--profile", "topk-sweep", "--engine", "vllm-lenvm", "--blocks", "1", *settings)
    with turn_of("vllm"):
        done = benchctl(*words, cwd=tmp_path, timeout_s=1800)
    path = tmp_path / "results" / "topk-sweep" / "latest"
    assert_ended(done, path)
    assert_compared(path)
    results = load_results(path)
    assert_accounts_agree(results, {"step-tokens", "counters"})
    runs = {(run.record.variant, run.record.cell.get("top_k")): run for run in results.runs}
    baseline, greedy, guided = runs["baseline", None], runs["guided", 1], runs["guided", 3]
    steps = [step for step in records_of(guided) if not step.is_warmup]
    assert all(step.guided_rows == step.output_tokens for step in steps)
    assert sum(step.candidates for step in steps) == 3 * ANSWERS * OUTPUT
    assert all(step.sections_ns["lvm_forward"] > 0 for step in steps if step.guided_rows)
    assert all(step.fused for step in steps if step.phase == "decode")
    assert not any(step.guided_rows for run in (greedy, baseline) for step in records_of(run) if not step.is_warmup)
    assert "guided top_k=1 took the greedy path" in done.stdout
    assert "--logits-processors" not in baseline.record.argv
    assert guided.record.effective_config["server.value_model.layers"] == 2
