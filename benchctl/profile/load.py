"""Profiles read, written, and identified by one SHA-256 that a new field of the profile does not change."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.errors import ProfileError, RecordError, UsageError
from benchctl.profile.checks import (
    own_variable_problems,
    profile_problems,
    sweep_problems,
    unfit_engine,
    values_without_cell,
)
from benchctl.profile.controls import with_controls
from benchctl.profile.engine_table import options_class
from benchctl.profile.errors import profile_error, validate
from benchctl.profile.files import assigned, extended_files, layered, profile_file, read_file, refuse
from benchctl.profile.model import Profile
from benchctl.profile.planning import Arm, variant_settings
from benchctl.profile.sections import ClusterSettings
from benchctl.profile.settings import (
    cells_of,
    factors_of,
    header_problems,
    is_load_factor,
    is_same,
    resolved_settings,
    setting_of,
)
from benchctl.profile.sizes import capacity_problems
from benchctl.profile.yaml import (
    STORED,
    Document,
    LocatedError,
    Location,
    Steps,
    dump_document,
    follow,
    left_out,
    plain_document,
    plain_value_problems,
    read_document,
    value_text,
)
from benchctl.records.files import encode
from benchctl.records.peaks import MEASURED, resolved_hardware

_OF_ARMS: Final = frozenset(
    {"engine", "model", "sampling", "request", "variants", "baseline", "sweep", "cells", "sweep_baseline"}
)
"""Keys on which the settings of runs depend."""


def load_profile(
    name_or_path: str,
    *,
    engine: str | None = None,
    overrides: Sequence[str] = (),
    blocks: int | None = None,
    seed: int | None = None,
    is_to_send: bool = False,
) -> Profile:
    """Read a profile by name or path, with the changes of the command line.

    ``engine`` is a preset or a kind and replaces the profile's engine; ``overrides`` are assignments such as
    ``workload.num_prompts=3`` and go over everything else, in the order given. With ``is_to_send`` the variables
    that headers name must be set here. Raises ProfileError with every error.
    """
    path, errors = profile_file(name_or_path), list[LocatedError]()
    options = {"--engine": engine, "--blocks": blocks, "--seed": seed}
    above = [plain_document({name[2:]: value}, name) for name, value in options.items() if value is not None]
    above += [assigned(assignment, errors) for assignment in overrides]
    tree = layered(extended_files(path, errors), above, errors)
    profile = _validated(tree, errors, is_to_send=is_to_send)
    is_measured = any(name.startswith(MEASURED) for name in hardware_names(profile))
    return _with_measured_peaks(profile, path) if is_measured else profile


def parse_profile(text: str, source: str, *, is_to_send: bool = False) -> Profile:
    """Read a complete profile from its text, for example the ``profile.yaml`` of a result directory.

    ``source`` names the text in messages. With ``is_to_send`` the variables that headers name must be set here.
    Raises ProfileError with every error.
    """
    errors = list[LocatedError]()
    tree = read_document(text, source, errors, STORED)
    if "extends" in tree.values:
        problem = "a stored profile is complete and cannot extend another; write out what it extends"
        refuse(errors, tree, problem, "extends")
        tree = tree.without("extends")
    return _validated(layered((), [tree], errors), errors, is_to_send=is_to_send, is_stored=True)


def stored_profile(text: str, source: str, *, is_to_send: bool = False) -> Profile:
    """The profile that a result directory holds as ``text`` in the file ``source``.

    Raises RecordError where it is damaged, ProfileError where ``is_to_send`` and a variable is not set here.
    """
    try:
        profile = parse_profile(text, source)
    except ProfileError as error:
        raise RecordError(
            f"{source} cannot be read as the profile of these results; restore it from a copy:\n{error}"
        ) from error
    return parse_profile(text, source, is_to_send=True) if is_to_send else profile


def profile_from_plain(plain: Mapping[str, Any], source: str, *, is_to_send: bool = False) -> Profile:
    """A complete profile from plain values. ``source`` names their origin in messages.

    Raises ProfileError with every error.
    """
    errors = list[LocatedError]()
    tree = plain_document(msgspec.to_builtins(plain, str_keys=True), source)
    return _validated(layered((), [tree], errors), errors, is_to_send=is_to_send)


def load_cluster(path: Path) -> ClusterSettings:
    """Read a YAML mapping of the keys of ``cluster``. Raises ProfileError with every error and its line."""
    errors = list[LocatedError]()
    tree = read_file(path, errors)
    settings, problems = validate(tree.values, ClusterSettings)
    errors += tree.errors([*plain_value_problems(tree.values), *problems])
    if settings is None or errors:
        raise profile_error(errors)
    return settings


def dump_profile(profile: Profile) -> str:
    """The complete profile as YAML; ``parse_profile`` reads it back as the same profile."""
    return dump_document(profile.model_dump(mode="json"))


def _validated(
    tree: Document, errors: list[LocatedError], *, is_to_send: bool = False, is_stored: bool = False
) -> Profile:
    if unusable := tree.errors(plain_value_problems(tree.values)):
        raise profile_error((*errors, *unusable))
    is_whole = not any(error.hides_keys for error in errors)
    profile, problems = validate(tree.values, Profile, reports_missing=is_whole)
    unread = {error.location for error in errors}  # what could not be read is not reported again as missing
    errors += [error for error in tree.errors(problems) if error.location not in unread]
    if profile is None and _OF_ARMS.isdisjoint(step for path, _ in problems for step in path[:1]):
        profile = _without(tree.values, (path for path, _ in problems))
    if profile is None:
        raise profile_error(errors)
    if (unfit := unfit_engine(profile)) is not None:
        raise profile_error(tree.errors([unfit]))

    options, _ = validate(profile.engine.options, options_class(profile.engine.kind))
    if options is not None:  # where they are valid without a variant's, all are written out
        engine = profile.engine.model_copy(update={"options": options.model_dump(mode="json")})
        profile = profile.model_copy(update={"engine": engine})
    if not problems:
        errors += tree.errors([*profile_problems(profile), *capacity_problems(profile)])
        errors += [] if is_stored else tree.errors(own_variable_problems(profile))
    problems = [*sweep_problems(profile)]
    if not (errors or problems) and any(variant.controls for variant in profile.variants.values()):
        profile, problems = with_controls(profile)
        problems += sweep_problems(profile)
    errors += tree.errors(problems)
    variants = profile.variants
    unswept = [
        name for name in variants if isinstance(variants[name].swept, bool) and not factors_of(profile, name)
    ]
    chosen = [(name, cell) for name in (unswept if problems else variants) for cell in cells_of(profile, name)]
    chosen += [] if problems else values_without_cell(profile)
    for arm in chosen:
        errors += _errors_of_arm(tree, profile, arm, is_to_send=is_to_send, is_stored=is_stored)
    if errors:
        raise profile_error(errors)
    return profile


def _without(values: dict[str, Any], faulty: Iterable[Steps]) -> Profile | None:
    """The profile without some values, so that its arms are checked as well; None where it needs these."""
    for path in faulty:
        values = left_out(values, tuple(takewhile(lambda step: isinstance(step, str), path)))
    return validate(values, Profile)[0]


def _errors_of_arm(
    tree: Document, profile: Profile, arm: Arm, *, is_to_send: bool, is_stored: bool
) -> Iterator[LocatedError]:
    """Every error of the settings of one run, where it was written.

    With ``is_to_send`` the variables that its headers name must be set. With ``is_stored``, what older versions let
    pass makes none.
    """
    variant, cell = arm
    settings, problems = resolved_settings(profile, variant, cell)
    if settings is not None:
        problems = [*header_problems(settings, is_to_send=is_to_send, is_stored=is_stored)]
    for path, problem in problems:
        yield LocatedError(_location_in_arm(tree, profile, arm, path), problem)
    for factor in cell:
        # In a file such a value may serve another that extends it.
        path = (*(() if is_load_factor(factor) else ("variants", variant)), *setting_of(factor))
        value, existing = follow(tree.values, path)
        if existing == path and tree.location(path).source == "--set":
            problem = (
                f"is {value_text(value)}, and sweep.{factor} replaces it in every run; leave out one of the two"
            )
            yield from tree.errors([(path, problem)])


def _location_in_arm(tree: Document, profile: Profile, arm: Arm, path: Steps) -> Location:
    """The location at which a setting of one run was written, or of what is nearest to it."""
    variant, cell = arm
    for factor, value in cell.items():
        if path[: len(setting_of(factor))] == setting_of(factor):
            values = tree.mapping("sweep").get(factor, [])
            return tree.location(("sweep", factor, *(i for i, each in enumerate(values) if is_same(each, value))))
    control = profile.variants[variant].control
    owner = control.of if control and variant not in tree.mapping("variants") else variant
    homes: list[Steps] = [("variants", owner, *path), path]
    if path[0] == "server":
        homes[1:] = [("engine", "python")] if path == ("server", "python") else []
        homes.append(("engine", "options", *path[1:]))
    existing = [home for home in homes if follow(tree.values, home)[1] == home]
    beside = [home for home in homes if follow(tree.values, home[:-1])[1] == home[:-1]]
    return tree.location(next(iter((*existing, *beside, homes[-1]))))


def _with_measured_peaks(profile: Profile, path: Path) -> Profile:
    """The profile with the peaks on file where it says ``measured``, stated in full: it means the same anywhere.

    Raises ProfileError when there are none on file.
    """
    try:
        stated = {name: resolved_hardware(name) for name in hardware_names(profile)}
    except UsageError as error:
        raise ProfileError(f"profile {profile.name} ({path}): hardware: {error}") from error

    def resolved(options: dict[str, Any]) -> dict[str, Any]:
        return options | ({"hardware": stated[options["hardware"]]} if options.get("hardware") in stated else {})

    engine = profile.engine.model_copy(update={"options": resolved(profile.engine.options)})
    variants = {
        name: variant.model_copy(update={"server": resolved(variant.server)})
        for name, variant in profile.variants.items()
    }
    return profile.model_copy(update={"hardware": stated[profile.hardware], "engine": engine, "variants": variants})


def hardware_names(profile: Profile) -> list[str]:
    """The names of hardware in a profile: that of FLOP/s, of the engine's options, and of variants' own."""
    options = [profile.engine.options, *(variant.server for variant in profile.variants.values())]
    return [profile.hardware, *(each["hardware"] for each in options if isinstance(each.get("hardware"), str))]


NOT_MEASURED: Final = frozenset({"cluster", "description", "needs_gpu", "step_time_model"})
"""Fields that change nothing of what is measured."""


def profile_sha256(profile: Profile) -> str:
    """SHA-256 of every value that is not the default of its field, as canonical JSON.

    The order of keys does not matter, but for variants and factors, whose order is that of the plan.
    """
    fields, omitted = options_class(profile.engine.kind).model_fields, dict.fromkeys(NOT_MEASURED, True)
    document = profile.model_dump(exclude_defaults=True, exclude={**omitted, "variants": {"__all__": omitted}})
    document["engine"]["options"] = {
        name: value
        for name, value in profile.engine.options.items()
        if name not in NOT_MEASURED
        and (fields[name].is_required() or encode(value) != encode(fields[name].default))
    }
    ordered = {key: list(document.get(key, {}).items()) for key in ("variants", "sweep")}
    return hashlib.sha256(encode({**document, **ordered})).hexdigest()


def engine_sha256(profile: Profile) -> str:
    """Hash of the baseline's server options: noise belongs to a server, not to a name."""
    options = variant_settings(profile, profile.baseline, {}).server.model_dump(
        mode="json", exclude=set(NOT_MEASURED)
    )
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
