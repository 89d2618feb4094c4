"""A fitted step-time model: coefficients, the data they come from, and how far predictions can be trusted.

    step time = sum over features of coefficient times feature, at least 0     (all in microseconds)

The interval of a prediction has two parts. The bootstrap draws of the coefficients say how far another set of runs
would move the prediction; ``residual_logs`` says how far a single step lies from it. As logarithms both are about
symmetric, and independent, so their half-widths add in squares.
"""

from dataclasses import dataclass, replace
from typing import Final

from benchctl.steptime.structure import Coefficient, ExpertsRead, Structure

RESIDUAL_LEVELS: Final = tuple(i / 100 for i in range(1, 100))
"""Levels of the quantiles in ``residual_logs``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file or result directory that a model was fitted to; ``sha256`` is that of the file or of its step logs."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutError:
    """Errors on groups that the fit did not see, each predicted by a fit to all the others.

    ``bias_frac`` is the mean of predicted / measured - 1, ``mape_frac`` that of its magnitude; ``coverage_frac`` is
    the share of steps inside the nominal 90 % interval.
    """

    by: str
    num_groups: int
    num_steps: int
    mape_frac: float
    bias_frac: float
    coverage_frac: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOverheads:
    """Time of a request outside the steps: before it is queued, and from its last step to the end of its answer.

    before = ``arrival_us``; after = ``departure_us + departure_us_per_token`` times output tokens. Waiting in the
    queue is left out: a simulator or the next step shows it.
    """

    arrival_us: float
    departure_us: float
    departure_us_per_token: float
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of a model. ``steps_left_out`` counts steps by the reason why the fit did not use them."""

    data: tuple[DataFile, ...] = ()
    runs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    num_steps: int = 0
    steps_left_out: tuple[tuple[str, int], ...] = ()
    engine: str | None = None
    engine_version: str | None = None
    clock: str | None = None
    fitted_on: str | None = None
    benchctl_version: str = ""
    held_out: tuple[HeldOutError, ...] = ()
    calibrated_from: str | None = None
    """Hardware of the model whose coefficients were scaled to this one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Coefficients of one structure for one kind of device.

    ``draws`` holds the coefficients of each bootstrap sample, in the order of ``coefficients``. ``residual_logs``
    are the quantiles of log(measured / predicted) at ``RESIDUAL_LEVELS``, of steps left out of the fit where there
    were groups to leave out; empty for a model without data.
    """

    structure: Structure
    coefficients: tuple[Coefficient, ...]
    hardware: str
    tensor_parallel: tuple[int, ...]
    experts_read: ExpertsRead = "uniform"
    draws: tuple[tuple[float, ...], ...] = ()
    residual_logs: tuple[float, ...] = ()
    overheads: RequestOverheads | None = None
    provenance: Provenance = Provenance()

    @property
    def values(self) -> dict[str, float]:
        """Coefficients by the name of their feature."""
        return {coefficient.name: coefficient.value for coefficient in self.coefficients}

    def with_draw(self, index: int) -> "StepTimeModel":
        """The model with the coefficients of one bootstrap draw: a whole run priced by it is one draw of that run.

        An index beyond the last draw starts over; a model without draws returns itself.
        """
        if not self.draws:
            return self
        values = self.draws[index % len(self.draws)]
        pairs = zip(self.coefficients, values, strict=True)
        return replace(self, coefficients=tuple(replace(each, value=value) for each, value in pairs))
