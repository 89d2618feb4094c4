"""``benchctl speculation``: what drafts gain, by the law and on a server with step times."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import typer

from benchctl.analysis.attribution.work import fitted_draft_warnings
from benchctl.analysis.experiment.drafts import MeasuredSpeculation, measured_speculation
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.cli.options import AsJson, numbers, refuse_first, with_options
from benchctl.cli.screen import drawable, tell, uncollected
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.profile.bounds import (
    MAX_CONCURRENCY,
    MAX_CONTEXT,
    MAX_DEVICES,
    MAX_DRAFT_TOKENS,
    MAX_TOKENS,
    MAX_TOTAL_TOKENS,
)
from benchctl.records.peaks import resolved_hardware
from benchctl.records.schema import ResultWarning
from benchctl.report.charts.figure import picture_bytes
from benchctl.report.charts.models import draw_speculation
from benchctl.report.model_documents import speculation_document
from benchctl.report.model_tables import (
    acceptance_words,
    batch_lines,
    batch_table,
    law_lines,
    law_table,
    measured_lines,
    measured_table,
    rate_table,
)
from benchctl.report.table import Table
from benchctl.steptime.model import StepTimeModel, read_model
from benchctl.steptime.queueing import RequestSize, ServerLimits, StepTimeSource, step_time_source
from benchctl.steptime.speculation_law import (
    Acceptance,
    DraftCost,
    PositionCounts,
    SpeculationLaw,
    counted,
    law_at,
    of_counters,
    stated,
)
from benchctl.steptime.speculation_load import ServedSpeculation, ServerSteps, Speculation, as_share, rows_that_fit
from benchctl.steptime.work import Deployment, one_step
from benchctl.units import capitalized

_DEFAULT_DRAFT_COST: Final = 0.05
"""One draft pass as a share of a step, where nothing states it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Raises UsageError for options that do not go together."""

    results: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="Result directory with arms that draft; checks the formula against it."
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="A[,A...]",
            help="Acceptance of a draft token: one number for every position, one for each given that all before "
            "it were accepted, or counts of that (80/100,60/80).",
        ),
    ] = None
    drafts: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_TOTAL_TOKENS,
            help="Drafts that an engine's counters state.",
        ),
    ] = None
    accepted: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Of --drafts, those accepted up to each position: "
            "vllm:spec_decode_num_accepted_tokens_per_pos_total.",
        ),
    ] = None
    draft_tokens: Annotated[str, typer.Option(metavar="K", help="Tokens drafted in a step: 4, 1,2,4 or 1..8.")] = (
        "1..8"
    )
    draft_cost: Annotated[
        float | None,
        typer.Option(
            metavar="C",
            help="Time of one draft pass as a share of a step of the target; 0.05 without --draft-model.",
        ),
    ] = None
    backfill_cost: Annotated[
        float,
        typer.Option(metavar="D", help="Share of a step that the backfill of bonus tokens adds."),
    ] = 0.0
    no_bonus: Annotated[bool, typer.Option("--no-bonus", help="The server yields no bonus tokens.")] = False
    model: Annotated[
        str | None,
        typer.Option(help="Model that is served: adds goodput by batch size."),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(help="Model that drafts, in place of --draft-cost."),
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(help="Device; that of --step-time-model by default."),
    ] = None
    tp: Annotated[int, typer.Option(min=1, max=MAX_DEVICES, help="Tensor-parallel size of the target.")] = 1
    step_time_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Fitted step times, in place of the roofline; the draft's too.",
        ),
    ] = None
    context: Annotated[int, typer.Option(min=1, max=MAX_CONTEXT, help="Tokens of a sequence in the cache.")] = 1024
    batch_size: Annotated[
        str | None,
        typer.Option(metavar="B[,B...]", help="Batch sizes; powers of two by default."),
    ] = None
    backfill: Annotated[
        Literal["none", "expansion", "prefill"],
        typer.Option(help="Way to compute the draft's keys and values of bonus tokens."),
    ] = "none"
    rate: Annotated[
        str | None,
        typer.Option(metavar="R[,R...]", help="Requests per second: adds latency."),
    ] = None
    input_len: Annotated[
        int, typer.Option(min=1, max=MAX_TOKENS, help="Prompt tokens of a request, for --rate.")
    ] = 1024
    output_len: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Output tokens of it.")] = 256
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=MAX_CONCURRENCY, help="Sequences in a batch, for --rate.")
    ] = 256
    seed: Annotated[int, typer.Option(help="Of the draws behind intervals.")] = 0
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Write the picture.", callback=drawable),
    ] = None
    as_json: AsJson = False

    def __post_init__(self) -> None:
        of_server = {
            "--draft-model": self.draft_model,
            "--step-time-model": self.step_time_model,
            "--batch-size": self.batch_size,
            "--rate": self.rate,
            "--backfill": None if self.backfill == "none" else self.backfill,
        }
        is_stated = (self.acceptance, self.drafts, self.accepted) != (None, None, None)
        refuse_first(
            {
                "DIR has the acceptance that was measured; leave out --acceptance, --drafts and --accepted": (
                    self.results is not None and is_stated
                ),
                "--draft-cost and --draft-model both state the cost of a draft; give one of them": (
                    self.draft_cost is not None and self.draft_model is not None
                ),
                "--backfill-cost is a constant; with --model, --backfill prices it by step times": (
                    self.model is not None and self.backfill_cost
                ),
                **{
                    f"{name} needs step times: name the model that is served with --model": (
                        self.model is None and value is not None
                    )
                    for name, value in of_server.items()
                },
            }
        )


@uncollected()
@with_options
def speculation(options: SpeculationOptions) -> None:
    """Compute tokens per step, speed-up and goodput of speculative decoding.

    A step with K draft tokens takes 1 + K C + D times a step without, with C from --draft-cost and D from
    --backfill-cost. With --model the step times of both models are used instead. With DIR acceptance and costs are
    those that were measured, and the formula is checked against the measurement.
    """
    measured = None if options.results is None else measured_speculation(load_experiment(options.results))
    judged = (
        read_acceptance(options.acceptance, options.drafts, options.accepted)
        if measured is None
        else measured.acceptance
    )
    bonus = not options.no_bonus and (measured is None or any(arm.bonus for arm in measured.arms))
    lengths = read_draft_tokens(options.draft_tokens)
    fitted = None if options.step_time_model is None else read_model(options.step_time_model)
    share = _DEFAULT_DRAFT_COST if options.draft_cost is None else options.draft_cost
    cost, samples, served = DraftCost(draft=share, backfill=options.backfill_cost), None, None
    if options.model is not None:
        server = _server(options.model, options, fitted, share)
        cost = server.cost
        load = Speculation(server.steps, judged, lengths, bonus=bonus, seed=options.seed)
        served = _served(load, server, options)
    elif measured is not None and measured.costs is not None and options.draft_cost is None and not cost.backfill:
        cost, samples = measured.costs.cost, measured.costs.samples(options.seed)
    law = law_at(judged, cost, lengths, bonus=bonus, seed=options.seed, cost_samples=samples)
    warnings = () if fitted is None else fitted_draft_warnings(fitted, str(options.step_time_model), max(lengths))
    _tell(law, served, measured, warnings, options)


def read_acceptance(acceptance: str | None, drafts: int | None = None, accepted: str | None = None) -> Acceptance:
    """The acceptance of --acceptance, or of --drafts and --accepted."""
    if (drafts is None) != (accepted is None):
        raise UsageError("--drafts and --accepted belong together: an engine counts drafts, and those accepted")
    if drafts is not None and accepted is not None and acceptance is None:
        return of_counters(drafts, numbers(accepted, "--accepted", int))
    if acceptance is None or accepted is not None:
        raise UsageError("state the acceptance once: with --acceptance, or with --drafts and --accepted")
    if "/" not in acceptance:
        return stated(numbers(acceptance, "--acceptance", float))
    try:
        pairs = [tuple(map(int, part.split("/"))) for part in acceptance.split(",")]
        return counted([PositionCounts(accepted=accepted, judged=judged) for accepted, judged in pairs])
    except ValueError:
        raise UsageError(
            f"--acceptance {acceptance[:40]!r}: write counts as accepted/judged, such as 80/100"
        ) from None


def read_draft_tokens(text: str) -> list[int]:
    """Ascending draft lengths of ``4``, ``1,2,4`` or ``1..8``."""
    lengths = numbers(text.replace("..", ","), "--draft-tokens", int, least=1, most=MAX_DRAFT_TOKENS)
    if ".." not in text:
        return sorted(set(lengths))
    if len(lengths) != 2 or lengths[0] > lengths[1]:
        raise UsageError(f"--draft-tokens {text[:40]!r}: write a range as 1..8, or numbers as 1,2,4")
    return list(range(lengths[0], lengths[1] + 1))


class _Server(NamedTuple):
    """Step times of target and draft, their origin in words, the cost of one draft pass of a single sequence as a
    share of the target's step, and the sequences that fit into the memory.
    """

    steps: ServerSteps
    origin: str
    cost: DraftCost
    memory_rows: int | None


def _server(model: str, options: SpeculationOptions, fitted: StepTimeModel | None, share: float) -> _Server:
    """The server of ``model``; a draft without a model costs ``share`` of a step."""
    device = options.hardware or (None if fitted is None else fitted.hardware)
    if device is None:
        raise UsageError("--model needs a device: name it with --hardware, such as h100-sxm or cpu:1.5:80")
    hardware = hardware_for(resolved_hardware(device))

    def deployed(model: str) -> tuple[Deployment, StepTimeSource]:
        deployment = Deployment(shape=shape_for(model), hardware=hardware, tensor_parallel=options.tp)
        return deployment, step_time_source(deployment, fitted)

    context = float(options.context)
    (target, source), draft = deployed(model), None
    draft_s, words = as_share(source.step_s, share), f"a draft pass at {share:.4g} of a step"
    if options.draft_model is not None:
        draft, draft_source = deployed(options.draft_model)
        draft_s, words = draft_source.step_s, f"drafts by {draft.shape.name}"
        single = one_step(num_decodes=1, context=context)
        share = draft_s(single) / source.step_s(single)
    steps = ServerSteps(target_s=source.step_s, draft_s=draft_s, context=context, backfill=options.backfill)
    origin = f"{source.words}, {words}, {context:.0f} tokens in the cache of each sequence"
    return _Server(steps, origin, DraftCost(draft=share), rows_that_fit(target, draft, context))


def _served(load: Speculation, server: _Server, options: SpeculationOptions) -> ServedSpeculation:
    """The load at each rate, and at the batch sizes that are named, or powers of two that fit into the memory."""
    if options.batch_size is not None:
        sizes = sorted(set(numbers(options.batch_size, "--batch-size", int, least=1)))
    else:
        powers = [1 << i for i in range(11)]
        sizes = [rows for rows in powers if server.memory_rows is None or rows <= server.memory_rows] or [1]
    return load.served(
        server.origin,
        sizes,
        memory_rows=server.memory_rows,
        rates=[] if options.rate is None else numbers(options.rate, "--rate", float),
        size=RequestSize(prompt_tokens=options.input_len, output_tokens=options.output_len),
        limits=ServerLimits(max_num_seqs=options.max_num_seqs),
    )


def _tell(
    law: SpeculationLaw,
    served: ServedSpeculation | None,
    measured: MeasuredSpeculation | None,
    warnings: tuple[ResultWarning, ...],
    options: SpeculationOptions,
) -> None:
    """Print tables or one JSON document, and write the picture, titled by acceptance and origin of step times."""
    parts: list[Table | str] = []
    if measured is not None:
        parts += (measured_table(measured), *measured_lines(measured), "")
    parts += (law_table(law), *law_lines(law))
    if served is not None:
        parts += ("", batch_table(served), *batch_lines(served))
    if served is not None and served.rates:
        parts += ("", rate_table(served))
    parts += (f"warning: {warning.message}" for warning in warnings)
    if (picture := options.plot) is not None:
        title = capitalized(acceptance_words(law.acceptance)) + (f"; {served.origin}" if served else "")
        picture.write_bytes(picture_bytes(draw_speculation(law, served, measured), title, suffix=picture.suffix))
        parts.append(f"picture: {picture}")
    tell(speculation_document(law, served, measured, warnings), *parts, as_json=options.as_json)
