"""The guidance of one request, parsed from the keys that a LenVM server reads.

Pure Python, so that requests can be checked without torch.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from benchctl.guided.errors import GuidanceError
from benchctl.guided.parameter_table import (
    EXPONENTIAL_MODES,
    KNOWN_KEYS,
    NEUTRAL_WIDTH,
    PARAMETERS,
    SERVER_MODE,
    SERVER_SCALE,
)

TOKEN_TEMPERATURE_KEYS: Final = frozenset({"token_temperature_scale", "boosted_token_ids", "token_temp_divisor"})
"""Keys that scale single tokens without a value model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidanceParams:
    """Guidance of one request, by the names of ``parameter_table``; an invalid value raises GuidanceError.

    A target is a hard constraint on the value, or on the length from which it follows, and takes the place of mode
    and scale; ``target_value`` wins over ``target_length``. A constraint without a target constrains nothing.
    """

    mode: str = PARAMETERS["mode"].profile_default
    value_scale: float = SERVER_SCALE
    gamma: float = PARAMETERS["gamma"].profile_default
    value_min: float | None = None
    value_entropy_threshold: float | None = None
    target_value: float | None = None
    target_length: float | None = None
    target_length_mode: str = "total"
    value_constraint: str = "eq"
    stride: int = 1
    skip_noop: bool = True
    is_neutral: bool = field(init=False, repr=False, compare=False, default=False)
    """True where the tilt leaves every probability as it is; a target never does."""

    def __post_init__(self) -> None:
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, parameter.check(name, value))
        is_neutral = not self.has_target and is_neutral_scale(self.mode, self.value_scale)
        object.__setattr__(self, "is_neutral", is_neutral)

    @property
    def has_target(self) -> bool:
        return self.target_value is not None or self.target_length is not None

    @property
    def rule(self) -> str:
        """The constraint of a request with a target, the mode of any other."""
        return self.value_constraint if self.has_target else self.mode


_OPTIONAL: Final = frozenset(each.name for each in fields(GuidanceParams) if each.default is None)


def is_neutral_scale(mode: str, scale: float) -> bool:
    """True for a scale that changes nothing; with ``mul`` a scale of 0 or less has no meaning, so does nothing."""
    if mode in EXPONENTIAL_MODES:
        return abs(scale) <= NEUTRAL_WIDTH
    return abs(scale - 1) <= NEUTRAL_WIDTH or (mode == "mul" and scale <= 0)


def is_noop(params: GuidanceParams) -> bool:
    """True where the tilt leaves every probability as it is; a target never does, whatever its value."""
    return params.is_neutral


def parse_params(mapping: Mapping[str, Any], source: str = "guidance") -> GuidanceParams | None:
    """The guidance that these keys ask for; None where none of them activates any.

    Mode, scale, targets and constraints activate, under any of their keys; gamma, thresholds and the like do not,
    but are checked. Raises GuidanceError, which names ``source``, for an unknown key or an invalid value.
    """
    for key in mapping:
        _check_key(key, source)
    values = {
        name: [parameter.check(key, mapping[key], source) for key in parameter.keys if key in mapping]
        for name, parameter in PARAMETERS.items()
    }
    if not any(values[name] for name, parameter in PARAMETERS.items() if parameter.activates):
        return None
    return GuidanceParams(**{"mode": SERVER_MODE, **{name: first[0] for name, first in values.items() if first}})


def check_top_k(params: GuidanceParams, top_k: int, max_candidates: int) -> None:
    """Raise GuidanceError where a request admits more candidates than a value model will score.

    Every candidate is scored in every mode, so that none works on a whole vocabulary (``top_k`` of 0 or less). A
    ``top_k`` of 1 is allowed, and leaves nothing to guide.
    """
    if not 0 < top_k <= max_candidates:
        meaning = "every token of the vocabulary" if top_k <= 0 else f"{top_k} candidates per step"
        raise GuidanceError(
            f"guidance: top_k is {top_k} with mode {params.mode!r}: {meaning} would have to be scored; "
            f"set top_k to 2 or more, {max_candidates} at most"
        )


def _check_key(key: str, source: str) -> None:
    if key in TOKEN_TEMPERATURE_KEYS:
        raise GuidanceError(
            f"{source}: {key!r} scales single tokens without a value model and is not supported; use logit_bias"
        )
    if key not in KNOWN_KEYS:
        near = difflib.get_close_matches(str(key), KNOWN_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(sorted(KNOWN_KEYS))}"
        raise GuidanceError(f"{source}: unknown key {key!r}; {hint}")
