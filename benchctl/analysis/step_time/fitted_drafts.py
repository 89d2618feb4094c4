"""Knowledge of a fitted step-time model about the verification of drafts.

A verification of K draft tokens computes K + 1 query tokens of each decoding row. In steps without drafts a row
has one, so that a cost of each row and one of each token (logits, sampling, attention of several query tokens)
cannot be told apart: the fit charges both by rows, and a verification adds none of it.
"""

from typing import TYPE_CHECKING

from benchctl.formats import count_of
from benchctl.records.record import ResultWarning

if TYPE_CHECKING:
    from benchctl.steptime.model import StepTimeModel


def fitted_draft_warnings(model: "StepTimeModel", name: str, num_draft_tokens: int) -> tuple[ResultWarning, ...]:
    """The warning that a model, called ``name``, cannot price the verification of so many draft tokens, or none.

    None for 0 draft tokens, for a fit that saw as many query tokens, and for the roofline, which fits nothing.
    """
    verified_tokens, fitted_tokens = num_draft_tokens + 1, model.provenance.most_query_tokens
    if not num_draft_tokens or model.structure == "roofline":
        return ()
    if fitted_tokens is not None and fitted_tokens >= verified_tokens:
        return ()
    fit = (
        "its file does not say whether the steps of its fit had drafts"
        if fitted_tokens is None
        else f"fitted to steps of at most {count_of(fitted_tokens, 'query token')} for each decoding sequence"
    )
    drafts = count_of(num_draft_tokens, "draft token")
    message = (
        f"{name}: {fit}, and a verification of {drafts} has {verified_tokens}: its time is an extrapolation; fit "
        "the model to steps with as many drafts, or give the costs of drafts as constants ('benchctl speculation' "
        "with --draft-cost and without --model)"
    )
    return (ResultWarning(code="drafts-not-fitted", message=message, where="step-time model"),)
