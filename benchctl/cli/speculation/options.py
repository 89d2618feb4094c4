"""Options of ``benchctl speculation``, and what their texts mean."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from benchctl.cli.pictures import drawable
from benchctl.errors import UsageError
from benchctl.profile.sections.ranges import (
    MAX_CONCURRENCY,
    MAX_CONTEXT,
    MAX_DEVICES,
    MAX_DRAFT_TOKENS,
    MAX_TOKENS,
    MAX_TOTAL_TOKENS,
)

if TYPE_CHECKING:
    from benchctl.steptime.speculation.acceptance import Acceptance, PositionCounts

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


def read_acceptance(acceptance: str | None, drafts: int | None, accepted: str | None) -> "Acceptance":
    """The acceptance of --acceptance, or of --drafts and --accepted."""
    from benchctl.steptime.speculation.acceptance import counted, of_counters, stated

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


def _position_counts(text: str) -> "PositionCounts":
    from benchctl.steptime.speculation.acceptance import PositionCounts

    accepted, _, judged = text.partition("/")
    try:
        counts = int(accepted), int(judged)
    except ValueError:
        raise UsageError(f"--acceptance {text[:40]!r}: write counts as accepted/judged, such as 80/100") from None
    return PositionCounts(accepted=counts[0], judged=counts[1])


def numbers(text: str, option: str, kind: Callable[[str], Number]) -> list[Number]:
    """Numbers separated by commas, in their order. Raises UsageError for anything else."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text[:40]!r}: expected numbers separated by commas, such as 1,2,4") from None
    if not all(isfinite(value) for value in values):
        raise UsageError(f"{option} {text[:40]!r}: each must be finite")
    return values


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
