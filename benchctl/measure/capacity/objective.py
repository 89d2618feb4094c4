"""An objective (SLO): a limit that a metric must keep, such as ``p99_ttft_ms=200``."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchctl.analysis.metrics.table import METRICS
from benchctl.errors import UsageError
from benchctl.profile.files import did_you_mean


@dataclass(frozen=True, slots=True)
class Objective:
    """At most ``limit`` where less of the metric is better, else at least."""

    metric: str
    limit: float

    @property
    def is_upper(self) -> bool:
        return METRICS[self.metric].direction == "lower"

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.is_upper else '>='} {self.limit:g} {METRICS[self.metric].unit}"

    def holds(self, metrics: Mapping[str, float | None]) -> bool:
        """True if the metric keeps the limit. Raises UsageError where the load leaves it unknown."""
        value = metrics[self.metric]
        if value is None:
            raise UsageError(
                f"--slo {self.metric}: unknown for this load (needs {METRICS[self.metric].needs}; a p99 needs 299 "
                "requests); raise workload.num_prompts, or choose another metric"
            )
        return value <= self.limit if self.is_upper else value >= self.limit


def parse_objective(text: str) -> Objective:
    """``METRIC=LIMIT``. Raises UsageError for a metric that there is none of, or one without a better direction."""
    name, separator, limit = text.partition("=")
    if not separator:
        raise UsageError(f"--slo {text!r}: expected METRIC=LIMIT, such as p99_ttft_ms=200")
    if name not in METRICS:
        reordered = [metric for metric in METRICS if sorted(metric.split("_")) == sorted(name.split("_"))]
        hint = did_you_mean(name, reordered or METRICS) or f"known are {', '.join(METRICS)}"
        raise UsageError(f"--slo {text!r}: no metric is called {name!r}; {hint}")
    if METRICS[name].direction == "none":
        raise UsageError(f"--slo {text!r}: neither more nor less of {name} is better; choose another metric")
    try:
        return Objective(name, float(limit))
    except ValueError:
        raise UsageError(f"--slo {text!r}: {limit!r} is not a number") from None
