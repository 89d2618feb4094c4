"""``benchctl verify``: check a result directory for alterations since the measurement."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from benchctl.cli.options.completion import complete_results
from benchctl.cli.output.verification import print_verification

if TYPE_CHECKING:
    from benchctl.records.integrity.verification import Verification

_ALTERED: Final = 4


def verify(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Result directory, finished or not, or an archive.", autocompletion=complete_results
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Read every file of a result directory, and report alterations since the measurement.

    Files without a digest are named. Exit code: 0 intact, 4 altered. Directories of older versions have no digests:
    their plan, the order of their runs and their request set are verified.
    """
    from benchctl.records.directory import open_results
    from benchctl.records.integrity.verification import verify_directory

    verified = verify_directory(open_results(results).path, is_fresh=True)
    if as_json:
        import json

        print(json.dumps(_document(results, verified), indent=1))
    else:
        print_verification(results, verified)
    if verified.alterations:
        raise typer.Exit(_ALTERED)


def _document(results: Path, verified: "Verification") -> dict[str, Any]:
    from benchctl.records.integrity.digests import directory_sha256

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
