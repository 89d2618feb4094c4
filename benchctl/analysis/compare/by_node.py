"""Results by node of every variant of a directory: those of its comparison with the baseline."""

from collections.abc import Sequence

from benchctl.analysis.compare.metric_comparison import roles_of
from benchctl.analysis.experiment.deciding import deciding_between
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.summary.nodes import NodeResults, results_by_node
from benchctl.records.schema import current_metric_name


def nodes_of_variants(pairs: Sequence[PairedRuns], confidence: float) -> tuple[NodeResults, ...]:
    """One for each variant whose blocks ran on more than one node; ``pairs`` are of one directory.

    None where the profile, which names the deciding metrics, cannot be read.
    """
    by_variant: dict[str, list[tuple[PairedRuns, Sequence[str]]]] = {}
    for paired in pairs:
        if paired.a.profile_or_none is not None:
            by_variant.setdefault(paired.pair.b.variant, []).append((paired, _deciding(paired)))
    variants = (results_by_node(cells, confidence) for cells in by_variant.values())
    return tuple(results for results in variants if results is not None)


def _deciding(paired: PairedRuns) -> list[str]:
    named = tuple(dict.fromkeys(map(current_metric_name, paired.a.profile.primary_metrics)))
    names = deciding_between(named, paired.pair, (paired.a, paired.b)).names
    roles = roles_of(names, is_forced=paired.a.results.manifest.stop != "natural")
    return [name for name, role in roles.items() if role == "deciding"]
