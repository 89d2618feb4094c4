"""Step records and configuration of a vLLM server, from what our plugin inside it wrote.

**Time.** A step ends when the engine's process has its outputs (``ended_ns``). It starts when the previous step
ended, if the engine had unfinished requests then; otherwise when the scheduler took up the first of the requests
that woke it. Such steps do not overlap and leave no gap while there is work:
scheduling, the model, sampling and taking in the outputs are all inside. vLLM's own ``elapsed_ms`` is less: the
wait for the model's answer after the work was handed over. It is used only where nothing better is known: for
the first part of a long prompt that meets an idle engine. With asynchronous scheduling the next step is handed
over before this one's answer; the time between two answers is still what a token takes.

**Tokens.** ``num_prefill_tokens`` and ``num_decode_tokens`` are the tokens computed, of requests without and with
output so far; a draft counts among the latter, and so does everything that a preempted request computes again.
``output_tokens`` are those that requests got: their sum is the usage, also with several choices, preemption,
prompts in chunks and drafts. ``accepted_tokens`` may be more than that: those beyond the end of a request are
accepted and given to nobody. (A text that a stop string cuts in the middle of a draft would be the exception;
benchctl never requests one.) ``preempted`` are preemptions that became known with this step's outputs;
``kv_used_blocks`` what was in use after it.

**Contexts**, the sum over the rows after a step, are not reported. They are counted from what is:

    context after a step = context before it + tokens computed + tokens from the prefix cache - rejected drafts
    context before the next = context after it - tokens of the requests that ended

A request of P prompt and O output tokens ends with P + O - 1 tokens in the cache, and the drafts that were accepted
beyond its end. When the server is idle nothing is left, which proves the count of the steps since it was idle last.
A preemption drops an unknown part, and an aborted request ends without a report: the contexts of such a stretch are
unknown from the first preemption, or as a whole. So are those of several replicas, whose lines alternate.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.engines.engine import phase_of, raw_step_log
from benchctl.errors import RecordError
from benchctl.records.files import read_jsonl
from benchctl.records.schema import StepRecord
from benchctl.units import NS_PER_MS
from benchctl.untrusted.files import DECODING_ERRORS, UnreadableError, read_bytes

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


def effective(path: Path) -> dict[str, Any]:
    """The flat configuration; empty when the plugin wrote none, for which the server's log has the reason."""
    description = read_description(path)
    flat: dict[str, Any] = {}
    for section in _FLAT:
        flat = _set_values(description, section) | flat
    for section, prefix in _PREFIXED.items():
        flat |= {f"{prefix}.{name}": value for name, value in _set_values(description, section).items()}
    # Settings for the synchronisation of several replicas, meaningless with one
    ignored = {"disable_nccl_for_dp_synchronization"} if flat.get("data_parallel_size") == 1 else set[str]()
    configured = {
        name: value for name, value in flat.items() if name not in ignored and not _OF_THE_RUN.search(name)
    }
    return configured | {
        f"{name}_version": version for name, version in description.get("versions", {}).items() if name != "vllm"
    }


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
    """The work of a step, as the scheduler planned it."""

    iteration_index: int | None = None
    num_ctx_requests: int = 0
    num_ctx_tokens: int = 0
    num_generation_requests: int = 0
    num_generation_tokens: int = 0
    elapsed_ms: float = 0.0
    is_dummy: bool = False


class Scheduler(msgspec.Struct, frozen=True, kw_only=True):
    """The queues of the scheduler after a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float | None = None


class SpecDecoding(msgspec.Struct, frozen=True, kw_only=True):
    """The drafts of a step; unknown where nothing is speculated."""

    num_drafts: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_accepted_tokens_per_pos: tuple[int, ...] | None = None


class Outputs(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that requests got from a step."""

    num_generation_tokens: int = 0
    num_preempted_reqs: int = 0
    finished_tokens: int | None = None
    """Tokens in the cache of the requests that ended with it; None where vLLM does not say."""
    num_first_tokens: int = 0
    """Requests that got their first token from a step with drafts; 0 for other steps."""


class RawStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the plugin, with vLLM's own names and numbers; a part is absent where vLLM reported none."""

    engine: int = 0
    recorded_ns: int
    ended_ns: int | None = None
    scheduled_ns: int | None = None
    details: Details | None = None
    scheduler: Scheduler | None = None
    prefix_cache: dict[str, int] = {}
    spec_decoding: SpecDecoding = SpecDecoding()
    outputs: Outputs = Outputs(finished_tokens=0)

    @property
    def end_ns(self) -> int:
        """The time at which the engine had the outputs, or at which they were recorded where that is unknown."""
        return self.recorded_ns if self.ended_ns is None else self.ended_ns

    @property
    def leaves_work(self) -> bool:
        """True where requests were unfinished after it."""
        queues = self.scheduler or Scheduler()
        return queues.num_running_reqs + queues.num_waiting_reqs + queues.num_skipped_waiting_reqs > 0

    def context_after(self, held: int | None) -> int | None:
        """The context after it, where ``held`` tokens were there before; None from where that is unknown."""
        outputs, work, drafts = self.outputs, self.details, self.spec_decoding
        if held is None or self.engine or outputs.finished_tokens is None or outputs.num_preempted_reqs:
            return None
        if work is None:
            return held
        rejected = (drafts.num_draft_tokens or 0) - (drafts.num_accepted_tokens or 0)
        after = (
            held + work.num_ctx_tokens + work.num_generation_tokens + self.prefix_cache.get("hits", 0) - rejected
        )
        return after if after >= 0 else None

    def left_by_finished(self) -> int:
        """Tokens in the cache of the requests that ended with it, with accepted ones beyond their ends.

        Those are computed and counted, but given to nobody.
        """
        ended = self.outputs.finished_tokens or 0
        if not ended or self.details is None or self.spec_decoding.num_drafts is None:
            return ended
        sampled = self.details.num_generation_requests + self.outputs.num_first_tokens
        return ended + sampled + (self.spec_decoding.num_accepted_tokens or 0) - self.outputs.num_generation_tokens


def with_contexts(raws: Iterable[RawStep]) -> Iterator[tuple[RawStep, int | None]]:
    """Each line with the sum of contexts after its step; None where the lines do not determine it.

    Raises RecordError at the first damaged line, after the lines before it.
    """
    stretch: list[tuple[RawStep, int | None]] = []
    held: int | None = 0
    try:
        for raw in raws:
            after = raw.context_after(held)
            stretch.append((raw, after))
            held = None if after is None else after - raw.left_by_finished()
            if raw.scheduler is not None and not raw.leaves_work:
                is_proved = not held
                yield from ((each, context if is_proved else None) for each, context in stretch)
                stretch, held = [], 0
    except RecordError:
        yield from stretch
        raise
    yield from stretch


def read_numbered_steps(directory: Path) -> Iterator[tuple[int | None, StepRecord]]:
    """The steps of a run, each with its number in the life of the server; None where vLLM does not count them.

    Raises RecordError at the first line that is damaged.
    """
    stated = read_description(directory / "server.json").get("cache_config", {}).get("num_gpu_blocks")
    blocks = stated - 1 if isinstance(stated, int) and stated > 1 else None  # vLLM keeps one for itself
    before: RawStep | None = None
    index = 0
    for raw, context_tokens in with_contexts(read_jsonl(raw_step_log(directory), RawStep)):
        work = raw.details
        if work is not None and not work.is_dummy:  # others are news of the scheduler, or idle rounds of a replica
            yield work.iteration_index, _normalised(raw, work, index, before, blocks, context_tokens)
            index += 1
        before = raw


def _normalised(
    raw: RawStep, work: Details, index: int, before: RawStep | None, blocks: int | None, context_tokens: int | None
) -> StepRecord:
    last_end_ns = before.end_ns if before is not None else 0
    start_ns = raw.end_ns - round(work.elapsed_ms * NS_PER_MS) if raw.scheduled_ns is None else raw.scheduled_ns
    if before is not None and before.leaves_work:
        start_ns = last_end_ns
    start_ns = min(max(start_ns, last_end_ns), raw.end_ns)
    usage = None if raw.scheduler is None else raw.scheduler.kv_cache_usage
    return StepRecord(
        step=index,
        start_ns=start_ns,
        dur_ns=raw.end_ns - start_ns,
        clock="host",
        phase=phase_of(work.num_ctx_tokens, work.num_generation_tokens),
        num_seqs=work.num_ctx_requests + work.num_generation_requests,
        num_prefill_tokens=work.num_ctx_tokens,
        num_decode_tokens=work.num_generation_tokens,
        context_tokens=context_tokens,
        output_tokens=raw.outputs.num_generation_tokens,
        drafts=raw.spec_decoding.num_drafts,
        draft_tokens=raw.spec_decoding.num_draft_tokens,
        accepted_tokens=raw.spec_decoding.num_accepted_tokens,
        accepted_by_position=raw.spec_decoding.num_accepted_tokens_per_pos,
        preempted=raw.outputs.num_preempted_reqs,
        kv_used_blocks=round(usage * blocks) if usage is not None and blocks is not None else None,
    )
