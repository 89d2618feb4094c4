"""What a covariate of the machine, such as its clocks, would gain and cost with eight blocks of two arms.

Normal noise of 2.8 %, of whose variance the covariate explains a share; the mean, with the position taken out,
without and with the covariate. Power at a true +5 % and a margin of 1 %; coverage of the 95 % interval with the
covariate, and where the change itself moves the covariate by one of its standard deviations. The same output
every time.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.statistics.intervals import t_quantile
from benchmarks.common.table import show
from benchmarks.verdict.known_truth import named_stream

NUM_BLOCKS: Final = 8
LOG_SD: Final = 0.028
NUM_DATA_SETS: Final = 20_000
Floats = NDArray[np.float64]


def fit(d: Floats, covariate: Floats | None) -> tuple[Floats, Floats]:
    """Centre and half of the 95 % interval of each data set, by least squares."""
    x = np.array([1.0 if b % 2 else -1.0 for b in range(NUM_BLOCKS)])
    columns = [np.ones_like(d), np.broadcast_to(x, d.shape), *([] if covariate is None else [covariate])]
    design = np.stack(columns, axis=2)
    across = np.swapaxes(design, 1, 2)
    inverse = np.linalg.inv(across @ design)
    found = inverse @ across @ d[:, :, None]
    rest, df = d - (design @ found)[:, :, 0], NUM_BLOCKS - len(columns)
    return found[:, 0, 0], t_quantile(0.975, df) * np.sqrt(np.sum(rest**2, axis=1) / df * inverse[:, 0, 0])


def main() -> None:
    rows, distance = [], math.log1p(0.05) - math.log1p(0.01)
    for explained in (0.0, 0.1, 0.2, 0.3, 0.5, 0.7):
        stream = named_stream("covariates", explained)
        covariate = stream.normal(size=(NUM_DATA_SETS, NUM_BLOCKS))
        other = stream.normal(size=covariate.shape)
        d = LOG_SD * (math.sqrt(explained) * covariate + math.sqrt(1 - explained) * other)
        (plain, plain_half), (adjusted, half) = fit(d, None), fit(d, covariate)
        moved = LOG_SD * math.sqrt(explained)
        shifted, shifted_half = fit(d + moved, covariate + 1)
        shares = {
            "power without": plain + distance > plain_half,
            "power with": adjusted + distance > half,
            "covers": abs(adjusted) <= half,
            "covers where the change moves it": abs(shifted - moved) <= shifted_half,
        }
        row = {"variance explained": f"{explained:.0%}"}
        rows.append(row | {name: f"{100 * np.mean(events):.1f}" for name, events in shares.items()})
    show(rows, f"{NUM_DATA_SETS} experiments for each row, in %")


if __name__ == "__main__":
    main()
