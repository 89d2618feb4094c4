"""The identity of an experiment: one SHA-256 that a new field of the profile does not change.

It covers every value that differs from the default of its field. So

* a new field whose default means "as before" leaves the identity of every older profile as it was;
* a value that is written out and equals the default is the same as one that is left out;
* descriptions, the step-time model, the demand for a GPU and the jobs of a cluster do not count: none changes what
  is measured.
"""

import hashlib
from typing import Any, Final

from benchctl.profile.choices import Section
from benchctl.profile.engine_options import options_class
from benchctl.profile.model import Profile
from benchctl.records.files import encode

NOT_MEASURED: Final = frozenset({"cluster", "description", "needs_gpu", "step_time_model"})
"""Fields that change nothing of what is measured."""


def profile_sha256(profile: Profile) -> str:
    """SHA-256 of every value that is not the default of its field, as canonical JSON.

    The order of keys does not matter, but for variants and factors, whose order is that of the plan.
    """
    options = options_class(profile.engine.kind).model_construct(**profile.engine.options)
    document = _not_default(profile)
    document["engine"]["options"] = _not_default(options)
    ordered = {key: list(document.get(key, {}).items()) for key in ("variants", "sweep")}
    return hashlib.sha256(encode({**document, **ordered})).hexdigest()


def _not_default(section: Section) -> dict[str, Any]:
    """The values of a section, and of those below it, that differ from their defaults."""
    values = dict[str, Any]()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name in NOT_MEASURED:
            continue
        if isinstance(value, Section):
            nested = _not_default(value)
            if nested or not isinstance(field.default, Section):
                values[name] = nested
        elif isinstance(section, Profile) and name == "variants":
            values[name] = {key: _not_default(variant) for key, variant in value.items()}
        elif field.is_required() or encode(value) != encode(field.default):
            values[name] = value
    return values
