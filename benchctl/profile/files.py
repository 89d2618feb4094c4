"""Files of profiles and engine presets by name, without validating any: fast, and faulty ones are listed too."""

import difflib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchctl.errors import ProfileError
from benchctl.profile.yaml import Document, LocatedError, Location, read_document, size_problem
from benchctl.untrusted.limits import PROFILE_BYTES

_PACKAGE = Path(__file__).resolve().parents[1]


def builtin_profiles() -> Path:
    """The directory of the profiles that benchctl carries."""
    installed = _PACKAGE / "_profiles"
    return installed if installed.is_dir() else _PACKAGE.parent / "profiles"


def profile_directories() -> tuple[Path, ...]:
    """Directories in which a name is looked up; the first match wins."""
    return (Path("profiles"), builtin_profiles())


def is_path(name_or_path: str) -> bool:
    """A path ends in .yaml or .yml, or has a separator; anything else is a name."""
    return name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path


def profile_file(name_or_path: str) -> Path:
    """The file of a profile.

    Raises ProfileError, naming the nearest known profile, when there is none.
    """
    if is_path(name_or_path):
        path = Path(name_or_path)
        if not path.is_file():
            raise ProfileError(
                f"{name_or_path}: {'not a regular' if path.exists() else 'no such'} file. "
                f"{known_profiles_text(path.stem)}"
            )
        return path
    for path in named_files(name_or_path, profile_directories()):
        return path
    raise ProfileError(f"no profile is called {name_or_path!r}. {known_profiles_text(name_or_path)}")


def named_files(name: str, directories: Iterable[Path]) -> Iterator[Path]:
    """The files that a name stands for, best first."""
    for directory in directories:
        for suffix in (".yaml", ".yml"):
            path = directory / f"{name}{suffix}"
            if path.is_file():
                yield path


def profile_files() -> dict[str, Path]:
    """Every profile that is found by name, in the order of the names."""
    return _files_by_name(profile_directories())


def preset_files() -> dict[str, Path]:
    """Every engine preset that is found by name, in the order of the names."""
    return _files_by_name(directory / "engines" for directory in profile_directories())


def _files_by_name(directories: Iterable[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for directory in directories:
        for path in sorted((*directory.glob("*.yaml"), *directory.glob("*.yml"))):
            files.setdefault(path.stem, path)
    return dict(sorted(files.items()))


def known_profiles_text(name: str) -> str:
    """Part of a message about a missing profile: ``Did you mean 'x'? Known profiles: x, y``."""
    names = profile_files()
    hint = did_you_mean(name, names)
    return f"{hint.capitalize()} Known profiles: {', '.join(names) or 'none'}".strip()


def did_you_mean(word: object, names: Iterable[str], prefix: str = "") -> str:
    """The hint ``did you mean 'x'?`` after ``prefix``, where ``word`` probably misspells a name; else no text."""
    matches = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6) if isinstance(word, str) else ()
    return f"{prefix}did you mean {matches[0]!r}?" if matches else ""


def display_path(path: Path) -> str:
    """A path as messages show it: relative to the current directory when it lies below it."""
    absolute, current = path.resolve(), Path.cwd()
    return str(absolute.relative_to(current)) if absolute.is_relative_to(current) else str(absolute)


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


def list_profiles() -> tuple[ProfileEntry, ...]:
    """The profiles that are found by name, in the order of their names; faulty ones too."""
    return tuple(
        ProfileEntry(name=name, path=path, description=_description(path)) for name, path in profile_files().items()
    )


def grouped_profiles() -> dict[str, tuple[ProfileEntry, ...]]:
    """The profiles that are found by name, in their groups; those that benchctl does not carry come first."""
    entries = {entry.name: entry for entry in list_profiles()}
    carried = {name for names in GROUPS.values() for name in names}
    groups = {OWN: tuple(entry for name, entry in entries.items() if name not in carried)}
    for title, names in GROUPS.items():
        groups[title] = tuple(entries[name] for name in names if name in entries)
    return {title: members for title, members in groups.items() if members}


def _description(path: Path) -> str:
    values = read_file(path, []).values
    if not values:
        return "not readable; 'benchctl profiles validate' reports the error"
    return str(values.get("description", ""))


def read_file(path: Path, errors: list[LocatedError]) -> Document:
    """One profile or preset by itself; an empty one, with an error more, where it cannot be read."""
    source = display_path(path)
    try:
        with path.open("rb") as file:
            content = file.read(PROFILE_BYTES + 1)
            size = max(len(content), os.fstat(file.fileno()).st_size)
        if size <= PROFILE_BYTES:
            return read_document(content.decode(), source, errors)
        problem = size_problem(size)
    except UnicodeDecodeError as error:
        problem = f"not readable as UTF-8: {error.reason} at byte {error.start}; save the file as UTF-8"
    except OSError as error:
        problem = f"not readable: {error.strerror}; check the file and its permissions"
    errors.append(LocatedError(Location(source), problem, hides_keys=True))
    return Document({}, {(): Location(source)})
