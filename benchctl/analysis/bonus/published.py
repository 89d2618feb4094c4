"""The published measurement that chose batch expansion, and the bounds of what it can say.

vLLM issue #4212, *Re-enable bonus tokens*, 2024: JackFram/llama-68m on one A100, tensor parallel 1, CUDA events
around the forward pass alone, without sampling and preparation of inputs. Prompt and context lengths, replays and
data type are not stated. The issue guessed that expansion costs less than 0.5 ms and compared that with a pass
without graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.profile.choices import Mode, Phase

SOURCE: Final = "vLLM issue #4212, llama-68m on one A100"
GUESSED_EXPANSION_MS: Final = 0.5
"""Upper bound of the cost of an expansion that the issue assumed; it was not measured."""
ROUNDING_MS: Final = 0.005
"""Half of the last digit of the published numbers."""


@dataclass(frozen=True, slots=True)
class PublishedPass:
    """One forward pass at two batch sizes: one number each."""

    phase: Phase
    mode: Mode
    ms_by_batch: tuple[tuple[int, float], ...]

    @property
    def growth_ms(self) -> float:
        """Time at the larger batch minus that at the smaller. Less than 0 is noise: twice the work takes no
        less.
        """
        (_, smaller), (_, larger) = self.ms_by_batch
        return larger - smaller


PASSES: Final = (
    PublishedPass("prefill", "eager", ((5, 1.16), (10, 1.10))),
    PublishedPass("decode", "eager", ((5, 0.89), (10, 0.87))),
    PublishedPass("prefill", "graph", ((5, 1.04), (10, 1.00))),
    PublishedPass("decode", "graph", ((5, 0.23), (10, 0.22))),
)


def least_noise_ms(passes: Sequence[PublishedPass] = PASSES) -> tuple[float, ...]:
    """The least error that each pass must hold, where the larger batch was faster by more than the rounding."""
    return tuple(-each.growth_ms for each in passes if -each.growth_ms > 2 * ROUNDING_MS + 1e-9)


def published_expansion_ms() -> float:
    """T(2B) - T(B) at B = 5 in graphs: the true cost of expansion, which the published table holds already."""
    return next(each.growth_ms for each in PASSES if (each.phase, each.mode) == ("decode", "graph"))
