"""The work of a run's steps as two mean steps, one that only decodes and one that carries prompts.

A mean step is described by quantities that a reader changes one at a time: rows that decode, their context, prompts
and their share of the steps, candidates of a guided row, tokens that a row verifies. ``FACTORS`` names them, and
``works_between`` gives the steps in which some of them are those of one run and the others those of another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.steptime.work import Quantity, StepWork

Flags: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStep:
    """A mean step; all but ``rows`` and ``prompts`` are means over its rows or its prompts, NaN without any."""

    rows: float
    row_context: float
    row_tokens: float
    guided: float
    candidates: float
    value_extend_tokens: float
    prompts: float
    prompt_context: float
    prompt_tokens: float
    prompt_ends: float
    value_prefill_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanWork:
    """The mean steps of a run, None for a kind that it has not; ``prompt_frac`` of its steps carry prompts."""

    prompt_frac: float
    decoding: MeanStep | None
    prompting: MeanStep | None


FACTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "batch": ("rows",),
    "context": ("row_context", "prompt_context"),
    "prompts": ("prompts", "prompt_tokens", "prompt_ends", "value_prefill_tokens"),
    "candidates": ("guided", "candidates", "value_extend_tokens"),
    "drafts": ("row_tokens",),
}
"""What two runs may differ in, and the fields of a mean step that say so. ``prompts`` has the share of the steps
that carry them as well."""
_PROMPTS: Final = list(FACTORS).index("prompts")
_FACTOR_OF: Final = {field: index for index, names in enumerate(FACTORS.values()) for field in names}


def mean_work(work: StepWork, num_steps: int) -> MeanWork:
    """The mean steps of a run's ``work``. Raises ValueError without steps."""
    if num_steps < 1:
        raise ValueError("a run without steps has no mean step")
    columns = {field.name: np.broadcast_to(getattr(work, field.name), num_steps) for field in fields(work)}
    prompting = columns["num_prefills"] > 0
    return MeanWork(
        prompt_frac=float(prompting.mean()),
        decoding=_mean_step(columns, ~prompting),
        prompting=_mean_step(columns, prompting),
    )


def _mean_step(columns: Mapping[str, Floats], where: Flags) -> MeanStep | None:
    if not where.any():
        return None
    mean = {name: float(column[where].mean()) for name, column in columns.items()}
    rows, prompts = mean["num_decodes"], mean["num_prefills"]

    def of_row(name: str) -> float:
        return mean[name] / rows if rows else np.nan

    def of_prompt(value: float) -> float:
        return value / prompts if prompts else np.nan

    return MeanStep(
        rows=rows,
        row_context=of_row("decode_context"),
        row_tokens=of_row("decode_tokens"),
        guided=of_row("guided_rows"),
        candidates=of_row("candidates"),
        value_extend_tokens=of_row("value_extend_tokens"),
        prompts=prompts,
        prompt_context=of_prompt(mean["prefill_context"]),
        prompt_tokens=of_prompt(mean["prefill_tokens"]),
        prompt_ends=of_prompt(mean["num_sampled"] - rows),
        value_prefill_tokens=of_prompt(mean["value_prefill_tokens"]),
    )


def works_between(a: MeanWork, b: MeanWork, takes_b: Flags) -> Sequence[tuple[Floats, StepWork]]:
    """Mean steps with some factors of ``b`` and the others of ``a``, each kind with its share of all steps.

    ``takes_b`` has a row for each combination and a column for each of ``FACTORS``; shares and works have a value
    for each combination. A kind of step that only one run has is taken from that run.
    """
    prompt_frac = np.where(takes_b[:, _PROMPTS], b.prompt_frac, a.prompt_frac)
    kinds = [(1 - prompt_frac, a.decoding, b.decoding), (prompt_frac, a.prompting, b.prompting)]
    works = []
    for share, step_a, step_b in kinds:
        first, second = step_a or step_b, step_b or step_a
        if first is not None and second is not None:
            works.append((share, _work_between(first, second, takes_b)))
    return works


def _work_between(a: MeanStep, b: MeanStep, takes_b: Flags) -> StepWork:
    def mixed(name: str) -> Quantity:
        of_a, of_b = getattr(a, name), getattr(b, name)
        of_a, of_b = (other if np.isnan(own) else own for own, other in ((of_a, of_b), (of_b, of_a)))
        values: Floats = np.where(takes_b[:, _FACTOR_OF[name]], *np.nan_to_num((of_b, of_a)))
        return values

    rows, prompts = mixed("rows"), mixed("prompts")
    row_tokens, row_context = mixed("row_tokens"), mixed("row_context")
    prompt_tokens, prompt_context = mixed("prompt_tokens"), mixed("prompt_context")
    return StepWork(
        num_prefills=prompts,
        prefill_tokens=prompts * prompt_tokens,
        prefill_context=prompts * prompt_context,
        prefill_positions=prompts * prompt_tokens * (prompt_context + prompt_tokens / 2),
        num_decodes=rows,
        decode_tokens=rows * row_tokens,
        decode_context=rows * row_context,
        decode_positions=rows * row_tokens * (row_context + row_tokens / 2),
        num_sampled=rows + prompts * mixed("prompt_ends"),
        guided_rows=rows * mixed("guided"),
        candidates=rows * mixed("candidates"),
        value_prefill_tokens=prompts * mixed("value_prefill_tokens"),
        value_extend_tokens=rows * mixed("value_extend_tokens"),
    )
