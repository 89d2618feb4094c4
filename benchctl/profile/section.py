"""What every part of a profile shares."""

from pydantic import BaseModel, ConfigDict

LEAST, MOST = 1e-6, 1e6
"""Rates, factors and durations lie between, so that no time computed from them overflows."""


class Section(BaseModel):
    """A part of a profile: frozen, closed, and strict about types (``"5"`` is no number)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
