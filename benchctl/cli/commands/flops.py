"""Tables and the JSON document of ``benchctl flops``.

``benchctl flops``: the FLOPs of a run, computed from its totals alone.
"""

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from benchctl.cli.screen import folding_console
from benchctl.costs.difference import Correction, explain_difference
from benchctl.costs.flops import (
    FlopsAccount,
    achieved_flops_per_s,
    observed_flops,
    published_flops,
    utilization_frac,
)
from benchctl.costs.hardware import Hardware, hardware_for
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.costs.work import RunLengths, RunTotals, StepLogCounts
from benchctl.errors import UsageError
from benchctl.formats import four_digits
from benchctl.profile.choices import MAX_CONTEXT, MAX_DRAFT_TOKENS, MAX_OUTPUTS, MAX_TOTAL_TOKENS
from benchctl.records.peaks import resolved_hardware
from benchctl.report.table import table_of
from benchctl.steptime.speculation.law import steps_by_length, survival
from benchctl.units import GIGA, PETA, TERA


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsRequest:
    """The command line, resolved."""

    base: ModelShape
    value_model: ModelShape | None
    totals: RunTotals
    top_k: int
    candidate_cost: float
    convention: Literal["published", "two-n", "lm-head-value-model"]
    wall_s: float | None
    hardware: Hardware
    observed_candidates: float | None = None
    """Candidates scored per output token."""
    drafting: "Drafting | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Speculation: acceptance of each drafted position, and the model that drafts; None for drafts from text."""

    acceptance: tuple[float, ...]
    model: ModelShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsAnswer:
    """The FLOPs count; with observed candidates or drafts also theirs, and the corrections between the two."""

    account: FlopsAccount
    observed: FlopsAccount | None = None
    corrections: tuple[Correction, ...] = ()


def print_tables(request: FlopsRequest, answer: FlopsAnswer) -> None:
    """The accounts side by side, and the corrections that lead from one to the other."""
    accounts = [answer.account] + ([answer.observed] if answer.observed is not None else [])
    headings: list[str] = [request.convention, "observed"][: len(accounts)]
    columns = [_readable(account, request) for account in accounts]
    rows = ((label, *(column[label] for column in columns)) for label in columns[0])
    console = folding_console(None)
    guided = _drafted(request.drafting)
    guided += f" guided by {request.value_model.name}, top_k {request.top_k}" if request.value_model else ""
    totals = request.totals
    console.print(
        f"{request.base.name}{guided}: {totals.num_sequences} outputs of {totals.num_questions} prompts, "
        f"{totals.output_tokens} output tokens"
    )
    console.print(table_of(("", *headings), rows, left=("",)))
    if request.wall_s is not None:
        console.print(
            f"peak: {four_digits(request.hardware.peak_flops_per_s / TERA)} TFLOP/s, {_origin(request.hardware)}"
        )
    if answer.corrections:
        priced = ((each.code, f"{each.flops / PETA:+.4g}", each.meaning) for each in answer.corrections)
        corrections = table_of(("correction", "PFLOP", "because"), priced, left=("correction", "because"))
        assumed = "prompts prefilled once by the base model, but once for each sample by the value model"
        if request.drafting is not None:
            assumed = "prompts prefilled once, and a bonus token after each draft accepted whole"
        console.print(f"From {headings[0]} to observed, which assumes equal lengths and {assumed}:")
        console.print(corrections.drawn(folds=True))


def _drafted(drafting: Drafting | None) -> str:
    """The speculation in words."""
    if drafting is None:
        return ""
    source = "from text" if drafting.model is None else f"by {drafting.model.name}"
    accepted = ", ".join(f"{probability:g}" for probability in drafting.acceptance)
    return f" with {len(drafting.acceptance)} draft tokens {source}, accepted with {accepted}"


def _origin(hardware: Hardware) -> str:
    """The origin of peaks in words."""
    return hardware.title if hardware.measured_at else f"{hardware.source}"


def _readable(account: FlopsAccount, request: FlopsRequest) -> dict[str, str]:
    """One column of the table; labels carry the units that people read."""
    return {
        label: "needs --wall" if number is None else f"{number / unit:.4g}"
        for key, label, unit, number in _numbers(account, request)
        if request.drafting is not None or not key.startswith("draft_")
    }


def _document(account: FlopsAccount, request: FlopsRequest) -> dict[str, float | None]:
    return {key: number for key, _, _, number in _numbers(account, request)}


