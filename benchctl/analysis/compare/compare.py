"""The comparison of two sides: cells matched, metrics of each cell compared, all tests corrected together.

    sides ▸ load ▸ match cells ▸ require comparable ▸ compare cells ▸ correct for several tests ▸ answers ▸ causes

A pure function of the directories: no clock, no randomness, and the same numbers on every machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from benchctl.analysis.compare.answers import AnswerOptions, with_answers
from benchctl.analysis.compare.attribution import with_decompositions
from benchctl.analysis.compare.cell import compare_cell
from benchctl.analysis.compare.correction import correct_for_multiple_tests
from benchctl.analysis.compare.metric_comparison import Rules, roles_of
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.warnings import (
    measurement_warnings,
    node_warnings,
    statistical_warnings,
    suspect_warnings,
)
from benchctl.analysis.experiment.deciding import DecidingMetrics, deciding_between
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import CellPair, Side, match_cells, parse_side
from benchctl.analysis.experiment.stopping import num_extensions_of, num_looks_of
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.statistics.block_ratio import Estimator
from benchctl.analysis.step_time.explain import explaining_model
from benchctl.analysis.summary.nodes import results_by_node
from benchctl.analysis.validity.comparability.declared import declared_settings
from benchctl.analysis.validity.comparability.differences import (
    Difference,
    configuration_differences,
    experiment_differences,
    refused_differences,
    require_comparable,
    run_differences,
)
from benchctl.analysis.validity.comparability.hardware import hardware_differences
from benchctl.analysis.validity.integrity import require_intact
from benchctl.analysis.validity.noise_floor_fit import other_machine_warning
from benchctl.errors import UsageError
from benchctl.profile.sources.files import did_you_mean
from benchctl.records.noise import NOISE_FILE, MetricNoise, load_noise
from benchctl.records.record import ResultWarning
from benchctl.records.schema import current_metric_name
from benchctl.untrusted.text import visible_line

__all__ = [
    "CompareOptions",
    "Side",
    "compare_experiments",
    "compare_sides",
    "load_sides",
    "parse_side",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of a comparison. Raises UsageError for a value out of range."""

    margin_frac: float = 0.01
    """The threshold: a smaller change does not count."""
    equivalence_margin_frac: float | None = None
    """Inside it two sides are called equivalent; None: inside the threshold."""
    confidence: float = 0.95
    estimator: Estimator | None = None
    """None: that of the profile."""
    metrics: tuple[str, ...] = ()
    """Deciding metrics; none: the primary metrics of the profile that both sides record."""
    allow: tuple[str, ...] = ()
    """Differences that are allowed beside those that both profiles allow."""
    allow_failed: bool = False
    """Judge the completed requests although others failed."""
    allow_suspect: bool = False
    """Count suspect runs."""
    allow_altered: bool = False
    """Judge files that were altered after they were measured."""
    noise: Mapping[str, MetricNoise] | None = None
    """Noise floors by metric; None: those on file in the directories, ``{}``: none."""
    noise_source: str = ""
    """The A/A experiment of ``noise``."""
    judge: str | None = None
    """Name of the judge of answers; None: ``json`` where requests ask for JSON without gold answers, else
    ``numeric``."""
    quality_margin_points: float | None = None
    """Margin with which quality decides as well; None: quality is reported and decides nothing."""
    step_time_model: Path | None = None
    """Model that explains the change of the mean step; None: the profile's, else a fit to the baseline."""

    def __post_init__(self) -> None:
        margin, equivalence, confidence = self.margin_frac, self.equivalence_margin_frac, self.confidence
        if not 0 <= margin < 1:
            raise UsageError(f"the threshold is {margin:.3g}; it is a fraction from 0 to below 1: 0.01 or 1%")
        if equivalence is not None and not 0 < equivalence < 1:
            message = "it is a fraction above 0 and below 1: 0.02 or 2%"
            raise UsageError(f"the equivalence margin is {equivalence:.3g}; {message}")
        if not 0.5 <= confidence < 1:
            raise UsageError(
                f"the confidence is {confidence:.3g}; it must be from 0.5 to below 1, for example 0.95"
            )


