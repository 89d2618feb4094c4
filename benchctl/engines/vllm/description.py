"""The configuration of a vLLM server, from the description that our plugin wrote.

Its configuration has sections; the effective configuration of a run is flat. Names are vLLM's own and mostly
those of the options, so that a profile allows a difference under one name: ``server.max_num_seqs``.
"""

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.untrusted.reading import DECODING_ERRORS, UnreadableError, read_bytes

_FLAT: Final = (
    "model_config", "cache_config", "scheduler_config", "parallel_config", "load_config", "device_config",
)  # fmt: skip
"""Sections whose settings keep their names; of two of one name the earlier section's is taken."""
_PREFIXED: Final = {
    "compilation_config": "compilation",
    "speculative_config": "speculative",
    "observability_config": "observability",
}
_OF_THE_RUN: Final = re.compile(r"(^|_)(port|ip|addr|host|time|uuid|id|dir|path)$")
"""Settings that say where or when a server ran, and differ between two that are configured alike."""
_OF_REPLICAS: Final = frozenset({"disable_nccl_for_dp_synchronization"})
"""Settings for the synchronisation of several replicas, meaningless with one."""


def effective(path: Path) -> dict[str, Any]:
    """The flat configuration; empty when the plugin wrote none, for which the server's log has the reason."""
    description = read_description(path)
    flat: dict[str, Any] = {}
    for section in _FLAT:
        flat = _set_values(description, section) | flat
    for section, prefix in _PREFIXED.items():
        flat |= {f"{prefix}.{name}": value for name, value in _set_values(description, section).items()}
    ignored = _OF_REPLICAS if flat.get("data_parallel_size") == 1 else frozenset[str]()
    configured = {
        name: value for name, value in flat.items() if name not in ignored and not _OF_THE_RUN.search(name)
    }
    return configured | {
        f"{name}_version": version for name, version in description.get("versions", {}).items() if name != "vllm"
    }


def num_kv_blocks(path: Path) -> int | None:
    """Blocks that requests can hold: all but the one that vLLM keeps for itself. None where it is unknown."""
    blocks = read_description(path).get("cache_config", {}).get("num_gpu_blocks")
    return blocks - 1 if isinstance(blocks, int) and blocks > 1 else None


def read_description(path: Path) -> dict[str, dict[str, Any]]:
    """The document as it was written, section by section; empty when it is missing or damaged."""
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, dict[str, Any]])
    except UnreadableError:
        return {}
    except DECODING_ERRORS:
        return {}


def _set_values(description: dict[str, dict[str, Any]], section: str) -> dict[str, Any]:
    """The settings of a section that have a value: most of the others are null because nothing requested them."""
    return {name: value for name, value in description.get(section, {}).items() if value is not None}
