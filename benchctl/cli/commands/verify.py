"""``benchctl verify``: check a result directory for alterations since the measurement."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from benchctl.cli.options.completion import complete_results
from benchctl.formats import megabytes

if TYPE_CHECKING:
    from benchctl.records.integrity.verification import Verification

_ALTERED: Final = 4


def verify(
    results: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Result directory, finished or not.", autocompletion=complete_results),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Read every file of a result directory and report alterations since the measurement.

    Exit code: 0 intact, 4 altered. Directories of older versions have no digests: their plan, the order of their
    runs and their request set are verified.
    """
    from benchctl.records.directory import open_results
    from benchctl.records.integrity.verification import verify_directory

    open_results(results)
    verified = verify_directory(results, is_fresh=True)
    if as_json:
        import json

        print(json.dumps(_document(results, verified), indent=1))
    else:
        _print(results, verified)
    if verified.alterations:
        raise typer.Exit(_ALTERED)


def _print(results: Path, verified: "Verification") -> None:
    from benchctl.records.integrity.digests import directory_sha256

    for alteration in verified.alterations:
        remark = "" if alteration.decides else " (no number depends on it)"
        print(f"{alteration.kind}: {alteration}{remark}")
    if verified.unrecorded and verified.num_files:
        print(f"no digest recorded for {len(verified.unrecorded)} runs: {', '.join(verified.unrecorded)}")
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
    if verified.digests is not None and not verified.alterations:
        print(f"digest of the whole directory: sha256 {directory_sha256(verified.digests)}")


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
        "alterations": [
            {"code": one.kind, "file": one.file, "what": one.what, "decides": one.decides}
            for one in verified.alterations
        ],
    }
