"""Engine presets: the engine that a name stands for, and the models that it substitutes.

A profile for a current device names models of seven billion parameters. A preset for a small machine lists under
``models`` a directory for each such name, and the profile then *is* about those: results, costs and comparisons use
no other. A name that the preset does not list stays.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchctl.profile.engine_table import ENGINES
from benchctl.profile.model import Profile
from benchctl.profile.sources.files import did_you_mean, preset_files
from benchctl.profile.sources.located import (
    LocatedDict,
    LocatedError,
    LocatedList,
    Location,
    changed_at,
    value_text,
)

_FACTORS: Final = ("model", "value_model", "server.value_model")
_DEFAULT_MODEL: Final = Profile.model_fields["model"].default


def read_preset(engine: LocatedDict) -> Path | LocatedDict | LocatedError:
    """The file of the preset that ``engine`` names; for a bare kind without a file, an engine without options."""
    name, files, kinds = engine["preset"], preset_files(), tuple(ENGINES)
    if isinstance(name, str) and name in files:
        return files[name]
    location = engine.location_of("preset")
    if name in kinds:
        return LocatedDict({"kind": name}, location, {"kind": location})
    problem = (
        f"{value_text(name)} is neither an engine preset nor a kind of engine; presets are {', '.join(files)}, "
        f"kinds are {', '.join(kinds)}{did_you_mean(name, (*files, *kinds), '; ')}"
    )
    return LocatedError(location, problem)


def with_models(profile: LocatedDict, substitutes: LocatedDict) -> LocatedDict:
    """The profile with every model replaced that has a substitute."""
    if not substitutes:
        return profile

    def substitute(value: Any) -> Any:
        if isinstance(value, LocatedList):
            return LocatedList([substitute(item) for item in value], value.locations)
        return substitutes.get(value, value) if isinstance(value, str) else value

    def at_keys(*keys: str) -> Callable[[LocatedDict], LocatedDict]:
        def change(section: LocatedDict) -> LocatedDict:
            for key in keys:
                if key in section:
                    section = section.with_value(key, substitute(section[key]))
            return section

        return change

    model = profile.get("model", _DEFAULT_MODEL)
    location = profile.locations.get("model", Location(profile.location.source, profile.location.line, ("model",)))
    profile = profile.with_value("model", substitute(model), location)
    profile = changed_at(profile, ("sweep",), at_keys(*_FACTORS))
    profile = changed_at(profile, ("engine", "options"), at_keys("value_model"))
    for variant in profile.mapping("variants"):
        profile = changed_at(profile, ("variants", variant, "server"), at_keys("value_model"))
    return profile
