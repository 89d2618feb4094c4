"""Step records and configuration from what our plugin in a vLLM server wrote."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.engines.engine import phase_of, raw_step_log
from benchctl.errors import RecordError
from benchctl.records.files import read_jsonl
from benchctl.records.schema import StepPhase, StepRecord
from benchctl.units import NS_PER_MS
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


class Details(msgspec.Struct, frozen=True, kw_only=True):
    iteration_index: int | None = None
    num_ctx_requests: int = 0
    num_ctx_tokens: int = 0
    num_generation_requests: int = 0
    num_generation_tokens: int = 0
    elapsed_ms: float = 0.0
    is_dummy: bool = False


class Scheduler(msgspec.Struct, frozen=True, kw_only=True):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float | None = None

    @property
    def num_unfinished(self) -> int:
        return self.num_running_reqs + self.num_waiting_reqs + self.num_skipped_waiting_reqs


class SpecDecoding(msgspec.Struct, frozen=True, kw_only=True):
    num_drafts: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_accepted_tokens_per_pos: tuple[int, ...] | None = None


class PrefixCache(msgspec.Struct, frozen=True, kw_only=True):
    hits: int = 0


class Outputs(msgspec.Struct, frozen=True, kw_only=True):
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preempted_reqs: int | None = None
    num_requests: int | None = None
    finished_tokens: int | None = None
    """Tokens in the cache of the requests that ended with this step; a plugin of before does not report them."""
    num_first_tokens: int | None = None
    """Requests that got their first token from a step with drafts; not reported for other steps."""


class RawStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the plugin; a part is absent where vLLM reported none."""

    engine: int = 0
    recorded_ns: int
    ended_ns: int | None = None
    scheduled_ns: int | None = None
    details: Details | None = None
    scheduler: Scheduler | None = None
    prefix_cache: PrefixCache | None = None
    spec_decoding: SpecDecoding | None = None
    outputs: Outputs | None = None

    @property
    def end_ns(self) -> int:
        """The time at which the engine had the outputs, or at which they were recorded where that is unknown."""
        return self.recorded_ns if self.ended_ns is None else self.ended_ns

    @property
    def finished_tokens(self) -> int:
        """Tokens in the cache of the requests that ended with it; 0 where that is unknown."""
        ended = 0 if self.outputs is None else self.outputs.finished_tokens or 0
        return ended + (self.cut_tokens if ended else 0)

    @property
    def cut_tokens(self) -> int:
        """Accepted tokens beyond the end of their request: computed and counted, but given to nobody."""
        if self.spec_decoding is None or self.details is None or self.outputs is None:
            return 0
        sampled = self.details.num_generation_requests + (self.outputs.num_first_tokens or 0)
        return sampled + (self.spec_decoding.num_accepted_tokens or 0) - self.outputs.num_generation_tokens

    @property
    def leaves_work(self) -> bool:
        """True where requests were unfinished after it."""
        return self.scheduler is not None and self.scheduler.num_unfinished > 0

    @property
    def is_step(self) -> bool:
        """True where the model computed something for a request; false for statistics of the scheduler alone."""
        if self.details is not None:
            return not self.details.is_dummy
        return self.outputs is not None and self.outputs.num_generation_tokens > 0

    @property
    def phase(self) -> StepPhase:
        if self.details is None:
            return "mixed" if self.outputs is not None and self.outputs.num_prompt_tokens else "decode"
        return phase_of(self.details.num_ctx_tokens, self.details.num_generation_tokens)


def with_contexts(raws: Iterable[RawStep]) -> Iterator[tuple[RawStep, int | None]]:
    """Each line with the sum of contexts after its step; None where the lines do not determine it.

    Raises RecordError at the first damaged line, after the lines before it.
    """
    stretch: list[tuple[RawStep, int | None]] = []
    held: int | None = 0
    try:
        for raw in raws:
            after = _context_after(raw, held)
            after = None if after is not None and after < 0 else after
            stretch.append((raw, after))
            held = None if after is None else after - raw.finished_tokens
            if raw.scheduler is not None and not raw.leaves_work:
                yield from stretch if not held else _unknown(stretch)
                stretch, held = [], 0
    except RecordError:
        yield from stretch
        raise
    yield from stretch


