"""The mean time of a step, divided in two ways: by its sections, and by the sizes of its batches.

The leaf sections and the unnamed remainder add up to the mean step. For batches, with p the share of the steps in a
bin and m their mean time,

    m_B - m_A = Σ (p_B - p_A) (m_A + m_B) / 2  +  Σ (m_B - m_A) (p_A + p_B) / 2

exactly (E. M. Kitagawa, *Components of a difference between two rates*, JASA 50, 1955, 1168-1194): other batches
against more time for the same batch. Prefill steps have their own bins, because they cost more at the same
size. A bin that one side lacks takes the other's mean time, so its whole difference is one of batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.attribution.estimate import Contribution, PairDesign, estimate_contributions, estimate_levels
from benchctl.analysis.attribution.run_time import RunTimeBreakdown, SizeKey
from benchctl.analysis.attribution.sections import CLOCK_NOTE, STEP, Section
from benchctl.units import s_from_ns

MAX_EXACT_SIZES: Final = 12
"""More sizes of decode batches are binned by powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSplit:
    """Invariant: ``sections`` add up to ``whole``, the difference of the mean step time.

    Sections are leaves, in the order of the tree; ``x (unnamed)`` is the unnamed remainder of x.
    """

    whole: Contribution
    sections: tuple[Contribution, ...]
    clock_note: str
    unplaced: tuple[str, ...]
    """Sections outside the tree, because their parents are unknown."""

    @property
    def largest(self) -> Contribution:
        return max(self.sections, key=lambda section: abs(section.added_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBin:
    """One kind of batch: its mean share of the steps over the blocks, and its mean time (None without any step)."""

    label: str
    a_share: float
    b_share: float
    a_step_s: float | None
    b_step_s: float | None
    batches_s: float
    """Time that it adds because it was more or less frequent."""
    same_batch_s: float
    """Time that it adds because its steps took longer or shorter."""

    @property
    def is_one_sided(self) -> bool:
        return self.a_step_s is None or self.b_step_s is None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """Invariants: ``batches`` and ``same_batch`` add up to ``whole``; each is the sum over its bins."""

    whole: Contribution
    batches: Contribution
    """Other batches at the same time for each."""
    same_batch: Contribution
    """More or less time for the same batches."""
    bins: tuple[BatchBin, ...]


def split_sections(
    a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign
) -> SectionSplit | None:
    """Split by sections; None if no step of either side has one."""
    breakdowns = [run.breakdown for run in (*a, *b) if run.breakdown is not None]
    inner = {section.name for run in breakdowns for _, section in run.step.walk() if section.children}
    if len(breakdowns) < len(a) + len(b) or not inner:
        return None
    largest = sorted(breakdowns, key=lambda run: -sum(1 for _ in run.step.walk()))
    # a section that is divided in any tree is divided in all
    names = list(dict.fromkeys(_leaf_name(leaf, inner) for run in largest for leaf in run.step.leaves()))

    def values(run: RunTimeBreakdown) -> list[float]:
        leaves = leaf_times_s(run, inner)
        return [sum(leaves.values()), *(leaves.get(name, 0.0) for name in names)]

    whole, *sections = estimate_levels([STEP, *names], a, b, values, design)
    clocks = sorted({clock for run in breakdowns for clock in run.clocks})
    return SectionSplit(
        whole=whole,
        sections=tuple(sections),
        clock_note="; ".join(CLOCK_NOTE[clock] for clock in clocks),
        unplaced=tuple(sorted({section.name for run in breakdowns for section in run.unplaced})),
    )


def _leaf_name(leaf: Section, inner: set[str]) -> str:
    return f"{leaf.name} (unnamed)" if leaf.name in inner else leaf.name


def leaf_times_s(run: RunTimeBreakdown, inner: set[str]) -> dict[str, float]:
    """Time per step of each leaf; ``inner`` are the sections with children in any run."""
    if run.breakdown is None:
        return {}
    leaves = run.breakdown.step.leaves()
    return {_leaf_name(leaf, inner): s_from_ns(leaf.mean_ns) * run.step_scale for leaf in leaves}


def split_batches(a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign) -> BatchSplit:
    """Split by batches; all runs of both sides have steps."""
    bin_of, labels = _bins([key for run in (*a, *b) for key in run.sizes])
    a_bins, b_bins = ([_binned(run, bin_of, len(labels)) for run in side] for side in (a, b))

    def split(x: "_Binned", y: "_Binned") -> list[float]:
        batches, same = zip(*map(_kitagawa, x.shares, x.means_s, y.shares, y.means_s), strict=True)
        return [sum(batches) + sum(same), sum(batches), sum(same), *batches, *same]

    names = [STEP, "other batches", "time in the same batch", *labels, *labels]
    _, batches, same, *by_bin = estimate_contributions(names, a_bins, b_bins, split, design)
    (whole,) = estimate_levels((STEP,), a, b, lambda run: (run.step_s / run.num_steps,), design)
    return BatchSplit(
        whole=whole,
        batches=batches,
        same_batch=same,
        bins=tuple(
            BatchBin(
                label=label,
                a_share=sum(run.shares[i] for run in a_bins) / len(a_bins),
                b_share=sum(run.shares[i] for run in b_bins) / len(b_bins),
                a_step_s=_pooled_mean_s(a_bins, i),
                b_step_s=_pooled_mean_s(b_bins, i),
                batches_s=by_bin[i].added_s,
                same_batch_s=by_bin[len(labels) + i].added_s,
            )
            for i, label in enumerate(labels)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Binned:
    """Steps and their time in each bin of one run."""

    num_steps: tuple[int, ...]
    total_s: tuple[float, ...]

    @property
    def shares(self) -> list[float]:
        return [count / sum(self.num_steps) for count in self.num_steps]

    @property
    def means_s(self) -> list[float | None]:
        return [time / count if count else None for count, time in zip(self.num_steps, self.total_s, strict=True)]


def _kitagawa(p_a: float, m_a: float | None, p_b: float, m_b: float | None) -> tuple[float, float]:
    """Contributions of one bin: from its share, and from its time."""
    before, after = (m_b if m_a is None else m_a), (m_a if m_b is None else m_b)
    if before is None or after is None:
        return 0.0, 0.0
    return (p_b - p_a) * (before + after) / 2, (after - before) * (p_a + p_b) / 2


def _bins(keys: Sequence[SizeKey]) -> tuple[Callable[[SizeKey], int], list[str]]:
    """The bin of each kind of step, and the labels of the bins."""
    sizes = sorted({size for phase, size in keys if phase == "decode"})
    is_exact = len(sizes) <= MAX_EXACT_SIZES

    def bin_key(key: SizeKey) -> tuple[str, int]:
        phase, size = key
        if phase != "decode":
            return phase, 0
        return phase, size if is_exact else max(size - 1, 0).bit_length()

    order = {"prefill": 0, "mixed": 1, "decode": 2}
    bin_keys = sorted({bin_key(key) for key in keys}, key=lambda bin_: (order[bin_[0]], bin_[1]))
    index = {bin_: i for i, bin_ in enumerate(bin_keys)}
    return lambda key: index[bin_key(key)], [_label(*bin_, is_exact=is_exact) for bin_ in bin_keys]


def _label(phase: str, size: int, *, is_exact: bool) -> str:
    """``decode of 9 to 16``: a bin of powers of two holds the sizes above the one below it."""
    if phase != "decode":
        return phase
    if is_exact:
        return f"decode of {size}"
    if size < 2:
        return "decode of 2" if size else "decode of at most 1"
    return f"decode of {(1 << (size - 1)) + 1} to {1 << size}"


def _binned(run: RunTimeBreakdown, bin_of: Callable[[SizeKey], int], num_bins: int) -> _Binned:
    counts, totals = [0] * num_bins, [0.0] * num_bins
    for key, steps in run.sizes.items():
        counts[bin_of(key)] += steps.num_steps
        totals[bin_of(key)] += steps.total_s
    return _Binned(tuple(counts), tuple(totals))


def _pooled_mean_s(runs: Sequence[_Binned], i: int) -> float | None:
    count = sum(run.num_steps[i] for run in runs)
    return sum(run.total_s[i] for run in runs) / count if count else None
