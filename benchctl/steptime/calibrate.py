"""Two scalars that carry a step-time model to another device, from a few steps measured there.

The source model prices each step of the target with the target's peaks. Its price has three parts: P_c bound by
arithmetic, P_m bound by memory, and o (all-reduce, requests, steps), which is taken to be the same. Utilisation
differs between devices, so

    y = o + s_c P_c + s_m P_m,    s_c, s_m = arg min sum (y - o - s_c P_c - s_m P_m)^2

    s_c = (sum P_c u  sum P_m^2  -  sum P_m u  sum P_c P_m) / det
    det = sum P_c^2 sum P_m^2 - (sum P_c P_m)^2,   u = y - o

and s_m likewise. Decode steps alone hardly determine s_c: a few prompts belong to the steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchctl.costs.hardware import Hardware
from benchctl.errors import UsageError
from benchctl.steptime.design import design_of
from benchctl.steptime.fit import one_hardware, provenance_of, tensor_parallel_of
from benchctl.steptime.model import UNSCALED, StepTimeModel
from benchctl.steptime.work import Floats, ObservedSteps, stacked

MAX_CONDITION: Final = 1e6
_NUDGE: Final = 1e-6
"""Relative change of a peak that shows which features are bound by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Times bound by arithmetic and by memory on the target, as multiples of the source model's price."""

    compute: float
    memory: float
    condition: float


def solve_scales(compute_us: Floats, memory_us: Floats, overhead_us: Floats, measured_us: Floats) -> Scales:
    """The scales of these steps. Raises UsageError when the steps do not determine both."""
    rest = measured_us - overhead_us
    normal = np.array(
        [[compute_us @ compute_us, compute_us @ memory_us], [compute_us @ memory_us, memory_us @ memory_us]]
    )
    condition = float(np.linalg.cond(normal)) if normal.any() else float("inf")
    if not condition <= MAX_CONDITION:
        part, remedy = (
            ("arithmetic", "prompts of 512 tokens and more")
            if normal[0, 0] < normal[1, 1]
            else ("memory", "decode steps of small batches")
        )
        raise UsageError(
            f"these steps do not determine how {part} scales (condition number {condition:.1e}, at most "
            f"{MAX_CONDITION:.0e} is accepted); add {remedy}"
        )
    compute, memory = np.linalg.solve(normal, np.array([compute_us @ rest, memory_us @ rest]))
    return Scales(compute=float(compute), memory=float(memory), condition=condition)


def calibrate(
    model: StepTimeModel, observed: Sequence[ObservedSteps], *, fitted_on: str | None = None
) -> tuple[StepTimeModel, Scales]:
    """The model on the device of these steps, and the scales. Raises UsageError as ``solve_scales`` does."""
    design = design_of(observed, model.columns)
    hardware = one_hardware(design)
    parts = [parts_of(model, run) for run in design.runs]
    compute, memory, overhead = (np.concatenate(column) for column in zip(*parts, strict=True))
    scales = solve_scales(compute, memory, overhead, design.measured_us)
    if min(scales.compute, scales.memory) <= 0:
        raise UsageError(
            f"the scales are {scales.compute:.3g} and {scales.memory:.3g}, and a time cannot shrink below 0: these "
            "steps do not fit the model; fit a model of its own to them"
        )
    origin = provenance_of(design, observed, fitted_on)
    calibrated = replace(
        model,
        hardware=hardware,
        tensor_parallel=tensor_parallel_of(design),
        compute_scale=model.compute_scale * scales.compute,
        memory_scale=model.memory_scale * scales.memory,
        # Two scales of all steps alike teach the coefficients nothing about drafts: their own fit counts.
        provenance=replace(
            origin,
            calibrated_from=model.hardware,
            most_query_tokens=model.provenance.most_query_tokens,
        ),
    )
    return calibrated, scales


def parts_of(model: StepTimeModel, run: ObservedSteps) -> tuple[Floats, Floats, Floats]:
    """The price of each step in microseconds: bound by arithmetic, bound by memory, and the rest."""
    device, num_steps = run.deployment.hardware, len(run.duration_us)

    def columns(device: Hardware) -> dict[str, Floats]:
        features = model.columns(run.work, replace(run.deployment, hardware=device))
        return {name: stacked([column], num_steps)[:, 0] for name, column in features.items()}

    base = columns(device)
    faster = columns(replace(device, peak_flops_per_s=device.peak_flops_per_s * (1 + _NUDGE)))
    wider = columns(replace(device, bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * (1 + _NUDGE)))
    parts = np.zeros((3, num_steps))
    for name, value in model.values.items():
        if name in base:
            price, is_scaled = value * base[name], name not in UNSCALED
            compute = price * _responds(base[name], faster[name]) * is_scaled
            memory = price * _responds(base[name], wider[name]) * is_scaled
            parts += np.stack([compute, memory, price - compute - memory])
    return parts[0], parts[1], parts[2]


def _responds(before: Floats, after: Floats) -> Floats:
    """1 where a feature falls as a peak rises, 0 where it does not: -d ln f / d ln peak, which is one of both."""
    change = 1.0 - after / np.where(before > 0, before, 1.0)
    elasticity = np.where(before > 0, change, 0.0) / _NUDGE
    return np.asarray(np.round(np.clip(elasticity, 0.0, 1.0), 3), dtype=np.float64)
