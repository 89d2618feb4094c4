"""The guidance of one request: its parameters, declared once for all servers, and the keys that ask for it."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal

from benchctl.errors import UsageError


class GuidanceError(UsageError, ValueError):
    """A request asks for guidance that does not exist; the message names key, value and remedy."""


class CheckpointError(UsageError):
    """A value model cannot be read; the message names the directory, the error and the remedy."""


EXPECTATION_MODES: Final = ("mul", "linear", "exp", "length_mul")
"""Tilt until the expected value reaches the one that the scale sets; neutral at 1."""
EXPONENTIAL_MODES: Final = ("centered_exp", "value_bias")
"""Tilt by the scale itself, among finitely many candidates; neutral at 0."""
MODES: Final = (*EXPECTATION_MODES, *EXPONENTIAL_MODES)
CONSTRAINTS: Final = ("eq", "ge", "le", "eq_soft")
CONSTRAINT_SIGNS: Final = {"==": "eq", "=": "eq", ">=": "ge", "<=": "le", "~=": "eq_soft", "~": "eq_soft"}
LENGTH_MODES: Final = {"total": "total", "budget": "total", "remaining": "remaining"}
NEUTRAL_WIDTH: Final = 1e-12
"""A scale this close to neutral is neutral."""
VLLM_PREFIX: Final = "lenvm_"
"""Precedes each name in ``vllm_xargs``."""
REVISIONS_THAT_SKIP: Final = frozenset({"V2", "V3"})
"""Revisions of the fork that leave out the value model where guidance changes no probability."""
SERVER_MODE: Final = "mul"
"""Mode of a request that activates guidance without naming one."""
SERVER_SCALE: Final = 1.0
"""Scale of a request that activates guidance without giving one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of guidance; a number unless it has ``choices`` or is a flag."""

    name: str
    """The same in profiles and requests."""
    meaning: str
    keys: tuple[str, ...] = ()
    """All keys under which servers take it; where a request gives several, the first one counts."""
    profile_default: Any = None
    """Value in profiles that do not set it; None leaves it to the server."""
    activates: bool = False
    """True where giving it asks for guidance, rather than refining guidance that another parameter asks for."""
    is_in_profiles: bool = True
    """False where profiles set it as an option of the server."""
    type: Literal["number", "count", "flag", "choice"] = "number"
    choices: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Accepted words, and the name that each stands for."""
    bounds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Limits of a number by the names ``ge``, ``gt``, ``le`` and ``lt``."""
    profile_minimum: float | None = None
    """Lower limit in profiles, where it is stricter than in requests."""
    requirement: str = "it must be a finite number"
    """Wording of the error for a value outside of the limits."""

    @property
    def profile_bounds(self) -> Mapping[str, float]:
        """Limits in profiles, by the names of ``bounds``."""
        return self.bounds if self.profile_minimum is None else {**self.bounds, "ge": self.profile_minimum}

    def check(self, key: str, value: object, source: str = "guidance") -> Any:
        """The value in its own type. Raises GuidanceError, which names ``source`` and ``key``, if it is invalid."""
        if self.type == "choice":
            if not isinstance(value, str) or value not in self.choices:
                raise GuidanceError(f"{source}: {key} is {value!r}; it must be one of {', '.join(self.choices)}")
            return self.choices[value]
        if self.type == "flag":
            if not isinstance(value, bool | int) or value not in (0, 1):
                raise GuidanceError(f"{source}: {key} is {value!r}; it must be true or false")
            return bool(value)
        number = _finite(value)
        if number is None:
            raise GuidanceError(f"{source}: {key} is {value!r}; it must be a finite number")
        limits = self.bounds
        is_allowed = (
            limits.get("ge", -math.inf) <= number <= limits.get("le", math.inf)
            and limits.get("gt", -math.inf) < number < limits.get("lt", math.inf)
            and (self.type != "count" or number == int(number))
        )
        if not is_allowed:
            raise GuidanceError(f"{source}: {key} is {value!r}; {self.requirement}")
        return int(number) if self.type == "count" else number


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


PARAMETERS: Final[Mapping[str, Parameter]] = {
    parameter.name: parameter
    for parameter in (
        Parameter(
            name="mode",
            meaning="Rule by which values tilt the candidates' probabilities; ``centered_exp`` and ``value_bias`` "
            "need a finite top_k.",
            keys=("mode", "value_mode"),
            profile_default="centered_exp",
            activates=True,
            type="choice",
            choices={mode: mode for mode in MODES},
        ),
        Parameter(
            name="value_scale",
            meaning="Strength of the tilt: 0 is neutral, negative shortens with ``centered_exp``.",
            keys=("value_scale", "scale"),
            profile_default=0.0,
            activates=True,
        ),
        Parameter(
            name="gamma",
            meaning="Discount that turns a value into a length.",
            keys=("length_gamma", "gamma"),
            profile_default=0.997,
            bounds={"gt": 0, "lt": 1},
            requirement="it must lie strictly between 0 and 1, such as 0.997",
        ),
        Parameter(
            name="value_entropy_threshold",
            meaning="Entropy in nats at or below which a row skips guidance; null: no row does.",
            keys=("value_entropy_threshold", "entropy_threshold"),
            profile_minimum=0,
        ),
        Parameter(
            name="value_min",
            meaning="Expected value below which a row skips guidance; null: no row does.",
            keys=("value_min",),
        ),
        Parameter(
            name="target_value",
            meaning="A hard constraint on the value, in place of mode and value_scale; it wins over "
            "``target_length``.",
            keys=("target_value",),
            activates=True,
            bounds={"ge": 0, "le": 1},
            requirement="it must lie between 0 (ends now) and 1 (never ends)",
        ),
        Parameter(
            name="target_length",
            meaning="The same on the length of an answer, in tokens.",
            keys=("target_length",),
            activates=True,
            bounds={"ge": 0},
            requirement="it is a number of tokens and must be 0 or more",
        ),
        Parameter(
            name="target_length_mode",
            meaning="``total`` counts the tokens generated so far, ``remaining`` does not; null: the server's "
            "choice, which is total.",
            keys=("target_length_mode", "length_mode"),
            type="choice",
            choices=LENGTH_MODES,
        ),
        Parameter(
            name="value_constraint",
            meaning="Comparison of the value with its target; null: the server's choice, which is eq.",
            keys=("value_constraint", "constraint", "cmp", "op"),
            activates=True,
            type="choice",
            choices={**{name: name for name in CONSTRAINTS}, **CONSTRAINT_SIGNS},
        ),
        Parameter(
            name="stride",
            meaning="Guide every n-th step of the request, starting with the first.",
            keys=("stride",),
            is_in_profiles=False,
            type="count",
            bounds={"ge": 1},
            requirement="it must be a whole number of steps, 1 or more",
        ),
        Parameter(
            name="skip_noop",
            meaning="Skip guidance that changes no probability.",
            keys=("skip_noop",),
            is_in_profiles=False,
            type="flag",
        ),
    )
}
"""Every parameter by its name. ``stride`` and ``skip_noop`` exist in our plugin alone."""
KNOWN_KEYS: Final = frozenset(key for parameter in PARAMETERS.values() for key in parameter.keys)
"""Every key that a request may use."""


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
    """True where the tilt leaves every probability as it is; a target never does, whatever its value."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideStep:
    """Counts of guidance in one step, by the names of step records."""

    guided_rows: int = 0
    candidates: int = 0
    """Of the guided rows."""
    value_prefill_tokens: int = 0
    value_extend_tokens: int = 0
    value_reuse_tokens: int = 0
    """Output tokens that were taken over from the candidates of an earlier step."""
    value_replayed: bool | None = None
    """True if the pass that scored repeated a recorded one; None where none ran or passes are not recorded."""
    value_recordings: int | None = None
    """Passes that were recorded in this step, because their sizes had not been foreseen; None as above."""
    fused: bool | None = None
    """True if prefixes were extended and candidates scored in one forward pass; None if nothing was scored."""
