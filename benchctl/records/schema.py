"""Schema versions of the result directory, and the stepwise upgrade of older documents.

History
1  first version
2  warning codes, metrics and a stop mode renamed (``RENAMED_CODES``, ``RENAMED_METRICS``, ``RENAMED_STOP_MODES``)
3  a metric renamed (``RENAMED_METRICS``)

Files are upgraded in memory as they are opened and never rewritten, so the digests of a directory stay valid.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchctl.errors import RecordError, SchemaVersionError
from benchctl.untrusted.text import visible_value

Upgrade: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
RENAMED_CODES: Final = {
    "client-lag": "event-loop-stalls",
    "client-late": "arrival-times-unreliable",
    "engine-starved": "underfilled-batch",
    "send-late": "sends-delayed",
}
"""Warning codes of schema 1 that schema 2 renamed."""
RENAMED_METRICS: Final = {
    "acceptance_frac": "acceptance_rate",
    "after_eos_frac": "past_eos_frac",
    "bound_stamp_frac": "coalesced_chunk_frac",
    "load_cpu_cores": "client_cpu_cores",
    "mean_e2el_ms": "e2el_ms",
    "mean_itl_ms": "itl_ms",
    "mean_tpot_ms": "tpot_ms",
    "mean_ttft_ms": "ttft_ms",
    "p99_read_late_ms": "p99_read_delay_ms",
}
"""Metrics of older schemas that were renamed, or merged with another of the same definition. No name was given
to another metric, so one table serves every version.
"""
RENAMED_STOP_MODES: Final = {"forced-natural": "replay-natural"}
"""Stop modes of schema 1 that schema 2 renamed."""


def current_metric_name(name: str) -> str:
    """Translate a metric name of an older schema; any other name is returned as it is."""
    return RENAMED_METRICS.get(name, name)


def _to_version_2(document: dict[str, Any]) -> dict[str, Any]:
    """Rename warning codes, stop mode and metrics; what has another shape is left to validation."""
    upgraded = dict(document)
    if isinstance(warnings := document.get("warnings"), list):
        upgraded["warnings"] = [_renamed(warning, "code", RENAMED_CODES) for warning in warnings]
    if isinstance(stop := document.get("stop"), str):
        upgraded["stop"] = RENAMED_STOP_MODES.get(stop, stop)
    return _with_metrics_renamed(upgraded)


def _with_metrics_renamed(document: dict[str, Any]) -> dict[str, Any]:
    """Rename the metrics of a noise floor, and those at the looks of a stopping rule."""
    upgraded = dict(document)
    if isinstance(metrics := document.get("metrics"), dict):
        upgraded["metrics"] = {current_metric_name(name): noise for name, noise in metrics.items()}
    if isinstance(stopping := document.get("stopping"), dict) and isinstance(stopping.get("looks"), list):
        upgraded["stopping"] = stopping | {"looks": [_look_to_version_2(look) for look in stopping["looks"]]}
    return upgraded


def _look_to_version_2(look: Any) -> Any:
    if not isinstance(look, dict) or not isinstance(look.get("half_widths"), list):
        return look
    return look | {"half_widths": [_renamed(width, "metric", RENAMED_METRICS) for width in look["half_widths"]]}


def _renamed(entry: Any, key: str, names: dict[str, str]) -> Any:
    """The entry with its ``key`` translated by ``names``."""
    if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
        return entry
    return entry | {key: names.get(entry[key], entry[key])}


UPGRADES: Final[Mapping[int, Upgrade]] = {1: _to_version_2, 2: _with_metrics_renamed}
"""``UPGRADES[n]`` turns a document of version n into one of version n + 1."""
_LAST_VERSION: Final = 9_999
"""Beyond it a version is none."""
SCHEMA_VERSION: Final = max(UPGRADES) + 1


def upgrade(document: dict[str, Any], path: Path, upgrades: Mapping[int, Upgrade] = UPGRADES) -> dict[str, Any]:
    """Bring a JSON document to the current schema.

    Raises RecordError when the version is absent or not a number, SchemaVersionError when it is newer.
    """
    version, newest = document.get("schema_version"), max(upgrades) + 1
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= _LAST_VERSION:
        raise RecordError(
            f"{path}: schema_version is {visible_value(version)}, not a positive whole number; "
            "this is not a file of a benchctl result directory, or it was edited"
        )
    if version > newest:
        raise SchemaVersionError(
            f"{path}: schema_version {version} is newer than {newest}, the newest this benchctl reads; "
            "read it with the benchctl that wrote it, or upgrade this one"
        )
    for older in range(version, newest):
        document = upgrades[older](document) | {"schema_version": older + 1}
    return document
