"""The fate of a block whose process has ended, by its exit code and by what is on disk."""

from typing import Final, Literal, TypeAlias

from benchctl.cluster.local.block_process import BlockProcess
from benchctl.errors import InvalidDataError, RunError, UsageError
from benchctl.records.claims import living_owner, state_of
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import ENDED

Fate: TypeAlias = Literal["ended", "of others", "refused", "died"]
"""All runs of the block have ended; another process measures it; its process refused it, as others would; that
died, or someone else interrupted it."""
_OF_ERRORS: Final = frozenset(error.exit_code for error in (UsageError, InvalidDataError, RunError))
"""Exit codes of a command that could not go on, of which some are those of failed and suspect runs, too."""


def fate_of(results: ResultDirectory, process: BlockProcess, code: int) -> Fate:
    """The fate of the block of ``process``, which ended with ``code``."""
    if code == 0:
        return "ended"
    if code not in _OF_ERRORS:
        return "died"
    runs = [run for run in results.due_plan().runs if run.block == process.block]
    if all(state_of(results.run(run.run_id)) in ENDED for run in runs):
        return "ended"
    return "refused" if living_owner(results, process.block) is None else "of others"
