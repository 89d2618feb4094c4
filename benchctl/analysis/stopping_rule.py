"""The looks of a stopping rule, planned before the first run.

Every run imports this module, so it imports neither numpy nor scipy.
"""

import math
from typing import Final

from benchctl.profile.model import Profile
from benchctl.records.record import StoppingRecord

ALPHA: Final = 0.05


def stopping_rule(profile: Profile) -> StoppingRecord | None:
    """The rule of a profile, before any look; None where the number of blocks is fixed."""
    if profile.stopping is None:
        return None
    looks = look_blocks(profile.blocks, profile.stopping.looks)
    return StoppingRecord(
        precision_frac=profile.stopping.precision, confidence=1 - ALPHA / len(looks), look_blocks=looks
    )


def look_blocks(most: int, num_looks: int) -> tuple[int, ...]:
    """Numbers of blocks after which there is a look: evenly spaced from 6 to ``most``.

    Invariants: strictly increasing, the last is ``most``, at most ``num_looks`` of them.
    """
    from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS  # noqa: PLC0415 - numpy

    first = min(MIN_PAIRED_BLOCKS, most)
    if num_looks == 1:
        return (most,)
    apart = (most - first) / (num_looks - 1)
    return tuple(sorted({first + math.floor(i * apart + 0.5) for i in range(num_looks)}))
