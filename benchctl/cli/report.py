"""``benchctl report``: write tables, JSON and pictures into a result directory."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.errors import RecordError

if TYPE_CHECKING:
    from benchctl.report.export import ReportFiles


def report(
    results: Annotated[Path, typer.Argument(metavar="DIR", help="A result directory, finished or not.")],
) -> None:
    """Write summary and sweep (CSV, JSON), result.json of each finished run, and plots; print where they are.

    'benchctl run' does this when it ends. A damaged file is named on stderr and exits 4, after the rest is written.
    """
    from benchctl.report.export import write_report

    files = write_report(results)
    _print_files(files)
    if files.damage:
        raise RecordError("\n".join(files.damage))


def _print_files(files: "ReportFiles") -> None:
    run_results = [path for path in files.written if path.name == "result.json"]
    for path in files.written:
        if path not in run_results:
            print(path)
    if run_results:
        print(f"{run_results[0].parent.parent}/*/result.json ({len(run_results)} runs)")
    for reason in files.skipped:
        print(f"not drawn: {reason}")
