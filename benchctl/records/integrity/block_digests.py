"""Digests of the runs of one block of a shared directory, written by the owner of the block alone.

    digests/b<block>-<generation>.json

Each claim of a block has a file of its own, so that nobody ever replaces what another process wrote. The newest one
of a block counts for all its runs, in place of what ``digests.json`` says of them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchctl.errors import RecordError
from benchctl.records.documents import record_of
from benchctl.records.files import check_name, check_run_id, read_document
from benchctl.records.jsonl import write_json_atomic
from benchctl.records.record import Count, Record
from benchctl.records.run import FileDigest
from benchctl.untrusted.files import entry_names
from benchctl.untrusted.text import visible_value
from benchctl.untrusted.writing import Fence, make_folder

FOLDER: Final = "digests"
_NAME: Final = re.compile(r"b(\d{1,9})-(\d{1,9})\.json")
_REMEDY: Final = "restore the file from a copy"


class BlockDigests(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Digests of the records of one block's runs, as the owner of one claim of it found and left them."""

    schema_version: int
    """Version of the result format."""
    block: Count
    """The block, from 0."""
    generation: Count
    """The claim whose owner wrote them, from 1."""
    runs: tuple[str, ...]
    """All runs of the block."""
    files: dict[str, FileDigest] = {}
    """Digests of the records of those that have ended, by path below the directory, with slashes."""


def write_block_digests(directory: Path, digests: BlockDigests, fence: Fence | None = None) -> None:
    """Replace the file of one claim; ``fence`` is called before it appears, and may refuse."""
    folder = directory / FOLDER
    make_folder(folder, within=directory)
    path = folder / f"b{digests.block:03d}-{digests.generation}.json"
    write_json_atomic(path, digests, within=directory, fence=fence)


def newest_block_digests(directory: Path, only: int | None = None) -> Mapping[int, BlockDigests]:
    """The digests of the newest claim of each block that has some, or of the block ``only``, by block.

    Empty for an ordinary directory. Raises RecordError when they cannot be read.
    """
    newest: dict[int, tuple[int, str]] = {}
    for name in _names(directory):
        if match := _NAME.fullmatch(name):
            block, generation = int(match[1]), int(match[2])
            if only is None or only == block:
                newest[block] = max(newest.get(block, (0, "")), (generation, name))
    return {block: _read(directory, block, *newest[block]) for block in sorted(newest)}


def _names(directory: Path) -> list[str]:
    try:
        return entry_names(directory / FOLDER, within=directory)
    except FileNotFoundError:
        return []


def _read(directory: Path, block: int, generation: int, name: str) -> BlockDigests:
    path = directory / FOLDER / name
    digests = record_of(read_document(path, within=directory), path, BlockDigests, remedy=_REMEDY)
    if (digests.block, digests.generation) != (block, generation):
        raise RecordError(
            f"{path}: is of block {visible_value(digests.block)}, generation "
            f"{visible_value(digests.generation)}; {_REMEDY}"
        )
    for number, run_id in enumerate(digests.runs):
        check_run_id(run_id, path, f"runs[{number}]")
    for file in digests.files:
        for part in file.split("/"):
            check_name(part, path, f"the file {file[:80]!r}")
    return digests
