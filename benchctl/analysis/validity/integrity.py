"""Alterations and copies of result files since they were measured, as warnings and as a refusal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchctl.errors import AlteredError, InvalidDataError
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity.verification import Alteration, AlterationKind, Verification, verify_directory
from benchctl.records.loaded import LoadedResults
from benchctl.records.record import ResultWarning
from benchctl.untrusted.files import is_there

_NUM_NAMED: Final = 4
"""Number of files that a warning names; a refusal names all."""
_MEANING: Final[dict[AlterationKind, str]] = {
    "altered-file": "not what was recorded",
    "missing-file": "files that were recorded are not there",
    "altered-plan": "runs contradict the plan or their own times",
    "altered-requests": "not the request set that was sent",
    "copied-run": "runs are copies of others",
}


def require_intact(
    a: LoadedResults, b: LoadedResults, differences: Sequence[str], *, allow_altered: bool
) -> tuple[ResultWarning, ...]:
    """Warnings about alterations in the directories of two sides since they were measured.

    Raises AlteredError if they affect numbers, unless ``allow_altered``; it names every file, and the undeclared
    ``differences`` of the sides.
    """
    sides = [a] if a.path.resolve() == b.path.resolve() else [a, b]
    verifications = [
        (side.source, verify_directory(side.path))
        for side in sides
        if is_there(side.path / "manifest.json", within=side.path)
    ]
    shared = _shared_runs(verifications)
    refused = [
        f"{path}/{alteration}"
        for path, verified in verifications
        for alteration in verified.alterations
        if alteration.decides
    ] + shared
    if refused and not allow_altered:
        lines = [f"  {line}" for line in refused]
        if differences:
            lines += ["and the two sides differ in more than the declared factor:"]
            lines += [f"  {difference}" for difference in differences]
        listed = "\n".join(lines)
        raise AlteredError(
            f"what is compared is not what was measured:\n{listed}\n"
            "Restore these files from a copy, or measure again; --allow-altered compares them as they are"
        )
    warnings = [warning for path, verified in verifications for warning in alteration_warnings(path, verified)]
    return (*warnings, *(ResultWarning(code="copied-run", message=line) for line in shared))


def _shared_runs(verifications: Sequence[tuple[Path, Verification]]) -> list[str]:
    """Runs that two experiments share; a copy of a whole directory is the same experiment."""
    if len(verifications) < 2 or verifications[0][1].manifest == verifications[1][1].manifest:
        return []
    (a_path, a), (b_path, b) = verifications
    shared = {(a.fingerprints[key], b.fingerprints[key]): None for key in a.fingerprints if key in b.fingerprints}
    return [
        f"{a_path}/runs/{a_runs[0]} holds the same records as {b_path}/runs/{b_runs[0]}, and no two runs have the "
        "same times"
        for a_runs, b_runs in shared
    ]


def integrity_warnings(results: ResultDirectory) -> tuple[ResultWarning, ...]:
    """Warnings about alterations of a result directory; none if its plan cannot be read."""
    try:
        return alteration_warnings(results.source, verify_directory(results.path))
    except InvalidDataError:  # reading the directory reports it as damage
        return ()


def alteration_warnings(path: Path, verified: Verification) -> tuple[ResultWarning, ...]:
    """One warning for each kind of alteration, with the first files."""
    by_kind: dict[AlterationKind, list[Alteration]] = {}
    for alteration in verified.alterations:
        by_kind.setdefault(alteration.kind, []).append(alteration)
    warnings = []
    for kind, alterations in by_kind.items():
        message = f"{_MEANING[kind]}: {'; '.join(map(str, alterations[:_NUM_NAMED]))}"
        if len(alterations) > _NUM_NAMED:
            message += f"; and {len(alterations) - _NUM_NAMED} more, which 'benchctl verify' lists"
        warnings.append(ResultWarning(code=kind, message=message, where=str(path)))
    return tuple(warnings)
