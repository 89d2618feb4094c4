"""The least time of a guided decode step at a device's peaks, and the ratio to the same step without guidance.

    from benchctl.costs.guided_floor import guided_floor

    ratio = (base + value model + sampling + launches) / base
    base, value model: max(bytes / bandwidth, FLOPs / peak) of each forward pass (``costs/roofline.py``)

A floor by peaks and no prediction: nothing reaches all of a data sheet's peaks, and how far a server stays behind
them was not part of it. Measured peaks give a closer one. It holds for steady decode of B rows that all ask for
guidance, each with c tokens in the cache before the step and k candidates. Assumed are

* weights that are read once by each pass, whatever its batch, in the format of each shape;
* prefixes that are read once for each row and pass, not once for each candidate, and new tokens that are written;
  elements of two bytes;
* u of the rows that need no scores in a step (one candidate, or too little entropy). Their token goes through the
  value model in a later pass, as a missing one;
* one pass over the value model, one after the other with the base model on one device. With ``reuse`` it has k
  tokens for each scored row, because the keys and values of the drawn candidate are kept, and the u B missing
  ones; with ``recompute`` k for each scored row and B missing ones; in ``two-phase`` the missing ones go in a pass
  of their own before;
* logits in float32 that guidance reads once and writes once. The sampler itself is in neither step;
* at k = 1 no guidance: there is nothing to choose from, and servers take the most probable token.

Launches count where passes are not replayed as CUDA graphs (``launch_s``): the host launches the operations of the
guidance from the moment at which the base model's logits are there, and what it needs for that beyond the time in
which the device computes them is added.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import ModelShape
from benchctl.costs.roofline import PassTime, pass_time
from benchctl.errors import UsageError

Scoring: TypeAlias = Literal["reuse", "recompute", "two-phase"]
"""The way in which prefixes of the value model grow by the token that was drawn."""

LAYER_OPERATIONS: Final = 9
"""Operations that one layer of a value model's pass launches, with benchctl's kernels."""
STEP_OPERATIONS: Final = 23
"""Operations of a guided step beside the layers, with one pass."""
SECOND_PASS_OPERATIONS: Final = 11
"""Those that a second pass adds beside its layers."""
LOGIT_BYTES: Final = 2 * 4
"""Bytes that guidance moves for each logit of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedFloor:
    """Least times of a guided decode step in seconds; ``value`` has the value model's passes in their order.

    Invariant: ``ratio`` is 1 and the sum of ``parts``.
    """

    base: PassTime[float]
    value: tuple[PassTime[float], ...] = ()
    value_tokens: float = 0.0
    """Tokens that go through the value model."""
    sampling_s: float = 0.0
    num_operations: int = 0
    """Operations that guidance launches where its passes are not replayed."""
    launches_s: float = 0.0
    """Time of the host for these beyond that of the device; 0 where they are replayed or unpriced."""

    @property
    def base_s(self) -> float:
        """The base model's decode step, which is the whole step without guidance."""
        return self.base.floor_s

    @property
    def value_s(self) -> float:
        return sum((each.floor_s for each in self.value), 0.0)

    @property
    def step_s(self) -> float:
        """The guided step."""
        return self.base_s + self.value_s + self.sampling_s + self.launches_s

    @property
    def ratio(self) -> float:
        """Guided over unguided step."""
        return self.step_s / self.base_s

    @property
    def parts(self) -> Mapping[str, float]:
        """Share of each cause in the ratio: reading weights and prefixes, arithmetic beyond that, and the rest."""
        times = {
            "weights": sum(each.weights_s for each in self.value),
            "prefixes": sum(each.prefixes_s for each in self.value),
            "arithmetic": sum(each.excess_compute_s for each in self.value),
            "sampling": self.sampling_s,
            "launches": self.launches_s,
        }
        return {cause: time_s / self.base_s for cause, time_s in times.items()}


def guided_floor(
    base: ModelShape,
    value_model: ModelShape,
    hardware: Hardware,
    *,
    batch: int,
    candidates: int,
    context: float,
    scoring: Scoring = "reuse",
    unscored_frac: float = 0.0,
    launch_s: float | None = None,
) -> GuidedFloor:
    """The least time of a decode step of ``batch`` rows with ``context`` tokens each and ``candidates`` to score.

    The value model is charged its value head whatever its shape says. ``unscored_frac`` of the rows need no scores.
    ``launch_s`` is the time that the host needs to launch an operation, None where passes are replayed. Raises
    UsageError for counts out of range.
    """
    _check(batch, candidates, context, scoring, unscored_frac, launch_s)
    length = context + 1  # with the newest token
    base_pass = pass_time(
        base,
        hardware,
        tokens=float(batch),
        kv_tokens=batch * (length + 1),
        positions=0.0,
        decode_positions=batch * length,
        heads=float(batch),
    )
    if candidates == 1:
        return GuidedFloor(base=base_pass)
    scored_rows = batch * (1 - unscored_frac)
    scored, missing = scored_rows * candidates, batch * (unscored_frac if scoring == "reuse" else 1.0)
    passes = [(scored_rows, missing, scored)]
    if scoring == "two-phase":
        passes = [(float(batch), missing, 0.0), (scored_rows, 0.0, scored)]
    shape = value_model.as_value_model()
    value = tuple(_value_pass(shape, hardware, length, *each) for each in passes)
    sampling_s = batch * base.vocab * LOGIT_BYTES / hardware.bandwidth_bytes_per_s
    num_operations = _num_operations(shape, len(value))
    device_s = sampling_s + sum(each.floor_s for each in value)
    return GuidedFloor(
        base=base_pass,
        value=value,
        value_tokens=missing + scored,
        sampling_s=sampling_s,
        num_operations=num_operations,
        launches_s=0.0 if launch_s is None else max(0.0, num_operations * launch_s - device_s),
    )


def _value_pass(
    shape: ModelShape, hardware: Hardware, length: float, rows: float, missing: float, scored: float
) -> PassTime[float]:
    tokens = missing + scored
    return pass_time(
        shape,
        hardware,
        tokens=tokens,
        kv_tokens=rows * length + tokens,
        positions=0.0,
        decode_positions=tokens * length,
        heads=scored,
    )


def _num_operations(shape: ModelShape, num_passes: int) -> int:
    return (
        STEP_OPERATIONS + num_passes * shape.layers * LAYER_OPERATIONS + (num_passes - 1) * SECOND_PASS_OPERATIONS
    )


def _check(
    batch: int, candidates: int, context: float, scoring: str, unscored_frac: float, launch_s: float | None
) -> None:
    for name, number in (("batch", batch), ("candidates", candidates)):
        if number < 1:
            raise UsageError(f"{name} is {number}; a guided step has 1 or more")
    if not context >= 0:
        raise UsageError(f"context is {context}; give the tokens of a prefix, 0 or more")
    if scoring not in get_args(Scoring):
        raise UsageError(f"scoring is {scoring!r}; choose one of {', '.join(get_args(Scoring))}")
    if not 0 <= unscored_frac <= 1:
        raise UsageError(f"unscored_frac is {unscored_frac}; give the share of rows without scores, from 0 to 1")
    if launch_s is not None and not launch_s >= 0:
        raise UsageError(f"launch_s is {launch_s}; give the seconds that the host needs for a launch, 0 or more")
