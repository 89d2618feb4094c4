"""The checks on file, for the experiments that they are about."""

import datetime as dt
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from benchctl.analysis.planning.noise_floor import engine_sha256
from benchctl.analysis.validity.noise import neighbour_warnings, unchecked_warning
from benchctl.cluster.neighbours.check import nothing_to_check
from benchctl.cluster.slots import Slot
from benchctl.errors import UsageError
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.schema import SCHEMA_VERSION, GpuInfo, ResultWarning
from benchctl.records.stores.neighbour_store import key_of, neighbours_directory, stored_checks
from benchctl.records.stores.stores import NEIGHBOURS_FILE, NeighbourCheck, NeighbourSlot, write_neighbours

_KEPT: Final = frozenset({"--engine", "--set", "--seed", "--profile", "-p"})
"""Options of ``run``, with a value each, that a check takes over."""
_FLAGS: Final = frozenset(
    {"--aa", "--check-neighbours", "--json", "--keep-raw-logs", "--no-store-noise", "--quick", "--quiet", "-q"}
)
"""Options of ``run`` without a value."""


def check_on_file(
    profile: Profile, slots: Sequence[Slot], gpus: Sequence[GpuInfo] | None = None
) -> NeighbourCheck | None:
    """The newest check on file for the baseline's server of ``profile`` on these slots of this machine."""
    devices = gpu_inventory() if gpus is None else gpus
    sought = NeighbourCheck(
        schema_version=SCHEMA_VERSION,
        measured_at="",
        source="",
        host=platform.node(),
        gpus=tuple(gpu.name for gpu in devices),
        engine=profile.engine.kind,
        engine_sha256=engine_sha256(profile),
        model=profile.model,
        request_set_sha256="",
        slots=tuple(NeighbourSlot(index=slot.index, gpus=slot.gpus, cores=slot.cores) for slot in slots),
        confidence=0.5,
    )
    entries = stored_checks(neighbours_directory(), key_of(sought))
    return next((entry.content for entry in entries if entry.content is not None), None)


def note_neighbours(
    results: ResultDirectory, profile: Profile, slots: Sequence[Slot], check: NeighbourCheck | None = None
) -> tuple[ResultWarning, ...]:
    """Give an experiment the check that applies to it, by default the one on file, and warn of what it says.

    Returns the warnings, which the manifest then holds; none where a single block runs at a time, and none where
    neighbours cannot matter.
    """
    if len(slots) < 2 or _cannot_matter(profile):
        return ()
    manifest = results.manifest()
    check = check or check_on_file(profile, slots, manifest.gpus)
    command = check_command(results, len(slots))
    if check is None:
        warnings: tuple[ResultWarning, ...] = (unchecked_warning(len(slots), command),)
    else:
        write_neighbours(results.path / NEIGHBOURS_FILE, check)
        begins_at = dt.datetime.now(dt.UTC).isoformat()
        warnings = neighbour_warnings(check, begins_at, command)
    others = tuple(warning for warning in manifest.warnings if not warning.code.startswith("neighbours-"))
    if (*others, *warnings) != manifest.warnings:
        results.write_manifest(msgspec.structs.replace(manifest, warnings=(*others, *warnings)))
    return warnings


def check_command(results: ResultDirectory, parallel: int, argv: Sequence[str] | None = None) -> str:
    """The command line that checks neighbours of an experiment: that of ``argv``, by default our own, as far as it
    says what is measured; of an experiment that continues, by its stored profile.
    """
    command, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    words, options, has_profile = iter(rest), list[str](), False
    for word in filter(None, words):
        name, equals, _ = word.partition("=")
        if not word.startswith("-"):
            options, has_profile = [*options, word], True
        elif name in _KEPT:
            options += [word] if equals else [word, next(words, "")]
            has_profile = has_profile or name in {"--profile", "-p"}
        elif not equals and name not in _FLAGS:
            next(words, None)
    what = options if command == "run" and has_profile else [str(results.path / "profile.yaml")]
    return shlex.join(["benchctl", "noise", "neighbours", *what, "--parallel", str(parallel)])


def _cannot_matter(profile: Profile) -> bool:
    try:
        return nothing_to_check(profile) is not None
    except UsageError:  # servers of others: where they are is not known
        return True
