"""``benchctl speculation``: what drafts gain, by the law and on a server with step times."""

from benchctl.cli.commands.speculation import (
    AcceptanceOption,
    AcceptedOption,
    BackfillCostOption,
    BackfillOption,
    BatchSizesOption,
    ContextOption,
    DeviceOption,
    DraftCostOption,
    DraftModelOption,
    DraftOptions,
    DraftsOption,
    DraftTokensOption,
    FittedOption,
    InputLengthOption,
    JsonOption,
    LoadOptions,
    MaxNumSeqsOption,
    NoBonusOption,
    OutputLengthOption,
    PlotOption,
    RatesOption,
    ResultsArgument,
    SeedOption,
    ServerOptions,
    StatedAcceptance,
    TargetOption,
    TpOption,
    answer_on_server,
    answer_with_constants,
    read_question,
)
from benchctl.cli.screen import uncollected
from benchctl.cli.speculation.output import show_answer
from benchctl.errors import UsageError


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
    stated = StatedAcceptance(acceptance=acceptance, drafts=drafts, accepted=accepted)
    question = read_question(results, stated, draft_tokens, no_bonus=no_bonus, seed=seed)
    costs = DraftOptions(model=draft_model, cost=draft_cost, backfill=backfill, backfill_cost=backfill_cost)
    if model is None:
        _check_no_server(draft_model, step_time_model, batch_size, rate, backfill)
        answer = answer_with_constants(question, costs)
    else:
        options = ServerOptions(
            model=model, hardware=hardware, tensor_parallel=tp, fitted=step_time_model, context=context
        )
        load = LoadOptions(
            batch_size=batch_size, rate=rate, input_len=input_len, output_len=output_len, max_num_seqs=max_num_seqs
        )
        answer = answer_on_server(question, options, costs, load)
    show_answer(answer, plot, as_json=as_json)


def _check_no_server(*server_options: object) -> None:
    """Refuse options of a server where none is described."""
    names = ("--draft-model", "--step-time-model", "--batch-size", "--rate", "--backfill")
    for name, value in zip(names, server_options, strict=True):
        if value is not None and value != "none":
            raise UsageError(f"{name} needs step times: name the model that is served with --model")
