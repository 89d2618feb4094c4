"""Read and write profiles.

A profile is read in layers (``sources``): the files it extends, itself, its engine preset, the command line. The
result is validated as a whole, and every error is reported at once with its line.
"""

import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Final

from benchctl.errors import DeprecatedWordWarning, ProfileError, RecordError, UsageError
from benchctl.profile.checks import profile_errors, unfit_engine
from benchctl.profile.controls import with_controls
from benchctl.profile.engine_options import ENGINES, options_class
from benchctl.profile.errors import profile_error, validate
from benchctl.profile.files import profile_file
from benchctl.profile.layers import Layers, over
from benchctl.profile.model import EngineSettings, Profile
from benchctl.profile.yaml import STORED, LocatedDict, Location, dump_document, located, plain_value_errors
from benchctl.records.stores.peaks_store import MEASURED, resolved_hardware

_HARDWARE: Final = "hardware"


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
    that headers name must be set here. Raises ProfileError with every error; issues a DeprecatedWordWarning for
    every older word.
    """
    path, layers = profile_file(name_or_path), Layers()
    options = {"--engine": engine, "--blocks": blocks, "--seed": seed}
    above = [layers.option(name, (name[2:],), value) for name, value in options.items() if value is not None]
    above += [layers.assignment(assignment) for assignment in overrides]
    tree = _layered(layers, path, above, kind=None)
    kind = tree.mapping("engine").get("kind")
    if isinstance(kind, str) and kind in ENGINES:  # overlays of this kind count
        tree = _layered(layers, path, above, kind=kind)
    for deprecation in dict.fromkeys(layers.deprecations):
        warnings.warn(str(deprecation), DeprecatedWordWarning, stacklevel=2)
    return _with_measured_peaks(_profile(layers, tree, is_to_send=is_to_send), path)


def _layered(layers: Layers, path: Path, above: Sequence[LocatedDict], *, kind: str | None) -> LocatedDict:
    """The file with what it extends, as an engine of this kind reads it, and the command line over it."""
    return layers.with_preset(reduce(over, above, layers.profile_file(path, kind)))


def parse_profile(text: str, source: str, *, is_to_send: bool = False) -> Profile:
    """Read a complete profile from its text, for example the ``profile.yaml`` of a result directory.

    ``source`` names the text in messages. With ``is_to_send`` the variables that headers name must be set here.
    Raises ProfileError with every error.
    """
    layers = Layers()
    tree = layers.text(text, source, STORED)
    if "extends" in tree:
        problem = "a stored profile is complete and cannot extend another; write out what it extends"
        layers.refuse(tree.error(problem, "extends"))
        tree = tree.without("extends")
    return _profile(layers, layers.with_preset(tree), is_to_send=is_to_send, is_stored=True)


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
    layers = Layers()
    return _profile(layers, layers.with_preset(layers.plain(plain, Location(source))), is_to_send=is_to_send)


def dump_profile(profile: Profile) -> str:
    """The complete profile as YAML; ``parse_profile`` reads it back as the same profile."""
    return dump_document(profile.model_dump(mode="json"))


def _profile(layers: Layers, tree: LocatedDict, *, is_to_send: bool = False, is_stored: bool = False) -> Profile:
    if unusable := tuple(plain_value_errors(tree)):
        raise profile_error((*layers.errors, *unusable))
    if (unfit := unfit_engine(tree)) is not None:
        raise profile_error((unfit,))
    tree = with_controls(tree, layers.errors)
    profile, type_errors = validate(tree, Profile, reports_missing=layers.is_whole)
    errors = (*layers.errors, *type_errors, *profile_errors(tree, is_to_send=is_to_send, is_stored=is_stored))
    if profile is None or errors:
        raise profile_error(errors)
    return profile.model_copy(update={"engine": _complete_engine(profile.engine)})


def _with_measured_peaks(profile: Profile, path: Path) -> Profile:
    """The profile with the peaks on file where it says ``measured``, stated in full: it means the same anywhere.

    Raises ProfileError when there are none on file.
    """

    def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
        hardware = options.get(_HARDWARE)
        return {**options, _HARDWARE: resolved_hardware(hardware)} if isinstance(hardware, str) else dict(options)

    if not any(hardware.startswith(MEASURED) for hardware in hardware_names(profile)):
        return profile
    try:
        return profile.model_copy(
            update={
                _HARDWARE: resolved_hardware(profile.hardware),
                "engine": profile.engine.model_copy(update={"options": resolved(profile.engine.options)}),
                "variants": {
                    name: variant.model_copy(update={"server": resolved(variant.server)})
                    for name, variant in profile.variants.items()
                },
            }
        )
    except UsageError as error:
        raise ProfileError(f"profile {profile.name} ({path}): hardware: {error}") from error


def hardware_names(profile: Profile) -> list[str]:
    """The names of hardware in a profile: that of FLOP/s, of the engine's options, and of variants' own."""
    options = [profile.engine.options, *(variant.server for variant in profile.variants.values())]
    return [profile.hardware, *(each[_HARDWARE] for each in options if isinstance(each.get(_HARDWARE), str))]


def _complete_engine(engine: EngineSettings) -> EngineSettings:
    """The engine with all its options written out, as far as they are valid without a variant's."""
    tree = located(engine.options, Location("engine"))
    options, _ = validate(tree, options_class(engine.kind))
    if options is None:
        return engine
    return engine.model_copy(update={"options": options.model_dump(mode="json")})
