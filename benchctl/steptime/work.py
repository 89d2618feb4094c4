"""The work of engine steps as counts, the deployment that does it, and the words of a step-time model.

Every quantity is one number or an array with one value for each step: formulas hold for both, so that a log of a
million steps and one step of a simulator are priced by the same lines of code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from benchctl.costs.hardware import Hardware
from benchctl.costs.shapes import ModelShape

Structure: TypeAlias = Literal["original", "overlap", "roofline"]
"""``original`` is the published form with seven coefficients; ``overlap`` takes max(compute, kv + weights) with
per-layer, per-request and all-reduce terms; ``roofline`` is the analytic bound, which nothing is fitted to."""

ExpertsRead: TypeAlias = Literal["linear", "uniform", "measured"]
"""Number of experts whose weights a step reads: min(N, n k), N (1 - (1 - k / N)^n), or a table of the user's."""


Backfill: TypeAlias = Literal["none", "expansion", "prefill"]
"""Way in which a draft's cache gets the bonus token; ``none`` costs nothing: a draft without a cache, such as
n-grams, or one that is a head of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One coefficient with its bootstrap interval; ``unit`` is empty for a factor on a time at peak."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""
    is_identified: bool = True
    """Whether the data determine it; a feature that never varies has no coefficient of its own."""


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Quantity: TypeAlias = float | npt.NDArray[np.float64]
else:
    Quantity: TypeAlias = float
"""One step, or many at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWork:
    """Counts of one step or of many.

    Row i of a batch has S_i tokens in the cache before the step and T_i new ones. ``*_context`` is the sum of S_i
    over the rows of that phase, ``*_positions`` the sum of T_i (S_i + T_i / 2), which is the number of pairs of a
    new token and a position that it attends to. A decoding row has T_i = 1 unless it verifies drafts.
    """

    num_prefills: Quantity = 0.0
    prefill_tokens: Quantity = 0.0
    prefill_context: Quantity = 0.0
    prefill_positions: Quantity = 0.0
    num_decodes: Quantity = 0.0
    decode_tokens: Quantity = 0.0
    decode_context: Quantity = 0.0
    decode_positions: Quantity = 0.0
    num_sampled: Quantity = 0.0
    """Tokens whose logits are computed: those of decoding rows, and the last of prompts that end in this step."""
    guided_rows: Quantity = 0.0
    candidates: Quantity = 0.0
    value_prefill_tokens: Quantity = 0.0
    value_extend_tokens: Quantity = 0.0

    @property
    def num_seqs(self) -> Quantity:
        return self.num_prefills + self.num_decodes

    @property
    def tokens(self) -> Quantity:
        return self.prefill_tokens + self.decode_tokens

    @property
    def context(self) -> Quantity:
        return self.prefill_context + self.decode_context


def one_step(
    *,
    num_decodes: float,
    context: float,
    num_prefills: float = 0.0,
    prompt_tokens: float = 0.0,
    prompt_context: float = 0.0,
    row_tokens: float = 1.0,
) -> StepWork:
    """A step of decoding rows with ``context`` tokens each in the cache, and of so many prompts.

    Each prompt has ``prompt_tokens`` new tokens behind ``prompt_context`` in the cache, and ends in this step. A
    row that verifies K drafts has ``row_tokens`` = K + 1 new tokens, and logits for each of them.
    """
    return StepWork(
        num_prefills=num_prefills,
        prefill_tokens=num_prefills * prompt_tokens,
        prefill_context=num_prefills * prompt_context,
        prefill_positions=num_prefills * prompt_tokens * (prompt_context + prompt_tokens / 2),
        num_decodes=num_decodes,
        decode_tokens=num_decodes * row_tokens,
        decode_context=num_decodes * context,
        decode_positions=num_decodes * row_tokens * (context + row_tokens / 2),
        num_sampled=num_decodes * row_tokens + num_prefills,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The model and the devices that run a step. ``tensor_parallel`` devices of one kind share each layer.

    ``weight_bytes_per_param`` replaces the format of the checkpoint's projections, for a server that quantises
    weights as it loads them; the arithmetic stays that of the shape.
    """

    shape: ModelShape
    hardware: Hardware
    tensor_parallel: int = 1
    weight_bytes_per_param: float | None = None
    kv_bytes_per_element: float = 2.0
    value_shape: ModelShape | None = None
    measured_experts: tuple[tuple[float, float], ...] = ()
    """Tokens of a step and experts that they read in one layer, in the order of tokens."""

    @property
    def param_bytes(self) -> float:
        """Bytes of one weight of a projection."""
        return self.shape.param_bytes() if self.weight_bytes_per_param is None else self.weight_bytes_per_param


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The file or result directory that steps were read from; ``sha256`` is that of its step log."""

    path: str
    sha256: str
    engine: str | None = None
    engine_version: str | None = None
    clock: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedSteps:
    """Steps of one run with their durations: what a model is fitted to and judged by.

    ``run`` and ``model`` name the groups that hold-outs leave out; ``duration_us`` has one value for each step of
    ``work``. ``is_saturated`` marks steps that a fit leaves out: preemption, a full cache, an empty batch.
    """

    run: str
    model: str
    deployment: Deployment
    work: StepWork
    duration_us: "npt.NDArray[np.float64]"
    is_saturated: "npt.NDArray[np.bool_]"
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Steps of ``is_saturated`` by the first reason that holds for them."""
    origin: Origin | None = None
