"""The answer of ``benchctl speculation``: the law with constant costs, or with the step times of a server."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchctl.cli.speculation.options import numbers, read_acceptance, read_batch_sizes, read_draft_tokens
from benchctl.cli.speculation.output import SpeculationAnswer
from benchctl.cli.speculation.server import DraftOptions, ServerOptions, build_server
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.analysis.summary.speculation import MeasuredSpeculation
    from benchctl.steptime.speculation.acceptance import Acceptance
    from benchctl.steptime.speculation.law import CostDraws, DraftCost


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedAcceptance:
    """The acceptance in the words of the command line; None for what it leaves out."""

    acceptance: str | None
    drafts: int | None
    accepted: str | None

    @property
    def is_stated(self) -> bool:
        return (self.acceptance, self.drafts, self.accepted) != (None, None, None)

    def read(self) -> "Acceptance":
        return read_acceptance(self.acceptance, self.drafts, self.accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The drafts that are asked about, whatever they cost."""

    acceptance: "Acceptance"
    draft_tokens: list[int]
    bonus: bool
    seed: int
    measured: "MeasuredSpeculation | None"
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


def _source(results: Path | None, stated: StatedAcceptance) -> "tuple[MeasuredSpeculation | None, Acceptance]":
    """The measurement of a result directory, if one is named, and the acceptance of drafts."""
    if results is None:
        return None, stated.read()
    if stated.is_stated:
        raise UsageError(
            "DIR has the acceptance that was measured; leave out --acceptance, --drafts and --accepted"
        )
    from benchctl.analysis.experiment.experiment import load_experiment
    from benchctl.analysis.summary.speculation import measured_speculation

    measured = measured_speculation(load_experiment(results))
    return measured, measured.acceptance


def answer_with_constants(question: Question, costs: DraftOptions) -> SpeculationAnswer:
    """The law with stated costs, or where none is stated with the measured ones."""
    from benchctl.steptime.speculation.draft_length import law_at

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


def _constant_cost(question: Question, costs: DraftOptions) -> "tuple[DraftCost, CostDraws | None]":
    """The stated costs, or where none is stated the measured ones with their draws."""
    measured = question.measured
    if costs.cost is None and not costs.backfill_cost and measured is not None and measured.costs is not None:
        return measured.costs.cost, measured.costs.draws(question.seed)
    return costs.constant(), None


def answer_on_server(
    question: Question, options: ServerOptions, costs: DraftOptions, load: LoadOptions
) -> SpeculationAnswer:
    """The law with the cost of a draft of one sequence on a server, and this server's load."""
    from benchctl.steptime.serving_times import RequestSize, ServerLimits
    from benchctl.steptime.speculation.batch_load import Speculation
    from benchctl.steptime.speculation.draft_length import law_at
    from benchctl.steptime.speculation.served import serve

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
