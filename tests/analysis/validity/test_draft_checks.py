"""Drafts by the steps, by the server's counters and by the options, where they agree and where they do not."""

import msgspec
import pytest
from support.results.builders import edit_steps, rewrite_lines, write_results

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.analysis.validity.checks import reconcile
from benchctl.profile.engine_table import options_class
from benchctl.records.loaded import load_results

BASELINE = "000-b0-baseline"
PREFIX = "vllm:spec_decode_num"


@pytest.fixture(name="results")
def _results(tmp_path):
    """A run whose seven decode steps draft two tokens for each of eight sequences."""
    results = write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},))
    edit_steps(results, BASELINE, with_drafts)
    plant_counters(results, drafts=56, draft_tokens=112, accepted_tokens=56, by_position=(42, 14))
    return results


def with_drafts(step):
    if step.phase == "prefill":
        return step
    return msgspec.structs.replace(step, drafts=8, draft_tokens=16, accepted_tokens=8, accepted_by_position=(6, 2))


def plant_counters(results, *, drafts, draft_tokens, accepted_tokens, by_position):
    grown = {"drafts": drafts, "draft_tokens": draft_tokens, "accepted_tokens": accepted_tokens}
    series = {f'{PREFIX}_{name}_total{{engine="0",model_name="m"}}': count for name, count in grown.items()}
    for position, count in enumerate(by_position):
        series[f'{PREFIX}_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="{position}"}}'] = count
    before = dict.fromkeys(series, 5.0)

    def change(sample):
        others = {name: value for name, value in sample["values"].items() if not name.startswith(PREFIX)}
        values = {name: 5.0 + count for name, count in series.items()} if any(others.values()) else before
        return sample | {"values": others | values}

    rewrite_lines(results.run(BASELINE).path / "prometheus.jsonl", change)


def checks_of(results, **server):
    """Checks by name; ``server`` are options that the run's variant had."""
    loaded = load_results(results.path)
    experiment, run = experiment_of(loaded), loaded.runs[0]
    settings = experiment.settings(run.record)
    settings = settings.model_copy(update={"server": settings.server.model_copy(update=server)})
    checks = reconcile(run, experiment.profile, settings, loaded.requests, loaded.manifest.stop)
    return {check.name: check for check in checks}


def test_steps_and_counters_that_agree_say_so_by_position(results):
    check = checks_of(results)["draft-counters"]
    assert check.ok is True
    assert "accepted by position (42, 14) by steps, (42, 14) by counters" in check.detail


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"drafts": 57}, "drafts 56 by steps, 57 by vllm:spec_decode_num_drafts_total"),
        ({"draft_tokens": 111}, "draft tokens 112 by steps, 111 by"),
        ({"accepted_tokens": 55}, "accepted tokens 56 by steps, 55 by"),
        ({"by_position": (41, 15)}, "accepted by position (42, 14) by steps, (41, 15) by counters"),
    ],
)
def test_a_counter_that_differs_by_one_makes_the_run_invalid(results, changed, text):
    counts = {"drafts": 56, "draft_tokens": 112, "accepted_tokens": 56, "by_position": (42, 14)}
    plant_counters(results, **counts | changed)
    check = checks_of(results)["draft-counters"]
    assert (check.ok, check.is_fatal) == (False, True)
    assert text in check.detail


def test_a_position_that_was_never_accepted_may_be_missing_from_a_page(results):
    edit_steps(results, BASELINE, lambda s: msgspec.structs.replace(s, accepted_by_position=s.drafts and (8, 0, 0)))
    plant_counters(results, drafts=56, draft_tokens=112, accepted_tokens=56, by_position=(56,))
    assert checks_of(results)["draft-counters"].ok is True


def test_a_position_accepted_more_often_than_the_one_before_is_impossible(results):
    edit_steps(results, BASELINE, lambda s: msgspec.structs.replace(s, accepted_by_position=s.drafts and (2, 6)))
    check = checks_of(results)["accepted-drafts"]
    assert (check.ok, check.is_fatal) == (False, True)
    assert "a position was accepted more often than the one before it" in check.detail


def test_positions_add_up_to_the_accepted_tokens_and_these_are_no_more_than_drafted(results):
    assert checks_of(results)["accepted-drafts"].ok is True
    edit_steps(results, BASELINE, lambda s: msgspec.structs.replace(s, accepted_tokens=s.drafts and 17))
    detail = checks_of(results)["accepted-drafts"].detail
    assert "more than were drafted" in detail
    assert "the positions add up to 56" in detail


def test_a_server_that_should_draft_and_never_did_makes_the_run_invalid(results):
    assert checks_of(results, num_speculative_tokens=2)["speculation"].ok is True
    edit_steps(
        results,
        BASELINE,
        lambda s: msgspec.structs.replace(
            s, drafts=None, draft_tokens=None, accepted_tokens=None, accepted_by_position=None
        ),
    )
    plant_counters(results, drafts=0, draft_tokens=0, accepted_tokens=0, by_position=(0, 0))
    check = checks_of(results, num_speculative_tokens=2)["speculation"]
    assert (check.ok, check.is_fatal, check.detail) == (False, True, "speculation declared; 0 draft tokens")
    assert checks_of(results, num_speculative_tokens=None)["speculation"].ok is True


def test_drafts_that_no_option_asked_for_are_told(results):
    check = checks_of(results, num_speculative_tokens=None)["speculation"]
    assert (check.ok, check.is_fatal) == (False, False)


def test_records_without_drafts_cannot_tell(tmp_path):
    checks = checks_of(write_results(tmp_path / "r"), num_speculative_tokens=2)
    assert {checks[name].ok for name in ("draft-counters", "accepted-drafts", "speculation")} == {None}


def test_engines_without_an_option_for_drafts_do_not_say_whether_they_speculate():
    assert options_class("llamacpp")().speculates is None
