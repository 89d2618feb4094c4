"""The sampling parameters of requests. See ``Profile.sampling``."""

from typing import Any, Final

from pydantic import Field, field_validator

from benchctl.profile.choices import PENALTIES
from benchctl.profile.sections.quantities import Penalty, Probability, Share, Temperature, VocabularyRank
from benchctl.profile.sections.section import Section

LEAST_TEMPERATURE: Final = 0.001
"""Logits that are divided by less overflow."""


class Sampling(Section):
    """Sampling parameters of every request of a variant. ``top_k: -1`` keeps the whole vocabulary."""

    temperature: Temperature = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: Share = 1.0
    """Keeps the most probable tokens up to this probability mass."""
    top_k: VocabularyRank = -1
    """Keeps this many most probable tokens; 1 is greedy, -1 keeps all."""
    min_p: Probability = 0.0
    """Drops tokens less probable than this fraction of the most probable one."""
    presence_penalty: Penalty = 0.0
    """Taken from the logits of tokens that the answer has; 0: none."""
    frequency_penalty: Penalty = 0.0
    """Taken from the logits of tokens once for each time that the answer has them; 0: none."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    """Divides positive logits, and multiplies negative ones, of tokens that prompt or answer have; 1: none."""

    @property
    def is_greedy(self) -> bool:
        """True where the most probable token is always chosen."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties that change anything, by name."""
        return {name: value for name in PENALTIES if (value := getattr(self, name)) != _NEUTRAL[name]}

    def stated(self) -> dict[str, Any]:
        """All parameters but penalties that change nothing: a server spends time in every step on those it has."""
        return self.model_dump(exclude=set(PENALTIES)) | self.penalties

    @field_validator("temperature")
    @classmethod
    def _divides_without_overflow(cls, temperature: float) -> float:
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"is {temperature:g}; write 0 for greedy decoding, or at least {LEAST_TEMPERATURE}")
        return temperature

    @field_validator("top_k")
    @classmethod
    def _top_k_is_a_count(cls, top_k: int) -> int:
        if top_k == 0:
            raise ValueError("top_k is 0; write -1 for the whole vocabulary or a positive count")
        return top_k


_NEUTRAL: Final = {name: Sampling.model_fields[name].default for name in PENALTIES}
