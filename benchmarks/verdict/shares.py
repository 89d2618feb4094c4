"""Shares of experiments, how certain they are, and whether they meet a demand."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from scipy.stats import binom, binomtest

REFUTED_P: Final = 0.01
"""A demand fails when a share outside of it would be rarer than this if the truth lay on its edge."""


@dataclass(frozen=True, slots=True)
class Share:
    """So many of so many experiments."""

    hits: int
    trials: int

    def __str__(self) -> str:
        """In per cent, with the 95 % interval of Clopper and Pearson."""
        interval = binomtest(self.hits, self.trials).proportion_ci(0.95)
        return f"{100 * self.hits / self.trials:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


@dataclass(frozen=True, slots=True)
class Demand:
    """The range in which the true probability is to lie."""

    low: float = 0.0
    high: float = 1.0

    def is_met(self, share: Share) -> bool:
        p_low = 1.0 if self.low == 0 else float(binom.cdf(share.hits, share.trials, self.low))
        p_high = 1.0 if self.high == 1 else float(binom.sf(share.hits - 1, share.trials, self.high))
        return min(p_low, p_high) >= REFUTED_P

    def __str__(self) -> str:
        if self.low == 0:
            return f"<= {100 * self.high:g}"
        return f">= {100 * self.low:g}" if self.high == 1 else f"{100 * self.low:g} to {100 * self.high:g}"


COVERS: Final = Demand(0.93, 0.97)
COVERS_AT_LEAST: Final = Demand(low=0.93)
MISSES: Final = Demand(high=0.07)
"""What an interval that covers in 93 % leaves out."""
SELDOM: Final = Demand(high=0.05)
NEARLY_ALWAYS: Final = Demand(low=0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A condition, what share of its experiments ended how, and what was demanded of that."""

    condition: Mapping[str, str]
    shares: Mapping[str, Share]
    demands: Mapping[str, Demand]

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(name for name, demand in self.demands.items() if not demand.is_met(self.shares[name]))

    def cells(self) -> dict[str, str]:
        """Text by column, in per cent."""
        found = dict(self.condition)
        for name, share in self.shares.items():
            found[name] = str(share)
        demanded = ", ".join(f"{name} {demand}" for name, demand in self.demands.items())
        return found | {"demanded": demanded or "-", "": ("FAIL" if self.failures else "ok") if demanded else ""}


def row(
    condition: Mapping[str, object],
    events: Iterable[Mapping[str, bool]],
    demands: Mapping[str, Demand] | None = None,
) -> Row:
    """Counts how many experiments each event happened in."""
    seen = list(events)
    shares = {name: Share(sum(event[name] for event in seen), len(seen)) for name in seen[0]}
    return Row(
        condition={name: str(value) for name, value in condition.items()}, shares=shares, demands=demands or {}
    )
