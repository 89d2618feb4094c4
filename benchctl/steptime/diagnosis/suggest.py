"""The runs that would determine a step-time model best: greedy choice from a grid of possible runs.

Each candidate run has requests of one shape at one concurrency, and so a known mix of steps. What it would add to
the design is a sum of squares that needs no measurement, because it depends on the work alone; the expected gain is
the fall in the sum of the coefficients' variances, each in units of its anchor's spread (A-optimal design with the
anchors as prior). The run with the largest gain in its predicted time is chosen. Runs are chosen one after another:
the second counts what the first would have told.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchctl.steptime.diagnosis.run_to_add import RunToAdd, num_requests
from benchctl.steptime.fitting.anchors import anchor_of
from benchctl.steptime.fitting.design import Design
from benchctl.steptime.fitting.fit import FitOptions
from benchctl.steptime.fitting.least_squares import Floats
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.work import Deployment, StepWork
from benchctl.units import US_PER_S

PROMPTS: Final = (128, 512, 2048, 8192)
OUTPUTS: Final = (1, 64, 256)
CONCURRENCY: Final = (1, 8, 32, 128)
_STEPS_OF_RUN: Final = 200
"""Steps by which a candidate is described; it is credited with as many as it has."""
_START_S: Final = 1.0
"""Time of a run beside its steps, so that the shortest ones are not endlessly good."""
_NOISE_FRAC: Final = 0.03
"""Error of a single step that is assumed where the data have less."""
_MIN_GAIN: Final = 0.02
"""Fall of the summed variances below which a run is not worth its time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    run: RunToAdd
    information: Floats
    """Sum of outer products of scaled rows over the steps of the run."""
    duration_s: float


def suggest_runs(
    model: StepTimeModel, design: Design, options: FitOptions, *, max_runs: int = 3
) -> tuple[RunToAdd, ...]:
    """The runs to add next, the most useful first, each with the coefficients that it determines; at most
    ``max_runs``, and none once no run would help.
    """
    if options.structure == "roofline":
        return ()
    spreads = np.array([anchor_of(name, options.structure).spread for name in design.names])
    information = _information(design.matrix / design.measured_us[:, None], spreads) + np.eye(len(spreads))
    candidates = list(_candidates(model, design, spreads))
    chosen: list[RunToAdd] = []
    while len(chosen) < max_runs and candidates:
        before = _inverse(information)
        after = [_inverse(information + each.information) for each in candidates]
        gains = 1.0 - np.array([np.trace(variance) for variance in after]) / np.trace(before)
        if gains.max() < _MIN_GAIN:
            break
        best = int(np.argmax(gains / (_START_S + np.array([each.duration_s for each in candidates]))))
        chosen.append(_explained(candidates[best].run, design.names, before, after[best]))
        information = information + candidates[best].information
        del candidates[best]
    return tuple(chosen)


def _information(relative_rows: Floats, spreads: Floats) -> Floats:
    """A'A over the noise, in units of the spreads: 1 on the diagonal is as much as the anchor itself says.

    Steps of a run are not independent: every tenth counts.
    """
    scaled = relative_rows * spreads
    return np.asarray(scaled.T @ scaled / (10 * _NOISE_FRAC**2), dtype=np.float64)


def _inverse(information: Floats) -> Floats:
    return np.asarray(np.linalg.inv(information), dtype=np.float64)


def _explained(run: RunToAdd, names: Sequence[str], before: Floats, after: Floats) -> RunToAdd:
    """The run with the coefficients whose variance it at least halves, or the one that it helps most."""
    falls = 1.0 - np.diag(after) / np.diag(before)
    order = np.argsort(-falls)
    helped = [names[i] for i in order if falls[i] >= 0.5] or [names[order[0]]]
    best = float(falls[order[0]])
    reason = f"variance of {', '.join(helped)} falls by up to {best:.0%}"
    return replace(run, reason=reason, coefficients=tuple(helped))


def _candidates(model: StepTimeModel, design: Design, spreads: Floats) -> Iterator[_Candidate]:
    """Every run of the grid that fits into the memory of each deployment that was fitted."""
    deployments = {
        (run.deployment.shape.name, run.deployment.tensor_parallel): run.deployment for run in design.runs
    }
    for (name, size), deployment in deployments.items():
        capacity = _cache_tokens(deployment)
        for prompt in PROMPTS:
            for output in OUTPUTS:
                for concurrency in CONCURRENCY:
                    if concurrency * (prompt + output) > capacity:
                        continue
                    steps = _steps_of(prompt, output, concurrency)
                    rows, step_us = _rows(model, design, deployment, steps)
                    num_steps = _num_steps(output, concurrency)
                    yield _Candidate(
                        run=RunToAdd(
                            prompt_tokens=prompt,
                            output_tokens=output,
                            concurrency=concurrency,
                            reason="",
                            model=name,
                            tensor_parallel=size,
                        ),
                        information=_information(rows, spreads) * (num_steps / _STEPS_OF_RUN),
                        duration_s=num_steps * step_us / US_PER_S,
                    )


def _num_steps(output: int, concurrency: int) -> float:
    """Steps of the requests of a run: its outputs, as often as its batch is renewed."""
    return num_requests(concurrency) / concurrency * output


def _rows(model: StepTimeModel, design: Design, deployment: Deployment, steps: StepWork) -> tuple[Floats, float]:
    """Features of these steps over their predicted times, and the mean of these times in microseconds."""
    columns = model.columns(steps, deployment)
    matrix = np.column_stack(np.broadcast_arrays(*(np.atleast_1d(columns.get(name, 0.0)) for name in design.names)))
    predicted_us = matrix @ np.array([model.values[name] for name in design.names])
    rows = np.asarray(matrix / np.maximum(predicted_us, 1.0)[:, None], dtype=np.float64)
    return rows, float(np.mean(predicted_us))


def _steps_of(prompt: int, output: int, concurrency: int) -> StepWork:
    """Steps of a closed loop of such requests: a prompt joins as often as a request ends, else all rows decode.

    The outputs of a batch are on average half done; a single row shows every length.
    """
    index = np.arange(_STEPS_OF_RUN, dtype=np.float64)
    is_prefill = index % max(1, round(output / concurrency)) == 0
    num_prefills = np.where(is_prefill, max(1.0, concurrency / output), 0.0)
    num_decodes = np.maximum(concurrency - num_prefills, 0.0) * (output > 1)
    generated = index * output / _STEPS_OF_RUN if concurrency == 1 else np.full(_STEPS_OF_RUN, output / 2)
    context = num_decodes * (prompt + generated)
    return StepWork(
        num_prefills=num_prefills,
        prefill_tokens=num_prefills * prompt,
        prefill_positions=num_prefills * prompt * prompt / 2,
        num_decodes=num_decodes,
        decode_tokens=num_decodes,
        decode_context=context,
        decode_positions=context + num_decodes / 2,
        num_sampled=num_decodes + num_prefills,
    )


def _cache_tokens(deployment: Deployment) -> float:
    """Tokens that 90 % of the devices' memory holds beside the weights; endless where it is unknown."""
    shape, devices = deployment.shape, deployment.tensor_parallel
    if deployment.hardware.memory_bytes is None:
        return float("inf")
    memory = 0.9 * devices * deployment.hardware.memory_bytes
    room = memory - shape.weight_bytes(deployment.param_bytes)
    return max(room, 0.0) / shape.kv_bytes_per_token(deployment.kv_bytes_per_element)
