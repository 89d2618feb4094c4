"""``benchctl flops``: the FLOPs of a run, computed from its totals alone."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.costs.difference import Correction
    from benchctl.costs.flops import FlopsAccount
    from benchctl.costs.hardware import Hardware
    from benchctl.costs.shapes import ModelShape
    from benchctl.costs.work import RunLengths, RunTotals, StepLogCounts

NO_MODEL = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlopsRequest:
    """The command line, resolved."""

    base: "ModelShape"
    value_model: "ModelShape | None"
    totals: "RunTotals"
    top_k: int
    candidate_cost: float
    convention: Literal["published", "two-n", "lm-head-value-model"]
    wall_s: float | None
    hardware: "Hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The FLOPs count; with observed candidates also theirs, and the corrections between the two."""

    account: "FlopsAccount"
    observed: "FlopsAccount | None" = None
    corrections: "tuple[Correction, ...]" = ()


_Base = Annotated[
    str, typer.Option("--base", metavar="MODEL", help="A built-in model, or a directory with a config.json.")
]
_ValueModel = Annotated[
    str, typer.Option("--value-model", metavar="MODEL", help=f"Value model, named likewise; '{NO_MODEL}' for none.")
]
_Questions = Annotated[int, typer.Option("--questions", min=1, help="Distinct prompts.")]
_Samples = Annotated[int, typer.Option("--samples", min=1, help="Outputs sampled for each prompt.")]
_PromptTokens = Annotated[
    int, typer.Option("--prompt-tokens", min=1, help="Total over the questions, each counted once.")
]
_OutputTokens = Annotated[int, typer.Option("--output-tokens", min=1, help="Total over questions and samples.")]
_TopK = Annotated[int, typer.Option("--top-k", min=1, help="Candidates charged for each output token.")]
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
    as_json: _AsJson = False,
) -> None:
    """FLOPs of a run from its totals. The defaults are those of a published run: 50 questions, 16 samples."""
    from benchctl.costs.hardware import hardware_for
    from benchctl.costs.shapes import shape_for
    from benchctl.costs.work import RunTotals
    from benchctl.records.stores.peaks_store import resolved_hardware

    if wall is not None and not (math.isfinite(wall) and wall > 0):
        raise UsageError(f"--wall is {wall}; give the seconds that the run took, more than 0")
    request = _FlopsRequest(
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
    )
    answer = _account(request, observed_candidates)
    if as_json:
        _print_json(request, answer, observed_candidates)
    else:
        _print_tables(request, answer)


def _account(request: _FlopsRequest, observed_candidates: float | None) -> _Answer:
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
    if observed_candidates is None:
        return _Answer(account=account)
    lengths = request.totals.evenly()
    counts = _assumed_counts(request, lengths, observed_candidates)
    return _Answer(
        account=account,
        observed=observed_flops(lengths.sequences, counts, base=base, value_model=value_model),
        corrections=explain_difference(
            account, lengths=lengths, counts=counts, base=base, value_model=value_model, top_k=request.top_k
        ),
    )


def _assumed_counts(request: _FlopsRequest, lengths: "RunLengths", candidates_per_token: float) -> "StepLogCounts":
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


def _print_tables(request: _FlopsRequest, answer: _Answer) -> None:
    from rich.console import Console
    from rich.table import Table

    from benchctl.formats import four_digits
    from benchctl.units import PETA, TERA

    accounts = [answer.account] + ([answer.observed] if answer.observed is not None else [])
    headings: list[str] = [request.convention, "observed"][: len(accounts)]
    table = Table("", *headings)
    for column in table.columns[1:]:
        column.justify = "right"
    columns = [_readable(account, request) for account in accounts]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns), end_section=label.endswith("total, PFLOP"))
    console = Console(highlight=False)
    guided = f" guided by {request.value_model.name}, top_k {request.top_k}" if request.value_model else ""
    totals = request.totals
    console.print(
        f"{request.base.name}{guided}: {totals.num_sequences} outputs of {totals.num_questions} prompts, "
        f"{totals.output_tokens} output tokens"
    )
    console.print(table)
    if request.wall_s is not None:
        console.print(
            f"peak: {four_digits(request.hardware.peak_flops_per_s / TERA)} TFLOP/s, {_origin(request.hardware)}"
        )
    if answer.corrections:
        corrections = Table("correction", "PFLOP", "because")
        corrections.columns[1].justify = "right"
        for correction in answer.corrections:
            corrections.add_row(correction.code, f"{correction.flops / PETA:+.4g}", correction.meaning)
        console.print(
            f"From {headings[0]} to observed, which assumes equal lengths and prompts prefilled once by the base "
            "model, but once for each sample by the value model:"
        )
        console.print(corrections)


def _origin(hardware: "Hardware") -> str:
    """The origin of peaks in words."""
    return hardware.title if hardware.measured_at else f"{hardware.source}"


def _readable(account: "FlopsAccount", request: _FlopsRequest) -> dict[str, str]:
    """One column of the table; labels carry the units that people read."""
    return {
        label: "needs --wall" if number is None else f"{number / unit:.4g}"
        for _, label, unit, number in _numbers(account, request)
    }


def _document(account: "FlopsAccount", request: _FlopsRequest) -> dict[str, float | None]:
    return {key: number for key, _, _, number in _numbers(account, request)}


def _numbers(account: "FlopsAccount", request: _FlopsRequest) -> list[tuple[str, str, float, float | None]]:
    """Key in the document, label of the row, the unit of that label, and the number in base units."""
    from benchctl.costs.flops import achieved_flops_per_s, utilization_frac
    from benchctl.units import GIGA, PETA, TERA

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
        ("total_flops", "total, PFLOP", PETA, account.total),
        ("ratio", "total / base", 1, account.ratio),
        ("flops_per_output_token", "GFLOP per output token", GIGA, account.flops_per_output_token),
        ("achieved_flops_per_s", "achieved TFLOP/s", TERA, achieved),
        ("utilization_frac", f"% of {request.hardware.device}'s peak", 0.01, utilization),
    ]


def _print_json(request: _FlopsRequest, answer: _Answer, observed_candidates: float | None) -> None:
    import json

    document: dict[str, Any] = {
        "base": request.base.name,
        "value_model": request.value_model.name if request.value_model else None,
        "num_questions": request.totals.num_questions,
        "num_sequences": request.totals.num_sequences,
        "prompt_tokens": request.totals.prompt_tokens,
        "output_tokens": request.totals.output_tokens,
        "top_k": request.top_k,
        "candidate_cost": request.candidate_cost,
        "observed_candidates_per_token": observed_candidates,
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
