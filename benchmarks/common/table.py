"""Tables that the benchmarks print."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def show(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """A table with a column for each key: text to the left, numbers to the right, unknown as a dash."""
    if title:
        print(f"\n{title}")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    texts = [[text(row.get(name)) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *texts, strict=True)]
    is_text = [all(isinstance(row.get(name), str | None) for row in rows) for name in columns]
    for line in (columns, *texts):
        cells = zip(line, widths, is_text, strict=True)
        print("  ".join(cell.ljust(width) if left else cell.rjust(width) for cell, width, left in cells).rstrip())


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], hidden: Sequence[str] = ()) -> None:
    """The table without ``hidden`` columns, and under it why a tool is missing from it."""
    unseen = {"failed", *hidden}
    show([{name: value for name, value in row.items() if name not in unseen} for row in rows], title)
    for row in rows:
        if "failed" in row:
            print(f"{row['tool']}: {row['failed']}")


def text(value: object) -> str:
    """Three digits behind the point for small numbers, one for others."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"
    return str(value)


def write(path: Path | None, document: object) -> None:
    if path:
        path.write_text(json.dumps(document, indent=1) + "\n")
