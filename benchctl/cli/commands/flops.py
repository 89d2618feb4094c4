"""``benchctl flops``: the FLOPs of a run, computed from its totals alone.

``benchctl steptime guided``: the least that a guided decode step can cost, before any measurement.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, TypeAlias

import typer

from benchctl.cli.options import AsJson, numbers
from benchctl.cli.screen import folding_console, tell
from benchctl.costs.difference import explain_difference
from benchctl.costs.flops import (
    FlopsAccount,
    achieved_flops_per_s,
    observed_flops,
    published_flops,
    utilization_frac,
)
from benchctl.costs.guided_floor import guided_floor
from benchctl.costs.hardware import Hardware, hardware_for
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.costs.work import RunLengths, RunTotals, StepLogCounts
from benchctl.errors import UsageError
from benchctl.profile.choices import (
    MAX_CONCURRENCY,
    MAX_CONTEXT,
    MAX_DRAFT_TOKENS,
    MAX_OUTPUTS,
    MAX_TOTAL_TOKENS,
)
from benchctl.records.peaks import MEASURED, best_series, named_peaks, resolved_hardware
from benchctl.report.table import Column, Table, table_of
from benchctl.steptime.speculation.law import steps_by_length, survival
from benchctl.units import GIGA, MS_PER_S, PETA, TERA, US_PER_S, four_digits, signed_three_digits

_NO_MODEL = "none"


_Base = Annotated[
    str, typer.Option("--base", metavar="MODEL", help="A built-in model, or a directory with a config.json.")
]
_ValueModel = Annotated[
    str,
    typer.Option("--value-model", metavar="MODEL", help=f"Value model, named likewise; '{_NO_MODEL}' for none."),
]
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
        "--draft-model", metavar="MODEL", help=f"Model that drafts; '{_NO_MODEL}' for drafts looked up in text."
    ),
]


def flops(
    base: _Base = "qwen2.5-7b",
    value_model: _ValueModel = "qwen2.5-1.5b",
    questions: Annotated[int, typer.Option("--questions", min=1, max=MAX_OUTPUTS, help="Distinct prompts.")] = 50,
    samples: _Samples = 16,
    prompt_tokens: _PromptTokens = 5200,
    output_tokens: _OutputTokens = 237_675,
    top_k: _TopK = 5,
    wall: _Wall = None,
    hardware: _HardwareName = "h100-sxm",
    candidate_cost: Annotated[
        float, typer.Option("--candidate-cost", help="Cost of a candidate, as a multiple of a decoded token.")
    ] = 1.0,
    convention: _ConventionName = "published",
    observed_candidates: _ObservedCandidates = None,
    draft_tokens: _DraftTokens = None,
    acceptance: _Acceptance = None,
    draft_model: _DraftModel = _NO_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")] = False,
) -> None:
    """FLOPs of a run from its totals. The defaults are those of a published run: 50 questions, 16 samples."""
    if wall is not None and not (math.isfinite(wall) and wall > 0):
        raise UsageError(f"--wall is {wall}; give the seconds that the run took, more than 0")
    base_shape, value_shape, draft_shape = shape_for(base), _shape(value_model), _shape(draft_model)
    device = hardware_for(resolved_hardware(hardware))
    accepted = _accepted(draft_tokens, acceptance, has_model=draft_shape is not None)
    totals = RunTotals(
        num_questions=questions,
        num_sequences=questions * samples,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    account = published_flops(
        totals,
        base=base_shape,
        value_model=value_shape,
        top_k=top_k,
        candidate_cost=candidate_cost,
        convention=convention,
    )
    columns: dict[str, _Numbers] = {convention: _numbers(account, wall, device)}
    corrections: list[dict[str, Any]] = []
    if accepted is not None or observed_candidates is not None:
        lengths = totals.evenly()
        counts = _counts(lengths, accepted, observed_candidates, top_k, has_value_model=value_shape is not None)
        shapes = (base_shape, value_shape, draft_shape)
        observed, corrections = _observed(account, lengths, counts, shapes, top_k)
        columns["observed"] = _numbers(observed, wall, device)
    stated = {
        "base": base_shape.name,
        "value_model": None if value_shape is None else value_shape.name,
        **asdict(totals),
        "top_k": top_k,
        "candidate_cost": candidate_cost,
        "observed_candidates_per_token": observed_candidates,
        "draft_model": None if draft_shape is None else draft_shape.name,
        "acceptance": accepted,
        "wall_s": wall,
    }
    _tell(stated, columns, corrections, device, as_json=as_json)


def _shape(model: str) -> ModelShape | None:
    return None if model.lower() == _NO_MODEL else shape_for(model)


def _accepted(draft_tokens: int | None, acceptance: str | None, *, has_model: bool) -> tuple[float, ...] | None:
    """Acceptance of each drafted position; None without speculation."""
    if draft_tokens is None and acceptance is None and not has_model:
        return None
    if draft_tokens is None or acceptance is None:
        raise UsageError("FLOPs of speculation need both --draft-tokens and --acceptance; state them")
    from benchctl.cli.commands.speculation import read_acceptance  # scipy, which is needed for drafts alone

    return read_acceptance(acceptance).of(draft_tokens)


def _counts(
    lengths: RunLengths,
    accepted: tuple[float, ...] | None,
    candidates_per_token: float | None,
    top_k: int,
    *,
    has_value_model: bool,
) -> StepLogCounts:
    """Expected counts: with drafts of a server with bonus tokens, each sequence to its own end."""
    totals, decoded = lengths.totals(), [max(output - 1, 0) for _, output in lengths.sequences]
    if accepted is not None:
        if has_value_model or candidates_per_token is not None:
            raise UsageError(
                "--draft-tokens needs --value-model none, without --observed-candidates: a value model guides one "
                "token at a time and cannot score drafts"
            )
        steps = steps_by_length(max(decoded), accepted, bonus=True)
        num_steps = sum(steps[tokens] for tokens in decoded)
        return StepLogCounts(
            base_prefill_tokens=totals.prompt_tokens,
            verification_tokens=round(num_steps * (len(accepted) + 1)),
            draft_prefill_tokens=totals.prompt_tokens,
            draft_tokens=round(num_steps * len(accepted)),
            backfill_tokens=round(num_steps * survival(accepted)[-1]),
        )
    if not has_value_model:
        raise UsageError("--observed-candidates needs a value model that scores them; name one with --value-model")
    if candidates_per_token is None or not 0 <= candidates_per_token <= top_k:
        raise UsageError(
            f"--observed-candidates is {candidates_per_token}; it is a mean per output token, from 0 to the "
            f"--top-k of {top_k}"
        )
    is_scored = candidates_per_token > 0
    return StepLogCounts(
        base_prefill_tokens=totals.prompt_tokens,
        value_prefill_tokens=sum(prompt for prompt, _ in lengths.sequences) if is_scored else 0,
        value_extend_tokens=sum(decoded) if is_scored else 0,
        candidates=round(candidates_per_token * totals.output_tokens),
    )


def _observed(
    account: FlopsAccount,
    lengths: RunLengths,
    counts: StepLogCounts,
    models: tuple[ModelShape, ModelShape | None, ModelShape | None],
    top_k: int,
) -> tuple[FlopsAccount, list[dict[str, Any]]]:
    """The FLOPs of these counts, and the corrections that lead to them from a published account."""
    base, value_model, draft_model = models
    corrections = explain_difference(
        account,
        lengths=lengths,
        counts=counts,
        base=base,
        value_model=value_model,
        draft_model=draft_model,
        top_k=top_k,
    )
    observed = observed_flops(
        lengths.sequences, counts, base=base, value_model=value_model, draft_model=draft_model
    )
    return observed, [{"code": each.code, "flops": each.flops, "meaning": each.meaning} for each in corrections]


_Numbers: TypeAlias = list[tuple[str, str, float, float | None]]
"""Key in the document, label of the row, the unit of that label, and the number in base units."""


def _numbers(account: FlopsAccount, wall_s: float | None, hardware: Hardware) -> _Numbers:
    achieved = achieved_flops_per_s(account.total, wall_s)
    utilization = utilization_frac(account.total, wall_s, hardware)
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
        ("utilization_frac", f"% of {hardware.device}'s peak", 0.01, utilization),
    ]


def _tell(
    stated: dict[str, Any],
    columns: dict[str, _Numbers],
    corrections: list[dict[str, Any]],
    hardware: Hardware,
    *,
    as_json: bool,
) -> None:
    """Print the document, or the accounts side by side and the corrections that lead from one to the other."""
    convention, *_ = columns
    if as_json:
        account, *observed = ({key: number for key, _, _, number in numbers} for numbers in columns.values())
        document = stated | {
            "hardware": hardware.name,
            "peak_flops_per_s": hardware.peak_flops_per_s,
            "peak_source": hardware.source,
            "convention": convention,
            "account": account,
            "observed": observed[0] if observed else None,
            "corrections": corrections,
        }
        print(json.dumps(document, indent=1))  # print_json has no whole numbers of more than 64 bits
        return
    console, work, accepted = folding_console(None), "", stated["acceptance"]
    if accepted is not None:
        source = "from text" if stated["draft_model"] is None else f"by {stated['draft_model']}"
        probabilities = ", ".join(f"{probability:g}" for probability in accepted)
        work = f" with {len(accepted)} draft tokens {source}, accepted with {probabilities}"
    if stated["value_model"] is not None:
        work += f" guided by {stated['value_model']}, top_k {stated['top_k']}"
    console.print(
        f"{stated['base']}{work}: {stated['num_sequences']} outputs of {stated['num_questions']} prompts, "
        f"{stated['output_tokens']} output tokens"
    )
    rows = (
        (each[0][1], *("needs --wall" if number is None else f"{number / unit:.4g}" for *_, unit, number in each))
        for each in zip(*columns.values(), strict=True)
        if accepted is not None or not each[0][0].startswith("draft_")
    )
    console.print(table_of(("", *columns), rows, left=("",)))
    if stated["wall_s"] is not None:
        origin = hardware.title if hardware.measured_at else hardware.source
        console.print(f"peak: {four_digits(hardware.peak_flops_per_s / TERA)} TFLOP/s, {origin}")
    if corrections:
        assumed = "prompts prefilled once by the base model, but once for each sample by the value model"
        if accepted is not None:
            assumed = "prompts prefilled once, and a bonus token after each draft accepted whole"
        console.print(f"From {convention} to observed, which assumes equal lengths and {assumed}:")
        priced = ((each["code"], f"{each['flops'] / PETA:+.4g}", each["meaning"]) for each in corrections)
        priced_table = table_of(("correction", "PFLOP", "because"), priced, left=("correction", "because"))
        console.print(priced_table.drawn(folds=True))


_FloorValueModel = Annotated[
    str, typer.Option("--value-model", metavar="MODEL", help="Value model, named likewise.")
]
_FloorHardware = Annotated[
    str,
    typer.Option(
        "--hardware", metavar="NAME", help="Device, name:TFLOP/s:GB/s, or 'measured' for the peaks on file."
    ),
]
_FloorScoring = Annotated[
    Literal["reuse", "recompute", "two-phase"],
    typer.Option(
        "--scoring",
        help="Whether keys and values of the drawn candidate are kept, computed again in the same pass, or in a "
        "pass of their own.",
    ),
]
_FloorUnscored = Annotated[
    float, typer.Option("--unscored", min=0, max=1, help="Share of the rows that need no scores in a step.")
]
_FloorLaunch = Annotated[
    str | None,
    typer.Option(
        "--launch-us",
        metavar="US",
        help="Time of the host for one launch, where passes are not replayed as CUDA graphs; 'measured' for that "
        "of the peaks on file.",
        show_default=False,
    ),
]

_MAX_LAUNCH_US: Final = 1e6


def guided(
    base: _Base = "qwen2.5-7b",
    value_model: _FloorValueModel = "qwen2.5-1.5b",
    hardware: _FloorHardware = "h200-sxm",
    batch: Annotated[str, typer.Option("--batch", metavar="B[,B...]", help="Rows of the step.")] = "1,8,64,256",
    top_k: Annotated[
        str, typer.Option("--top-k", metavar="K[,K...]", help="Candidates that are scored in each row.")
    ] = "2,3,4,5",
    context: Annotated[
        int, typer.Option("--context", min=0, max=MAX_CONTEXT, help="Tokens of a row in the cache.")
    ] = 300,
    scoring: _FloorScoring = "reuse",
    unscored: _FloorUnscored = 0.0,
    launch: _FloorLaunch = None,
    as_json: AsJson = False,
) -> None:
    """The least ratio of a guided decode step to an unguided one, by batch and top_k, and where it comes from.

    A floor at the device's peaks, not a prediction: servers stay behind them in both steps.
    """
    base_shape, value_shape = shape_for(base), shape_for(value_model).as_value_model()
    device, launch_us = hardware_for(resolved_hardware(hardware)), _launch_us(launch, hardware)
    floors = {
        (rows, candidates): guided_floor(
            base_shape,
            value_shape,
            device,
            batch=rows,
            candidates=candidates,
            context=context,
            scoring=scoring,
            unscored_frac=unscored,
            launch_s=None if launch_us is None else launch_us / US_PER_S,
        )
        for rows in sorted(set(numbers(batch, "--batch", int, least=1, most=MAX_CONCURRENCY)))
        for candidates in sorted(set(numbers(top_k, "--top-k", int, least=1, most=MAX_CONTEXT)))
    }
    table_rows = [
        {"batch": rows, "top_k": candidates} | {name: getattr(floor, name) for name in _FLOOR_NUMBERS}
        for (rows, candidates), floor in floors.items()
    ]
    document = {
        "base": base_shape.name,
        "value_model": value_shape.name,
        "hardware": device.name,
        "peak_flops_per_s": device.peak_flops_per_s,
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        "peak_source": device.source,
        "context_tokens": context,
        "scoring": scoring,
        "unscored_frac": unscored,
        "launch_us": launch_us,
        "rows": table_rows,
    }
    title = (
        f"Floor of a guided step: {base_shape.name} guided by {value_shape.name} on {device.title}, context "
        f"{context}, scoring {scoring}"
    )
    tell(document, _floor_table(title, table_rows), *_floor_notes(document, device), as_json=as_json)


_FLOOR_NUMBERS: Final = (
    *("base_s", "value_s", "sampling_s", "launches_s", "step_s", "ratio", "parts", "value_tokens"),
    "num_operations",
)


def _launch_us(text: str | None, hardware: str) -> float | None:
    """Microseconds as stated, or as measured: of the device that ``hardware`` names so, or of this machine's."""
    if text is None:
        return None
    if text == MEASURED:
        word, _, name = hardware.partition(":")
        series = best_series(named_peaks(name if word == MEASURED and name else None), "launch")
        if series is None:
            raise UsageError("the peaks on file have no launch; measure one with 'benchctl micro roofline'")
        return series.median * US_PER_S
    first, *others = numbers(text, "--launch-us", float)
    if others or not 0 <= first <= _MAX_LAUNCH_US:
        raise UsageError(
            f"--launch-us {text[:40]!r}: give microseconds from 0 to {_MAX_LAUNCH_US:.0f}, or {MEASURED}"
        )
    return first


