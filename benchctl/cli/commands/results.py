"""Commands on result directories: show, list, report, verify, export and import."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Group
from rich.text import Text

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.compare.answer import answer_lines
from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.experiment.pairing import Side, parse_side
from benchctl.cli.commands.compare import page_of_sides
from benchctl.cli.options import RESULTS, RESULTS_HELP, AsJson, ResultsDir, complete_results, results_named
from benchctl.cli.screen import bytes_progress, note, print_json, say, tell, text_console, uncollected, verdict_text
from benchctl.errors import RecordError, UsageError, as_usage_error
from benchctl.interop.foreign_writers import write_foreign
from benchctl.interop.lenvm.import_directory import import_lenvm
from benchctl.interop.lenvm.summary import REPAIRS, SUMMARY_NAME
from benchctl.records.archive import contents_of, import_archive, write_archive
from benchctl.records.directory import open_results
from benchctl.records.files import write_bytes_atomic
from benchctl.records.integrity import Verification, directory_sha256, verify_directory
from benchctl.records.writers import current_manifest
from benchctl.report import curve_tables, experiment_tables, time_tables
from benchctl.report.documents import show_document
from benchctl.report.export import list_directories, write_figures, write_report
from benchctl.report.model_tables import acceptance_table
from benchctl.report.table import Table, table_of
from benchctl.report.texts import texts_of
from benchctl.report.verdicts import directory_verdict
from benchctl.units import count_of, folded, megabytes
from benchctl.untrusted.text import visible_line

_ALTERED: Final = 4
"""Exit code for files that are not as they were measured."""


@uncollected()
def show(
    results: ResultsDir,
    allow_suspect: Annotated[
        bool, typer.Option("--allow-suspect", help="Include suspect runs in means and ratios.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Show every run, table, column and note.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the verdict, the cost against the baseline, findings, notes, the breakdown of a step, and runs.

    Damaged files are named on stderr, with exit code 4 after everything readable has been shown.
    """
    analysis = analyze_directory(results, allow_suspect=allow_suspect)
    if as_json:
        print_json(show_document(analysis))
    else:
        _print(analysis, show_all=show_all)
    if analysis.damage:
        raise RecordError("\n".join(analysis.damage))


_MOST_LINES: Final = 60
_LEAST_LINES: Final = 6
"""A part of which fewer lines fit is left out."""
_MOST_RUNS: Final = 8


def _print(analysis: AnalyzedExperiment, *, show_all: bool) -> None:
    """Print parts as far as they fit on a screen or two, or all of them."""
    console, num_lines, cut = text_console(), 0, []
    for name, part in _parts(analysis, console.width, show_all=show_all):
        with console.capture() as capture:
            console.print(*([""] if num_lines else []), part, sep="\n")
        lines, room = capture.get().splitlines(), _MOST_LINES - 1 - num_lines
        if not show_all and len(lines) > room:
            cut.append(name)
            lines = [*lines[: room - 1], "…"] if room > _LEAST_LINES else []
        num_lines += len(lines)
        console.file.write("".join(f"{line}\n" for line in lines))
    if cut:
        console.print(f"more with --all: {', '.join(cut)}")


def _parts(analysis: AnalyzedExperiment, width: int, *, show_all: bool) -> Iterator[tuple[str, Group]]:
    """The parts of the output by name, first those that say most: subject, answer, tables and texts."""
    verdict, drafts = directory_verdict(analysis), {arm.label: arm.drafts() for arm in analysis.cells}
    whole = [f"{verdict.word}: {verdict.sentence}"] if verdict.all else []
    answers = dict.fromkeys([*whole, *(f"{one.word}: {one.sentence}" for one in verdict.all)])
    lines = [verdict_text(folded(answer, width)) for answer in answers]
    if len(verdict.all) == len(verdict.comparisons) == 1:
        lines += [Text(folded(line, width)) for line in answer_lines(verdict.comparisons[0])]
    hits = experiment_tables.hits_text(analysis)
    subject = (experiment_tables.headline(analysis), *([] if hits is None else [f"prefix hits: {hits}"]))
    yield "verdicts", Group(*subject, *([""] if lines else []), *lines)
    *texts, notes = texts_of(analysis)
    runs = ("runs", *_runs(analysis, show_all=show_all))
    parts: list[tuple[str, Table | str | None, list[str]]] = [
        ("capacity", curve_tables.capacity_table(analysis), curve_tables.capacity_lines(analysis)),
        ("cost", experiment_tables.sweep_table(analysis), []),
        ("passes", time_tables.passes_table(analysis), []),
        ("launches", time_tables.launch_table(analysis), []),
        ("curves", curve_tables.curves_table(analysis), []),
        *texts,
        ("cells", experiment_tables.cells_table(analysis), []),
        notes,
        ("drafts", acceptance_table({label: each for label, each in drafts.items() if each is not None}), []),
        ("ladder", experiment_tables.ladder_table(analysis), []),
        ("scatter", experiment_tables.scatter_table(analysis), experiment_tables.scatter_lines(analysis)),
        ("carry-over", experiment_tables.carry_over_table(analysis), []),
        ("nodes", experiment_tables.nodes_table(analysis.nodes), []),
        ("time per step", experiment_tables.breakdown_table(analysis), []),
    ]
    has_news = any(run.record.state != "done" for run in analysis.runs)
    for name, top, rest in (runs, *parts) if has_news and not show_all else (*parts, runs):
        if isinstance(top, Table):
            yield name, Group(top.drawn(width, is_all=show_all), *rest)
        elif rest:
            yield name, Group(Text(top or "", style="bold"), *map(visible_line, rest))


