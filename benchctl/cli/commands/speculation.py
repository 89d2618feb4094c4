"""Options of ``benchctl speculation``, and what their texts mean.

The server that ``benchctl speculation`` computes with, from the command line.
The answer of ``benchctl speculation``: the law with constant costs, or with the step times of a server.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import typer

from benchctl.analysis.attribution.work import fitted_draft_warnings
from benchctl.analysis.drafts import MeasuredSpeculation, measured_speculation
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.cli.options.lists import numbers
from benchctl.cli.screen import drawable
from benchctl.cli.speculation.output import SpeculationAnswer
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
from benchctl.steptime.model_file import read_model
from benchctl.steptime.serving_times import RequestSize, ServerLimits
from benchctl.steptime.source import StepTimeSource, fitted_source, roofline_source
from benchctl.steptime.speculation.acceptance import Acceptance, PositionCounts, counted, of_counters, stated
from benchctl.steptime.speculation.batch_load import Speculation
from benchctl.steptime.speculation.draft_length import law_at
from benchctl.steptime.speculation.law import CostDraws, DraftCost
from benchctl.steptime.speculation.served import rows_that_fit, serve
from benchctl.steptime.speculation.server_steps import Backfill, ServerSteps, as_share
from benchctl.steptime.work import Deployment, one_step

Number = TypeVar("Number", int, float)

ResultsArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DIR]", help="Result directory with arms that draft: the law against it.", show_default=False
    ),
]
AcceptanceOption = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        metavar="A[,A...]",
        help="Acceptance of a draft token: one number for every position, one for each given that all before it "
        "were accepted, or counts of that (80/100,60/80).",
        show_default=False,
    ),
]
DraftsOption = Annotated[
    int | None,
    typer.Option(
        "--drafts", min=1, max=MAX_TOTAL_TOKENS, help="Drafts that an engine's counters state.", show_default=False
    ),
]
AcceptedOption = Annotated[
    str | None,
    typer.Option(
        "--accepted",
        metavar="N[,N...]",
        help="Of --drafts, those accepted up to each position: vllm:spec_decode_num_accepted_tokens_per_pos_total.",
        show_default=False,
    ),
]
DraftTokensOption = Annotated[
    str, typer.Option("--draft-tokens", metavar="K", help="Tokens drafted in a step: 4, 1,2,4 or 1..8.")
]
DraftCostOption = Annotated[
    float | None,
    typer.Option(
        "--draft-cost",
        metavar="C",
        help="Time of one draft pass as a share of a step of the target; 0.05 without --draft-model.",
        show_default=False,
    ),
]
BackfillCostOption = Annotated[
    float,
    typer.Option("--backfill-cost", metavar="D", help="Share of a step that the backfill of bonus tokens adds."),
]
NoBonusOption = Annotated[bool, typer.Option("--no-bonus", help="The server yields no bonus tokens.")]
TargetOption = Annotated[
    str | None,
    typer.Option("--model", help="Model that is served: adds goodput by batch size.", show_default=False),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option("--draft-model", help="Model that drafts, in place of --draft-cost.", show_default=False),
]
DeviceOption = Annotated[
    str | None, typer.Option("--hardware", help="Device; that of --step-time-model by default.", show_default=False)
]
TpOption = Annotated[int, typer.Option("--tp", min=1, max=MAX_DEVICES, help="Tensor-parallel size of the target.")]
FittedOption = Annotated[
    Path | None,
    typer.Option(
        "--step-time-model",
        metavar="FILE",
        help="Fitted step times, in place of the roofline; the draft's too.",
        show_default=False,
    ),
]
ContextOption = Annotated[
    int, typer.Option("--context", min=1, max=MAX_CONTEXT, help="Tokens of a sequence in the cache.")
]
BatchSizesOption = Annotated[
    str | None,
    typer.Option(
        "--batch-size", metavar="B[,B...]", help="Batch sizes; powers of two by default.", show_default=False
    ),
]
BackfillOption = Annotated[
    Literal["none", "expansion", "prefill"],
    typer.Option("--backfill", help="Way to compute the draft's keys and values of bonus tokens."),
]
RatesOption = Annotated[
    str | None,
    typer.Option("--rate", metavar="R[,R...]", help="Requests per second: adds latency.", show_default=False),
]
InputLengthOption = Annotated[
    int, typer.Option("--input-len", min=1, max=MAX_TOKENS, help="Prompt tokens of a request, for --rate.")
]
OutputLengthOption = Annotated[
    int, typer.Option("--output-len", min=1, max=MAX_TOKENS, help="Output tokens of it.")
]
MaxNumSeqsOption = Annotated[
    int, typer.Option("--max-num-seqs", min=1, max=MAX_CONCURRENCY, help="Sequences in a batch, for --rate.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the draws behind intervals.")]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Write the picture.", show_default=False, callback=drawable),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def read_acceptance(acceptance: str | None, drafts: int | None, accepted: str | None) -> Acceptance:
    """The acceptance of --acceptance, or of --drafts and --accepted."""
    if (drafts is None) != (accepted is None):
        raise UsageError("--drafts and --accepted belong together: an engine counts drafts, and those accepted")
    if (acceptance is None) == (accepted is None):
        raise UsageError("state the acceptance once: with --acceptance, or with --drafts and --accepted")
    if drafts is not None and accepted is not None:
        return of_counters(drafts, numbers(accepted, "--accepted", int))
    text = acceptance or ""
    if "/" in text:
        return counted([_position_counts(part) for part in text.split(",")])
    return stated(numbers(text, "--acceptance", float))


def _position_counts(text: str) -> PositionCounts:

    accepted, _, judged = text.partition("/")
    try:
        counts = int(accepted), int(judged)
    except ValueError:
        raise UsageError(f"--acceptance {text[:40]!r}: write counts as accepted/judged, such as 80/100") from None
    return PositionCounts(accepted=counts[0], judged=counts[1])


def read_draft_tokens(text: str) -> list[int]:
    """Ascending draft lengths of ``4``, ``1,2,4`` or ``1..8``."""
    first, dots, last = text.partition("..")
    if not dots:
        lengths = sorted(set(numbers(text, "--draft-tokens", int)))
        if lengths[-1] > MAX_DRAFT_TOKENS:
            raise UsageError(f"--draft-tokens {text[:40]!r}: more than {MAX_DRAFT_TOKENS} in a step; give fewer")
        return lengths
    try:
        lengths = list(range(int(first), int(last) + 1)) if int(last) <= MAX_DRAFT_TOKENS else []
    except ValueError:
        lengths = []
    if not lengths:
        raise UsageError(
            f"--draft-tokens {text[:40]!r}: write a range as 1..8, or numbers as 1,2,4, up to {MAX_DRAFT_TOKENS}"
        )
    return lengths


def read_batch_sizes(text: str | None, memory_rows: int | None) -> list[int]:
    """The batch sizes that are named, or powers of two that fit into the memory."""
    if text is not None:
        return sorted(set(numbers(text, "--batch-size", int)))
    powers = [1 << i for i in range(11)]
    return [rows for rows in powers if memory_rows is None or rows <= memory_rows] or powers[:1]


DEFAULT_DRAFT_COST: Final = 0.05
"""One draft pass as a share of a step, where nothing states it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """The costs of drafts that the command line names: constants, or a model and a way to compute backfills."""

    model: str | None
    cost: float | None
    """One draft pass as a share of the target's step; None for ``DEFAULT_DRAFT_COST``."""
    backfill: Backfill
    backfill_cost: float

    def __post_init__(self) -> None:
        if self.cost is not None and self.model is not None:
            raise UsageError("--draft-cost and --draft-model both state the cost of a draft; give one of them")

    def constant(self) -> DraftCost:
        """The stated costs. Raises UsageError for one that is negative or not finite."""
        draft = DEFAULT_DRAFT_COST if self.cost is None else self.cost
        return DraftCost(draft=draft, backfill=self.backfill_cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The model, the device and the step times that the command line names."""

    model: str
    hardware: str | None
    tensor_parallel: int
    fitted: Path | None
    context: int
    """Tokens of a sequence in the cache."""

    def deployment(self, model: str) -> Deployment:
        """A model on the devices of the server. Raises UsageError without a device."""
        hardware = self.hardware
        if hardware is None and self.fitted is not None:
            hardware = read_model(self.fitted).hardware
        if hardware is None:
            raise UsageError("--model needs a device: name it with --hardware, such as h100-sxm or cpu:1.5:80")
        return Deployment(
            shape=shape_for(model),
            hardware=hardware_for(resolved_hardware(hardware)),
            tensor_parallel=self.tensor_parallel,
        )

    def source(self, deployment: Deployment) -> StepTimeSource:
        """Step times of a deployment, from the fitted model or the roofline."""
        if self.fitted is not None:
            return fitted_source(read_model(self.fitted), deployment)
        return roofline_source(deployment)

    def draft_warnings(self, num_draft_tokens: int) -> tuple[ResultWarning, ...]:
        """The warning that the fitted model does not know what verifying so many draft tokens takes, or none."""
        if self.fitted is None:
            return ()
        return fitted_draft_warnings(read_model(self.fitted), str(self.fitted), num_draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Step times of target and draft, and their origin in words."""

    steps: ServerSteps
    origin: str
    cost: DraftCost
    """One draft pass of a single sequence as a share of the target's step, without backfill."""
    memory_rows: int | None


def build_server(options: ServerOptions, drafts: DraftOptions) -> Server:
    """The server of the options; a draft without a model costs a share of the target's step."""
    if drafts.backfill_cost:
        raise UsageError("--backfill-cost is a constant; with --model, --backfill prices it by step times")
    target, context = options.deployment(options.model), float(options.context)
    source = options.source(target)
    if drafts.model is None:
        cost = drafts.constant().draft
        draft, draft_s = None, as_share(source.step_s, cost)
        origin = f"{source.words}, a draft pass at {cost:.4g} of a step"
    else:
        draft = options.deployment(drafts.model)
        draft_s = options.source(draft).step_s
        origin = f"{source.words}, drafts by {draft.shape.name}"
        single = one_step(num_decodes=1, context=context)
        cost = draft_s(single) / source.step_s(single)
    return Server(
        steps=ServerSteps(target_s=source.step_s, draft_s=draft_s, context=context, backfill=drafts.backfill),
        origin=f"{origin}, {context:.0f} tokens in the cache of each sequence",
        cost=DraftCost(draft=cost),
        memory_rows=rows_that_fit(target, draft, context),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedAcceptance:
    """The acceptance in the words of the command line; None for what it leaves out."""

    acceptance: str | None
    drafts: int | None
    accepted: str | None

    @property
    def is_stated(self) -> bool:
        return (self.acceptance, self.drafts, self.accepted) != (None, None, None)

    def read(self) -> Acceptance:
        return read_acceptance(self.acceptance, self.drafts, self.accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The drafts that are asked about, whatever they cost."""

    acceptance: Acceptance
    draft_tokens: list[int]
    bonus: bool
    seed: int
    measured: MeasuredSpeculation | None
    """The measurement that the acceptance comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The batches and the requests that a server is asked about."""

    batch_size: str | None
    rate: str | None
    input_len: int
    output_len: int
    max_num_seqs: int


def read_question(
    results: Path | None, stated: StatedAcceptance, draft_tokens: str, *, no_bonus: bool, seed: int
) -> Question:
    """The drafts of the command line, with the acceptance of a result directory where one is named."""
    measured, acceptance = _source(results, stated)
    yields_bonus = measured is None or any(arm.bonus for arm in measured.arms)
    return Question(
        acceptance=acceptance,
        draft_tokens=read_draft_tokens(draft_tokens),
        bonus=yields_bonus and not no_bonus,
        seed=seed,
        measured=measured,
    )


def _source(results: Path | None, stated: StatedAcceptance) -> tuple[MeasuredSpeculation | None, Acceptance]:
    """The measurement of a result directory, if one is named, and the acceptance of drafts."""
    if results is None:
        return None, stated.read()
    if stated.is_stated:
        raise UsageError(
            "DIR has the acceptance that was measured; leave out --acceptance, --drafts and --accepted"
        )

    measured = measured_speculation(load_experiment(results))
    return measured, measured.acceptance


def answer_with_constants(question: Question, costs: DraftOptions) -> SpeculationAnswer:
    """The law with stated costs, or where none is stated with the measured ones."""
    cost, draws = _constant_cost(question, costs)
    law = law_at(
        question.acceptance,
        cost,
        question.draft_tokens,
        bonus=question.bonus,
        seed=question.seed,
        cost_draws=draws,
    )
    return SpeculationAnswer(law=law, served=None, measured=question.measured)


def _constant_cost(question: Question, costs: DraftOptions) -> tuple[DraftCost, CostDraws | None]:
    """The stated costs, or where none is stated the measured ones with their draws."""
    measured = question.measured
    if costs.cost is None and not costs.backfill_cost and measured is not None and measured.costs is not None:
        return measured.costs.cost, measured.costs.draws(question.seed)
    return costs.constant(), None


def answer_on_server(
    question: Question, options: ServerOptions, costs: DraftOptions, load: LoadOptions
) -> SpeculationAnswer:
    """The law with the cost of a draft of one sequence on a server, and this server's load."""
    drafts, bonus, seed = question.draft_tokens, question.bonus, question.seed
    server = build_server(options, costs)
    served = serve(
        Speculation(server.steps, question.acceptance, drafts, bonus=bonus, seed=seed),
        server.origin,
        read_batch_sizes(load.batch_size, server.memory_rows),
        memory_rows=server.memory_rows,
        rates=[] if load.rate is None else numbers(load.rate, "--rate", float),
        size=RequestSize(prompt_tokens=load.input_len, output_tokens=load.output_len),
        limits=ServerLimits(max_num_seqs=load.max_num_seqs),
    )
    return SpeculationAnswer(
        law=law_at(question.acceptance, server.cost, drafts, bonus=bonus, seed=seed),
        served=served,
        measured=question.measured,
        warnings=options.draft_warnings(max(drafts)),
    )