def _numbers(account: FlopsAccount, request: FlopsRequest) -> list[tuple[str, str, float, float | None]]:
    """Key in the document, label of the row, the unit of that label, and the number in base units."""
    achieved = achieved_flops_per_s(account.total, request.wall_s)
    utilization = utilization_frac(account.total, request.wall_s, request.hardware)
    return [
        ("base_prefill_flops", "base prefill, PFLOP", PETA, account.base_prefill.total),
        ("base_decode_flops", "base decode, PFLOP", PETA, account.base_decode.total),
        ("base_linear_flops", "  of both: linear", PETA, account.base.linear),
        ("base_attention_flops", "  of both: attention", PETA, account.base.attention),
        ("base_head_flops", "  of both: head", PETA, account.base.head),
        ("base_total_flops", "base total, PFLOP", PETA, account.base.total),
        ("value_prefill_flops", "value model prefill, PFLOP", PETA, account.value_prefill.total),
        ("value_extend_flops", "value model extend, PFLOP", PETA, account.value_extend.total),
        ("value_candidates_flops", "value model candidates, PFLOP", PETA, account.value_candidates.total),
        ("value_total_flops", "value model total, PFLOP", PETA, account.value.total),
        ("draft_prefill_flops", "draft model prefill, PFLOP", PETA, account.draft_prefill.total),
        ("draft_decode_flops", "draft model decode, PFLOP", PETA, account.draft_decode.total),
        ("draft_total_flops", "draft model total, PFLOP", PETA, account.draft.total),
        ("total_flops", "total, PFLOP", PETA, account.total),
        ("ratio", "total / base, prompts included", 1, account.ratio),
        ("flops_per_output_token", "GFLOP per output token, without prompts", GIGA, account.flops_per_output_token),
        ("achieved_flops_per_s", "achieved TFLOP/s", TERA, achieved),
        ("utilization_frac", f"% of {request.hardware.device}'s peak", 0.01, utilization),
    ]


def print_json(request: FlopsRequest, answer: FlopsAnswer) -> None:
    """The document: numbers in base units, with their unit in the key."""
    drafting = request.drafting
    document: dict[str, Any] = {
        "base": request.base.name,
        "value_model": request.value_model.name if request.value_model else None,
        "num_questions": request.totals.num_questions,
        "num_sequences": request.totals.num_sequences,
        "prompt_tokens": request.totals.prompt_tokens,
        "output_tokens": request.totals.output_tokens,
        "top_k": request.top_k,
        "candidate_cost": request.candidate_cost,
        "observed_candidates_per_token": request.observed_candidates,
        "draft_model": drafting.model.name if drafting and drafting.model else None,
        "acceptance": list(drafting.acceptance) if drafting else None,
        "wall_s": request.wall_s,
        "hardware": request.hardware.name,
        "peak_flops_per_s": request.hardware.peak_flops_per_s,
        "peak_source": request.hardware.source,
        "convention": request.convention,
        "account": _document(answer.account, request),
        "observed": _document(answer.observed, request) if answer.observed is not None else None,
        "corrections": [
            {"code": correction.code, "flops": correction.flops, "meaning": correction.meaning}
            for correction in answer.corrections
        ],
    }
    print(json.dumps(document, indent=1))


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


def _drafting(draft_tokens: int | None, acceptance: str | None, draft_model: str) -> Drafting | None:
    """Speculation as the options state it; None without any."""
    has_model = draft_model.lower() != NO_MODEL
    if draft_tokens is None and acceptance is None and not has_model:
        return None
    if draft_tokens is None or acceptance is None:
        raise UsageError("FLOPs of speculation need both --draft-tokens and --acceptance; state them")
    from benchctl.cli.commands.speculation import read_acceptance  # scipy, which is needed for drafts alone

    return Drafting(
        acceptance=read_acceptance(acceptance, None, None).of(draft_tokens),
        model=shape_for(draft_model) if has_model else None,
    )


def _account(request: FlopsRequest) -> FlopsAnswer:

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


def _drafted_counts(request: FlopsRequest, drafting: Drafting, lengths: RunLengths) -> StepLogCounts:
    """Expected counts of a server with bonus tokens, each sequence to its own end."""
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


def _assumed_counts(request: FlopsRequest, lengths: RunLengths, candidates_per_token: float) -> StepLogCounts:

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
