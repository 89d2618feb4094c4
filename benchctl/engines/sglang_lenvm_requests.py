"""Guided requests to SGLang's LenVM fork: their fields, and those that are refused as fatal or ambiguous.

The fork checks little. A request that its sampler has no path for raises an exception inside the scheduler, which
ends all other requests too; a setting that the path in use does not know is silently ignored. Both are refused
here, before anything is sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchctl.guided.params import EXPONENTIAL_MODES, NEUTRAL_WIDTH, SERVER_MODE, SERVER_SCALE
from benchctl.profile.model import Guidance, Sampling

BUILT_IN_GAMMA: Final = 0.997
"""Discount of the path for finitely many candidates, whatever a request says."""
_REPLACED_BY_TARGET: Final = ("mode", "value_scale")

Params = Mapping[str, Any]
"""``custom_params`` of one request; None stands for a request that has none."""


def custom_params(guidance: Guidance | None) -> dict[str, Any] | None:
    """``custom_params`` as the fork reads them. None without guidance: a key alone activates it.

    A target takes the place of mode and scale, which would only choose a path that targets do not have.
    """
    if guidance is None:
        return None
    params = guidance.model_dump(exclude_none=True)
    if guidance.has_target:
        params = {name: value for name, value in params.items() if name not in _REPLACED_BY_TARGET}
    return params


def refusal(params: Params | None, sampling: Sampling, revision: str | None) -> tuple[str, str] | None:
    """The error that the server would make with such a request, and the remedy; None for a request without one.

    ``top_k`` 1 and temperature 0 are allowed: greedy decoding, where guidance never acts on any revision.
    """
    if params is None or sampling.is_greedy:
        return None
    mode, has_all, has_target = _mode(params), sampling.top_k < 1, _has_target(params)
    if revision == "V4" and has_target:
        return "dies of a target, for which V4 has no path", "leave the target out, or take another revision"
    if has_all and not has_target and mode in EXPONENTIAL_MODES:
        return (
            f"dies of mode {mode} with top_k {sampling.top_k}, for which its sampler has no path",
            "set sampling.top_k to 2 or more",
        )
    if has_all and revision == "V4":
        return f"dies of guidance with top_k {sampling.top_k} on V4", "set sampling.top_k to 2 or more"
    if has_all or has_target:
        return None
    if params.get("value_min") is not None:
        return "ignores value_min where top_k is finite and nothing has a target", "leave value_min out"
    gamma = params.get("gamma", BUILT_IN_GAMMA)
    if mode == "length_mul" and gamma != BUILT_IN_GAMMA:
        return (
            f"computes lengths with gamma {BUILT_IN_GAMMA} with a finite top_k, not with {gamma}",
            f"set guidance.gamma to {BUILT_IN_GAMMA}",
        )
    return None


def mixed_refusal(requests: Sequence[Params | None]) -> tuple[str, str] | None:
    """The same for requests in one batch: a target sends the whole batch to a path that cannot tilt."""
    guided = [params for params in requests if params is not None]
    tilting = sorted({_mode(params) for params in guided if not _has_target(params)} & {*EXPONENTIAL_MODES})
    if tilting and any(map(_has_target, guided)):
        return (
            f"dies of a batch in which some requests have a target and others mode {tilting[0]}",
            "measure them in variants of their own",
        )
    return None


def ambiguities(requests: Sequence[Params | None]) -> tuple[str, ...]:
    """The parts of requests in one batch that the revisions understand differently, each with its meanings."""
    guided = [params for params in requests if params is not None]
    texts = [text for params in guided if (text := _neutral(params))]
    if any(params.get("value_entropy_threshold") is not None for params in guided):
        texts.append(
            "value_entropy_threshold: V0 to V3 hold it against the entropy of the filtered candidates, V4 against "
            "that of the whole vocabulary; and rows that it skips are sampled without any filter on V0, V1 and V3"
        )
    if len({_mode(params) for params in guided if not _has_target(params)}) > 1:
        texts.append("several modes in one batch: V2 tilts each row by its own, V0, V1, V3 and V4 all rows by mul")
    if guided and len(guided) < len(requests):
        texts.append(
            "requests without guidance beside guided ones: V0, V1 and V3 sample them without top_k, top_p and "
            "min_p, V2 and V4 as they ask"
        )
    return tuple(dict.fromkeys(texts))


def _neutral(params: Params) -> str | None:
    """The effect of a scale that tilts nothing, by revision."""
    if _has_target(params):
        return None
    mode, scale = _mode(params), params.get("value_scale", SERVER_SCALE)
    neutral_scale = 0.0 if mode in EXPONENTIAL_MODES else 1.0
    if mode == "mul" and scale <= 0:
        return (
            f"value_scale {scale:g} with mode mul: V2 and V3 leave the request unguided, V0, V1 and V4 drive every "
            "step to its shortest candidate"
        )
    if abs(scale - neutral_scale) > NEUTRAL_WIDTH:
        return None
    return (
        f"value_scale {scale:g} with mode {mode}: V0, V1 and V4 run the value model and tilt nothing, V2 and V3 "
        "never run it"
    )


def _mode(params: Params) -> str:
    return str(params.get("mode", SERVER_MODE))


def _has_target(params: Params) -> bool:
    return params.get("target_value") is not None or params.get("target_length") is not None