def _runs(analysis: AnalyzedExperiment, *, show_all: bool) -> tuple[Table, list[str]]:
    """Every run, or first those that are not done, and how many are left."""
    table = experiment_tables.runs_table(analysis)
    if show_all or len(table.rows) <= _MOST_RUNS:
        return table, []
    rows = sorted(table.rows, key=lambda row: bool(row["state"] == "done"))
    more = f"… {count_of(len(rows) - _MOST_RUNS, 'more run')}: --all"
    return replace(table, title="Runs", rows=tuple(rows[:_MOST_RUNS])), [more]


_COLUMNS: Final = ("directory", "created", "profile", "engine", "state", "verdict", "runs", "remarks")


def list_results(
    root: Annotated[Path, typer.Argument(help="Parent of result directories.")] = RESULTS,
    as_json: AsJson = False,
) -> None:
    """List result directories, newest first, with profile, engine, state and the number of runs."""
    entries = list_directories(root)
    rows = [[visible_line(field) for field in _row(root, entry)] for entry in entries]
    empty = f"{root} contains no results yet; 'benchctl run' creates them"
    table = table_of(_COLUMNS, rows, left={*_COLUMNS} - {"runs"}, extra=("created", "profile")) if rows else empty
    tell({"root": str(root), "results": entries}, table, as_json=as_json)


def _row(root: Path, entry: dict[str, Any]) -> list[str]:
    """The fields of a directory; the remarks begin with the blocks that are done of an experiment in progress."""
    path, nodes = Path(entry["path"]), entry["nodes"]
    name = str(path.relative_to(root)) if path != root else str(root)
    if entry["problem"] is not None:
        return [name, "", "", "", entry["state"] or "unreadable", "", "", entry["problem"]]
    simulated = "simulated" if entry["is_simulated"] else None
    on_nodes = f"{len(nodes)} nodes" if len(nodes) > 1 else None
    remarks = [simulated, on_nodes, entry["label"], entry["damage"], entry["altered"]]
    if entry["state"] in {"running", "interrupted"} and entry["num_blocks"]:
        remarks.insert(0, f"{entry['num_blocks_done']} of {entry['num_blocks']} blocks done")
    fields = (entry[name] or "" for name in ("created_at", "profile", "engine", "state", "verdict"))
    return [name, *fields, f"{entry['num_done']}/{entry['num_planned']}", " · ".join(filter(None, remarks))]


