"""The profiles that are found by name, without validating any: fast, and faulty ones are listed too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchctl.profile.sources.files import display_path, profile_files
from benchctl.profile.sources.yaml_text import read_document

OWN: Final = "yours"
"""Group of profiles that benchctl does not carry."""
GROUPS: Final = {
    "start here": ("flag", "two-builds", "own-prompts", "aa", "ci-smoke"),
    "sampler and guidance": (
        "topk-sweep",
        "structured-output",
        "lora",
        "controls",
        "natural",
        "model-size-sweep",
        "guided-idle",
        "noop-skip",
        "fused-vs-two-phase",
        "guided-switches",
        "lenvm-50x16",
        "lenvm-model-sizes",
    ),
    "speculation": ("speculation", "bonus-tokens"),
    "load": ("rate-limited", "azure-replay", "rtx4090-replay", "llm-mock-batch", "llm-mock-cache"),
    "models and calibration": (*(f"steptime-w{number}" for number in range(1, 6)), "steptime-v1"),
}
"""The profiles that benchctl carries by what they are for, each group in the order to read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEntry:
    """A profile that is found by name."""

    name: str
    path: Path
    description: str

    @property
    def group(self) -> str:
        """The group in ``GROUPS``, else ``OWN``."""
        return next((title for title, names in GROUPS.items() if self.name in names), OWN)


def list_profiles() -> tuple[ProfileEntry, ...]:
    """The profiles that are found by name, in the order of their names; faulty ones too."""
    return tuple(
        ProfileEntry(name=name, path=path, description=_description(path)) for name, path in profile_files().items()
    )


def grouped_profiles() -> dict[str, tuple[ProfileEntry, ...]]:
    """The profiles that are found by name, in their groups; those that benchctl does not carry come first."""
    entries = list_profiles()
    groups = {OWN: tuple(entry for entry in entries if entry.group == OWN)}
    for title, names in GROUPS.items():
        members = (entry for entry in entries if entry.name in names)
        groups[title] = tuple(sorted(members, key=lambda entry: names.index(entry.name)))
    return {title: members for title, members in groups.items() if members}


def _description(path: Path) -> str:
    try:
        document = read_document(path.read_text(encoding="utf-8"), display_path(path), [])
    except (OSError, UnicodeDecodeError):
        document = None
    if not document:
        return "not readable; 'benchctl profiles validate' reports the error"
    return str(document.get("description", ""))
