"""What others do with the same runs: do they see a change where there is none, and one where there is one?"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from scipy.stats import ttest_ind

from benchmarks.verdict.known_truth import BLOCK_LOG_SD, Made, experiments, judge, named_stream

REQUESTS_PER_RUN: Final = 1000
REQUEST_LOG_SD: Final = 0.1
NUM_RESAMPLES: Final = 2000


def rivals(made: Made, num_experiments: int) -> Iterator[dict[str, bool]]:
    """Whether each way of deciding says that something changed, experiment by experiment."""
    stream = named_stream("rivals", made)
    strict = replace(made, margin_frac=0.0)
    for experiment, (compared,) in experiments(made, num_experiments):
        a, b = (np.log([block["step_ms"] for block in arm]) for arm in experiment.arms)
        yield {
            "one run each, two days, 1 %": _is_beyond(b[0] - a[0] + stream.normal(0, BLOCK_LOG_SD * math.sqrt(2))),
            "one run each, same block, 1 %": _is_beyond(b[0] - a[0]),
            "one run each, t-test of requests": _t_test(a[:1], b[:1], stream),
            "all runs, t-test of pooled requests": _t_test(a, b, stream),
            "blocks, percentile bootstrap": _percentile_bootstrap(b - a, stream),
            "benchctl, margin 0": _is_change(judge(experiment, strict)[0].verdict),
            "benchctl, margin 1 %": _is_change(compared.verdict),
        }


def _is_change(verdict: str) -> bool:
    return verdict in {"regression", "improvement"}


def _is_beyond(log_ratio: float) -> bool:
    return abs(log_ratio) > math.log1p(0.01)


def _t_test(a: np.ndarray, b: np.ndarray, stream: np.random.Generator) -> bool:
    """Welch's test at 5 % over requests, as if they were independent of one another."""
    sides = [
        (side[:, None] + stream.normal(0, REQUEST_LOG_SD, (len(side), REQUESTS_PER_RUN))).ravel() for side in (a, b)
    ]
    return bool(ttest_ind(*sides, equal_var=False).pvalue < 0.05)


def _percentile_bootstrap(d: np.ndarray, stream: np.random.Generator) -> bool:
    """Whether the middle 95 % of resampled means leave no change out."""
    means = d[stream.integers(0, len(d), (NUM_RESAMPLES, len(d)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return bool(low > 0 or high < 0)
