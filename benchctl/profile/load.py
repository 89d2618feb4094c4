"""Read, write and identify profiles.

A profile is read in layers (``sources``): the files it extends, itself, its engine preset, the command line.
The result is validated as a whole, and every fault is reported at once with the line it stands on.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from benchctl.profile.checks import profile_faults
from benchctl.profile.controls import with_controls
from benchctl.profile.document import Fault, Place, dump_document, node_from_plain
from benchctl.profile.engine_table import ENGINES, options_class
from benchctl.profile.faults import profile_error, validate
from benchctl.profile.locate import locate_profile, profile_files
from benchctl.profile.model import ComparisonRules, Engine, Profile
from benchctl.profile.sources import (
    Draft,
    from_assignment,
    from_option,
    read_file,
    read_profile_file,
    read_text,
    with_engine,
    without,
)
from benchctl.records.jsonl import encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEntry:
    """A profile that is found by name."""

    name: str
    path: Path
    description: str


def load_profile(
    name_or_path: str,
    *,
    engine: str | None = None,
    overrides: Sequence[str] = (),
    blocks: int | None = None,
    seed: int | None = None,
) -> Profile:
    """Read a profile by name or path, with what the command line changes in it.

    ``engine`` is a preset or a kind and replaces the profile's engine; ``overrides`` are assignments such as
    ``workload.num_prompts=3`` and go over everything else, in the order given. Raises ProfileError with every
    fault.
    """
    path = locate_profile(name_or_path)
    options = {"--engine": engine, "--blocks": blocks, "--seed": seed}
    above = [from_option(name, (name[2:],), value) for name, value in options.items() if value is not None]
    above += [from_assignment(assignment) for assignment in overrides]
    draft = _layered(path, above, kind=None)
    if (kind := _kind_of(draft)) is not None:
        draft = _layered(path, above, kind=kind)
    return _profile(draft)


def _layered(path: Path, above: Sequence[Draft], *, kind: str | None) -> Draft:
    """The file with what it extends, as an engine of this kind reads it, and the command line over it."""
    return with_engine(reduce(Draft.under, above, read_profile_file(path, kind)))


def _kind_of(draft: Draft) -> str | None:
    """The kind of the draft's engine; None where it is missing or unknown."""
    engine = draft.tree.child("engine")
    kind = engine.child("kind") if engine else None
    return str(kind.value) if kind is not None and kind.value in ENGINES else None


def parse_profile(text: str, source: str) -> Profile:
    """Read a complete profile from its text, for example the ``profile.yaml`` of a result directory.

    ``source`` names the text in messages. Raises ProfileError with every fault.
    """
    draft = read_text(text, source)
    extends = draft.tree.child("extends")
    if extends is not None:
        problem = "a profile is complete here and extends nothing; write out what it extends"
        tree = without(draft.tree, {"extends"})
        draft = Draft(tree, (*draft.faults, Fault(extends.place, extends.path, problem)), is_whole=False)
    return _profile(with_engine(draft))


def profile_from_plain(plain: Mapping[str, Any], source: str) -> Profile:
    """A complete profile from plain values. ``source`` says where they come from, for messages.

    Raises ProfileError with every fault.
    """
    return _profile(with_engine(Draft(node_from_plain(plain, Place(source)))))


def dump_profile(profile: Profile) -> str:
    """The complete profile as YAML; ``parse_profile`` reads it back as the same profile."""
    return dump_document(profile.model_dump(mode="json"))


def profile_sha256(profile: Profile) -> str:
    """Identity of an experiment: SHA-256 of the complete profile as canonical JSON.

    The order of keys does not matter, but for variants and factors, whose order is that of the plan.
    """
    document: dict[str, Any] = profile.model_dump(mode="json")
    if profile.comparison == ComparisonRules():  # experiments from before this section keep their identity
        del document["comparison"]
    ordered = {key: list(document[key].items()) for key in ("variants", "sweep")}
    return hashlib.sha256(encode(document | ordered)).hexdigest()


def list_profiles() -> tuple[ProfileEntry, ...]:
    """The profiles that are found by name, in the order of their names; faulty ones too."""
    return tuple(
        ProfileEntry(name=name, path=path, description=_description(read_file(path)))
        for name, path in profile_files().items()
    )


def _description(draft: Draft) -> str:
    node = draft.tree.child("description")
    if node is not None:
        return str(node.value)
    return "" if draft.is_whole else "not readable; 'benchctl profiles validate' says why"


def _profile(draft: Draft) -> Profile:
    tree, names_taken = with_controls(draft.tree)
    profile, found = validate(tree, Profile)
    if not draft.is_whole:
        found = tuple(fault for fault in found if not fault.is_absence)
    faults = (*draft.faults, *names_taken, *found, *profile_faults(tree))
    if profile is None or faults:
        raise profile_error(faults)
    return profile.model_copy(update={"engine": _complete_engine(profile.engine)})


def _complete_engine(engine: Engine) -> Engine:
    """The engine with all its options written out, as far as they can stand without a variant's."""
    tree = node_from_plain(engine.options, Place("engine"))
    options, _ = validate(tree, options_class(engine.kind))
    if options is None:
        return engine
    return engine.model_copy(update={"options": options.model_dump(mode="json")})
