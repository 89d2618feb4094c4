"""A comparison written to files: the form goes by the suffix, and a CI job's summary is appended to."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.unpaired_sides import is_unpaired
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.errors import InvalidDataError, UsageError
from benchctl.report.documents.comparison import document_of, refusal_document
from benchctl.report.text.comparison_markdown import markdown_of

PAGE: Final = ".html"
SUFFIXES: Final = (".json", ".md", ".csv", ".png", PAGE)
_SUMMARY: Final = "GITHUB_STEP_SUMMARY"


def checked_outputs(outputs: Sequence[Path], sides: tuple[str, str]) -> tuple[Path, ...]:
    """Raises UsageError for a form that does not exist or a directory that is not there, before any work."""
    for path in outputs:
        if path.suffix == PAGE and is_unpaired(*sides):
            raise UsageError(
                f"--output {path}: a page shows runs and steps, which files of other tools do not hold; write a "
                f"file that ends in {', '.join(suffix for suffix in SUFFIXES if suffix != PAGE)}"
            )
        if path.suffix not in SUFFIXES:
            raise UsageError(
                f"--output {path}: the suffix names no form; write a file that ends in {', '.join(SUFFIXES)}"
            )
        if not path.parent.is_dir():
            raise UsageError(f"--output {path}: {path.parent} is no directory; make it first")
    return tuple(outputs)


def summary_path() -> Path:
    """The file that the job's environment names. Raises UsageError where there is none."""
    named = os.environ.get(_SUMMARY)
    if not named:
        raise UsageError(
            f"--github-summary appends to the file named by {_SUMMARY}, which is not set; outside a job of GitHub "
            "Actions write --output FILE.md instead"
        )
    return Path(named)


def write_comparison(comparison: Comparison, path: Path, *, show_all: bool) -> None:
    """Replace ``path`` with the comparison in the form of its suffix."""
    from benchctl.records.jsonl import write_bytes_atomic

    write_bytes_atomic(path, _content(comparison, path.suffix, show_all=show_all))


def write_page(a: str, b: str, options: CompareOptions, path: Path) -> tuple[str, ...]:
    """Replace ``path`` with the page on two sides of result directories; returns what of these cannot be read."""
    from benchctl.analysis.analyzed import analyze_directory
    from benchctl.records.jsonl import write_bytes_atomic
    from benchctl.report.page.build import sides_page

    a_side, b_side = parse_side(a), parse_side(b)
    a_analysis = analyze_directory(a_side.path, allow_suspect=options.allow_suspect)
    is_one = a_side.path.resolve() == b_side.path.resolve()
    b_analysis = a_analysis if is_one else analyze_directory(b_side.path, allow_suspect=options.allow_suspect)
    write_bytes_atomic(path, sides_page((a_analysis, a_side), (b_analysis, b_side), options).encode())
    return tuple(dict.fromkeys((*a_analysis.damage, *b_analysis.damage)))


def _content(comparison: Comparison, suffix: str, *, show_all: bool) -> bytes:
    if suffix == ".png":
        from benchctl.report.plots.forest import forest_plot

        return forest_plot(comparison)
    if suffix == ".csv":
        from benchctl.report.documents.comparison_csv import comparison_csv

        return comparison_csv(comparison)
    if suffix == ".md":
        return f"{markdown_of(comparison, show_all=show_all)}\n".encode()
    return f"{json.dumps(document_of(comparison), indent=1, allow_nan=False)}\n".encode()


def write_refusal(error: InvalidDataError, outputs: Sequence[Path], summary: Path | None) -> None:
    """What JSON and Markdown say where nothing was compared; other forms have no way to say it."""
    from benchctl.records.jsonl import write_bytes_atomic

    told = f"**not compared: {str(error).splitlines()[0]}**\n\n```text\n{error}\n```"
    for path in outputs:
        if path.suffix == ".json":
            write_bytes_atomic(path, f"{json.dumps(refusal_document(error), indent=1)}\n".encode())
        elif path.suffix == ".md":
            write_bytes_atomic(path, f"{told}\n".encode())
    if summary is not None:
        append(summary, told)


def append(path: Path, text: str) -> None:
    """Add to a job's summary, which other steps write, too."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")
