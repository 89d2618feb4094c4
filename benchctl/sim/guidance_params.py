"""Guidance of one simulated request, with the limits of the fork's revisions that the simulator emulates."""

from collections.abc import Mapping
from typing import Any, Final

from benchctl.errors import UsageError
from benchctl.guided.parameter_table import EXPONENTIAL_MODES
from benchctl.guided.params import TOKEN_TEMPERATURE_KEYS, GuidanceParams, parse_params

_SOURCE: Final = "custom_params"


def parse_custom_params(params: Mapping[str, Any], *, top_k: int, revision: str) -> GuidanceParams | None:
    """Check ``custom_params`` and return the guidance that they ask for; None when no key activates any.

    Modes ``centered_exp`` and ``value_bias`` need a finite top_k, and so does V4 for all guidance; V4 refuses
    hard constraints. Keys that scale single tokens are accepted and have no effect. Raises UsageError naming key,
    value and remedy.
    """
    if ("boosted_token_ids" in params) != ("token_temp_divisor" in params):
        raise UsageError(f"{_SOURCE}: boosted_token_ids and token_temp_divisor must come together")
    own = {key: value for key, value in params.items() if key not in TOKEN_TEMPERATURE_KEYS}
    guidance = parse_params(own, source=_SOURCE)
    if guidance is None:
        return None
    if top_k == -1 and (guidance.mode in EXPONENTIAL_MODES or revision == "V4"):
        raise UsageError(
            f"{_SOURCE}: mode {guidance.mode!r} with top_k -1; set a finite top_k of at least 2, because the "
            "value model cannot score the whole vocabulary"
        )
    if guidance.has_target and revision == "V4":
        raise UsageError(
            f"{_SOURCE}: revision V4 has no hard constraints; drop target_value and target_length or start the "
            "server with --revision V1 or V2"
        )
    return guidance
