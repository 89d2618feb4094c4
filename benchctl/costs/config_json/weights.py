"""The format of quantised weights as the ``quantization_config`` of a ``config.json`` describes it."""

from collections.abc import Mapping
from typing import Any, Final

from benchctl.costs.config_json.keys import ConfigKeys
from benchctl.costs.precision import WeightFormat
from benchctl.errors import UsageError
from benchctl.untrusted.text import visible_value

_STORED_BITS: Final[dict[int, WeightFormat]] = {4: "int4", 8: "int8-stored"}
"""Formats of weights that are widened before they are multiplied, by bits."""
_MODELOPT: Final[dict[str, WeightFormat]] = {"FP8": "fp8", "NVFP4": "fp4", "W4A16_AWQ": "int4", "INT4_AWQ": "int4"}
_COMPRESSED: Final[dict[tuple[Any, Any, bool], WeightFormat]] = {
    ("float", 8, True): "fp8",
    ("float", 8, False): "fp8-stored",
    ("int", 8, True): "int8",
    ("int", 8, False): "int8-stored",
    ("int", 4, False): "int4",
    ("float", 4, True): "fp4",
}
"""Formats of compressed-tensors by type and bits of the weights, and whether activations are quantised."""


def weight_format(config: ConfigKeys) -> WeightFormat:
    """The format of the projections' weights; bfloat16 without a ``quantization_config``.

    A checkpoint in 32 bits counts as bfloat16, which engines serve it in. Raises UsageError for a method or a width
    that is unknown.
    """
    quantisation = config.values.get("quantization_config") or config.values.get("compression_config")
    if not quantisation:
        return "bfloat16"
    if not isinstance(quantisation, dict):
        raise UsageError(
            f"{config.path}: quantization_config is {visible_value(quantisation)}; it must be an object"
        )
    method = str(quantisation.get("quant_method") or "")
    weights = _format_of(method, quantisation)
    if weights is None:
        raise UsageError(
            f"{config.path}: quantization_config with quant_method {visible_value(method)} has weights of an "
            "unknown format; known are fp8, gptq and awq of 4 or 8 bits, bitsandbytes, compressed-tensors and "
            "modelopt. Remove the key from a copy of the file to count weights of 2 bytes"
        )
    return weights


def _format_of(method: str, quantisation: Mapping[str, Any]) -> WeightFormat | None:
    if method in {"fp8", "fbgemm_fp8"}:
        return "fp8"
    if method in {"gptq", "awq", "gptq_marlin", "awq_marlin"}:
        bits = quantisation.get("bits", quantisation.get("w_bit", 4))
        return _STORED_BITS.get(bits) if isinstance(bits, int) else None
    if method == "bitsandbytes":
        return "int8" if quantisation.get("load_in_8bit") else "int4"
    if method == "modelopt":
        return _MODELOPT.get(str(quantisation.get("quant_algo")).upper())
    if method == "compressed-tensors":
        return _compressed_format(quantisation)
    return None


def _compressed_format(quantisation: Mapping[str, Any]) -> WeightFormat | None:
    """The format of the first group; the groups of published checkpoints differ in targets, not in format."""
    groups = quantisation.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    if not isinstance(group, dict) or not isinstance(weights := group.get("weights"), dict):
        return None
    has_quantised_inputs = bool(group.get("input_activations"))
    kind, bits = weights.get("type"), weights.get("num_bits")
    is_named = isinstance(kind, str) and isinstance(bits, int)
    return _COMPRESSED.get((kind, bits, has_quantised_inputs)) if is_named else None
