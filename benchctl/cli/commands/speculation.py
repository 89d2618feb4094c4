"""``benchctl speculation``: what drafts gain, by the law and on a server with step times."""

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from benchctl.analysis.attribution.work import fitted_draft_warnings
from benchctl.analysis.experiment.drafts import MeasuredSpeculation, measured_speculation
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.cli.options import AsJson, numbers
from benchctl.cli.screen import drawable, tell, uncollected
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.profile.choices import (
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
from benchctl.report.table import Table
from benchctl.report.tables.models import (
    acceptance_words,
    batch_lines,
    batch_table,
    law_lines,
    law_table,
    measured_lines,
    measured_table,
    rate_table,
)
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.model_file import read_model
from benchctl.steptime.serving_times import RequestSize, ServerLimits
from benchctl.steptime.source import StepTimeSource, fitted_source, roofline_source
from benchctl.steptime.speculation.acceptance import Acceptance, PositionCounts, counted, of_counters, stated
from benchctl.steptime.speculation.batch_load import Speculation
from benchctl.steptime.speculation.draft_length import SpeculationLaw, law_at
from benchctl.steptime.speculation.law import DraftCost
from benchctl.steptime.speculation.served import ServedSpeculation, rows_that_fit, serve
from benchctl.steptime.speculation.server_steps import Backfill, ServerSteps, as_share
from benchctl.steptime.work import Deployment, one_step
from benchctl.units import capitalized

_Results = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DIR]", help="Result directory with arms that draft: the law against it.", show_default=False
    ),
]
_Acceptance = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        metavar="A[,A...]",
        help="Acceptance of a draft token: one number for every position, one for each given that all before it "
        "were accepted, or counts of that (80/100,60/80).",
        show_default=False,
    ),
]
_Drafts = Annotated[
    int | None,
    typer.Option(
        "--drafts", min=1, max=MAX_TOTAL_TOKENS, help="Drafts that an engine's counters state.", show_default=False
    ),
]
_Accepted = Annotated[
    str | None,
    typer.Option(
        "--accepted",
        metavar="N[,N...]",
        help="Of --drafts, those accepted up to each position: vllm:spec_decode_num_accepted_tokens_per_pos_total.",
        show_default=False,
    ),
]
_DraftTokens = Annotated[
    str, typer.Option("--draft-tokens", metavar="K", help="Tokens drafted in a step: 4, 1,2,4 or 1..8.")
]
_DraftCost = Annotated[
    float | None,
    typer.Option(
        "--draft-cost",
        metavar="C",
        help="Time of one draft pass as a share of a step of the target; 0.05 without --draft-model.",
        show_default=False,
    ),
]
_BackfillCost = Annotated[
    float,
    typer.Option("--backfill-cost", metavar="D", help="Share of a step that the backfill of bonus tokens adds."),
]
_Target = Annotated[
    str | None,
    typer.Option("--model", help="Model that is served: adds goodput by batch size.", show_default=False),
]
_DraftModel = Annotated[
    str | None,
    typer.Option("--draft-model", help="Model that drafts, in place of --draft-cost.", show_default=False),
]
_Device = Annotated[
    str | None, typer.Option("--hardware", help="Device; that of --step-time-model by default.", show_default=False)
]
_TensorParallel = Annotated[
    int, typer.Option("--tp", min=1, max=MAX_DEVICES, help="Tensor-parallel size of the target.")
]
_Fitted = Annotated[
    Path | None,
    typer.Option(
        "--step-time-model",
        metavar="FILE",
        help="Fitted step times, in place of the roofline; the draft's too.",
        show_default=False,
    ),
]
_BatchSizes = Annotated[
    str | None,
    typer.Option(
        "--batch-size", metavar="B[,B...]", help="Batch sizes; powers of two by default.", show_default=False
    ),
]
_Backfill = Annotated[
    Literal["none", "expansion", "prefill"],
    typer.Option("--backfill", help="Way to compute the draft's keys and values of bonus tokens."),
]
_Rates = Annotated[
    str | None,
    typer.Option("--rate", metavar="R[,R...]", help="Requests per second: adds latency.", show_default=False),
]
_InputLength = Annotated[
    int, typer.Option("--input-len", min=1, max=MAX_TOKENS, help="Prompt tokens of a request, for --rate.")
]
_MaxNumSeqs = Annotated[
    int, typer.Option("--max-num-seqs", min=1, max=MAX_CONCURRENCY, help="Sequences in a batch, for --rate.")
]
_Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Write the picture.", show_default=False, callback=drawable),
]

