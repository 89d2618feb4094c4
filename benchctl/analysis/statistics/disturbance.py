"""A disturbance: servers beside neighbours against the same servers alone, by blocks.

Both sides are the same server with the same load, so that "no difference" is what one expects, and a claim of one
must be rare where there is none. A disturbance is therefore claimed where two things hold at once: the interval of
the ratio, at 99 % over all claims of a check together (Bonferroni), excludes 1, and the ratio itself is larger than
the change margin, the threshold or the noise floor of the metric where that is larger. Of a check without any
disturbance at most one in a hundred claims one. Runs that do not count, because they failed or because the client
was late, may be the work of neighbours, too, and would hide it if they were only left out: their numbers are a test
of their own (Fisher's, one-sided).
"""

from typing import Final, Literal, TypeAlias

from benchctl.analysis.statistics.block_ratio import RatioEstimate
from benchctl.analysis.statistics.fisher import Share, fisher_one_sided
from benchctl.analysis.statistics.margins import Margins
from benchctl.analysis.statistics.sample_size import blocks_for_distance

Finding: TypeAlias = Literal["disturbed", "undisturbed", "undecided"]
ALPHA: Final = 0.01
"""Chance that a check claims any disturbance where there is none."""


def confidence_of_claims(num_claims: int, num_looks: int = 1) -> float:
    """The confidence of each interval: 1 - 0.01 / (claims of a check times looks at it)."""
    return 1 - ALPHA / (num_claims * num_looks)


def finding_of(estimate: RatioEstimate, margins: Margins) -> Finding:
    """The finding by the interval of the estimate, at the confidence that it has.

    ``disturbed``: the interval excludes "no change", and the ratio is beyond the change margin. ``undisturbed``:
    all of the interval is inside the equivalence margin. ``undecided``: anything else, and no interval.
    """
    interval = estimate.log_interval
    if interval is None:
        return "undecided"
    low, high = interval
    if not low <= 0.0 <= high and abs(estimate.log_ratio) > margins.log_change:
        return "disturbed"
    return "undisturbed" if max(-low, high) <= margins.log_equivalence else "undecided"


def blocks_to_decide(estimate: RatioEstimate, margins: Margins, confidence: float) -> int | None:
    """Blocks in all with which an undecided finding would be decided, if ratio and scatter stay as they are.

    Beyond the change margin the interval of ``confidence`` has to leave "no change", within the equivalence margin
    it has to fit in. None between the two, where no number of blocks helps, and where a thousand do not suffice.
    """
    away = abs(estimate.log_ratio)
    distance = away if away > margins.log_change else margins.log_equivalence - away
    needed = blocks_for_distance(estimate, distance, confidence)
    return None if needed is None else max(needed, estimate.num_blocks + 1)


def loses_runs(beside: Share, alone: Share, confidence: float) -> bool:
    """True where more runs do not count beside neighbours than alone, of all that were planned, than chance
    explains.
    """
    return fisher_one_sided(beside, alone) <= 1 - confidence
