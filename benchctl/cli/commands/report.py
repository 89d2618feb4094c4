"""``benchctl report``: write tables, JSON, plots and the page of a result directory, or a page on two sides."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.options.completion import complete_results
from benchctl.errors import RecordError

if TYPE_CHECKING:
    from benchctl.analysis.experiment.pairing import Side
    from benchctl.report.export import ReportFiles


def report(
    a: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="Result directory, finished or not, or an archive.", autocompletion=complete_results
        ),
    ],
    b: Annotated[
        str | None,
        typer.Argument(
            metavar="[B]", help="Side to judge against DIR, for a page on both; each DIR or DIR:variant."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Directory for the report of DIR, in place of DIR itself; with two sides, file for the page.",
            show_default=False,
        ),
    ] = None,
    allow_suspect: Annotated[
        bool, typer.Option("--allow-suspect", help="Include suspect runs, with a note on the page and in tables.")
    ] = False,
) -> None:
    """Write report.html, summary and sweep (CSV, JSON), result.json of each finished run, and plots.

    'benchctl run' does this when it ends. With two sides, only a page on B against A is written, by default
    report-A-vs-B.html in the working directory; for a page with another threshold, use 'benchctl compare A B
    --output page.html'. The page is self-contained. Damaged files are named on stderr, with exit code 4 after the
    rest is written.
    """
    if b is not None:
        _write_page(a, b, output, allow_suspect=allow_suspect)
        return
    files = _write_report(Path(a), output, allow_suspect=allow_suspect)
    run_results = [path for path in files.written if path.name == "result.json"]
    for path in files.written:
        if path not in run_results:
            print(path)
    if run_results:
        print(f"{run_results[0].parent.parent}/*/result.json ({len(run_results)} runs)")
    for reason in files.skipped:
        print(f"not drawn: {reason}")
    if files.damage:
        raise RecordError("\n".join(files.damage))


def _write_report(results: Path, output: Path | None, *, allow_suspect: bool) -> "ReportFiles":
    """Write the report of one directory. Raises UsageError where the files cannot be written."""
    from benchctl.report.export import write_report
    from benchctl.system_errors import as_usage_error

    try:
        return write_report(results, allow_suspect=allow_suspect, directory=output)
    except OSError as error:
        where = "write the report elsewhere with -o DIR" if output is None else "name another directory with -o"
        raise as_usage_error(error, output or results, remedy=f"{where}, or copy {results}") from error


def _write_page(a: str, b: str, output: Path | None, *, allow_suspect: bool) -> None:
    from benchctl.analysis.compare.compare import CompareOptions
    from benchctl.analysis.experiment.pairing import parse_side
    from benchctl.cli.output.comparison import write_page

    path = output or Path(f"report-{_slug(parse_side(a))}-vs-{_slug(parse_side(b))}.html")
    damage = write_page(a, b, CompareOptions(allow_suspect=allow_suspect), path)
    print(path)
    if damage:
        raise RecordError("\n".join(damage))


def _slug(side: "Side") -> str:
    name = side.path.resolve().name + (f"-{side.variant}" if side.variant else "")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)
