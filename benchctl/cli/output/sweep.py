"""A sweep of loads as a table, a JSON document and a picture."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from benchctl.cli.output.outcome import warn
from benchctl.errors import MissingPackageError
from benchctl.formats import short_number

if TYPE_CHECKING:
    from pathlib import Path

    from benchctl.measure.capacity.search import Largest
    from benchctl.measure.capacity.sweep import Sweep
    from benchctl.profile.model import Profile

_ALWAYS: Final = ("ttft_ms", "tpot_ms", "output_throughput", "mean_batch_size")
"""Metrics of every table, behind those of the limits."""
_OUTCOMES: Final = {True: "kept", False: "broken", None: "too short to tell"}
_UNITS: Final = {"rate": "requests/s", "max-concurrency": "slots"}


def print_sweep(sweep: "Sweep", profile: "Profile") -> None:
    """Print a row for each load, and a sentence for each arm on the largest that keeps all limits."""
    from rich.table import Table

    from benchctl.cli.output.screen import wide_console

    console = wide_console()
    names = _names(sweep, _ALWAYS)
    heads = [
        "arm",
        *([_UNITS[sweep.kind]] if sweep.kind else []),
        *names,
        *(["limits"] if sweep.objectives else []),
    ]
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in {"arm", "limits"} else "right", no_wrap=True)
    for each in sweep.points:
        cells = [each.point.label]
        if each.point.size is not None:
            cells.append(f"{each.point.size:.4g}")
        cells += ["-" if (value := each.metrics[name]) is None else short_number(value) for name in names]
        table.add_row(*cells, *([_OUTCOMES[each.holds]] if sweep.objectives else []))
    console.print(table)
    console.print()
    for line in _sentences(sweep):
        console.print(line)
    console.print(f"all times are simulated, with {_costs(profile)}")
    for warning in sweep.warnings:
        warn(warning.message)


def sweep_document(sweep: "Sweep", profile: "Profile") -> dict[str, Any]:
    """Everything of a sweep; ``largest`` and ``breaks`` enclose the capacity of an arm."""
    import msgspec

    return {
        "schema_version": 1,
        "profile": profile.name,
        "seed": profile.seed,
        "blocks": profile.blocks,
        "costs": _costs(profile),
        "load": sweep.kind,
        "objectives": [str(objective) for objective in sweep.objectives],
        "points": [
            {
                "arm": each.point.label,
                "variant": each.point.variant,
                "cell": each.point.cell,
                "settings": each.point.settings,
                "size": each.point.size,
                "holds": each.holds if sweep.objectives else None,
                "metrics": {name: value for name, value in each.metrics.items() if value is not None},
            }
            for each in sweep.points
        ],
        "capacities": [
            {"arm": each.label, "largest": each.largest.holds, "breaks": each.largest.breaks}
            for each in sweep.capacities
        ],
        "warnings": msgspec.to_builtins(sweep.warnings),
    }


def write_sweep(sweep: "Sweep", profile: "Profile", output_root: "Path") -> "tuple[Path, ...]":
    """Write ``sweep.json``, and where a load was swept ``saturation.png``, into a new directory.

    Without the package that draws, a line on stderr says that there is no picture.
    """
    import datetime as dt

    from benchctl.measure.result_directory import renamed_when_complete
    from benchctl.records.jsonl import write_bytes_atomic, write_json_atomic

    stem = f"{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%SZ}-sweep"
    names = ["sweep.json"]
    with renamed_when_complete(output_root / profile.name, stem) as (unfinished, finish):
        write_json_atomic(unfinished / "sweep.json", sweep_document(sweep, profile))
        if sweep.kind is not None:
            try:
                write_bytes_atomic(unfinished / "saturation.png", _picture(sweep, profile))
                names.append("saturation.png")
            except MissingPackageError as error:
                warn(f"saturation.png is not drawn: {error}")
        directory = finish()
    return tuple(directory / name for name in names)


def _picture(sweep: "Sweep", profile: "Profile") -> bytes:
    from benchctl.report.plots.saturation import SaturationLine, draw_saturation

    largest = {each.label: each.largest.holds for each in sweep.capacities}
    lines = []
    for label, group in groupby(sweep.points, key=lambda each: each.point.label):
        points = list(group)
        lines.append(
            SaturationLine(
                label=label,
                sizes=[each.point.size or 0.0 for each in points],
                metrics=[each.metrics for each in points],
                largest=largest.get(label),
            )
        )
    limits = {objective.metric: objective.limit for objective in sweep.objectives}
    names = list(dict.fromkeys([*(limits or ("ttft_ms",)), "output_throughput"]))
    title = f"{profile.name}: load and latency, simulated"
    return draw_saturation(title, _UNITS[sweep.kind or "rate"], lines, names, limits)


def _names(sweep: "Sweep", others: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*(objective.metric for objective in sweep.objectives), *others]))


def _costs(profile: "Profile") -> str:
    from benchctl.profile.planning.plan import arms, variant_settings
    from benchctl.sim.settings import costs_in_words

    return " and ".join(
        sorted({costs_in_words(variant_settings(profile, variant, cell)) for variant, cell in arms(profile)})
    )


def _sentences(sweep: "Sweep") -> list[str]:
    limits = " and ".join(map(str, sweep.objectives))
    unit = _UNITS[sweep.kind or "rate"]
    lines = [f"{each.label}: {_in_words(each.largest, unit)}" for each in sweep.capacities]
    if sweep.objectives and any(each.holds is None for each in sweep.points):
        lines.append(
            "too short to tell: the requests arrive within less than five latencies, or fill the slots less than "
            "five times; raise workload.num_prompts"
        )
    best = max(sweep.capacities, key=lambda each: each.largest.holds or 0.0, default=None)
    if best is not None and best.largest.holds is not None and len(sweep.capacities) > 1:
        lines.append(f"most under {limits}: {best.label} with {best.largest.holds:.4g} {unit}")
    return lines


def _in_words(largest: "Largest", unit: str) -> str:
    if largest.holds is None:
        return "no load keeps the limits" + (
            "" if largest.breaks is None else f", not even {largest.breaks:.4g} {unit}"
        )
    if largest.breaks is None:
        return f"no load breaks the limits up to {largest.holds:.4g} {unit}, the most that was tried"
    return f"{largest.holds:.4g} {unit} keep the limits, {largest.breaks:.4g} break them"