def report(
    a: Annotated[str, typer.Argument(metavar="DIR", help=RESULTS_HELP, autocompletion=complete_results)],
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
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Also write every chart as PNG, SVG and PDF into this directory."),
    ] = None,
    allow_suspect: Annotated[
        bool, typer.Option("--allow-suspect", help="Include suspect runs, with a note on the page and in tables.")
    ] = False,
) -> None:
    """Write report.html, summary and sweep (CSV, JSON), result.json of each finished run, and plots.

    'benchctl run' does this when it ends. With two sides, only a page on B against A is written, by default
    report-A-vs-B.html in the working directory; for a page with another threshold, use 'benchctl compare A B
    --output page.html'. The page is self-contained. Damaged files, and why two sides cannot be compared, are named
    on stderr, with exit code 4 after the rest is written.
    """
    a = results_named(a)
    if b is not None and figures is not None:
        raise UsageError("--figures draws the charts of one directory: leave out B")
    if b is not None:
        _write_page(a, results_named(b), output, allow_suspect=allow_suspect)
        return
    try:
        files = write_report(Path(a), allow_suspect=allow_suspect, directory=output)
    except OSError as error:
        where = "write the report elsewhere with -o DIR" if output is None else "name another directory with -o"
        raise as_usage_error(error, output or Path(a), remedy=f"{where}, or copy {a}") from error
    if figures is not None:
        for path in write_figures(files, figures)[::3]:
            print(f"{path}, .svg, .pdf")
    run_results = [path for path in files.written if path.name == "result.json"]
    print(*(path for path in files.written if path not in run_results), sep="\n")
    if run_results:
        folders = {path.parent.parent for path in run_results}
        folder = folders.pop() if len(folders) == 1 else f"{files.root}/blocks/*/runs"
        say(f"{folder}/*/result.json ({len(run_results)} runs)")
    for reason in files.skipped:
        say(f"not drawn: {reason}")
    if files.damage:
        raise RecordError("\n".join(files.damage))


def _write_page(a: str, b: str, output: Path | None, *, allow_suspect: bool) -> None:
    path = output or Path(f"report-{_slug(parse_side(a))}-vs-{_slug(parse_side(b))}.html")
    page, problems = page_of_sides(a, b, CompareOptions(allow_suspect=allow_suspect))
    write_bytes_atomic(path, page.encode())
    print(path)
    if problems:
        raise RecordError("\n".join(problems))


def _slug(side: Side) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", side.path.resolve().name + (f"-{side.variant}" if side.variant else ""))


def verify(
    results: ResultsDir,
    as_json: AsJson = False,
) -> None:
    """Read every file of a result directory, and report alterations since the measurement.

    Files without a digest are named. Exit code: 0 intact, 4 altered. Directories of older versions have no digests:
    nothing of them can be verified.
    """
    _tell_verified(results, verify_directory(open_results(results).path, is_fresh=True), as_json=as_json)


def _tell_verified(results: Path, verified: Verification, *, as_json: bool = False) -> None:
    """Print what was altered in ``results``, or that nothing was; ends the command where something was."""
    document = {
        "path": str(results),
        "intact": not verified.alterations,
        "sha256": None if verified.digests is None else directory_sha256(verified.digests),
        "benchctl_version": verified.manifest.benchctl_version,
        "files": verified.num_files,
        "hashed_bytes": verified.hashed_bytes,
        "unrecorded": verified.unrecorded,
        "uncovered": verified.uncovered,
        "alterations": [
            {"code": each.kind, "file": each.file, "what": each.what, "decides": each.decides}
            for each in verified.alterations
        ],
    }
    tell(document, *_verified_lines(results, verified), as_json=as_json)
    if verified.alterations:
        raise typer.Exit(_ALTERED)


def _verified_lines(results: Path, verified: Verification) -> Iterator[str]:
    for each in verified.alterations:
        yield f"{each.kind}: {each}{'' if each.decides else ' (no number depends on it)'}"
    if verified.unrecorded and verified.num_files:
        yield f"no digest recorded for {len(verified.unrecorded)} runs: {', '.join(verified.unrecorded)}"
    if verified.uncovered and verified.num_files:
        yield f"covered by no digest: {', '.join(map(visible_line, verified.uncovered))}"
    if verified.alterations:
        yield (
            f"{results} was altered; restore these files from a copy, or measure again. 'benchctl compare' refuses "
            "it without --allow-altered if numbers depend on them"
        )
    elif verified.num_files == 0:
        yield (
            f"{results} was written by benchctl {verified.manifest.benchctl_version} without digests, so that "
            "nothing can be verified"
        )
    else:
        yield f"{results} is intact: {verified.num_files} files, {megabytes(verified.hashed_bytes)} read"
    if not verified.alterations:
        yield from _digest_lines(verified)


def _digest_lines(verified: Verification) -> Iterator[str]:
    """The digest by which the directory is cited; none for one of an older version without digests."""
    if verified.digests is not None:
        yield f"digest of the whole directory: sha256 {directory_sha256(verified.digests)}"


