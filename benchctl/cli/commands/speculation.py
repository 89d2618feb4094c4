"""``benchctl speculation``: what drafts gain, by the law and on a server with step times."""

from pathlib import Path
from typing import TYPE_CHECKING

from benchctl.cli.screen import print_json
from benchctl.cli.speculation_options import (
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
    SeedOption,
    TargetOption,
    TpOption,
    numbers,
    read_acceptance,
    read_batch_sizes,
    read_draft_tokens,
)
from benchctl.cli.speculation_output import print_speculation
from benchctl.cli.speculation_server import DEFAULT_DRAFT_COST, ServerOptions, build_server
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.steptime.speculation.acceptance import Acceptance
    from benchctl.steptime.speculation.draft_length import SpeculationLaw
    from benchctl.steptime.speculation.served import ServedSpeculation


def speculation(
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
    times of both models take the place of these.
    """
    from benchctl.steptime.serving_times import RequestSize, ServerLimits
    from benchctl.steptime.speculation.batch_load import Speculation
    from benchctl.steptime.speculation.served import serve

    stated = read_acceptance(acceptance, drafts, accepted)
    lengths, bonus = read_draft_tokens(draft_tokens), not no_bonus
    if draft_cost is not None and draft_model is not None:
        raise UsageError("--draft-cost and --draft-model both state the cost of a draft; give one of them")
    if model is None:
        _check_no_server(draft_model, step_time_model, batch_size, rate, backfill)
        law = _law(stated, lengths, draft_cost, backfill_cost, bonus=bonus, seed=seed)
        _show(law, None, plot, as_json=as_json)
        return
    if backfill_cost:
        raise UsageError("--backfill-cost is a constant; with --model, --backfill prices it by step times")
    options = ServerOptions(
        model=model, draft_model=draft_model, hardware=hardware, tensor_parallel=tp, fitted=step_time_model
    )
    server = build_server(options, draft_cost, float(context), backfill)
    law = _law(stated, lengths, server.draft_cost, 0.0, bonus=bonus, seed=seed)
    served = serve(
        Speculation(server.steps, stated, lengths, bonus=bonus, seed=seed),
        server.origin,
        read_batch_sizes(batch_size, server.memory_rows),
        memory_rows=server.memory_rows,
        rates=[] if rate is None else numbers(rate, "--rate", float),
        size=RequestSize(prompt_tokens=input_len, output_tokens=output_len),
        limits=ServerLimits(max_num_seqs=max_num_seqs),
    )
    _show(law, served, plot, as_json=as_json)


def _check_no_server(*server_options: object) -> None:
    """Refuse options of a server where none is described."""
    names = ("--draft-model", "--step-time-model", "--batch-size", "--rate", "--backfill")
    for name, value in zip(names, server_options, strict=True):
        if value is not None and value != "none":
            raise UsageError(f"{name} needs step times: name the model that is served with --model")


def _law(
    acceptance: "Acceptance", lengths: list[int], draft: float | None, backfill: float, *, bonus: bool, seed: int
) -> "SpeculationLaw":
    from benchctl.steptime.speculation.draft_length import law_at
    from benchctl.steptime.speculation.law import DraftCost

    cost = DraftCost(draft=DEFAULT_DRAFT_COST if draft is None else draft, backfill=backfill)
    return law_at(acceptance, cost, lengths, bonus=bonus, seed=seed)


def _show(law: "SpeculationLaw", served: "ServedSpeculation | None", plot: Path | None, *, as_json: bool) -> None:
    if plot is not None:
        _draw(plot, law, served)
    if as_json:
        from benchctl.report.documents.speculation import speculation_document

        print_json(speculation_document(law, served))
        return
    print_speculation(law, served)
    if plot is not None:
        print(f"picture: {plot}")


def _draw(path: Path, law: "SpeculationLaw", served: "ServedSpeculation | None") -> None:
    from benchctl.formats import capitalized
    from benchctl.report.plots.speculation import draw_speculation
    from benchctl.report.text.speculation import acceptance_words

    words = capitalized(acceptance_words(law.acceptance))
    title = words if served is None else f"{words}; {served.origin}"
    path.write_bytes(draw_speculation(title, law, served))
