"""Several ways to do one thing, measured in turns in one call: their options, rounds, and the table with ratios."""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any]


class FailedError(Exception):
    """Why a way gave no figures; the others go on."""


def options(text: str | None, *arguments: str, **defaults: Any) -> argparse.Namespace:
    """The command line: positional ``arguments``, and an option for each of ``defaults``, of the type of its value.

    A list is an option of several values, False a switch. All have ``--json``.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in arguments:
        parser.add_argument(name)
    for name, default in defaults.items():
        how: dict[str, Any] = {"type": type(default), "default": default, "help": "(%(default)s)"}
        if default is False:
            how = {"action": "store_true"}
        elif isinstance(default, list):
            how |= {
                "type": type(default[0]),
                "nargs": "+",
                "metavar": "X",
                "help": f"({' '.join(map(str, default))})",
            }
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args()


def in_turns(ways: Mapping[str, Callable[[], Figures]], rounds: int = 1) -> dict[str, list[Figures]]:
    """The figures of each way in each round; whoever begins changes from round to round."""
    samples: dict[str, list[Figures]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            try:
                samples[name].append(ways[name]())
            except FailedError as error:
                samples[name].append({"failed": str(error)})
    return samples


def typical(samples: Sequence[Figures]) -> dict[str, Any]:
    """Of each number the median over the rounds, of anything else the last."""
    good = [figures for figures in samples if "failed" not in figures]
    if not good:
        return {"failed": samples[-1]["failed"]}
    row = {}
    for name in dict.fromkeys(name for figures in good for name in figures):
        values = [figures[name] for figures in good if figures.get(name) is not None]
        is_number = values and all(isinstance(value, Real) for value in values)
        row[name] = statistics.median(values) if is_number else values[-1] if values else None
    return row


def compared(
    title: str, ways: Mapping[str, Callable[[], Figures]], *, rounds: int = 1, ratios: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Measure in turns and print: a row for each way, whose ``ratios`` are to the first of them."""
    rows = [{"way": name, **typical(figures)} for name, figures in in_turns(ways, rounds).items()]
    for row in rows:
        row |= {f"x {name}": row[name] / rows[0][name] for name in ratios if row.get(name) and rows[0].get(name)}
    show(rows, title)
    return rows


def show(rows: Sequence[Figures], title: str = "") -> None:
    """A table with a column for each key: text to the left, numbers to the right, unknown as a dash.

    Under it stands why a way is missing from it.
    """
    print(f"\n{title}" if title else "")
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "failed"]
    texts = [[text(row.get(name)) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *texts, strict=True)]
    is_text = [all(isinstance(row.get(name), str | None) for row in rows) for name in columns]
    for line in (columns, *texts):
        cells = zip(line, widths, is_text, strict=True)
        print("  ".join(cell.ljust(width) if left else cell.rjust(width) for cell, width, left in cells).rstrip())
    for row in rows:
        if "failed" in row:
            print(f"{row['way']}: {row['failed']}", flush=True)


def text(value: object) -> str:
    """Three digits behind the point for small numbers, one for others."""
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"
    return "-" if value is None else str(value)


def write(path: Path | None, document: object) -> None:
    if path:
        path.write_text(json.dumps(document, indent=1) + "\n")
