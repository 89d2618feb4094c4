"""``benchctl speculation``: what drafts gain, by the law and on a server with step times."""

from typing import TYPE_CHECKING

from benchctl.cli.screen import print_json, uncollected
from benchctl.cli.speculation.options import (
    AcceptanceOption,
    AcceptedOption,
    BackfillCostOption,
    BackfillOption,
    BatchSizesOption,
    ContextOption,
    DeviceOption,
    DraftCostOption,
    DraftModelOption,
    DraftsOption,
    DraftTokensOption,
    FittedOption,
    InputLengthOption,
    JsonOption,
    MaxNumSeqsOption,
    NoBonusOption,
    OutputLengthOption,
    PlotOption,
    RatesOption,
    ResultsArgument,
    SeedOption,
    TargetOption,
    TpOption,
    numbers,
    read_acceptance,
    read_batch_sizes,
    read_draft_tokens,
)
from benchctl.cli.speculation.output import SpeculationAnswer, draw_answer, print_answer
from benchctl.cli.speculation.server import DEFAULT_DRAFT_COST, ServerOptions, build_server
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from benchctl.analysis.summary.speculation import MeasuredSpeculation
    from benchctl.steptime.speculation.acceptance import Acceptance
    from benchctl.steptime.speculation.law import CostDraws, DraftCost


@uncollected()
def speculation(
    results: ResultsArgument = None,
    acceptance: AcceptanceOption = None,
    drafts: DraftsOption = None,
    accepted: AcceptedOption = None,
    draft_tokens: DraftTokensOption = "1..8",
    draft_cost: DraftCostOption = None,
    backfill_cost: BackfillCostOption = 0.0,
    no_bonus: NoBonusOption = False,
    model: TargetOption = None,
    draft_model: DraftModelOption = None,
    hardware: DeviceOption = None,
    tp: TpOption = 1,
    step_time_model: FittedOption = None,
    context: ContextOption = 1024,
    batch_size: BatchSizesOption = None,
    backfill: BackfillOption = "none",
    rate: RatesOption = None,
    input_len: InputLengthOption = 1024,
    output_len: OutputLengthOption = 256,
    max_num_seqs: MaxNumSeqsOption = 256,
    seed: SeedOption = 0,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens per step and speed-up of speculative decoding, and its goodput under load.

    A step costs 1 + K C + D of one without drafts, C being --draft-cost and D --backfill-cost. With --model, step
    times of both models take the place of these; with DIR, acceptance and costs are those that were measured, and
    the law is held against the measurement.
    """
    from benchctl.steptime.serving_times import RequestSize, ServerLimits
    from benchctl.steptime.speculation.batch_load import Speculation
    from benchctl.steptime.speculation.draft_length import law_at
    from benchctl.steptime.speculation.served import serve

    measured, of_drafts = _source(results, acceptance, drafts, accepted)
    lengths = read_draft_tokens(draft_tokens)
    bonus = not (no_bonus or (measured is not None and not any(arm.bonus for arm in measured.arms)))
    if draft_cost is not None and draft_model is not None:
        raise UsageError("--draft-cost and --draft-model both state the cost of a draft; give one of them")
    served, cost_draws = None, None
    if model is None:
        _check_no_server(draft_model, step_time_model, batch_size, rate, backfill)
        cost, cost_draws = _constant_cost(draft_cost, backfill_cost, measured, seed)
    else:
        if backfill_cost:
            raise UsageError("--backfill-cost is a constant; with --model, --backfill prices it by step times")
        options = ServerOptions(
            model=model, draft_model=draft_model, hardware=hardware, tensor_parallel=tp, fitted=step_time_model
        )
        server = build_server(options, draft_cost, float(context), backfill)
        cost = server.cost
        served = serve(
            Speculation(server.steps, of_drafts, lengths, bonus=bonus, seed=seed),
            server.origin,
            read_batch_sizes(batch_size, server.memory_rows),
            memory_rows=server.memory_rows,
            rates=[] if rate is None else numbers(rate, "--rate", float),
            size=RequestSize(prompt_tokens=input_len, output_tokens=output_len),
            limits=ServerLimits(max_num_seqs=max_num_seqs),
        )
    answer = SpeculationAnswer(
        law=law_at(of_drafts, cost, lengths, bonus=bonus, seed=seed, cost_draws=cost_draws),
        served=served,
        measured=measured,
    )
    if plot is not None:
        draw_answer(plot, answer)
    if as_json:
        from benchctl.report.documents.speculation import speculation_document

        print_json(speculation_document(answer.law, served, measured))
        return
    print_answer(answer)
    if plot is not None:
        print(f"picture: {plot}")


def _source(
    results: "Path | None", acceptance: str | None, drafts: int | None, accepted: str | None
) -> "tuple[MeasuredSpeculation | None, Acceptance]":
    """The measurement of a result directory, if one is named, and the acceptance of drafts."""
    if results is None:
        return None, read_acceptance(acceptance, drafts, accepted)
    if (acceptance, drafts, accepted) != (None, None, None):
        raise UsageError(
            "DIR has the acceptance that was measured; leave out --acceptance, --drafts and --accepted"
        )
    from benchctl.analysis.experiment.experiment import load_experiment
    from benchctl.analysis.summary.speculation import measured_speculation

    measured = measured_speculation(load_experiment(results))
    return measured, measured.acceptance


def _constant_cost(
    draft_cost: float | None, backfill_cost: float, measured: "MeasuredSpeculation | None", seed: int
) -> "tuple[DraftCost, CostDraws | None]":
    """The stated costs, or where none is stated the measured ones with their draws."""
    from benchctl.steptime.speculation.law import DraftCost

    if draft_cost is None and not backfill_cost and measured is not None and measured.costs is not None:
        return measured.costs.cost, measured.costs.draws(seed)
    cost = DraftCost(draft=DEFAULT_DRAFT_COST if draft_cost is None else draft_cost, backfill=backfill_cost)
    return cost, None


def _check_no_server(*server_options: object) -> None:
    """Refuse options of a server where none is described."""
    names = ("--draft-model", "--step-time-model", "--batch-size", "--rate", "--backfill")
    for name, value in zip(names, server_options, strict=True):
        if value is not None and value != "none":
            raise UsageError(f"{name} needs step times: name the model that is served with --model")
