"""What a fitted step-time model is said to know of the verification of drafts."""

from dataclasses import replace

import numpy as np
import pytest
from support.step_time import planted_run

from benchctl.analysis.attribution.work import fitted_draft_warnings
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.work import StepWork, most_query_tokens, one_step

PLANTED = {"compute": 1.5, "memory": 1.2, "all_reduce": 1.0, "layers": 40.0, "requests": 8.0, "steps": 90.0}


def fitted(*row_tokens: int, structure: str = "overlap") -> StepTimeModel:
    """A model of one run for each number of query tokens of its rows."""
    runs = [
        planted_run("qwen2.5-7b", 1, PLANTED, seed=i, num_steps=60, row_tokens=number)
        for i, number in enumerate(row_tokens)
    ]
    return fit_model(runs, FitOptions(structure=structure, num_draws=5))


def messages(model: StepTimeModel, num_draft_tokens: int) -> list[str]:
    warnings = fitted_draft_warnings(model, "m.json", num_draft_tokens)
    assert {warning.code for warning in warnings} <= {"drafts-not-fitted"}
    return [warning.message for warning in warnings]


def test_a_fit_records_the_most_query_tokens_of_any_run() -> None:
    assert fitted(1).provenance.most_query_tokens == 1
    assert fitted(1, 4, 2).provenance.most_query_tokens == 4


def test_a_mean_between_two_whole_numbers_is_a_row_of_the_larger() -> None:
    assert most_query_tokens(StepWork(num_decodes=np.array([4.0, 8.0]), decode_tokens=np.array([4.0, 18.0]))) == 3
    assert most_query_tokens(one_step(num_decodes=7, context=9, row_tokens=5)) == 5
    assert most_query_tokens(one_step(num_decodes=0, context=0, num_prefills=2, prompt_tokens=9)) == 0


def test_only_drafts_that_the_fit_did_not_see_are_warned_of() -> None:
    model = fitted(1, 4)
    assert [len(messages(model, number)) for number in (0, 1, 3, 4)] == [0, 0, 0, 1]
    (message,) = messages(model, 4)
    assert message.startswith("m.json: fitted to steps of at most 4 query tokens")


def test_a_file_that_does_not_record_it_is_said_to_be_unknown() -> None:
    model = fitted(1)
    older = replace(model, provenance=replace(model.provenance, most_query_tokens=None))
    (message,) = messages(older, 2)
    assert "does not say whether the steps of its fit had drafts" in message
    assert messages(older, 0) == []


@pytest.mark.parametrize("num_draft_tokens", [1, 8])
def test_the_roofline_which_fits_nothing_has_nothing_to_learn_from_drafts(num_draft_tokens: int) -> None:
    assert messages(fitted(1, structure="roofline"), num_draft_tokens) == []
