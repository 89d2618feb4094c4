"""Words that a shell completes: names of profiles and engines, and result directories.

They are looked up in directories alone: a key press must not wait for libraries that measure or analyse.
"""

from collections.abc import Iterable

_MANIFEST = "manifest.json"


def complete_profile(incomplete: str) -> list[str]:
    """Names of profiles that begin so; the shell adds files by itself where there are none."""
    from benchctl.profile.sources.files import profile_files

    return _beginning(incomplete, profile_files())


def complete_engine(incomplete: str) -> list[str]:
    """Names of engine presets and kinds that begin so."""
    from benchctl.profile.engine_table import ENGINES
    from benchctl.profile.sources.files import preset_files

    return _beginning(incomplete, sorted({*preset_files(), *ENGINES}))


def complete_results(incomplete: str) -> list[str]:
    """Result directories below the parent of results that begin so, ``latest`` of each experiment first."""
    from benchctl.cli.options.experiment import RESULTS

    directories = (path.parent for path in RESULTS.glob(f"*/*/{_MANIFEST}"))
    ordered = sorted(directories, key=lambda path: (path.name != "latest", str(path)))
    return _beginning(incomplete, map(str, ordered))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
