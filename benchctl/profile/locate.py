"""Where profiles and engine presets are found.

A name is looked up in ``./profiles`` and then among the profiles that benchctl carries: those of the checkout,
or the copy inside an installed package.
"""

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchctl.errors import ProfileError

_PACKAGE = Path(__file__).resolve().parents[1]


def builtin_profiles() -> Path:
    """The directory of the profiles that benchctl carries."""
    installed = _PACKAGE / "_profiles"
    return installed if installed.is_dir() else _PACKAGE.parent / "profiles"


def profile_directories() -> tuple[Path, ...]:
    """Where a name is looked up, first match wins."""
    return (Path("profiles"), builtin_profiles())


def is_path(name_or_path: str) -> bool:
    """A path ends in .yaml or .yml, or has a separator; anything else is a name."""
    return name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path


def locate_profile(name_or_path: str) -> Path:
    """The file of a profile.

    Raises ProfileError, naming the nearest known profile, when there is none.
    """
    if is_path(name_or_path):
        path = Path(name_or_path)
        if not path.is_file():
            raise ProfileError(f"{name_or_path}: no such file. {known_profiles_text(path.stem)}")
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
    found: dict[str, Path] = {}
    for directory in directories:
        for path in sorted((*directory.glob("*.yaml"), *directory.glob("*.yml"))):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def known_profiles_text(wanted: str) -> str:
    """``Did you mean 'x'? Known profiles: x, y`` for a message about a profile that is not there."""
    known = profile_files()
    near = nearest(wanted, known)
    hint = f"Did you mean {near!r}? " if near else ""
    return f"{hint}Known profiles: {', '.join(known) or 'none'}"


def nearest(wanted: str, known: Iterable[str]) -> str | None:
    """The known name that ``wanted`` is probably a misspelling of."""
    near = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.6)
    return near[0] if near else None


def shown_path(path: Path) -> str:
    """A path as messages show it: relative to the current directory when it lies below it."""
    absolute = path.resolve()
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)
