"""``benchctl flops``: the FLOPs of a run, computed from its numbers of tokens.

``benchctl steptime guided``: the least that a guided decode step can cost, before any measurement.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated, Any, Final, Literal, TypeAlias

import typer

from benchctl.cli.options import AsJson, numbers, refuse_first, with_options
from benchctl.cli.screen import tell, text_console
from benchctl.costs.flops import (
    Correction,
    FlopsAccount,
    achieved_flops_per_s,
    explain_difference,
    observed_flops,
    published_flops,
    utilization_frac,
)
from benchctl.costs.hardware import Hardware, hardware_for
from benchctl.costs.roofline import guided_floor
from benchctl.costs.run_work import RunLengths, RunTotals, StepLogCounts
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.profile.bounds import MAX_CONCURRENCY, MAX_CONTEXT, MAX_DRAFT_TOKENS, MAX_OUTPUTS, MAX_TOTAL_TOKENS
from benchctl.records.peaks import MEASURED, best_series, named_peaks, resolved_hardware
from benchctl.report.table import Column, Table, table_of
from benchctl.units import GIGA, MS_PER_S, PETA, TERA, US_PER_S, four_digits, signed_three_digits

_NO_MODEL = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsOptions:
    """The totals of a run, its models, and the account of them."""

    base: Annotated[
        str, typer.Option(metavar="MODEL", help="A built-in model, or a directory with a config.json.")
    ] = "qwen2.5-7b"
    value_model: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help=f"Value model, a second model that steers the sampling; '{_NO_MODEL}' for none."
        ),
    ] = "qwen2.5-1.5b"
    questions: Annotated[int, typer.Option(min=1, max=MAX_OUTPUTS, help="Distinct prompts.")] = 50
    samples: Annotated[int, typer.Option(min=1, max=MAX_OUTPUTS, help="Outputs sampled for each prompt.")] = 16
    prompt_tokens: Annotated[
        int,
        typer.Option(min=1, max=MAX_TOTAL_TOKENS, help="Total over the questions, each counted once."),
    ] = 5200
    output_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_TOTAL_TOKENS, help="Total over questions and samples.")
    ] = 237_675
    top_k: Annotated[
        int, typer.Option(min=1, max=MAX_CONTEXT, help="Candidates charged for each output token.")
    ] = 5
    wall: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time the run took; gives achieved FLOP/s.")
    ] = None
    hardware: Annotated[
        str,
        typer.Option(metavar="NAME", help="Device whose peak achieved FLOP/s are compared with, or 'measured'."),
    ] = "h100-sxm"
    candidate_cost: Annotated[
        float, typer.Option(help="Cost of a candidate, as a multiple of a decoded token.")
    ] = 1.0
    convention: Annotated[
        Literal["published", "two-n", "lm-head-value-model"],
        typer.Option(help="Rule of accounting; the last two are earlier forms of the first."),
    ] = "published"
    observed_candidates: Annotated[
        float | None,
        typer.Option(
            metavar="MEAN",
            help="Candidates scored per output token; adds the account of what was computed.",
        ),
    ] = None
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            max=MAX_DRAFT_TOKENS,
            help="Tokens drafted for each sequence in each step; adds the account of what was computed.",
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Acceptance of a draft token, given that all before it were: one number, or one for each "
            "position.",
        ),
    ] = None
    draft_model: Annotated[
        str,
        typer.Option(metavar="MODEL", help=f"Model that drafts; '{_NO_MODEL}' for drafts looked up in text."),
    ] = _NO_MODEL
    as_json: AsJson = False

    def __post_init__(self) -> None:
        drafts, candidates, has_value_model = (
            self.draft_tokens,
            self.observed_candidates,
            _is_model(self.value_model),
        )
        has_drafts = drafts is not None or self.acceptance is not None or _is_model(self.draft_model)
        refuse_first(
            {
                f"--wall is {self.wall}; give the seconds that the run took, more than 0": (
                    self.wall is not None and not (math.isfinite(self.wall) and self.wall > 0)
                ),
                "FLOPs of speculation need both --draft-tokens and --acceptance; state them": (
                    has_drafts and (drafts is None or self.acceptance is None)
                ),
                "--draft-tokens needs --value-model none, without --observed-candidates: a value model guides one "
                "token at a time and cannot score drafts": has_drafts
                and (has_value_model or candidates is not None),
                "--observed-candidates needs a value model that scores them; name one with --value-model": (
                    candidates is not None and not has_value_model
                ),
                f"--observed-candidates is {candidates}; it is a mean per output token, from 0 to the --top-k of "
                f"{self.top_k}": candidates is not None and not 0 <= candidates <= self.top_k,
            }
        )


def _is_model(name: str) -> bool:
    return name.lower() != _NO_MODEL


@with_options
def flops(options: FlopsOptions) -> None:
    """Compute the FLOPs of a run from its numbers of tokens. The defaults are those of a published run."""
    base = shape_for(options.base)
    value_model = shape_for(options.value_model) if _is_model(options.value_model) else None
    draft_model = shape_for(options.draft_model) if _is_model(options.draft_model) else None
    device = hardware_for(resolved_hardware(options.hardware))
    totals = RunTotals(
        num_questions=options.questions,
        num_sequences=options.questions * options.samples,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )
    account = published_flops(
        totals,
        base=base,
        value_model=value_model,
        top_k=options.top_k,
        candidate_cost=options.candidate_cost,
        convention=options.convention,
    )
    columns: dict[str, _Numbers] = {options.convention: _numbers(account, options.wall, device)}
    accepted = None
    if options.draft_tokens is not None:
        from benchctl.cli.commands.speculation import read_acceptance  # scipy, which is needed for drafts alone

        accepted = read_acceptance(options.acceptance).of(options.draft_tokens)
    corrections: tuple[Correction, ...] = ()
    if accepted is not None or options.observed_candidates is not None:
        lengths = totals.evenly()
        counts = _expected_counts(lengths, accepted, options.observed_candidates or 0.0)
        models = {"value_model": value_model, "draft_model": draft_model}
        corrections = explain_difference(
            account, lengths=lengths, counts=counts, base=base, top_k=options.top_k, **models
        )
        observed = observed_flops(lengths.sequences, counts, base=base, **models)
        columns["observed"] = _numbers(observed, options.wall, device)
    stated = {
        "base": base.name,
        "value_model": None if value_model is None else value_model.name,
        **asdict(totals),
        "top_k": options.top_k,
        "candidate_cost": options.candidate_cost,
        "observed_candidates_per_token": options.observed_candidates,
        "draft_model": None if draft_model is None else draft_model.name,
        "acceptance": accepted,
        "wall_s": options.wall,
    }
    _tell(stated, columns, corrections, device, as_json=options.as_json)


def _expected_counts(
    lengths: RunLengths, accepted: tuple[float, ...] | None, candidates_per_token: float
) -> StepLogCounts:
    """Expected counts: with drafts of a server with bonus tokens, each sequence to its own end."""
    totals, decoded = lengths.totals(), [max(output - 1, 0) for _, output in lengths.sequences]
    if accepted is not None:
        from benchctl.steptime.speculation_law import steps_by_length, survival  # numpy, needed for drafts alone

        steps = steps_by_length(max(decoded), accepted, bonus=True)
        num_steps = sum(steps[tokens] for tokens in decoded)
        return StepLogCounts(
            base_prefill_tokens=totals.prompt_tokens,
            verification_tokens=round(num_steps * (len(accepted) + 1)),
            draft_prefill_tokens=totals.prompt_tokens,
            draft_tokens=round(num_steps * len(accepted)),
            backfill_tokens=round(num_steps * survival(accepted)[-1]),
        )
    is_scored = candidates_per_token > 0
    return StepLogCounts(
        base_prefill_tokens=totals.prompt_tokens,
        value_prefill_tokens=sum(prompt for prompt, _ in lengths.sequences) if is_scored else 0,
        value_extend_tokens=sum(decoded) if is_scored else 0,
        candidates=round(candidates_per_token * totals.output_tokens),
    )


_Numbers: TypeAlias = list[tuple[str, str, float, float | None]]
"""Key in the document, label of the row, the unit of that label, and the number in base units."""


def _numbers(account: FlopsAccount, wall_s: float | None, hardware: Hardware) -> _Numbers:
    achieved = achieved_flops_per_s(account.total, wall_s)
    utilization = utilization_frac(account.total, wall_s, hardware)
    return [
        ("base_prefill_flops", "base prefill, PFLOP", PETA, account.of("base_prefill").total),
        ("base_decode_flops", "base decode, PFLOP", PETA, account.of("base_decode").total),
        ("base_linear_flops", "  of both: linear", PETA, account.of("base").linear),
        ("base_attention_flops", "  of both: attention", PETA, account.of("base").attention),
        ("base_head_flops", "  of both: head", PETA, account.of("base").head),
        ("base_total_flops", "base total, PFLOP", PETA, account.of("base").total),
        ("value_prefill_flops", "value model prefill, PFLOP", PETA, account.of("value_prefill").total),
        ("value_extend_flops", "value model extend, PFLOP", PETA, account.of("value_extend").total),
        ("value_candidates_flops", "value model candidates, PFLOP", PETA, account.of("value_candidates").total),
        ("value_total_flops", "value model total, PFLOP", PETA, account.of("value").total),
        ("draft_prefill_flops", "draft model prefill, PFLOP", PETA, account.of("draft_prefill").total),
        ("draft_decode_flops", "draft model decode, PFLOP", PETA, account.of("draft_decode").total),
        ("draft_total_flops", "draft model total, PFLOP", PETA, account.of("draft").total),
        ("total_flops", "total, PFLOP", PETA, account.total),
        ("ratio", "total / base, prompts included", 1, account.ratio),
        ("flops_per_output_token", "GFLOP per output token, without prompts", GIGA, account.flops_per_output_token),
        ("achieved_flops_per_s", "achieved TFLOP/s", TERA, achieved),
        ("utilization_frac", f"% of {hardware.device}'s peak", 0.01, utilization),
    ]


def _tell(
    stated: dict[str, Any],
    columns: dict[str, _Numbers],
    corrections: Sequence[Correction],
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
            "corrections": [asdict(each) for each in corrections],
        }
        print(json.dumps(document, indent=1))  # print_json has no whole numbers of more than 64 bits
        return
    console, work, accepted = text_console(), "", stated["acceptance"]
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
        priced = ((each.code, f"{each.flops / PETA:+.4g}", each.meaning) for each in corrections)
        console.print(table_of(("correction", "PFLOP", "because"), priced, left=("correction", "because")))


_MAX_LAUNCH_US: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedOptions:
    """A guided decode step, and its device."""

    base: Annotated[
        str, typer.Option(metavar="MODEL", help="A built-in model, or a directory with a config.json.")
    ] = "qwen2.5-7b"
    value_model: Annotated[str, typer.Option(metavar="MODEL", help="Value model, which steers the sampling.")] = (
        "qwen2.5-1.5b"
    )
    hardware: Annotated[
        str,
        typer.Option(metavar="NAME", help="Device, name:TFLOP/s:GB/s, or 'measured' for the peaks on file."),
    ] = "h200-sxm"
    batch: Annotated[str, typer.Option(metavar="B[,B...]", help="Rows of the step.")] = "1,8,64,256"
    top_k: Annotated[str, typer.Option(metavar="K[,K...]", help="Candidates that are scored in each row.")] = (
        "2,3,4,5"
    )
    context: Annotated[int, typer.Option(min=0, max=MAX_CONTEXT, help="Tokens of a row in the cache.")] = 300
    scoring: Annotated[
        Literal["reuse", "recompute", "two-phase"],
        typer.Option(
            help="Whether keys and values of the drawn candidate are kept, computed again in the same pass, or in "
            "a pass of their own.",
        ),
    ] = "reuse"
    unscored: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the rows that need no scores in a step.")
    ] = 0.0
    launch_us: Annotated[
        str | None,
        typer.Option(
            metavar="US",
            help="Time of the host for one launch, where passes are not replayed as CUDA graphs; 'measured' for "
            "that of the peaks on file.",
        ),
    ] = None
    as_json: AsJson = False


@with_options
def guided(options: GuidedOptions) -> None:
    """Compute how little a guided decode step can cost against an unguided one, by batch and top_k.

    In a guided step a value model, a small second model, scores the candidates of the next token. The result is a
    floor, from bytes and FLOPs at the device's peaks, and no prediction: servers do not reach these peaks.
    """
    base, value_model = shape_for(options.base), shape_for(options.value_model).as_value_model()
    device, launch_us = hardware_for(resolved_hardware(options.hardware)), _launch_us(options)
    sizes = product(
        sorted(set(numbers(options.batch, "--batch", int, least=1, most=MAX_CONCURRENCY))),
        sorted(set(numbers(options.top_k, "--top-k", int, least=1, most=MAX_CONTEXT))),
    )
    rows = []
    for batch, candidates in sizes:
        floor = guided_floor(
            base,
            value_model,
            device,
            batch=batch,
            candidates=candidates,
            context=options.context,
            scoring=options.scoring,
            unscored_frac=options.unscored,
            launch_s=None if launch_us is None else launch_us / US_PER_S,
        )
        of_floor = {name: getattr(floor, name) for name in _FLOOR_NUMBERS}
        rows.append({"batch": batch, "top_k": candidates, **of_floor})
    document = {
        "base": base.name,
        "value_model": value_model.name,
        "hardware": device.name,
        "peak_flops_per_s": device.peak_flops_per_s,
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        "peak_source": device.source,
        "context_tokens": options.context,
        "scoring": options.scoring,
        "unscored_frac": options.unscored,
        "launch_us": launch_us,
        "rows": rows,
    }
    title = (
        f"Floor of a guided step: {base.name} guided by {value_model.name} on {device.title}, context "
        f"{options.context}, scoring {options.scoring}"
    )
    tell(document, _floor_table(title, rows), *_floor_notes(document, device), as_json=options.as_json)


_FLOOR_NUMBERS: Final = (
    *("base_s", "value_s", "sampling_s", "launches_s", "step_s", "ratio", "parts", "value_tokens"),
    "num_operations",
)


def _launch_us(options: GuidedOptions) -> float | None:
    """Microseconds as stated, or as measured: of the device that ``--hardware`` names so, or of this machine's."""
    text = options.launch_us
    if text is None:
        return None
    if text == MEASURED:
        word, _, name = options.hardware.partition(":")
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
    yield (
        f"{origin}. No server reaches them in either step, so this is a floor and no prediction; the parts add up "
        "to the ratio less 1"
    )
    num_operations = max(row["num_operations"] for row in document["rows"])
    if document["launch_us"] is None and num_operations:
        yield (
            f"launches cost nothing here, as in CUDA graphs; without graphs the host launches {num_operations} "
            "operations, which --launch-us prices"
        )
