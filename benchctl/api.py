"""The Python interface: read, compare and load what the command line measures.

    import benchctl

    experiment = benchctl.load_results("results/topk-sweep/latest")
    for row in experiment.sweep:
        print(row.label, row.values["wall_ratio"])

    comparison = benchctl.compare("results/x:baseline", "results/x:guided", metrics=["step_ms"])
    print(comparison.verdict, comparison.exit_code)

These names are kept stable from version to version; everything else in the package may move. Errors are those of
``benchctl.errors``; each message names location, value and remedy.
"""

from collections.abc import Sequence
from pathlib import Path

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.foreign import compare_paths
from benchctl.profile.load import load_profile
from benchctl.profile.model import Profile

__all__ = [
    "AnalyzedExperiment",
    "CompareOptions",
    "Comparison",
    "Profile",
    "compare",
    "load_profile",
    "load_results",
]


def load_results(path: str | Path, *, allow_suspect: bool = False) -> AnalyzedExperiment:
    """A result directory with everything that is derived from it: runs, cells, sweep,
    ladders, findings, warnings.

    A damaged or unfinished directory is read as far as possible; ``damage`` lists the rest. Suspect runs count
    only with ``allow_suspect``. Raises UsageError if ``path`` is none.
    """
    return analyze_directory(Path(path), allow_suspect=allow_suspect)


def compare(
    a: str | Path,
    b: str | Path,
    *,
    threshold: float | None = None,
    metrics: Sequence[str] = (),
    options: CompareOptions | None = None,
) -> Comparison:
    """Compare B with A, as ``benchctl compare A B`` does, and return the verdict with every ratio and interval.

    ``a`` and ``b`` are ``DIR``, ``DIR:variant``, or result files of other tools. ``threshold`` is the fraction that
    counts as a change (None: that of the profile), ``metrics`` those that decide (the profile's primary metrics if
    empty). ``options`` replaces both. Raises InvalidDataError if the sides may not be compared, and says why.
    """
    return compare_paths(str(a), str(b), options or CompareOptions(margin_frac=threshold, metrics=tuple(metrics)))
