"""The last document of a shared directory: manifest and digests, assembled from the runs when all have ended."""

import msgspec

from benchctl.analysis.validity.machines import version_warning
from benchctl.errors import RecordError
from benchctl.records.claims import is_shared, state_of
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import assemble_digests
from benchctl.records.record import ENDED
from benchctl.records.schema import ResultWarning
from benchctl.records.stores import NOISE


def assemble(results: ResultDirectory) -> bool:
    """Write state and warnings of the experiment and the digests of its runs, if every planned run has ended.

    All of it follows from the runs, so that two who assemble at once write the same. Returns whether it was
    written. Raises OSError where nothing can be written.
    """
    runs = [results.run(planned.run_id) for planned in results.due_plan().runs]
    # From the end: blocks begin in order, and one look then says that some are left.
    states = []
    for run in reversed(runs):
        states.append(state_of(run))
        if states[-1] not in ENDED:
            return False
    if not is_shared(results.path):
        return False
    assemble_digests(results)
    manifest = results.manifest()
    state = "failed" if "failed" in states else "suspect" if "suspect" in states else "done"
    warnings = (*manifest.warnings, *_version_warnings(results))
    assembled = msgspec.structs.replace(manifest, state=state, warnings=tuple(dict.fromkeys(warnings)))
    if assembled != manifest:
        results.write_manifest(assembled)
    return True


def _version_warnings(results: ResultDirectory) -> list[ResultWarning]:
    """Warnings of noise on file from another version of the engine, which only servers report; in planned order."""
    noise = NOISE.in_results(results.path)
    if noise is None:
        return []
    warnings = []
    for planned in results.due_plan().runs:
        try:
            record = results.run(planned.run_id).read()
        except RecordError:
            continue
        warnings.append(version_warning(noise, record.engine_version))
    return [warning for warning in dict.fromkeys(warnings) if warning is not None]
