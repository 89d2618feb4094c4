"""What a cost model is told about a step, and what it answers."""

from typing import Final, Protocol

import msgspec

from benchctl.costs.shapes import ModelShape
from benchctl.sim.guidance import UNGUIDED, GuidedStep
from benchctl.units import NS_PER_S

_LOAD_BYTES_PER_S: Final = 1e9
"""3.1 s for the 1.5B value model, an assumption."""


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The batch of one step.

    ``context_tokens`` is the sum of the contexts after the step, ``attended_positions`` the positions that all
    new tokens see together. ``is_greedy`` is None when no row samples. ``longest_context`` and
    ``most_new_tokens`` are maxima over the rows.
    """

    num_seqs: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampling: int
    context_tokens: int
    attended_positions: int
    is_greedy: bool | None
    guided: GuidedStep = UNGUIDED
    loads_value_model: bool = False
    longest_context: int = 0
    most_new_tokens: int = 0


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one step, each without what is stated beside it, so that they only add up.

    None means that the section does not exist in this step. ``sampler_rest`` and ``lvm_rest`` are what their
    sections hold beyond the named parts.
    """

    schedule: int = 0
    model_forward: int
    sampler_rest: int | None = None
    pre_lvm: int | None = None
    sample: int | None = None
    lvm_rest: int | None = None
    lvm_build_pending: int | None = None
    lvm_forward: int | None = None
    lvm_apply_guidance: int | None = None
    value_model_load: int | None = None

    def scaled(self, factor: float) -> "StepCost":
        """Every part times ``factor``, to whole nanoseconds."""
        parts = {
            name: round(value * factor)
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None
        }
        return StepCost(**parts)

    def sections(self) -> dict[str, int]:
        """The nested sections of a step record; parents are the sums of their parts."""
        sections = {"schedule": self.schedule, "model_forward": self.model_forward}
        if self.sampler_rest is None:
            return sections
        total = self.sampler_rest
        if self.pre_lvm is not None:
            sections["pre_lvm"] = self.pre_lvm
            total += self.pre_lvm
        if self.lvm_rest is not None:
            outer = self.lvm_rest
            for name in ("lvm_build_pending", "value_model_load", "lvm_forward", "lvm_apply_guidance"):
                part: int | None = getattr(self, name)
                if part is not None:
                    sections[name] = part
                    outer += part
            sections["lvm_apply_outer"] = outer
            total += outer
        if self.sample is not None:
            sections["sample"] = self.sample
            total += self.sample
        sections["sampler_total"] = total
        return sections


class CostModel(Protocol):
    """Prices a step. Implementations: lenvm-h100, roofline, llm-mock."""

    def __call__(self, batch: StepBatch, /) -> StepCost: ...


def value_model_load_ns(shape: ModelShape) -> int:
    """What the first guided step takes longer on a server that loads its value model lazily: weights / 1 GB/s."""
    return round(shape.weight_bytes() / _LOAD_BYTES_PER_S * NS_PER_S)