_DEFAULT_DRAFT_COST: Final = 0.05
"""One draft pass as a share of a step, where nothing states it."""


@uncollected()
def speculation(
    results: _Results = None,
    acceptance: _Acceptance = None,
    drafts: _Drafts = None,
    accepted: _Accepted = None,
    draft_tokens: _DraftTokens = "1..8",
    draft_cost: _DraftCost = None,
    backfill_cost: _BackfillCost = 0.0,
    no_bonus: Annotated[bool, typer.Option("--no-bonus", help="The server yields no bonus tokens.")] = False,
    model: _Target = None,
    draft_model: _DraftModel = None,
    hardware: _Device = None,
    tp: _TensorParallel = 1,
    step_time_model: _Fitted = None,
    context: Annotated[
        int, typer.Option("--context", min=1, max=MAX_CONTEXT, help="Tokens of a sequence in the cache.")
    ] = 1024,
    batch_size: _BatchSizes = None,
    backfill: _Backfill = "none",
    rate: _Rates = None,
    input_len: _InputLength = 1024,
    output_len: Annotated[
        int, typer.Option("--output-len", min=1, max=MAX_TOKENS, help="Output tokens of it.")
    ] = 256,
    max_num_seqs: _MaxNumSeqs = 256,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws behind intervals.")] = 0,
    plot: _Plot = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per step and speed-up of speculative decoding, and its goodput under load.

    A step costs 1 + K C + D of one without drafts, C being --draft-cost and D --backfill-cost. With --model, step
    times of both models take the place of these; with DIR, acceptance and costs are those that were measured, and
    the law is held against the measurement.
    """
    measured, judged = _measured_or_stated(results, acceptance, drafts, accepted)
    bonus = not no_bonus and (measured is None or any(arm.bonus for arm in measured.arms))
    lengths, cost = read_draft_tokens(draft_tokens), _stated_cost(model, draft_model, draft_cost, backfill_cost)
    draws, served, fitted = None, None, None if step_time_model is None else read_model(step_time_model)
    if model is not None:
        models = model, draft_model
        steps, origin, cost, memory_rows = _server(
            models, (hardware, tp), fitted, float(context), backfill, cost.draft
        )
        served = serve(
            Speculation(steps, judged, lengths, bonus=bonus, seed=seed),
            origin,
            _batch_sizes(batch_size, memory_rows),
            memory_rows=memory_rows,
            rates=[] if rate is None else numbers(rate, "--rate", float),
            size=RequestSize(prompt_tokens=input_len, output_tokens=output_len),
            limits=ServerLimits(max_num_seqs=max_num_seqs),
        )
    else:
        _check_no_server(draft_model, step_time_model, batch_size, rate, backfill)
        if measured is not None and measured.costs is not None and draft_cost is None and not backfill_cost:
            cost, draws = measured.costs.cost, measured.costs.draws(seed)
    law = law_at(judged, cost, lengths, bonus=bonus, seed=seed, cost_draws=draws)
    warnings = () if fitted is None else fitted_draft_warnings(fitted, str(step_time_model), max(lengths))
    _tell(law, served, measured, warnings, plot, as_json=as_json)


def _measured_or_stated(
    results: Path | None, acceptance: str | None, drafts: int | None, accepted: str | None
) -> tuple[MeasuredSpeculation | None, Acceptance]:
    """The measurement of a result directory, if one is named, and the acceptance of drafts."""
    if results is None:
        return None, read_acceptance(acceptance, drafts, accepted)
    if (acceptance, drafts, accepted) != (None, None, None):
        raise UsageError(
            "DIR has the acceptance that was measured; leave out --acceptance, --drafts and --accepted"
        )
    measured = measured_speculation(load_experiment(results))
    return measured, measured.acceptance


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


def _stated_cost(
    model: str | None, draft_model: str | None, draft_cost: float | None, backfill_cost: float
) -> DraftCost:
    if draft_cost is not None and draft_model is not None:
        raise UsageError("--draft-cost and --draft-model both state the cost of a draft; give one of them")
    if model is not None and backfill_cost:
        raise UsageError("--backfill-cost is a constant; with --model, --backfill prices it by step times")
    return DraftCost(draft=_DEFAULT_DRAFT_COST if draft_cost is None else draft_cost, backfill=backfill_cost)


def _check_no_server(*server_options: object) -> None:
    """Refuse options of a server where none is described."""
    names = ("--draft-model", "--step-time-model", "--batch-size", "--rate", "--backfill")
    for name, value in zip(names, server_options, strict=True):
        if value is not None and value != "none":
            raise UsageError(f"{name} needs step times: name the model that is served with --model")


def _batch_sizes(text: str | None, memory_rows: int | None) -> list[int]:
    """The batch sizes that are named, or powers of two that fit into the memory."""
    if text is not None:
        return sorted(set(numbers(text, "--batch-size", int)))
    powers = [1 << i for i in range(11)]
    return [rows for rows in powers if memory_rows is None or rows <= memory_rows] or powers[:1]


def _server(
    models: tuple[str, str | None],
    devices: tuple[str | None, int],
    fitted: StepTimeModel | None,
    context: float,
    backfill: Backfill,
    share: float,
) -> tuple[ServerSteps, str, DraftCost, int | None]:
    """Step times of target and draft on so many devices, their origin in words, the cost of one draft pass of a
    single sequence as a share of the target's step, and the sequences that fit into the memory.

    A draft without a model costs ``share`` of a step.
    """
    name, tensor_parallel = devices[0] or (None if fitted is None else fitted.hardware), devices[1]
    if name is None:
        raise UsageError("--model needs a device: name it with --hardware, such as h100-sxm or cpu:1.5:80")
    hardware = hardware_for(resolved_hardware(name))

    def deployed(model: str) -> tuple[Deployment, StepTimeSource]:
        deployment = Deployment(shape=shape_for(model), hardware=hardware, tensor_parallel=tensor_parallel)
        return deployment, roofline_source(deployment) if fitted is None else fitted_source(fitted, deployment)

    (target, source), draft = deployed(models[0]), None
    draft_s, words = as_share(source.step_s, share), f"a draft pass at {share:.4g} of a step"
    if models[1] is not None:
        draft, draft_source = deployed(models[1])
        draft_s, words = draft_source.step_s, f"drafts by {draft.shape.name}"
        single = one_step(num_decodes=1, context=context)
        share = draft_s(single) / source.step_s(single)
    steps = ServerSteps(target_s=source.step_s, draft_s=draft_s, context=context, backfill=backfill)
    origin = f"{source.words}, {words}, {context:.0f} tokens in the cache of each sequence"
    return steps, origin, DraftCost(draft=share), rows_that_fit(target, draft, context)


def _tell(
    law: SpeculationLaw,
    served: ServedSpeculation | None,
    measured: MeasuredSpeculation | None,
    warnings: tuple[ResultWarning, ...],
    picture: Path | None,
    *,
    as_json: bool,
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
    if picture is not None:
        title = capitalized(acceptance_words(law.acceptance)) + (f"; {served.origin}" if served else "")
        spec = draw_speculation(law, served, measured)
        picture.write_bytes(picture_bytes(spec, title, suffix=picture.suffix))
        parts.append(f"picture: {picture}")
    tell(speculation_document(law, served, measured, warnings), *parts, as_json=as_json)
