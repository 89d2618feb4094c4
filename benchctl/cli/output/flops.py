"""Tables and the JSON document of ``benchctl flops``."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

if TYPE_CHECKING:
    from benchctl.costs.difference import Correction
    from benchctl.costs.flops import FlopsAccount
    from benchctl.costs.hardware import Hardware
    from benchctl.costs.shapes import ModelShape
    from benchctl.costs.work import RunTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsRequest:
    """The command line, resolved."""

    base: "ModelShape"
    value_model: "ModelShape | None"
    totals: "RunTotals"
    top_k: int
    candidate_cost: float
    convention: Literal["published", "two-n", "lm-head-value-model"]
    wall_s: float | None
    hardware: "Hardware"
    observed_candidates: float | None = None
    """Candidates scored per output token."""
    drafting: "Drafting | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Speculation: acceptance of each drafted position, and the model that drafts; None for drafts from text."""

    acceptance: tuple[float, ...]
    model: "ModelShape | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsAnswer:
    """The FLOPs count; with observed candidates or drafts also theirs, and the corrections between the two."""

    account: "FlopsAccount"
    observed: "FlopsAccount | None" = None
    corrections: "tuple[Correction, ...]" = ()


def print_tables(request: FlopsRequest, answer: FlopsAnswer) -> None:
    """The accounts side by side, and the corrections that lead from one to the other."""
    from benchctl.cli.output.screen import folding_console
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
    console = folding_console(None)
    guided = _drafted(request.drafting)
    guided += f" guided by {request.value_model.name}, top_k {request.top_k}" if request.value_model else ""
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
        assumed = "prompts prefilled once by the base model, but once for each sample by the value model"
        if request.drafting is not None:
            assumed = "prompts prefilled once, and a bonus token after each draft accepted whole"
        console.print(f"From {headings[0]} to observed, which assumes equal lengths and {assumed}:")
        console.print(corrections)


def _drafted(drafting: Drafting | None) -> str:
    """The speculation in words."""
    if drafting is None:
        return ""
    source = "from text" if drafting.model is None else f"by {drafting.model.name}"
    accepted = ", ".join(f"{probability:g}" for probability in drafting.acceptance)
    return f" with {len(drafting.acceptance)} draft tokens {source}, accepted with {accepted}"


def _origin(hardware: "Hardware") -> str:
    """The origin of peaks in words."""
    return hardware.title if hardware.measured_at else f"{hardware.source}"


def _readable(account: "FlopsAccount", request: FlopsRequest) -> dict[str, str]:
    """One column of the table; labels carry the units that people read."""
    return {
        label: "needs --wall" if number is None else f"{number / unit:.4g}"
        for key, label, unit, number in _numbers(account, request)
        if request.drafting is not None or not key.startswith("draft_")
    }


def _document(account: "FlopsAccount", request: FlopsRequest) -> dict[str, float | None]:
    return {key: number for key, _, _, number in _numbers(account, request)}


def _numbers(account: "FlopsAccount", request: FlopsRequest) -> list[tuple[str, str, float, float | None]]:
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
