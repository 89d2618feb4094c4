"""The profiles that are found by name, without validating any: fast, and faulty ones are listed too."""

from dataclasses import dataclass
from pathlib import Path

from benchctl.profile.sources.files import display_path, profile_files
from benchctl.profile.sources.yaml_text import read_document


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEntry:
    """A profile that is found by name."""

    name: str
    path: Path
    description: str


def list_profiles() -> tuple[ProfileEntry, ...]:
    """The profiles that are found by name, in the order of their names; faulty ones too."""
    return tuple(
        ProfileEntry(name=name, path=path, description=_description(path)) for name, path in profile_files().items()
    )


def _description(path: Path) -> str:
    try:
        document = read_document(path.read_text(encoding="utf-8"), display_path(path), [])
    except (OSError, UnicodeDecodeError):
        document = None
    if not document:
        return "not readable; 'benchctl profiles validate' reports the error"
    return str(document.get("description", ""))
