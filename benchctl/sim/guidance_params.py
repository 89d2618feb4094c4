"""What a request asks of the value model: the keys of ``custom_params`` that the guided fork understands."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchctl.errors import UsageError
from benchctl.profile.sources.files import nearest

MODES: Final = ("mul", "linear", "exp", "length_mul", "centered_exp", "value_bias")
_FINITE_TOP_K_MODES: Final = frozenset({"centered_exp", "value_bias"})
_TARGET_KEYS: Final = ("target_value", "target_length")
_CONSTRAINT_KEYS: Final = ("value_constraint", "constraint", "cmp", "op")
_ACTIVATING_KEYS: Final = ("value_scale", "scale", "value_mode", "mode", *_TARGET_KEYS, *_CONSTRAINT_KEYS)
_PASSIVE_KEYS: Final = (
    "gamma",
    "length_gamma",
    "value_min",
    "value_entropy_threshold",
    "entropy_threshold",
    "target_length_mode",
    "length_mode",
    "token_temperature_scale",
    "boosted_token_ids",
    "token_temp_divisor",
)
_KNOWN_KEYS: Final = tuple(sorted(_ACTIVATING_KEYS + _PASSIVE_KEYS))
_CONSTRAINTS: Final = frozenset({"eq", "ge", "le", "eq_soft", "==", "=", ">=", "<=", "~=", "~"})
_NEUTRAL_WIDTH: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidanceParams:
    """Valid guidance of one request. ``has_target`` is a hard constraint on value or length."""

    mode: str = "mul"
    value_scale: float = 1.0
    gamma: float = 0.997
    value_entropy_threshold: float | None = None
    has_target: bool = False

    @property
    def is_neutral(self) -> bool:
        """Whether the tilt leaves every probability as it is; a hard constraint never does."""
        if self.has_target:
            return False
        if self.mode in _FINITE_TOP_K_MODES:
            return abs(self.value_scale) <= _NEUTRAL_WIDTH
        return abs(self.value_scale - 1) <= _NEUTRAL_WIDTH or (self.mode == "mul" and self.value_scale <= 0)


def parse_custom_params(params: Mapping[str, Any], *, top_k: int, revision: str) -> GuidanceParams | None:
    """Check ``custom_params`` and return the guidance they ask for; None when no key activates any.

    Modes ``centered_exp`` and ``value_bias`` need a finite top_k, and so does V4 for all guidance; V4 refuses
    hard constraints. Raises UsageError naming key, value and remedy.
    """
    _check_keys(params)
    if not any(key in params for key in _ACTIVATING_KEYS):
        return None
    guidance = GuidanceParams(
        mode=_mode(params),
        value_scale=_number(params, ("value_scale", "scale"), 1.0),
        gamma=_gamma(params),
        value_entropy_threshold=_threshold(params),
        has_target=_has_target(params),
    )
    if top_k == -1 and (guidance.mode in _FINITE_TOP_K_MODES or revision == "V4"):
        raise UsageError(
            f"custom_params: mode {guidance.mode!r} with top_k -1; set a finite top_k of at least 2, because the "
            "value model cannot score the whole vocabulary"
        )
    if guidance.has_target and revision == "V4":
        raise UsageError(
            "custom_params: revision V4 has no hard constraints; drop target_value and target_length or start the "
            "server with --revision V1 or V2"
        )
    return guidance


def _check_keys(params: Mapping[str, Any]) -> None:
    for key in params:
        if key not in _KNOWN_KEYS:
            near = nearest(key, _KNOWN_KEYS)
            hint = f"did you mean {near!r}?" if near else f"known keys are {', '.join(_KNOWN_KEYS)}"
            raise UsageError(f"custom_params: unknown key {key!r}; {hint}")
    if ("boosted_token_ids" in params) != ("token_temp_divisor" in params):
        raise UsageError("custom_params: boosted_token_ids and token_temp_divisor must come together")


def _mode(params: Mapping[str, Any]) -> str:
    mode = params.get("mode", params.get("value_mode", "mul"))
    if mode not in MODES:
        raise UsageError(f"custom_params: mode is {mode!r}; it must be one of {', '.join(MODES)}")
    return str(mode)


def _gamma(params: Mapping[str, Any]) -> float:
    gamma = _number(params, ("length_gamma", "gamma"), 0.997)
    if not 0 < gamma < 1:
        raise UsageError(f"custom_params: gamma is {gamma}; it must lie between 0 and 1")
    return gamma


def _threshold(params: Mapping[str, Any]) -> float | None:
    threshold = _number(params, ("value_entropy_threshold", "entropy_threshold"), -1.0)
    return threshold if threshold >= 0 else None


def _has_target(params: Mapping[str, Any]) -> bool:
    """A constraint without a target is none: it falls through to the expectation modes."""
    for key in _CONSTRAINT_KEYS:
        if key in params and params[key] not in _CONSTRAINTS:
            raise UsageError(
                f"custom_params: {key} is {params[key]!r}; it must be one of {', '.join(sorted(_CONSTRAINTS))}"
            )
    if "target_value" in params and not 0 <= _number(params, ("target_value",), 0.0) <= 1:
        raise UsageError(f"custom_params: target_value is {params['target_value']}; it must lie within 0 and 1")
    if "target_length" in params and _number(params, ("target_length",), 0.0) < 0:
        raise UsageError(f"custom_params: target_length is {params['target_length']}; it must not be negative")
    return any(key in params for key in _TARGET_KEYS)


def _number(params: Mapping[str, Any], keys: tuple[str, ...], default: float) -> float:
    """The value of the first of ``keys`` that is given."""
    for key in keys:
        if key in params:
            value = params[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UsageError(f"custom_params: {key} is {value!r}; it must be a finite number")
            return float(value)
    return default
