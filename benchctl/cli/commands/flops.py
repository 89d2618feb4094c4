"""``benchctl flops``: the FLOPs of a run, computed from its totals alone."""

import math
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from benchctl.errors import UsageError
from benchctl.profile.sections.ranges import MAX_CONTEXT, MAX_DRAFT_TOKENS, MAX_OUTPUTS, MAX_TOTAL_TOKENS

if TYPE_CHECKING:
    from benchctl.cli.output.flops import Drafting, FlopsAnswer, FlopsRequest
    from benchctl.costs.work import RunLengths, StepLogCounts

NO_MODEL = "none"


_Base = Annotated[
    str, typer.Option("--base", metavar="MODEL", help="A built-in model, or a directory with a config.json.")
]
_ValueModel = Annotated[
    str, typer.Option("--value-model", metavar="MODEL", help=f"Value model, named likewise; '{NO_MODEL}' for none.")
]
_Questions = Annotated[int, typer.Option("--questions", min=1, max=MAX_OUTPUTS, help="Distinct prompts.")]
_Samples = Annotated[
    int, typer.Option("--samples", min=1, max=MAX_OUTPUTS, help="Outputs sampled for each prompt.")
]
_PromptTokens = Annotated[
    int,
    typer.Option(
        "--prompt-tokens", min=1, max=MAX_TOTAL_TOKENS, help="Total over the questions, each counted once."
    ),
]
_OutputTokens = Annotated[
    int, typer.Option("--output-tokens", min=1, max=MAX_TOTAL_TOKENS, help="Total over questions and samples.")
]
_TopK = Annotated[
    int, typer.Option("--top-k", min=1, max=MAX_CONTEXT, help="Candidates charged for each output token.")
]
_Wall = Annotated[
    float | None, typer.Option("--wall", metavar="SECONDS", help="Time the run took; gives achieved FLOP/s.")
]
_HardwareName = Annotated[
    str,
    typer.Option(
        "--hardware", metavar="NAME", help="Device whose peak achieved FLOP/s are compared with, or 'measured'."
    ),
]
_CandidateCost = Annotated[
    float, typer.Option("--candidate-cost", help="Cost of a candidate, as a multiple of a decoded token.")
]
_ConventionName = Annotated[
    Literal["published", "two-n", "lm-head-value-model"],
    typer.Option("--convention", help="Rule of accounting; the last two are earlier forms of the first."),
]
_ObservedCandidates = Annotated[
    float | None,
    typer.Option(
        "--observed-candidates",
        metavar="MEAN",
        help="Candidates scored per output token; adds the account of what was computed.",
    ),
]
_DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        metavar="K",
        min=1,
        max=MAX_DRAFT_TOKENS,
        help="Tokens drafted for each sequence in each step; adds the account of what was computed.",
    ),
]
_Acceptance = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        metavar="LIST",
        help="Acceptance of a draft token, given that all before it were: one number, or one for each position.",
    ),
]
_DraftModel = Annotated[
    str,
    typer.Option(
        "--draft-model", metavar="MODEL", help=f"Model that drafts; '{NO_MODEL}' for drafts looked up in text."
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")]


def flops(
    base: _Base = "qwen2.5-7b",
    value_model: _ValueModel = "qwen2.5-1.5b",
    questions: _Questions = 50,
    samples: _Samples = 16,
    prompt_tokens: _PromptTokens = 5200,
    output_tokens: _OutputTokens = 237_675,
    top_k: _TopK = 5,
    wall: _Wall = None,
    hardware: _HardwareName = "h100-sxm",
    candidate_cost: _CandidateCost = 1.0,
    convention: _ConventionName = "published",
    observed_candidates: _ObservedCandidates = None,
    draft_tokens: _DraftTokens = None,
    acceptance: _Acceptance = None,
    draft_model: _DraftModel = NO_MODEL,
    as_json: _AsJson = False,
) -> None:
    """FLOPs of a run from its totals. The defaults are those of a published run: 50 questions, 16 samples."""
    from benchctl.cli.output.flops import FlopsRequest, print_json, print_tables
    from benchctl.costs.hardware import hardware_for
    from benchctl.costs.shapes import shape_for
    from benchctl.costs.work import RunTotals
    from benchctl.records.stores.peaks_store import resolved_hardware

    if wall is not None and not (math.isfinite(wall) and wall > 0):
        raise UsageError(f"--wall is {wall}; give the seconds that the run took, more than 0")
    request = FlopsRequest(
        base=shape_for(base),
        value_model=None if value_model.lower() == NO_MODEL else shape_for(value_model),
        totals=RunTotals(
            num_questions=questions,
            num_sequences=questions * samples,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        ),
        top_k=top_k,
        candidate_cost=candidate_cost,
        convention=convention,
        wall_s=wall,
        hardware=hardware_for(resolved_hardware(hardware)),
        observed_candidates=observed_candidates,
        drafting=_drafting(draft_tokens, acceptance, draft_model),
    )
    answer = _account(request)
    if as_json:
        print_json(request, answer)
    else:
        print_tables(request, answer)


def _drafting(draft_tokens: int | None, acceptance: str | None, draft_model: str) -> "Drafting | None":
    """Speculation as the options state it; None without any."""
    from benchctl.cli.output.flops import Drafting
    from benchctl.cli.speculation.options import read_acceptance
    from benchctl.costs.shapes import shape_for

    has_model = draft_model.lower() != NO_MODEL
    if draft_tokens is None and acceptance is None and not has_model:
        return None
    if draft_tokens is None or acceptance is None:
        raise UsageError("FLOPs of speculation need both --draft-tokens and --acceptance; state them")
    return Drafting(
        acceptance=read_acceptance(acceptance, None, None).of(draft_tokens),
        model=shape_for(draft_model) if has_model else None,
    )


def _account(request: "FlopsRequest") -> "FlopsAnswer":
    from benchctl.cli.output.flops import FlopsAnswer
    from benchctl.costs.difference import explain_difference
    from benchctl.costs.flops import observed_flops, published_flops

    base, value_model = request.base, request.value_model
    account = published_flops(
        request.totals,
        base=base,
        value_model=value_model,
        top_k=request.top_k,
        candidate_cost=request.candidate_cost,
        convention=request.convention,
    )
    lengths = request.totals.evenly()
    draft_model = None
    if request.drafting is not None:
        counts, draft_model = _drafted_counts(request, request.drafting, lengths), request.drafting.model
    elif request.observed_candidates is not None:
        counts = _assumed_counts(request, lengths, request.observed_candidates)
    else:
        return FlopsAnswer(account=account)
    return FlopsAnswer(
        account=account,
        observed=observed_flops(
            lengths.sequences, counts, base=base, value_model=value_model, draft_model=draft_model
        ),
        corrections=explain_difference(
            account,
            lengths=lengths,
            counts=counts,
            base=base,
            value_model=value_model,
            draft_model=draft_model,
            top_k=request.top_k,
        ),
    )


def _drafted_counts(request: "FlopsRequest", drafting: "Drafting", lengths: "RunLengths") -> "StepLogCounts":
    """Expected counts of a server with bonus tokens, each sequence to its own end."""
    from benchctl.costs.work import StepLogCounts
    from benchctl.steptime.speculation.law import steps_by_length, survival

    if request.value_model is not None or request.observed_candidates is not None:
        raise UsageError(
            "--draft-tokens needs --value-model none, without --observed-candidates: a value model guides one "
            "token at a time and cannot score drafts"
        )
    decoded = [max(output - 1, 0) for _, output in lengths.sequences]
    steps = steps_by_length(max(decoded), drafting.acceptance, bonus=True)
    num_steps, num_drafts = sum(steps[tokens] for tokens in decoded), len(drafting.acceptance)
    return StepLogCounts(
        base_prefill_tokens=request.totals.prompt_tokens,
        verification_tokens=round(num_steps * (num_drafts + 1)),
        draft_prefill_tokens=request.totals.prompt_tokens,
        draft_tokens=round(num_steps * num_drafts),
        backfill_tokens=round(num_steps * survival(drafting.acceptance)[-1]),
    )


def _assumed_counts(request: "FlopsRequest", lengths: "RunLengths", candidates_per_token: float) -> "StepLogCounts":
    from benchctl.costs.work import StepLogCounts

    if request.value_model is None:
        raise UsageError("--observed-candidates needs a value model that scores them; name one with --value-model")
    if not 0 <= candidates_per_token <= request.top_k:
        raise UsageError(
            f"--observed-candidates is {candidates_per_token}; it is a mean per output token, from 0 to the "
            f"--top-k of {request.top_k}"
        )
    is_scored = candidates_per_token > 0
    return StepLogCounts(
        base_prefill_tokens=request.totals.prompt_tokens,
        value_prefill_tokens=sum(prompt for prompt, _ in lengths.sequences) if is_scored else 0,
        value_extend_tokens=sum(max(output - 1, 0) for _, output in lengths.sequences) if is_scored else 0,
        candidates=round(candidates_per_token * request.totals.output_tokens),
    )
