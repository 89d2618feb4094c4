"""``benchctl export``: a result directory in the files of another load generator."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchctl.cli.options.completion import complete_results
from benchctl.cli.options.experiment import FormerOutputDir, chosen_output
from benchctl.errors import RecordError


class Form(StrEnum):
    """The load generator whose files are written."""

    VLLM = "vllm"
    AIPERF = "aiperf"
    LENVM = "lenvm"


def export(
    results: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A result directory, finished or not.", autocompletion=complete_results),
    ],
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="vllm: the result of 'vllm bench serve'; aiperf: profile_export_aiperf.json and .jsonl; "
            "lenvm: summary.csv in the columns of the LenVM project.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Directory to write; by default DIR/export/<format>."),
    ] = None,
    output_dir: FormerOutputDir = None,
) -> None:
    """Write each finished run in the format of another tool, one directory for each arm.

    'benchctl compare OUT/baseline OUT/guided-top_k5' reads these files, without blocks. Damaged files are
    named on stderr, with exit code 4 after the rest is written.
    """
    from benchctl.analysis.analyzed import analyze_directory
    from benchctl.interop.writers.export import write_foreign

    analysis = analyze_directory(results)
    out = chosen_output(output, output_dir) or results / "export" / form.value
    paths = write_foreign(analysis, form.value, out)
    for directory in dict.fromkeys(out / path.relative_to(out).parts[0] for path in paths):
        count = sum(path.is_relative_to(directory) for path in paths)
        print(f"{directory} ({count} files)")
    if analysis.damage:
        raise RecordError("\n".join(analysis.damage))
