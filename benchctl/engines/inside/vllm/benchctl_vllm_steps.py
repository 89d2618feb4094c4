"""Runs inside a vLLM server: writes one line of JSON for each engine step, and the server's configuration.

vLLM finds this directory's entry point of the group ``vllm.stat_logger_plugins`` on ``PYTHONPATH`` and calls
``StepLog.record`` in its front end after the outputs of each step. ``BENCHCTL_STEP_LOG`` names the file of steps,
``BENCHCTL_SERVER_DESCRIPTION`` the one that describes the server; without them nothing is written.

A line keeps vLLM's own names and numbers, in parts that are absent where vLLM reports nothing:

``engine`` index of the replica; ``recorded_ns`` when the line was made; ``ended_ns`` when the engine's process had
the outputs of the step; ``scheduled_ns`` when the scheduler took up the first request that gets its first output
here, given only if the engine was idle before; all on CLOCK_MONOTONIC, which processes of one machine
share. ``details`` (of the scheduler: requests, tokens, the wait for the model in ``elapsed_ms``), ``scheduler``,
``prefix_cache``, ``spec_decoding``, ``outputs`` (tokens that went to requests, and those in the cache of the
requests that ended).

The front end may be late and read the outputs of several steps at once: ``recorded_ns`` is then late as well, and
``ended_ns`` is not. It comes from the message of the engine's process, which vLLM does not hand to its loggers, so
the method that receives it is wrapped.

Nothing here may harm the server: at the first error one warning goes to its log, and nothing is written from
then on.
"""

import enum
import functools
import importlib
import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Callable

import benchctl_vllm_cpu
from vllm.v1.metrics.loggers import StatLoggerBase

_log = logging.getLogger("vllm.benchctl_step_log")

_DETAILS = (
    "iteration_index", "num_ctx_requests", "num_ctx_tokens", "num_generation_requests", "num_generation_tokens",
    "elapsed_ms", "is_dummy",
)  # fmt: skip
_SCHEDULER = ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage")
_PREFIX_CACHE = ("hits",)
_SPEC_DECODING = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_ACCEPTED_BY_POSITION = "num_accepted_tokens_per_pos"
_OUTPUTS = ("num_generation_tokens", "num_preempted_reqs")
_FIRST_TOKENS = "time_to_first_tokens_iter"
"""One entry for each request that got its first token."""
_UNFINISHED = ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs")
_SCHEDULED_EVENT = "SCHEDULED"
_SECTIONS = (
    "model_config", "cache_config", "scheduler_config", "parallel_config", "load_config", "device_config",
    "compilation_config", "speculative_config", "observability_config",
)  # fmt: skip
_LONGEST_LIST = 64
_SECRETS = ("token", "key", "secret", "password")
"""Parts of the names of text fields that are never written, such as the key with which a model was fetched."""


class _Received:
    """The newest message of an engine's process; there is one reader of them in a server."""

    message: object = None


def _watch_messages() -> None:
    """Keep each message of the engine's process for the moment in which its step is recorded."""
    client = importlib.import_module("vllm.v1.engine.core_client").AsyncMPClient
    receive = client.get_output_async
    if hasattr(receive, "__wrapped__"):
        return

    @functools.wraps(receive)
    async def get_output_async(self, *args, **how):  # type: ignore[no-untyped-def]
        message = await receive(self, *args, **how)
        _Received.message = message
        return message

    client.get_output_async = get_output_async