def export(
    results: ResultsDir,
    form: Annotated[
        Literal["vllm", "aiperf", "lenvm"] | None,
        typer.Option(
            "--format",
            help="vllm: the result of 'vllm bench serve'; aiperf: profile_export_aiperf.json and .jsonl; "
            "lenvm: summary.csv in the columns of the LenVM project.",
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write one file instead, x.tar.gz, of which 'benchctl import archive' makes a directory.",
        ),
    ] = None,
    allow_running: Annotated[
        bool, typer.Option("--allow-running", help="Archive an experiment that is being measured, as it is now.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Directory to write; by default DIR/export/<format>."),
    ] = None,
) -> None:
    """Write an archive, or each finished run in the format of another tool, one directory for each arm.

    'benchctl compare OUT/baseline OUT/guided-top_k5' reads these files, without blocks. An archive holds no logs
    with secrets, and is the same file whenever and wherever it is written. Damaged files are named on stderr,
    with exit code 4 after the rest is written.
    """
    if (form is None) == (archive is None):
        raise UsageError("give either --archive FILE, for one file, or --format, for the files of another tool")
    if archive is not None and output is not None:
        raise UsageError(f"--archive {archive} names what is written; leave out --output")
    if archive is not None:
        _write_archive(results, archive, allow_running=allow_running)
    elif form is not None:
        analysis, out = analyze_directory(results), output or results / "export" / form
        paths = write_foreign(analysis, form, out)
        for name, count in Counter(path.relative_to(out).parts[0] for path in paths).items():
            say(f"{out / name} ({count} files)")
        if analysis.damage:
            raise RecordError("\n".join(analysis.damage))


def _write_archive(path: Path, archive: Path, *, allow_running: bool) -> None:
    results = open_results(path)
    if current_manifest(results).state == "running" and not allow_running:
        raise UsageError(
            f"{path} is being measured, and an archive would end in the middle of a run; wait until it has ended, "
            "or archive it as it is now with --allow-running"
        )
    contents = contents_of(results.path)
    with bytes_progress(archive.name, contents.size_bytes) as on_bytes:
        write_archive(results, contents, archive, on_bytes)
    for name in contents.irregular:
        note(f"left out: {visible_line(name)} of {results.path}: no regular file")
    sizes = f"{megabytes(contents.size_bytes)} in {megabytes(archive.stat().st_size)}"
    verified = verify_directory(results.path)
    print(f"{archive}: {len(contents.files)} files, {sizes}", *_digest_lines(verified), sep="\n")
    if verified.alterations:
        altered = "\n".join(f"  {alteration}" for alteration in verified.alterations)
        raise RecordError(
            f"{path} was altered since it was measured, and the archive holds it as it is:\n{altered}"
        )


app = typer.Typer(
    add_completion=False,
    help="Import archives and results of other projects as result directories.",
    no_args_is_help=True,
)


@app.command("archive")
def archive(
    source: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Archive that 'benchctl export DIR --archive FILE' wrote."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="Result directory to create; by default results/<profile>/<name>.",
        ),
    ] = None,
) -> None:
    """Make a result directory of an archive, and verify it.

    Exit code: 0 intact, 4 altered since the measurement, or a damaged archive.
    """
    path = import_archive(source, output, RESULTS)
    verified = verify_directory(path, is_fresh=True)
    say(f"results in {path}")
    _tell_verified(path, verified)


@app.command("lenvm")
def lenvm(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Output of the timing scripts of LenVM (length value model): baseline.meta.json and others.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Result directory to create."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The served model, if the name of DIR does not contain it.")
    ] = None,
    value_model: Annotated[
        str | None, typer.Option(help="The value model, if the name of DIR does not contain it.")
    ] = None,
) -> None:
    """Import one run of each arm as one block, with warnings about unreliable data.

    Usage is counted once per request; of several starts of a server, those that answered count; unreadable lines
    are left out and reported. 'benchctl show', 'report' and 'compare' read the result; its lenvm_summary.csv has
    the columns of the project. One block is a screening: comparing it exits with 3.
    """
    result = import_lenvm(source, output, model=model, value_model=value_model, argv=("benchctl", *sys.argv[1:]))
    for title, is_mended in (("mended or left out", True), ("to bear in mind", False)):
        warnings = [warning for warning in result.warnings if (warning.code in REPAIRS) is is_mended]
        if warnings:
            say(f"{title}:")
        for warning in warnings:
            say(f"  {warning.code}: {warning.message}{f' ({warning.where})' if warning.where else ''}")
    for run in result.runs:
        reasons = "".join(f"\n  {warning.code}: {warning.message}" for warning in run.warnings)
        say(f"{run.run_id}: {run.state}{reasons}")
    say(f"results in {result.path}")
    say(f"their columns: {result.path / SUMMARY_NAME}")
