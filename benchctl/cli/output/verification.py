"""A verification of a result directory on the terminal."""

from pathlib import Path
from typing import TYPE_CHECKING

from benchctl.formats import megabytes
from benchctl.untrusted.text import visible_line

if TYPE_CHECKING:
    from benchctl.records.integrity.verification import Verification


def print_verification(results: Path, verified: "Verification") -> None:
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


def print_digest(verified: "Verification") -> None:
    """Print the digest by which the directory is cited; nothing for one of an older version without digests."""
    from benchctl.records.integrity.digests import directory_sha256

    if verified.digests is not None:
        print(f"digest of the whole directory: sha256 {directory_sha256(verified.digests)}")
