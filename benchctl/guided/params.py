"""What a request asks of the value model: keys as a LenVM server reads them from ``custom_params``.

Pure Python, so that a request can be checked where no device is.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from benchctl.guided.errors import GuidanceError

EXPONENTIAL_MODES: Final = ("centered_exp", "value_bias")
"""Tilt by ``scale`` itself; neutral at 0."""
EXPECTATION_MODES: Final = ("mul", "linear", "exp", "length_mul")
"""Tilt until the expected value is what ``scale`` makes of it; neutral at 1."""
MODES: Final = (*EXPONENTIAL_MODES, *EXPECTATION_MODES)
CONSTRAINTS: Final = ("eq", "ge", "le", "eq_soft")
NEUTRAL_WIDTH: Final = 1e-12
"""A scale this close to neutral is neutral."""

_DEFAULT_MODE: Final = "mul"
"""Of a request that activates guidance without naming a mode."""
ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "mode": ("mode", "value_mode"),
    "scale": ("value_scale", "scale"),
    "gamma": ("length_gamma", "gamma"),
    "value_min": ("value_min",),
    "entropy_threshold": ("value_entropy_threshold", "entropy_threshold"),
    "target_value": ("target_value",),
    "target_length": ("target_length",),
    "length_mode": ("target_length_mode", "length_mode"),
    "constraint": ("value_constraint", "constraint", "cmp", "op"),
    "stride": ("stride",),
    "skip_noop": ("skip_noop",),
}
"""Keys of each field; where a request gives several, the first one here counts, and all are checked."""
ACTIVATING: Final = ("mode", "scale", "target_value", "target_length", "constraint")
KNOWN_KEYS: Final = frozenset(key for keys in ALIASES.values() for key in keys)
_OF_TEMPERATURE: Final = frozenset({"token_temperature_scale", "boosted_token_ids", "token_temp_divisor"})
CONSTRAINT_SIGNS: Final = {"==": "eq", "=": "eq", ">=": "ge", "<=": "le", "~=": "eq_soft", "~": "eq_soft"}
LENGTH_MODES: Final = {"total": "total", "budget": "total", "remaining": "remaining"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidanceParams:
    """Guidance of one request; whatever is invalid raises GuidanceError.

    A target is a hard constraint on the value, or on the length from which it follows, and takes the place of mode
    and scale; ``target_value`` wins over ``target_length``. A constraint without a target constrains nothing.
    """

    mode: str = "centered_exp"
    scale: float = 1.0
    gamma: float = 0.997
    """Discount per token that links lengths and values; strictly between 0 and 1."""
    value_min: float | None = None
    """Below this expected value a step is not guided, whatever the mode."""
    entropy_threshold: float | None = None
    """At or below this entropy of the candidates, in nats, a step is not guided."""
    target_value: float | None = None
    target_length: float | None = None
    """In tokens."""
    length_mode: str = "total"
    """``total``: ``target_length`` counts the tokens generated so far; ``remaining``: only those still to come."""
    constraint: str = "eq"
    stride: int = 1
    """Every so many steps of the request are guided, the first always."""
    skip_noop: bool = True
    """Whether guidance that changes no probability is left out rather than computed."""
    is_neutral: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, check(name, value))
        object.__setattr__(self, "is_neutral", self._is_neutral())

    @property
    def has_target(self) -> bool:
        return self.target_value is not None or self.target_length is not None

    def _is_neutral(self) -> bool:
        if self.has_target:
            return False
        if self.mode in EXPONENTIAL_MODES:
            return abs(self.scale) <= NEUTRAL_WIDTH
        return abs(self.scale - 1) <= NEUTRAL_WIDTH or (self.mode == "mul" and self.scale <= 0)


def is_noop(params: GuidanceParams) -> bool:
    """Whether the tilt leaves every probability as it is; a target never does, whatever it comes to.

    ``mul`` has no meaning at a scale of 0 or less and leaves everything as it is there as well.
    """
    return params.is_neutral


def parse_params(mapping: Mapping[str, Any]) -> GuidanceParams | None:
    """The guidance that these keys ask for, or None where none of them activates any.

    Mode, scale, targets and constraints activate, under any of their names; gamma, thresholds and the like do not,
    but are checked. Raises GuidanceError for an unknown key or an invalid value.
    """
    for key in mapping:
        _check_key(key)
    given = {name: [key for key in keys if key in mapping] for name, keys in ALIASES.items()}
    checked = {name: [_CHECKS[name](key, mapping[key]) for key in keys] for name, keys in given.items()}
    if not any(checked[name] for name in ACTIVATING):
        return None
    chosen = {name: values[0] for name, values in checked.items() if values}
    return GuidanceParams(**{"mode": _DEFAULT_MODE, **chosen})


def check_top_k(params: GuidanceParams, top_k: int, max_candidates: int) -> None:
    """Raise GuidanceError where a request lets in more candidates than a value model will score.

    Every candidate is scored in every mode, so that none works on a whole vocabulary (``top_k`` of 0 or less). A
    ``top_k`` of 1 is allowed, and leaves nothing to guide.
    """
    if not 0 < top_k <= max_candidates:
        meaning = "every token of the vocabulary" if top_k <= 0 else f"{top_k} candidates per step"
        raise GuidanceError(
            f"guidance: top_k is {top_k} with mode {params.mode!r}: {meaning} would have to be scored; "
            f"set top_k to 2 or more, {max_candidates} at most"
        )


def _check_key(key: str) -> None:
    if key in _OF_TEMPERATURE:
        raise GuidanceError(
            f"guidance: {key!r} scales single tokens without a value model and is not supported; use logit_bias"
        )
    if key not in KNOWN_KEYS:
        near = difflib.get_close_matches(str(key), KNOWN_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(sorted(KNOWN_KEYS))}"
        raise GuidanceError(f"guidance: unknown key {key!r}; {hint}")


def _finite(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GuidanceError(f"guidance: {key} is {value!r}; it must be a finite number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise GuidanceError(f"guidance: {key} is {value!r}; it must be a finite number")
    return number


def _gamma(key: str, value: object) -> float:
    gamma = _finite(key, value)
    if not 0 < gamma < 1:
        raise GuidanceError(f"guidance: {key} is {value!r}; it must lie strictly between 0 and 1, such as 0.997")
    return gamma


def _fraction(key: str, value: object) -> float:
    number = _finite(key, value)
    if not 0 <= number <= 1:
        raise GuidanceError(f"guidance: {key} is {value!r}; it must lie between 0 (ends now) and 1 (never ends)")
    return number


def _length(key: str, value: object) -> float:
    number = _finite(key, value)
    if number < 0:
        raise GuidanceError(f"guidance: {key} is {value!r}; it is a number of tokens and must be 0 or more")
    return number


def _stride(key: str, value: object) -> int:
    number = _finite(key, value)
    if number < 1 or number != int(number):
        raise GuidanceError(f"guidance: {key} is {value!r}; it must be a whole number of steps, 1 or more")
    return int(number)


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise GuidanceError(f"guidance: {key} is {value!r}; it must be true or false")
    return bool(value)


def _one_of(names: Mapping[str, str]) -> Callable[[str, object], str]:
    def check(key: str, value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise GuidanceError(f"guidance: {key} is {value!r}; it must be one of {', '.join(names)}")
        return names[value]

    return check


_CHECKS: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "mode": _one_of({mode: mode for mode in MODES}),
    "scale": _finite,
    "gamma": _gamma,
    "value_min": _finite,
    "entropy_threshold": _finite,
    "target_value": _fraction,
    "target_length": _length,
    "length_mode": _one_of(LENGTH_MODES),
    "constraint": _one_of({**{name: name for name in CONSTRAINTS}, **CONSTRAINT_SIGNS}),
    "stride": _stride,
    "skip_noop": _flag,
}
_OPTIONAL: Final = frozenset(each.name for each in fields(GuidanceParams) if each.default is None)
