"""The guidance of one request to vLLM, and the filters top_k, top_p and min_p that it takes over.

A request asks by keys of ``vllm_xargs``: ``lenvm_`` before the names of ``parameter_table``
(``lenvm_value_scale``, ``lenvm_mode``...). Keys without the prefix are ignored.

Guidance chooses among the tokens that temperature and filters leave. vLLM applies its filters last, so on a guided
request they would cut the guided distribution once more. They are therefore moved, when a request comes in, from
vLLM's own parameters to ``lenvm_top_k``, ``lenvm_top_p`` and ``lenvm_min_p``, and vLLM's are left open. Clients
send ``top_p`` as usual. Requests that are never guided (greedy, or at a scale that changes nothing) keep vLLM's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchctl.guided.params import VLLM_PREFIX as PREFIX
from benchctl.guided.params import GuidanceError, GuidanceParams, check_top_k, is_noop, parse_params
from benchctl.guided.rows import GREEDY_TEMPERATURE

_OPEN: Final[Mapping[str, tuple[float, ...]]] = {"top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,)}
"""Values of vLLM's filters that filter nothing; the first is what an open one is set to."""
_MOVED_KEYS: Final = frozenset(PREFIX + name for name in _OPEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedRequest:
    """Guidance of a request that may be guided, with the filters that come before it."""

    params: GuidanceParams
    top_k: int
    top_p: float
    min_p: float


def asks_for_guidance(sampling: Any) -> bool:
    """True for a request with any key of ours."""
    return bool(sampling.extra_args) and any(key.startswith(PREFIX) for key in sampling.extra_args or ())


def admit(sampling: Any, max_candidates: int) -> None:
    """Check a request as it comes in, and take over its filters; a second call changes nothing.

    Raises GuidanceError for anything invalid, whether it would have had an effect or not.
    """
    if not asks_for_guidance(sampling):
        return
    own, filters = _split(sampling)
    params = parse_params(own)
    # vLLM opens the filters of greedy requests.
    if params is not None and sampling.temperature > GREEDY_TEMPERATURE:
        check_top_k(params, int(filters["top_k"]), max_candidates)
    is_ours = (
        params is not None
        and sampling.temperature > GREEDY_TEMPERATURE
        and filters["top_k"] != 1
        and not (params.skip_noop and is_noop(params))
    )
    extra = {key: value for key, value in (sampling.extra_args or {}).items() if key not in _MOVED_KEYS}
    if is_ours:
        extra |= {PREFIX + name: value for name, value in filters.items()}
    sampling.extra_args = extra
    for name, value in filters.items():
        kind = int if name == "top_k" else float
        setattr(sampling, name, kind(_OPEN[name][0] if is_ours else value))


def guided_request(sampling: Any) -> GuidedRequest | None:
    """The guidance of an admitted request; None for one that is never guided."""
    if not sampling.extra_args or f"{PREFIX}top_k" not in sampling.extra_args:
        return None
    own, filters = _split(sampling)
    params = parse_params(own)
    if params is None:
        return None
    return GuidedRequest(params=params, top_k=int(filters["top_k"]), top_p=filters["top_p"], min_p=filters["min_p"])


def _split(sampling: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Keys of guidance without their prefix, and the filters, wherever they are written."""
    own = {
        key.removeprefix(PREFIX): value
        for key, value in (sampling.extra_args or {}).items()
        if key.startswith(PREFIX)
    }
    filters: dict[str, float] = {}
    for name, opened in _OPEN.items():
        native = getattr(sampling, name)
        if name not in own:
            filters[name] = native
            continue
        filters[name] = _filter(name, own.pop(name))
        if native not in opened and native != filters[name]:
            raise GuidanceError(
                f"guidance: {name} is {native!r} and {PREFIX}{name} is {filters[name]!r}; give one of the two"
            )
    return own, filters


def _filter(name: str, value: object) -> float:
    limits = {"top_k": (-1, float("inf")), "top_p": (0, 1), "min_p": (0, 1)}[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not limits[0] <= float(value) <= limits[1] or (name == "top_p" and not value):  # type: ignore[arg-type]
        raise GuidanceError(f"guidance: {PREFIX}{name} is {value!r}; give what {name} itself may be")
    if name == "top_k" and float(value) != int(value):  # type: ignore[call-overload,arg-type]
        raise GuidanceError(f"guidance: {PREFIX}{name} is {value!r}; give a whole number")
    return value  # type: ignore[return-value]
