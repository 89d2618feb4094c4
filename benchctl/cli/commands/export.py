"""``benchctl export``: a result directory as one file, or in the files of another load generator."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.options.completion import complete_results
from benchctl.cli.options.experiment import FormerOutputDir, chosen_output
from benchctl.errors import RecordError, UsageError
from benchctl.formats import megabytes

if TYPE_CHECKING:
    from benchctl.records.archive.contents import Contents
    from benchctl.records.directory import ResultDirectory


class Form(StrEnum):
    """The load generator whose files are written."""

    VLLM = "vllm"
    AIPERF = "aiperf"
    LENVM = "lenvm"


def export(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A result directory, finished or not, or an archive of one.",
            autocompletion=complete_results,
        ),
    ],
    form: Annotated[
        Form | None,
        typer.Option(
            "--format",
            help="vllm: the result of 'vllm bench serve'; aiperf: profile_export_aiperf.json and .jsonl; "
            "lenvm: summary.csv in the columns of the LenVM project.",
            show_default=False,
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            "--archive",
            metavar="FILE",
            help="Write one file instead, which every command takes in place of DIR: .tar.zst, .tar.gz or .tar.",
            show_default=False,
        ),
    ] = None,
    allow_running: Annotated[
        bool, typer.Option("--allow-running", help="Archive an experiment that is being measured, as it is now.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Directory to write; by default DIR/export/<format>."),
    ] = None,
    output_dir: FormerOutputDir = None,
) -> None:
    """Write an archive, or each finished run in the format of another tool, one directory for each arm.

    'benchctl compare OUT/baseline OUT/guided-top_k5' reads these files, without blocks. An archive holds no logs
    with secrets, and is the same file whenever and wherever it is written. Damaged files are named on stderr,
    with exit code 4 after the rest is written.
    """
    output = chosen_output(output, output_dir)
    if (form is None) == (archive is None):
        raise UsageError("give either --archive FILE, for one file, or --format, for the files of another tool")
    if archive is not None:
        if output is not None:
            raise UsageError(f"--archive {archive} names what is written; leave out --output")
        _write_archive(results, archive, allow_running=allow_running)
    elif form is not None:
        _write_foreign(results, form, output)


def _write_foreign(results: Path, form: Form, output: Path | None) -> None:
    from benchctl.analysis.analyzed import analyze_directory
    from benchctl.interop.writers.export import write_foreign
    from benchctl.records.archive.opening import derived_directory

    analysis = analyze_directory(results)
    out = output or (derived_directory(results, "export") or results / "export") / form.value
    paths = write_foreign(analysis, form.value, out)
    for directory in dict.fromkeys(out / path.relative_to(out).parts[0] for path in paths):
        count = sum(path.is_relative_to(directory) for path in paths)
        print(f"{directory} ({count} files)")
    if analysis.damage:
        raise RecordError("\n".join(analysis.damage))


def _write_archive(path: Path, archive: Path, *, allow_running: bool) -> None:
    from benchctl.cli.output.transfer import bytes_progress
    from benchctl.cli.output.verification import print_digest
    from benchctl.records.archive.compression import compression_of_name
    from benchctl.records.archive.contents import contents_of
    from benchctl.records.archive.packing import write_archive
    from benchctl.records.claims.lock import current_manifest
    from benchctl.records.directory import open_results
    from benchctl.records.integrity.verification import verify_directory

    compression = compression_of_name(archive)
    results = open_results(path)
    if current_manifest(results).state == "running" and not allow_running:
        raise UsageError(
            f"{path} is being measured, and an archive would end in the middle of a run; wait until it has ended, "
            "or archive it as it is now with --allow-running"
        )
    contents = contents_of(results.path)
    with bytes_progress(archive.name, contents.size_bytes) as on_bytes:
        write_archive(results, contents, archive, compression, on_bytes)
    _print_written(results, archive, contents)
    verified = verify_directory(results.path)
    print_digest(verified)
    if verified.alterations:
        altered = "\n".join(f"  {alteration}" for alteration in verified.alterations)
        raise RecordError(
            f"{path} was altered since it was measured, and the archive holds it as it is:\n{altered}"
        )


def _print_written(results: "ResultDirectory", archive: Path, contents: "Contents") -> None:
    from benchctl.untrusted.text import visible_line

    for name in contents.irregular:
        print(f"left out: {visible_line(name)} of {results.source}: no regular file", file=sys.stderr)
    sizes = f"{megabytes(contents.size_bytes)} in {megabytes(archive.stat().st_size)}"
    print(f"{archive}: {len(contents.files)} files, {sizes}")