def compare_sides(a_side: Side, b_side: Side, options: CompareOptions) -> Comparison:
    """Load two sides and compare B with A.

    Raises NotComparableError where they differ in more than the declared factor, AlteredError where files were
    altered after they were measured, RecordError where results are damaged, UsageError for a variant or metric that
    does not exist.
    """
    return compare_experiments(*load_sides(a_side, b_side, options), options)


def load_sides(
    a_side: Side, b_side: Side, options: CompareOptions
) -> tuple[tuple[Experiment, Side], tuple[Experiment, Side]]:
    """The experiments of two sides, that of one directory once."""
    a = load_experiment(a_side.path, allow_suspect=options.allow_suspect)
    is_one = b_side.path.resolve() == a_side.path.resolve()
    b = a if is_one else load_experiment(b_side.path, allow_suspect=options.allow_suspect)
    return (a, a_side), (b, b_side)


def compare_experiments(
    reference: tuple[Experiment, Side], other: tuple[Experiment, Side], options: CompareOptions
) -> Comparison:
    """Compare loaded sides, as ``compare_sides`` does; one directory is one and the same ``Experiment``.

    Suspect runs count where the experiment was loaded with ``allow_suspect``.
    """
    (a, a_side), (b, b_side) = reference, other
    named = deciding_metrics(options.metrics or a.profile.primary_metrics)
    pairs = match_cells(a, a_side, b, b_side)
    altered, allowed = _require_comparable((a, b), pairs, options)
    num_looks = num_looks_of(a.results.manifest, b.results.manifest)
    confidence = 1 - (1 - options.confidence) / num_looks
    noise, noise_source, misfits = (
        noise_of(a, b) if options.noise is None else (options.noise, options.noise_source, ())
    )
    rules = Rules(
        margin_frac=options.margin_frac,
        confidence=confidence,
        is_paired=pairs[0].pairing != "unpaired",
        noise=noise,
        equivalence_margin_frac=options.equivalence_margin_frac,
        estimator=options.estimator or a.estimator,
    )
    paired_runs = [PairedRuns.of(pair, (a, b)) for pair in pairs]
    uncorrected = []
    for cell in paired_runs:
        deciding = DecidingMetrics(named) if options.metrics else deciding_between(named, cell.pair, (a, b))
        compared = compare_cell(
            cell,
            roles_of(deciding.names, is_forced=a.results.manifest.stop != "natural"),
            rules,
            allow_failed=options.allow_failed,
        )
        uncorrected.append(replace(compared, unrecorded=deciding.unrecorded))
    cells = with_answers(
        correct_for_multiple_tests(uncorrected, confidence),
        pairs,
        (a, b),
        AnswerOptions(judge=options.judge, margin_points=options.quality_margin_points, confidence=confidence),
    )
    model = explaining_model((a, b), [run for pair in pairs for run in pair.a_runs], options.step_time_model)
    cells = with_decompositions(cells, paired_runs, confidence, rules.estimator, model)
    deciding_in = [[metric.metric.name for metric in cell.deciding] for cell in cells]
    nodes = results_by_node(zip(paired_runs, deciding_in, strict=True), confidence, rules.estimator)
    names = side_names(a_side, b_side)
    return Comparison(
        a_name=names[0],
        b_name=names[1],
        pairing=pairs[0].pairing,
        margin_frac=options.margin_frac,
        equivalence_margin_frac=options.equivalence_margin_frac,
        confidence=confidence,
        num_looks=num_looks,
        num_extensions=num_extensions_of(a.results.manifest, b.results.manifest),
        cells=cells,
        allowed=allowed,
        warnings=(
            *altered,
            *(suspect_warnings(pairs, names) if a.allow_suspect or b.allow_suspect else ()),
            *misfits,
            *measurement_warnings(a.results, b.results, paired_runs),
            *statistical_warnings(cells),
            *node_warnings(nodes),
        ),
        nodes=nodes,
        noise={name: noise for name, noise in rules.noise.items() if name in chain(*deciding_in)},
        noise_source=noise_source,
    )


