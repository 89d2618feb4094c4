"""The identity of an experiment: one SHA-256 that a new field of the profile does not change.

It covers every value that differs from the *first* default of its field, which is that of the version of benchctl
that introduced the field. So

* a new field whose default means "as before" leaves the identity of every older profile as it was;
* a value that is written out and equals the default is the same as one that is left out;
* a default that changes later goes into ``FORMER_DEFAULTS`` with its first value. An older profile, which has that
  value, keeps its identity; one with the new default gets another.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from pydantic.fields import FieldInfo

from benchctl.profile.engine_table import options_class
from benchctl.profile.model import Profile
from benchctl.profile.section import Section
from benchctl.profile.sources.yaml_text import read_document
from benchctl.records.jsonl import encode

FORMER_DEFAULTS: Final[Mapping[str, Any]] = {}
"""First default of every field whose default has changed since: by dotted path, with ``<name>`` for the name of a
variant; an option of an engine as ``<kind>.<option>``."""
_DEFAULT_COMPARISON: Final = {"estimator": "robust"}


def profile_sha256(profile: Profile, former_defaults: Mapping[str, Any] = FORMER_DEFAULTS) -> str:
    """SHA-256 of every value that is not the first default of its field, as canonical JSON.

    The order of keys does not matter, but for variants and factors, whose order is that of the plan.
    """
    identity = _Identity(former_defaults)
    document = identity.of_section(profile, "")
    options = identity.of_options(profile.engine.kind, profile.engine.options)
    return _sha256(document | {"engine": document["engine"] | {"options": options}})


def is_profile_of(text: str, profile: Profile, sha256: str) -> bool:
    """Whether a stored ``profile.yaml`` is the one that its manifest names by ``sha256``.

    Manifests of schema 1 hold the digest of the whole document, with the defaults that its version of benchctl had:
    they are all in ``text``.
    """
    if sha256 == profile_sha256(profile):
        return True
    document: dict[str, Any] = read_document(text, "profile.yaml", [])
    if document.get("comparison") == _DEFAULT_COMPARISON:  # left out since the version that introduced it
        document = {key: value for key, value in document.items() if key != "comparison"}
    return sha256 == _sha256(document)


def _sha256(document: Mapping[str, Any]) -> str:
    ordered = {key: list(document.get(key, {}).items()) for key in ("variants", "sweep")}
    return hashlib.sha256(encode({**document, **ordered})).hexdigest()


class _Identity:
    """The values of a profile that differ from first defaults."""

    def __init__(self, former_defaults: Mapping[str, Any]) -> None:
        self._former_defaults = former_defaults

    def of_section(self, section: Section, prefix: str) -> dict[str, Any]:
        values = dict[str, Any]()
        for name, field in type(section).model_fields.items():
            value, path = getattr(section, name), f"{prefix}{name}"
            if isinstance(value, Section):
                nested = self.of_section(value, f"{path}.")
                if nested or not isinstance(field.default, Section):
                    values[name] = nested
            elif name == "variants" and isinstance(value, dict):
                values[name] = {key: self.of_section(variant, f"{path}.<name>.") for key, variant in value.items()}
            elif not self._is_first_default(value, path, field):
                values[name] = value
        return values

    def of_options(self, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        fields = options_class(kind).model_fields
        return {
            name: value
            for name, value in options.items()
            if name not in fields or not self._is_first_default(value, f"{kind}.{name}", fields[name])
        }

    def _is_first_default(self, value: Any, path: str, field: FieldInfo) -> bool:
        if path in self._former_defaults:
            return encode(value) == encode(self._former_defaults[path])
        return not field.is_required() and encode(value) == encode(field.default)
