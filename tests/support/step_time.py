"""Observed steps with planted coefficients, and a table of steps as a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.steptime.features import features
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.work import Coefficient, Deployment, ObservedSteps, StepWork, Structure, count_step_work

MODELS = (("qwen2.5-7b", 1), ("qwen2.5-72b", 4), ("qwen2.5-14b", 2), ("qwen2.5-32b", 4), ("qwen2.5-1.5b", 1))


def fitted_model(*, steps_us: float, **more: Any) -> StepTimeModel:
    """The model of a fit on H100s whose fixed time of a step is ``steps_us``."""
    return StepTimeModel(
        structure="overlap",
        coefficients=(
            Coefficient(name="compute", value=1.5),
            Coefficient(name="memory", value=1.25),
            Coefficient(name="all_reduce", value=1.0),
            Coefficient(name="layers", value=30.0, unit="us"),
            Coefficient(name="requests", value=20.0, unit="us"),
            Coefficient(name="steps", value=steps_us, unit="us"),
        ),
        hardware="h100-sxm",
        tensor_parallel=(1,),
        **more,
    )


def random_work(seed: int, num_steps: int, row_tokens: int = 1) -> StepWork:
    """Batches of up to 200 rows at contexts up to 8,000, a third of them with prompts.

    A row has ``row_tokens`` new tokens, all but one of them drafts.
    """
    stream = np.random.default_rng(seed)
    num_decodes = stream.integers(1, 200, num_steps).astype(float)
    has_prompts = stream.random(num_steps) < 1 / 3
    num_prefills = np.where(has_prompts, stream.integers(1, 4, num_steps), 0).astype(float)
    prefill_tokens = num_prefills * stream.integers(16, 3000, num_steps)
    context = num_decodes * stream.integers(50, 8000, num_steps) + prefill_tokens + num_decodes
    return count_step_work(
        num_prefills=num_prefills,
        prefill_tokens=prefill_tokens,
        num_decodes=num_decodes,
        decode_tokens=num_decodes * row_tokens,
        context_after=context + num_decodes * (row_tokens - 1),
        draft_tokens=num_decodes * (row_tokens - 1),
    )


def decoding(rows, context) -> StepWork:
    """Rows that decode one token each at the same context."""
    return StepWork(
        num_decodes=rows,
        decode_tokens=rows,
        decode_context=rows * context,
        decode_positions=rows * (context + 0.5),
        num_sampled=rows,
    )


def prompts(num, tokens, context=0) -> StepWork:
    """Prompts, or chunks of them after a context."""
    return StepWork(
        num_prefills=num,
        prefill_tokens=num * tokens,
        prefill_context=num * context,
        prefill_positions=num * tokens * (context + tokens / 2),
        num_sampled=num,
    )


def planted_run(
    model: str,
    tensor_parallel: int,
    coefficients: Mapping[str, float],
    *,
    structure: Structure = "overlap",
    seed: int = 0,
    num_steps: int = 300,
    noise: float = 0.0,
    hardware: str = "h100-sxm",
    run: str = "",
    row_tokens: int = 1,
) -> ObservedSteps:
    """Steps of one run whose times are the planted sum of features, times log-normal noise."""
    deployment = Deployment(
        shape=shape_for(model), hardware=hardware_for(hardware), tensor_parallel=tensor_parallel
    )
    work = random_work(seed, num_steps, row_tokens)
    columns = features(work, deployment, structure)
    times = sum(value * np.asarray(columns[name]) for name, value in coefficients.items()) * np.ones(num_steps)
    factors = np.exp(np.random.default_rng([seed, 1]).normal(0.0, noise, num_steps)) if noise else 1.0
    return ObservedSteps(
        run=run or f"{model}-tp{tensor_parallel}-{seed}",
        model=model,
        deployment=deployment,
        work=work,
        duration_us=times * factors,
        is_saturated=np.zeros(num_steps, dtype=bool),
    )


def planted_runs(
    coefficients: Mapping[str, float], *, structure: Structure = "overlap", noise: float = 0.0, num_steps: int = 300
) -> list[ObservedSteps]:
    """One run of each of five deployments."""
    return [
        planted_run(model, size, coefficients, structure=structure, seed=i, noise=noise, num_steps=num_steps)
        for i, (model, size) in enumerate(MODELS)
    ]


def names_of(structure: Structure) -> tuple[str, ...]:
    """Features of a structure for dense models, in their order."""
    deployment = Deployment(shape=shape_for("qwen2.5-7b"), hardware=hardware_for("h100-sxm"))
    return tuple(features(random_work(0, 3), deployment, structure))


def write_table(path: Path, observed: ObservedSteps, **renamed: str) -> Path:
    """The steps as a CSV with the columns of a step record, ``renamed`` ones under other names."""
    work = observed.work
    columns = {
        "run": [observed.run] * len(observed.duration_us),
        "model": [observed.model] * len(observed.duration_us),
        "tensor_parallel": [observed.deployment.tensor_parallel] * len(observed.duration_us),
        "hardware": [observed.deployment.hardware.name] * len(observed.duration_us),
        "duration_us": observed.duration_us.tolist(),
        "num_prefills": np.asarray(work.num_prefills).tolist(),
        "num_decodes": np.asarray(work.num_decodes).tolist(),
        "num_prefill_tokens": np.asarray(work.prefill_tokens).tolist(),
        "num_decode_tokens": np.asarray(work.decode_tokens).tolist(),
        "context_tokens": (np.asarray(work.context) + np.asarray(work.tokens)).tolist(),
    }
    names = [renamed.get(name, name) for name in columns]
    rows = zip(*columns.values(), strict=True)
    path.write_text(
        "\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8"
    )
    return path