def _require_comparable(
    sides: tuple[Experiment, Experiment], pairs: Sequence[CellPair], options: CompareOptions
) -> tuple[tuple[ResultWarning, ...], tuple[Difference, ...]]:
    """Warnings and differences that are allowed. Raises AlteredError or NotComparableError for other ones."""
    a, b = sides
    manifests = a.results.manifest, b.results.manifest
    hosts = {manifest.host.hostname for manifest in manifests}
    has_one_experiment = manifests[0] == manifests[1]
    runs_of_cells = {pair.label: (pair.a_runs, pair.b_runs) for pair in pairs}
    declared = {pair.label: _declared_between(pair, sides) for pair in pairs}
    differences = (
        *experiment_differences(a.results, b.results),
        *configuration_differences(runs_of_cells, declared, hostname=hosts.pop() if len(hosts) == 1 else None),
        *run_differences(runs_of_cells, declared, has_one_experiment=has_one_experiment),
        *hardware_differences(runs_of_cells, has_one_experiment=has_one_experiment),
    )
    shared = tuple(p for p in a.profile.allowed_differences if p in b.profile.allowed_differences)
    patterns = (*shared, *options.allow)
    refused = refused_differences(differences, patterns)
    altered = require_intact(a.results, b.results, refused, allow_altered=options.allow_altered)
    return altered, require_comparable(differences, patterns)


def _declared_between(pair: CellPair, sides: tuple[Experiment, Experiment]) -> frozenset[str]:
    """Patterns of the settings in which both profiles say that the two arms differ."""
    of_profiles = []
    for experiment in sides:
        a, b = experiment.settings(pair.a), experiment.settings(pair.b)
        kind = experiment.results.manifest.engine
        of_profiles.append(frozenset() if a is None or b is None else declared_settings(a, b, kind))
    return of_profiles[0] & of_profiles[1]


def noise_of(a: Experiment, b: Experiment) -> tuple[dict[str, MetricNoise], str, tuple[ResultWarning, ...]]:
    """The noise on file in the directories; of two, the larger floor of each metric. With its files and the A/A
    experiments that measured it, and a warning for each noise that is left out because its machine measured no run.
    """
    held = [(one, floor) for one in dict.fromkeys((a, b)) if (floor := load_noise(one.path)) is not None]
    misfits = [other_machine_warning(floor, experiment.results) for experiment, floor in held]
    fitting = [pair for pair, misfit in zip(held, misfits, strict=True) if misfit is None]
    noise_by_metric: dict[str, MetricNoise] = {}
    for name, noise in chain.from_iterable(floor.metrics.items() for _, floor in fitting):
        noise_by_metric[name] = max(noise_by_metric.get(name, noise), noise, key=lambda each: each.floor_frac)
    sources = (f"{one.source / NOISE_FILE}, measured in {of.source} on {of.host}" for one, of in fitting)
    return noise_by_metric, visible_line("; ".join(sources)), tuple(filter(None, misfits))


def deciding_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """The metrics that make the verdict, each once, those of an older schema under their new names.

    Raises UsageError for one that is unknown or has no better direction.
    """
    current = tuple(dict.fromkeys(map(current_metric_name, names)))
    for name in current:
        if name not in METRICS:
            hint = did_you_mean(name, METRICS) or f"metrics are {', '.join(METRICS)}"
            raise UsageError(f"no metric is called {name!r}; {hint}")
        if METRICS[name].direction == "none" and not METRICS[name].is_exact:
            raise UsageError(
                f"{name} cannot decide a comparison: neither more nor less of it is better. "
                "It is shown as exploratory; name others with --metrics, or as primary_metrics of the profile"
            )
    return current


def side_names(a: Side, b: Side) -> tuple[str, str]:
    """The shortest names that tell the two sides apart."""
    if a.variant and b.variant and a.variant != b.variant:
        return a.variant, b.variant
    short = (a.path.resolve().name, b.path.resolve().name)
    return short if short[0] != short[1] else (str(a), str(b))