def _floor_table(title: str, rows: list[dict[str, Any]]) -> Table:
    """The ratio with its parts for each batch and number of candidates."""
    columns = (
        Column("batch", "batch"),
        Column("top_k", "top_k"),
        Column("base_s", "base ms", _milliseconds),
        Column("step_s", "guided ms", _milliseconds),
        Column("ratio", "ratio", lambda ratio: f"{ratio:.3f}"),
        *(Column(cause, cause, signed_three_digits) for cause in rows[0]["parts"]),
        Column("value_tokens", "value tokens", four_digits),
    )
    return Table(title, columns, tuple(row | row["parts"] for row in rows))


def _milliseconds(time_s: float) -> str:
    return four_digits(time_s * MS_PER_S)


def _floor_notes(document: dict[str, Any], hardware: Hardware) -> Iterator[str]:
    """The origin of the peaks, and what the floor does not contain."""
    origin = "measured peaks" if hardware.measured_at else f"peaks: {hardware.source}"
    meaning = "No server reaches them in either step, so this is a floor and no prediction"
    yield f"{origin}. {meaning}; the parts add up to the ratio less 1"
    num_operations = max(row["num_operations"] for row in document["rows"])
    if document["launch_us"] is None and num_operations:
        yield (
            f"launches cost nothing here, as in CUDA graphs; without graphs the host launches {num_operations} "
            "operations, which --launch-us prices"
        )