def _context_after(raw: RawStep, held: int | None) -> int | None:
    """The context after a step that began with ``held`` tokens; None from where it is unknown."""
    outputs, details = raw.outputs, raw.details
    if held is None or raw.engine or (outputs is not None and outputs.finished_tokens is None):
        return None
    if outputs is not None and (outputs.num_preempted_reqs or details is None):
        return None
    if details is None:
        return held
    from_cache = 0 if raw.prefix_cache is None else raw.prefix_cache.hits
    spec = raw.spec_decoding
    rejected = 0 if spec is None else (spec.num_draft_tokens or 0) - (spec.num_accepted_tokens or 0)
    return held + details.num_ctx_tokens + details.num_generation_tokens + from_cache - rejected


def _unknown(stretch: Iterable[tuple[RawStep, int | None]]) -> Iterator[tuple[RawStep, int | None]]:
    return ((raw, None) for raw, _ in stretch)


def read_vllm_steps(directory: Path) -> Iterator[StepRecord]:
    """The steps of a run. Raises RecordError at the first line that is damaged."""
    return (step for _, step in read_numbered_steps(directory))


def read_numbered_steps(directory: Path) -> Iterator[tuple[int | None, StepRecord]]:
    """The steps of a run, each with its number in the life of the server; None where vLLM does not count them."""
    blocks = num_kv_blocks(directory / "server.json")
    before: RawStep | None = None
    index = 0
    for raw, context_tokens in with_contexts(read_jsonl(raw_step_log(directory), RawStep)):
        if raw.is_step:
            number = raw.details.iteration_index if raw.details is not None else None
            yield number, _normalised(raw, index, _start_ns(raw, before), blocks, context_tokens)
            index += 1
        before = raw


def _start_ns(raw: RawStep, before: RawStep | None) -> int:
    last_end_ns = before.end_ns if before is not None else 0
    if before is not None and before.leaves_work:
        start_ns = last_end_ns
    elif raw.scheduled_ns is not None:
        start_ns = raw.scheduled_ns
    else:
        start_ns = raw.end_ns - round(raw.details.elapsed_ms * NS_PER_MS) if raw.details is not None else raw.end_ns
    return min(max(start_ns, last_end_ns), raw.end_ns)


def _normalised(
    raw: RawStep, index: int, start_ns: int, blocks: int | None, context_tokens: int | None
) -> StepRecord:
    details, scheduler, outputs = raw.details, raw.scheduler, raw.outputs
    spec = raw.spec_decoding or SpecDecoding()
    usage = scheduler.kv_cache_usage if scheduler is not None else None
    if details is not None:
        num_seqs = details.num_ctx_requests + details.num_generation_requests
    else:
        num_seqs = (outputs.num_requests or 0) if outputs is not None else 0
    return StepRecord(
        step=index,
        start_ns=start_ns,
        dur_ns=raw.end_ns - start_ns,
        clock="host",
        phase=raw.phase,
        num_seqs=num_seqs,
        num_prefill_tokens=details.num_ctx_tokens if details is not None else None,
        num_decode_tokens=details.num_generation_tokens if details is not None else None,
        context_tokens=context_tokens,
        output_tokens=outputs.num_generation_tokens if outputs is not None else 0,
        drafts=spec.num_drafts,
        draft_tokens=spec.num_draft_tokens,
        accepted_tokens=spec.num_accepted_tokens,
        accepted_by_position=spec.num_accepted_tokens_per_pos,
        preempted=outputs.num_preempted_reqs if outputs is not None else 0,
        kv_used_blocks=round(usage * blocks) if usage is not None and blocks is not None else None,
    )
