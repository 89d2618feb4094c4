"""Features of steps: the columns that a step-time model weighs with coefficients, in a fixed order.

Times at the data sheet's peaks are in microseconds; counts (``layers``, ``requests``, ``steps``, ``guided_steps``,
``guided_rows``, ``candidates``) have coefficients in microseconds each. With C the FLOPs of a step at peak, K its
key-value bytes and W its weights at peak bandwidth, C and W with the head:

overlap        compute C or memory K + W, whichever is larger, the other 0; all_reduce, layers, requests, steps
scaling-book   compute C or weights W, whichever is larger, the other 0; kv K; all_reduce, layers, requests, steps
no-overlap     compute C, kv K, weights W; all_reduce, layers, requests, steps
roofline       roofline max(C, K + W), whose coefficient is 1
original       the seven published ones (``original.py``)

A step without tokens has none of these but ``steps``; the published form reads weights even then. A deployment
with a value model adds that model's forward pass at its roofline, 1 for a guided step, its rows and candidates.

Two columns for one maximum let compute and memory have efficiencies of their own while the model stays linear.
Every step of a model has the same layers and steps, so that their coefficients differ only over models.
"""

from typing import TYPE_CHECKING, Final, TypeAlias

from benchctl.steptime.structure import ExpertsRead, Structure
from benchctl.steptime.terms.all_reduce import step_all_reduces
from benchctl.steptime.terms.elementwise import greater, is_above
from benchctl.steptime.terms.experts import experts_read_by
from benchctl.steptime.terms.guided_work import value_model_us
from benchctl.steptime.terms.original import original_times
from benchctl.steptime.terms.peak_times import peak_times
from benchctl.steptime.work import Deployment, StepWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchctl.steptime.work import Quantity

    FeaturesOf: TypeAlias = Callable[[StepWork], tuple[Quantity, ...]]

_OVERHEADS: Final = ("all_reduce", "layers", "requests", "steps")
_NAMES: Final[dict[Structure, tuple[str, ...]]] = {
    "original": (
        "prefill",
        "decode",
        "static_weights",
        "expert_weights",
        "all_reduce",
        "requests",
        "steps",
    ),
    "overlap": ("compute", "memory", *_OVERHEADS),
    "scaling-book": ("compute", "weights", "kv", *_OVERHEADS),
    "no-overlap": ("compute", "kv", "weights", *_OVERHEADS),
    "roofline": ("roofline",),
}
GUIDED_NAMES: Final = ("value_model", "guided_steps", "guided_rows", "candidates")
COUNTS: Final = frozenset({"layers", "requests", "steps", "guided_steps", "guided_rows", "candidates"})
"""Features that count; the others are times at peak, in microseconds."""


def feature_names(structure: Structure, *, is_guided: bool = False) -> tuple[str, ...]:
    """Names of the columns in order; ``is_guided`` adds those of a value model."""
    return _NAMES[structure] + (GUIDED_NAMES if is_guided else ())


def features(
    work: StepWork, deployment: Deployment, structure: Structure, experts_read: ExpertsRead = "uniform"
) -> "dict[str, Quantity]":
    """The features of a step, or of many, by name in the order of ``feature_names``."""
    names = feature_names(structure, is_guided=deployment.value_shape is not None)
    return dict(zip(names, step_features(deployment, structure, experts_read)(work), strict=True))


def step_features(
    deployment: Deployment, structure: Structure, experts_read: ExpertsRead = "uniform"
) -> "FeaturesOf":
    """The function from the work of a step, or of many, to its features, with all constants computed once.

    Raises UsageError for measured experts without a table.
    """
    price = (
        _original(deployment, experts_read)
        if structure == "original"
        else _corrected(deployment, structure, experts_read)
    )
    value_us = value_model_us(deployment)
    if value_us is None:
        return price
    return lambda work: (
        *price(work),
        value_us(work),
        is_above(work.guided_rows, 0.0),
        work.guided_rows,
        work.candidates,
    )


def _corrected(deployment: Deployment, structure: Structure, experts_read: ExpertsRead) -> "FeaturesOf":
    """Columns of all structures but the published one."""
    times, layers = peak_times(deployment), float(deployment.shape.layers)
    num_experts, all_reduces = experts_read_by(deployment, experts_read), step_all_reduces(deployment)
    columns = _COLUMNS[structure]

    def price(work: StepWork) -> "tuple[Quantity, ...]":
        tokens = work.prefill_tokens + work.decode_tokens
        has_tokens = is_above(tokens, 0.0)
        compute = (
            tokens * times.token_us
            + work.prefill_positions * times.prefill_position_us
            + work.decode_positions * times.decode_position_us
            + work.prefill_context * times.prefill_context_us
            + work.num_sampled * times.head_us
        )
        kv = (work.prefill_context + work.decode_context + tokens) * times.kv_token_us
        weights: Quantity = has_tokens * times.static_weights_us
        if num_experts is not None:
            weights = weights + num_experts(tokens) * times.expert_weights_us
        # One row with logits reads the whole head.
        weights = weights + is_above(work.num_sampled, 0.0) * times.head_weights_us
        if structure == "roofline":
            return (greater(compute, kv + weights),)
        all_reduce = has_tokens * (0.0 if all_reduces is None else all_reduces(tokens))
        requests = work.num_prefills + work.num_decodes
        return (*columns(compute, kv, weights), all_reduce, has_tokens * layers, requests, has_tokens * 0.0 + 1.0)

    return price


def _overlap(compute: "Quantity", kv: "Quantity", weights: "Quantity") -> "tuple[Quantity, ...]":
    is_compute_bound = is_above(compute, kv + weights)
    return is_compute_bound * compute, (1.0 - is_compute_bound) * (kv + weights)


def _scaling_book(compute: "Quantity", kv: "Quantity", weights: "Quantity") -> "tuple[Quantity, ...]":
    is_compute_bound = is_above(compute, weights)
    return is_compute_bound * compute, (1.0 - is_compute_bound) * weights, kv


def _no_overlap(compute: "Quantity", kv: "Quantity", weights: "Quantity") -> "tuple[Quantity, ...]":
    return compute, kv, weights


_COLUMNS: Final = {
    "overlap": _overlap,
    "scaling-book": _scaling_book,
    "no-overlap": _no_overlap,
    "roofline": _no_overlap,
}


def _original(deployment: Deployment, experts_read: ExpertsRead) -> "FeaturesOf":
    times, num_experts = original_times(deployment), experts_read_by(deployment, experts_read)
    moe = deployment.shape.moe
    # With no tokens the published form counts the experts of one.
    fewest_experts = float(moe.experts_per_token) if moe is not None and experts_read == "linear" else 0.0

    def price(work: StepWork) -> "tuple[Quantity, ...]":
        prefill = greater(
            times.compute_us(work.prefill_tokens, work.prefill_positions),
            times.kv_us(work.prefill_context, work.prefill_tokens),
        )
        decode = greater(
            times.compute_us(work.decode_tokens, work.decode_positions),
            times.kv_us(work.decode_context, work.decode_tokens),
        )
        tokens, requests = work.prefill_tokens + work.decode_tokens, work.num_prefills + work.num_decodes
        nothing = 0.0 * tokens
        experts = nothing if num_experts is None else greater(num_experts(tokens), nothing + fewest_experts)
        return (
            prefill,
            decode,
            nothing + times.static_weights_us,
            experts * times.expert_weights_us,
            tokens * times.all_reduce_token_us,
            requests,
            nothing + 1.0,
        )

    return price