class StepLog(StatLoggerBase):  # type: ignore[misc]
    """A logger of statistics as vLLM makes them, one for each replica of the engine."""

    def __init__(self, vllm_config: object = None, engine_index: int = 0, *_: object, **__: object) -> None:
        self._config = vllm_config
        self._engine = engine_index
        self._file: int | None = None
        self._was_idle = True
        self._is_silent = False
        self._try(self._open)

    def _try(self, action: Callable[..., None], *given: object) -> None:
        """Run ``action``; the first error is logged, then this logger is silent. No error reaches the server."""
        if self._is_silent:
            return
        try:
            action(*given)
        except Exception as error:  # noqa: BLE001 - a measurement must not end what it measures
            self._is_silent = True
            _log.warning("benchctl records no more steps of this server: %s: %s", type(error).__name__, error)

    def _open(self) -> None:
        path = os.environ.get("BENCHCTL_STEP_LOG")
        if path is None:
            return
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # Without vLLM's own line of each iteration, which repeats the step log and costs time to write
        logging.getLogger("vllm.v1.metrics.loggers").addFilter(
            lambda record: "Iteration(%d)" not in str(record.msg)
        )
        try:
            _watch_messages()
        except (ImportError, AttributeError) as error:
            _log.warning(
                "benchctl cannot see when steps end in this version of vLLM, only when they are reported: %s", error
            )

    def record(
        self,
        scheduler_stats: object = None,
        iteration_stats: object = None,
        *_: object,
        **__: object,
    ) -> None:
        """One step's statistics."""
        if self._file is not None:
            self._try(self._record, scheduler_stats, iteration_stats)

    def _record(self, scheduler: object, iteration: object) -> None:
        if scheduler is None and iteration is None:
            return
        parts = {
            "details": _numbers(getattr(scheduler, "iteration_details", None), _DETAILS),
            "scheduler": _numbers(scheduler, _SCHEDULER),
            "prefix_cache": _numbers(getattr(scheduler, "prefix_cache_stats", None), _PREFIX_CACHE),
            "spec_decoding": _spec_decoding(getattr(scheduler, "spec_decoding_stats", None)),
            "outputs": _numbers(iteration, _OUTPUTS),
        }
        if iteration is not None:
            parts["outputs"] |= _finished(iteration)
            if parts["spec_decoding"]:
                parts["outputs"]["num_first_tokens"] = len(getattr(iteration, _FIRST_TOKENS, ()))
        line = {"engine": self._engine, **self._times(), **{name: part for name, part in parts.items() if part}}
        if scheduler is not None:
            self._was_idle = not any(parts["scheduler"].get(name) for name in _UNFINISHED)
        self._write(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def _times(self) -> dict[str, int]:
        recorded_ns = time.monotonic_ns()
        message, _Received.message = _Received.message, None
        ended_s = getattr(message, "timestamp", None)
        times_s = {
            "ended_ns": ended_s if isinstance(ended_s, float) and ended_s > 0 else None,
            "scheduled_ns": _first_scheduled_s(message) if self._was_idle else None,
        }
        stated_ns = {name: round(time_s * 1e9) for name, time_s in times_s.items() if time_s is not None}
        return {"recorded_ns": recorded_ns, **stated_ns}

    def _write(self, line: bytes) -> None:
        written = os.write(self._file, line)  # type: ignore[arg-type]
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes of a line could be written; the disk may be full")

    def log_engine_initialized(self) -> None:
        """The engine is up: say how it is configured."""
        self._try(self._describe)

    def _describe(self) -> None:
        path = os.environ.get("BENCHCTL_SERVER_DESCRIPTION")
        if path is None:
            return
        sections = {name: _plain_fields(getattr(self._config, name, None)) for name in _SECTIONS}
        if sections["speculative_config"] and benchctl_vllm_cpu.is_in_use():
            sections["speculative_config"]["cpu_sampling"] = "corrected by benchctl"
        described = {"versions": _versions(), **{name: fields for name, fields in sections.items() if fields}}
        with open(f"{path}.partial", "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(described, file, indent=1, sort_keys=True)
        os.replace(f"{path}.partial", path)  # noqa: PTH105

    def log(self, *_: object, **__: object) -> None:
        """No periodic output."""


# A version of vLLM may require more methods of its loggers; those do nothing here.
StepLog.__abstractmethods__ = frozenset()


def _numbers(source: object, names: tuple[str, ...]) -> dict[str, int | float | bool]:
    """Those of the named attributes that are numbers."""
    values = {name: getattr(source, name, None) for name in names}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    }


def _spec_decoding(stats: object) -> dict[str, object]:
    """Drafts of a step: their numbers, and accepted ones by position, the first drafted token first."""
    part: dict[str, object] = dict(_numbers(stats, _SPEC_DECODING))
    accepted = getattr(stats, _ACCEPTED_BY_POSITION, None)
    if isinstance(accepted, list) and all(isinstance(count, int) for count in accepted):
        part[_ACCEPTED_BY_POSITION] = accepted
    return part


def _finished(iteration: object) -> dict[str, int]:
    """Tokens in the cache of the requests that ended: their prompts and outputs without the last token."""
    ended = getattr(iteration, "finished_requests", None)
    if not isinstance(ended, list):
        return {}
    tokens = [
        (getattr(each, "num_prompt_tokens", None), getattr(each, "num_generation_tokens", 0)) for each in ended
    ]
    if any(prompt is None for prompt, _ in tokens):
        return {}
    return {"finished_tokens": sum(prompt + max(output - 1, 0) for prompt, output in tokens)}


def _first_scheduled_s(message: object) -> float | None:
    """Time at which the scheduler first took up one of a message's requests that have waited until now."""
    times_s = [
        event.timestamp
        for output in getattr(message, "outputs", ())
        for event in getattr(output, "events", None) or ()
        if getattr(event.type, "name", None) == _SCHEDULED_EVENT
    ]
    return min(times_s, default=None)


def _plain_fields(config: object) -> dict[str, object]:
    """The public fields of a configuration that JSON can represent."""
    fields = getattr(config, "__dict__", {})
    plain = {name: _plain(value) for name, value in fields.items() if not name.startswith("_")}
    return {
        name: value
        for name, value in plain.items()
        if value is not _plain and not (isinstance(value, str) and set(_SECRETS).intersection(name.split("_")))
    }


def _plain(value: object) -> object:
    """A value that JSON can represent; this function itself for any other."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if type(value).__module__ == "torch":
        return str(value)
    if isinstance(value, (list, tuple)) and len(value) <= _LONGEST_LIST:
        items = [_plain(item) for item in value]
        return items if _plain not in items else _plain
    return _plain


def _versions() -> dict[str, str]:
    loaded = (
        (name, getattr(sys.modules.get(name), "__version__", None)) for name in ("vllm", "torch", "transformers")
    )
    return {"python": platform.python_version(), **{name: str(version) for name, version in loaded if version}}
