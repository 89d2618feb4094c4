"""The guidance of a variant's requests, declared by the table of parameters in ``guided/parameter_table.py``."""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import Field

from benchctl.guided.parameter_table import CONSTRAINTS, MODES, PARAMETERS
from benchctl.profile.sections.quantities import MOST
from benchctl.profile.sections.section import Section

if TYPE_CHECKING:
    GuidanceMode: TypeAlias = str
    Constraint: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    GuidanceMode = Literal[MODES]
    Constraint = Literal[CONSTRAINTS]


def _parameter(name: str) -> Any:
    """The default, the limits and the meaning of a parameter."""
    parameter = PARAMETERS[name]
    limits: dict[str, Any] = dict(parameter.profile_bounds)
    if parameter.type == "number":
        limits |= {"ge": -MOST} if not limits.keys() & {"ge", "gt"} else {}
        limits |= {"le": MOST} if not limits.keys() & {"le", "lt"} else {}
    return Field(default=parameter.profile_default, description=parameter.meaning, **limits)


class Guidance(Section):
    """Guidance that the requests of a variant ask for (``custom_params`` of the fork)."""

    mode: GuidanceMode = _parameter("mode")
    value_scale: float = _parameter("value_scale")
    gamma: float = _parameter("gamma")
    value_entropy_threshold: float | None = _parameter("value_entropy_threshold")
    value_min: float | None = _parameter("value_min")
    target_value: float | None = _parameter("target_value")
    target_length: float | None = _parameter("target_length")
    target_length_mode: Literal["total", "remaining"] | None = _parameter("target_length_mode")
    value_constraint: Constraint | None = _parameter("value_constraint")

    @property
    def has_target(self) -> bool:
        """True where a hard constraint takes the place of mode and value_scale."""
        return self.target_value is not None or self.target_length is not None
