"""Findings on speculative decoding, from planted steps: drafts that cannot win, and those that never were."""

import msgspec
import pytest
from support.results.builders import edit_steps
from support.results.drafted import write_drafted

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.metrics.speculation import arm_drafts

GUIDED = "guided top_k=5"
ACCEPTED = ((3, 2, 0, 3, 1, 3), (2, 3, 3, 0, 3, 1), (1, 3, 2, 3, 0, 3))


def findings_of(path):
    return {finding.code: finding for finding in analyze_directory(path).findings if "specul" in finding.code}


def test_one_draft_token_without_a_bonus_token_cannot_win(tmp_path):
    results = write_drafted(
        tmp_path / "r",
        ((1, 0, 1, 1), (1, 1, 0, 1), (0, 1, 1, 1)),
        num_draft_tokens=1,
        has_bonus=False,
        step_factor=1.05,
    )
    findings = findings_of(results.path)
    finding = findings["speculation-cannot-win"]
    assert finding.numbers["tokens_per_step"] == 1
    assert "of one draft token and no bonus token one token comes" in finding.sentence
    assert set(findings) == {"speculation-cannot-win"}


def test_drafts_that_were_declared_and_never_seen_measure_another_path(tmp_path):
    results = write_drafted(tmp_path / "r", ACCEPTED)
    assert "speculation-never-drafted" not in findings_of(results.path)
    for run in results.runs():
        if "guided" in run.path.name:
            edit_steps(results, run.path.name, without_drafts)
    assert "speculation-never-drafted" not in findings_of(results.path)  # by the server's counters
    for run in results.runs():
        (run.path / "prometheus.jsonl").unlink()
    assert "speculation-never-drafted" not in findings_of(results.path)  # each sequence gains several tokens
    for run in results.runs():
        edit_steps(results, run.path.name, lambda step: msgspec.structs.replace(step, output_tokens=8))
    finding = findings_of(results.path)["speculation-never-drafted"]
    assert finding.numbers == {"num_steps": 21, "num_runs": 3}
    assert finding.sentence.startswith(f"{GUIDED} never drafted a token in 21 steps of its 3 runs")


def without_drafts(step):
    return msgspec.structs.replace(
        step, drafts=None, draft_tokens=None, accepted_tokens=None, accepted_by_position=None
    )


def test_acceptance_of_an_arm_is_that_of_all_its_runs_with_an_interval_over_them(tmp_path):
    analysis = analyze_directory(write_drafted(tmp_path / "r", ACCEPTED).path)
    (cell,) = (cell for cell in analysis.cells if cell.variant == "guided")
    drafts = arm_drafts([run.run for run in cell.runs])
    assert drafts.counts.accepted_by_position == (8 * 15, 8 * 12, 8 * 9)
    assert [at.survival for at in drafts.positions] == pytest.approx([15 / 18, 12 / 18, 9 / 18])
    assert [at.conditional for at in drafts.positions] == pytest.approx([15 / 18, 12 / 15, 9 / 12])
    assert drafts.counts.metrics["acceptance_length"] == 1 + 36 / 18
    assert all(at.survival_interval == pytest.approx((at.survival,) * 2) for at in drafts.positions)
    assert cell.centre("tokens_per_step") == pytest.approx(drafts.counts.metrics["acceptance_length"])
    assert analysis.cells[0].drafts() is None


@pytest.mark.parametrize(("draft", "is_charged"), [("draft_model: llama-68m", True), ("draft_cost: 0.05", False)])
def test_flops_explain_a_slowdown_by_drafts_only_where_all_that_drafts_cost_is_charged(tmp_path, draft, is_charged):
    results = write_drafted(tmp_path / "r", ((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0)), step_factor=9.0)
    results.write_profile((results.path / "profile.yaml").read_text().replace("draft_cost: 0.05", draft))
    found = {finding.code: finding for finding in analyze_directory(results.path).findings}
    assert ("unexplained-by-flops" in found) == is_charged
    if is_charged:
        # 20 prompt tokens beside 16 verified ones in place of 5 decoded ones; the draft adds about 1 %
        ratio = found["unexplained-by-flops"].numbers["flops_ratio_observed"]
        assert ratio == pytest.approx(36 / 25, rel=0.05)
