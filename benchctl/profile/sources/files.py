"""Files of profiles and engine presets, found by name.

A name is looked up in ``./profiles`` and then among the profiles that benchctl carries: those of the checkout,
or the copy inside an installed package.
"""

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchctl.errors import ProfileError

_PACKAGE = Path(__file__).resolve().parents[2]


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
