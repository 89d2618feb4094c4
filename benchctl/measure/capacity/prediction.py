"""Prediction intervals of a simulated run, from the uncertainty of the step-time model that prices it.

A fitted model keeps the coefficients of each bootstrap sample. A whole run priced by one of them is one draw of
that run; the quantiles of its metrics over all draws are the interval. It holds what the fit does not know of the
coefficients, and neither the scatter of single steps nor what the simulator leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchctl.engines.openai_server import own_options
from benchctl.engines.sim.options import SimOptions
from benchctl.errors import UsageError
from benchctl.measure.capacity.point import metrics_of_life
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import arm_label
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import Record
from benchctl.steptime.model_file import read_model


class Predicted(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One metric of one arm: its value with the fitted coefficients, and between which values the draws lie."""

    value: float
    low: float
    high: float


class ArmPrediction(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The metrics of one arm that are known in every draw."""

    arm: str
    num_draws: int
    level: float
    metrics: dict[str, Predicted]


@dataclass(frozen=True, slots=True)
class _Arm:
    label: str
    settings: VariantSettings


def predict_intervals(
    profile: Profile, requests: Sequence[PreparedRequest], num_draws: int, level: float = 0.9
) -> tuple[ArmPrediction, ...]:
    """The interval of each metric of each arm, over at most ``num_draws`` draws.

    Raises UsageError where an arm is priced by anything but a fitted model with draws.
    """
    predictions = []
    for variant, cell in arms(profile):
        arm = _Arm(arm_label(variant, cell), variant_settings(profile, variant, cell))
        count = min(num_draws, _num_draws(arm))
        value = metrics_of_life(profile, _with_noise(arm.settings, "none"), requests, 0)
        drawn = _with_noise(arm.settings, "fitted")
        draws = [metrics_of_life(profile, drawn, requests, seed) for seed in range(count)]
        metrics = {}
        for name, centre in value.items():
            numbers = [number for draw in draws if (number := draw[name]) is not None]
            if centre is not None and len(numbers) == count:
                low, high = np.quantile(numbers, ((1 - level) / 2, (1 + level) / 2))
                metrics[name] = Predicted(value=centre, low=float(low), high=float(high))
        predictions.append(ArmPrediction(arm=arm.label, num_draws=count, level=level, metrics=metrics))
    return tuple(predictions)


def _with_noise(settings: VariantSettings, noise: str) -> VariantSettings:
    return settings.model_copy(update={"server": settings.server.model_copy(update={"noise": noise})})


def _num_draws(arm: _Arm) -> int:
    options = own_options(arm.settings, SimOptions)
    if options.step_time_model is None:
        raise UsageError(
            f"{arm.label}: cost model {options.cost_model} has no uncertainty to draw from; take cost_model "
            "fitted with a step_time_model, or leave --draws out"
        )
    count = len(read_model(Path(options.step_time_model).expanduser()).draws)
    if count < 2:
        raise UsageError(
            f"{options.step_time_model}: the model has no bootstrap draws; fit it with some, or leave --draws out"
        )
    return count
