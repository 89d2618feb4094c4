"""``benchctl show``: the contents of a result directory as tables.

A verification of a result directory on the terminal.
``benchctl verify``: check a result directory for alterations since the measurement.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchctl.analysis.summary.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.cli.options.options import complete_results
from benchctl.cli.output.verdicts import print_notes
from benchctl.cli.screen import print_json, print_tables, uncollected, wide_console
from benchctl.errors import RecordError
from benchctl.formats import megabytes
from benchctl.records.directory import open_results
from benchctl.records.integrity import Verification, directory_sha256, verify_directory
from benchctl.report.documents import show_document
from benchctl.report.tables import experiment, times
from benchctl.report.tables.models import acceptance_table
from benchctl.untrusted.text import visible_line


@uncollected()
def show(
    results: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Result directory, finished or not.", autocompletion=complete_results),
    ],
    allow_suspect: Annotated[
        bool, typer.Option("--allow-suspect", help="Include suspect runs in means and ratios.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Show runs, cells, the breakdown of a step, the cost against the baseline, and findings.

    Damaged files are named on stderr, with exit code 4 after everything readable has been shown.
    """
    analysis = analyze_directory(results, allow_suspect=allow_suspect)
    if as_json:
        print_json(show_document(analysis))
    else:
        _print_tables(analysis)
    if analysis.damage:
        raise RecordError("\n".join(analysis.damage))


def _print_tables(analysis: AnalyzedExperiment) -> None:

    console = wide_console()
    console.print(experiment.headline(analysis))
    tables = (
        experiment.runs_table(analysis),
        experiment.cells_table(analysis),
        times.passes_table(analysis),
        times.launch_table(analysis),
        acceptance_table({arm.label: drafts for arm in analysis.cells if (drafts := arm.drafts()) is not None}),
        experiment.breakdown_table(analysis),
        experiment.sweep_table(analysis),
        experiment.floor_table(analysis),
        experiment.nodes_table(analysis.nodes),
        experiment.ladder_table(analysis),
    )
    print_tables(console, tables)
    print_notes(console, analysis)


def print_verification(results: Path, verified: Verification) -> None:
    """Print what was altered in ``results``, or that nothing was."""
    for alteration in verified.alterations:
        remark = "" if alteration.decides else " (no number depends on it)"
        print(f"{alteration.kind}: {alteration}{remark}")
    if verified.unrecorded and verified.num_files:
        print(f"no digest recorded for {len(verified.unrecorded)} runs: {', '.join(verified.unrecorded)}")
    if verified.uncovered and verified.num_files:
        print(f"covered by no digest: {', '.join(map(visible_line, verified.uncovered))}")
    if verified.alterations:
        print(
            f"{results} was altered; restore these files from a copy, or measure again. 'benchctl compare' refuses "
            "it without --allow-altered if numbers depend on them"
        )
    elif verified.num_files == 0:
        print(
            f"{results} was written by benchctl {verified.manifest.benchctl_version} without digests; its "
            "plan, the order of its runs and its request set agree, and nothing else can be verified"
        )
    else:
        print(f"{results} is intact: {verified.num_files} files, {megabytes(verified.hashed_bytes)} read")
    if not verified.alterations:
        print_digest(verified)


def print_digest(verified: Verification) -> None:
    """Print the digest by which the directory is cited; nothing for one of an older version without digests."""
    if verified.digests is not None:
        print(f"digest of the whole directory: sha256 {directory_sha256(verified.digests)}")


_ALTERED: Final = 4


def verify(
    results: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Result directory, finished or not.", autocompletion=complete_results),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Read every file of a result directory, and report alterations since the measurement.

    Files without a digest are named. Exit code: 0 intact, 4 altered. Directories of older versions have no digests:
    their plan, the order of their runs and their request set are verified.
    """
    verified = verify_directory(open_results(results).path, is_fresh=True)
    if as_json:
        print(json.dumps(_document(results, verified), indent=1))
    else:
        print_verification(results, verified)
    if verified.alterations:
        raise typer.Exit(_ALTERED)


def _document(results: Path, verified: Verification) -> dict[str, Any]:

    digests = verified.digests
    return {
        "path": str(results),
        "intact": not verified.alterations,
        "sha256": None if digests is None else directory_sha256(digests),
        "benchctl_version": verified.manifest.benchctl_version,
        "files": verified.num_files,
        "hashed_bytes": verified.hashed_bytes,
        "unrecorded": list(verified.unrecorded),
        "uncovered": list(verified.uncovered),
        "alterations": [
            {"code": one.kind, "file": one.file, "what": one.what, "decides": one.decides}
            for one in verified.alterations
        ],
    }
