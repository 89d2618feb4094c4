"""``benchctl export``: a result directory in the files of another load generator."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchctl.errors import RecordError


class Form(StrEnum):
    """Whose files."""

    VLLM = "vllm"
    AIPERF = "aiperf"
    LENVM = "lenvm"


def export(
    results: Annotated[Path, typer.Argument(metavar="DIR", help="A result directory, finished or not.")],
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="vllm: the result of 'vllm bench serve'; aiperf: profile_export_aiperf.json and .jsonl; "
            "lenvm: summary.csv in the columns of the LenVM project.",
        ),
    ],
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", metavar="OUT", help="Where to; DIR/export/<format> otherwise."),
    ] = None,
) -> None:
    """Write each finished run as another tool would have written it, one directory for each arm.

    'benchctl compare OUT/baseline OUT/guided-top_k5' reads them again, as files without blocks. What maps to what:
    docs/interop.md. A damaged file is named on stderr and exits 4, after the rest is written.
    """
    from benchctl.analysis.analyzed import analyze_directory
    from benchctl.interop.writers.export import write_foreign

    analysis = analyze_directory(results)
    out = results / "export" / form.value if output_dir is None else output_dir
    written = write_foreign(analysis, form.value, out)
    for directory in dict.fromkeys(out / path.relative_to(out).parts[0] for path in written):
        count = sum(path.is_relative_to(directory) for path in written)
        print(f"{directory} ({count} files)")
    if analysis.damage:
        raise RecordError("\n".join(analysis.damage))
