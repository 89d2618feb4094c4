"""Both ways of backfill on the screen and as a JSON document, beside the published numbers."""

from typing import TYPE_CHECKING, Any, Final

from benchctl.formats import UNKNOWN, three_digits
from benchctl.micro.bonus.published import SOURCE
from benchctl.micro.bonus.sentences import modes_in_words, published_limits, verdict_sentences
from benchctl.units import ms_from_ns

if TYPE_CHECKING:
    from rich.console import Console

    from benchctl.micro.bonus.results import MeasuredBonus, PublishedBeside
    from benchctl.micro.bonus.verdict import BackfillVerdict, Comparison, Cost

_COSTS: Final = ("decode", "expansion", "prefill", "difference")
_HEADS: Final = (
    "batch",
    "tokens m",
    "T(B)",
    "expansion: T(B+m) - T(B)",
    "prefill of m",
    "expansion - prefill",
    "cheaper",
)


def print_bonus(measured: "MeasuredBonus") -> None:
    """Print a table for each context and pair of modes, what follows, and the published numbers."""
    from benchctl.cli.screen import wide_console

    console = wide_console()
    for design, verdict in measured.verdicts:
        console.print(f"{measured.where}, {design.context_tokens} tokens in the cache of each sequence; ms")
        for modes in verdict.mode_pairs:
            console.print()
            console.print(modes_in_words(*modes), style="bold")
            console.print(_table(verdict, modes))
        console.print()
        for sentence in verdict_sentences(verdict):
            console.print(f"* {sentence}")
        console.print()
    _print_published(console, measured)


def _table(verdict: "BackfillVerdict", modes: Any) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in _HEADS:
        table.add_column(head, justify="left" if head == "cheaper" else "right", no_wrap=True)
    for row in verdict.rows(*modes):
        costs = [in_ms(getattr(row, name)) for name in _COSTS]
        table.add_row(str(row.batch_size), str(row.bonus_tokens), *costs, row.cheaper or "inconclusive")
    return table


def in_ms(cost: "Cost | None") -> str:
    """``1.23 [1.20, 1.26]``, in milliseconds."""
    if cost is None:
        return UNKNOWN
    centre = _ms(cost.centre_ns)
    if cost.low_ns is None or cost.high_ns is None:
        return centre
    return f"{centre} [{_ms(cost.low_ns)}, {_ms(cost.high_ns)}]"


def _ms(duration_ns: float) -> str:
    """Three digits, and at most four behind the point: a tenth of a microsecond."""
    text = three_digits(ms_from_ns(duration_ns))
    return text if abs(ms_from_ns(duration_ns)) >= 0.1 else f"{ms_from_ns(duration_ns):.4f}"


def _print_published(console: "Console", measured: "MeasuredBonus") -> None:
    from rich.table import Table

    console.print(
        f"Published ({SOURCE}) beside the same passes here; another device, so only signs and shares compare"
    )
    table = Table(box=None, pad_edge=False)
    for head in ("pass", "batch", "published, ms", "here, ms"):
        table.add_column(head, justify="left" if head == "pass" else "right", no_wrap=True)
    for each in measured.published:
        table.add_row(
            f"{each.phase} {each.mode}", str(each.batch_size), f"{each.published_ms:.2f}", in_ms(each.cost)
        )
    console.print(table)
    console.print("What the published numbers could not show:")
    for sentence in published_limits():
        console.print(f"* {sentence}")


def bonus_document(measured: "MeasuredBonus") -> dict[str, Any]:
    """Everything of the verdicts; times in nanoseconds."""
    return {
        "schema_version": 1,
        "results": str(measured.path),
        "model": measured.model,
        "device": measured.device,
        "dtype": measured.dtype,
        "verdicts": [
            {
                "context_tokens": design.context_tokens,
                "confidence": verdict.confidence,
                "row_confidence": verdict.row_confidence,
                "comparisons": [_row_document(row) for row in verdict.comparisons],
                "sentences": verdict_sentences(verdict),
            }
            for design, verdict in measured.verdicts
        ],
        "published": {
            "source": SOURCE,
            "passes": [_published_document(each) for each in measured.published],
            "limits": published_limits(),
        },
    }


def _row_document(row: "Comparison") -> dict[str, Any]:
    return {
        "batch_size": row.batch_size,
        "bonus_tokens": row.bonus_tokens,
        "decode_mode": row.decode_mode,
        "prefill_mode": row.prefill_mode,
        "num_blocks": row.num_blocks,
        **{f"{name}_ns": _cost_document(getattr(row, name)) for name in _COSTS},
        "cheaper": row.cheaper,
    }


def _published_document(each: "PublishedBeside") -> dict[str, Any]:
    return {
        "phase": each.phase,
        "mode": each.mode,
        "batch_size": each.batch_size,
        "published_ms": each.published_ms,
        "here_ns": None if each.cost is None else _cost_document(each.cost),
    }


def _cost_document(cost: "Cost") -> dict[str, float | None]:
    return {"centre": cost.centre_ns, "low": cost.low_ns, "high": cost.high_ns}
