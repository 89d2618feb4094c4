"""The identity of an experiment: one SHA-256 that a new field of the profile does not change.

It covers every value that differs from the *first* default of its field, which is that of the version of benchctl
that introduced the field. So

* a new field whose default means "as before" leaves the identity of every older profile as it was;
* a value that is written out and equals the default is the same as one that is left out;
* descriptions, the step-time model, the demand for a GPU and the jobs of a cluster do not count: none changes what
  is measured;
* a default that changes later goes into ``FORMER_DEFAULTS`` with its first value. An older profile, which has that
  value, keeps its identity; one with the new default gets another.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from benchctl.profile.choices import Section
from benchctl.profile.engine_options import options_class
from benchctl.profile.model import Profile
from benchctl.profile.yaml import read_document
from benchctl.records.files import encode

FORMER_DEFAULTS: Final[Mapping[str, Any]] = {}
"""First default of every field whose default has changed since: by dotted path, with ``<name>`` for the name of a
variant; an option of an engine as ``<kind>.<option>``."""


NOT_MEASURED: Final = frozenset({"cluster", "description", "needs_gpu", "step_time_model"})
"""Fields that change nothing of what is measured."""


def profile_sha256(profile: Profile, former_defaults: Mapping[str, Any] = FORMER_DEFAULTS) -> str:
    """SHA-256 of every value that is not the first default of its field, as canonical JSON.

    The order of keys does not matter, but for variants and factors, whose order is that of the plan.
    """
    options = options_class(profile.engine.kind).model_construct(**profile.engine.options)
    document = _not_default(profile, "", former_defaults)
    document["engine"]["options"] = _not_default(options, f"{profile.engine.kind}.", former_defaults)
    return _sha256(document)


def is_profile_of(text: str, profile: Profile, sha256: str) -> bool:
    """True where a stored ``profile.yaml`` is the one that its manifest names by ``sha256``.

    Manifests of schema 1 hold the digest of the whole document with all defaults of its version of benchctl.
    """
    if sha256 == profile_sha256(profile):
        return True
    document: dict[str, Any] = read_document(text, "profile.yaml", [])
    if document.get("comparison") == {"estimator": "robust"}:  # schema 1 left the default of this section out
        document = {key: value for key, value in document.items() if key != "comparison"}
    return sha256 == _sha256(document)


def _sha256(document: Mapping[str, Any]) -> str:
    ordered = {key: list(document.get(key, {}).items()) for key in ("variants", "sweep")}
    return hashlib.sha256(encode({**document, **ordered})).hexdigest()


def _not_default(section: Section, prefix: str, former_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section, and of those below it, that differ from their first defaults."""
    values = dict[str, Any]()
    for name, value in section:
        if name in NOT_MEASURED:
            continue
        field, path = type(section).model_fields[name], f"{prefix}{name}"
        if isinstance(value, Section):
            nested = _not_default(value, f"{path}.", former_defaults)
            if nested or not isinstance(field.default, Section):
                values[name] = nested
        elif path == "variants":
            values[name] = {key: _not_default(v, f"{path}.<name>.", former_defaults) for key, v in value.items()}
        elif field.is_required() or encode(value) != encode(former_defaults.get(path, field.default)):
            values[name] = value
    return values
