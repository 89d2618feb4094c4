"""Step records from the lines of our plugin in a vLLM server.

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
``kv_used_blocks`` what was in use after it; ``context_tokens`` are counted in ``contexts.py``.
"""

from collections.abc import Iterator
from pathlib import Path

from benchctl.engines.engine import raw_step_log
from benchctl.engines.vllm.contexts import with_contexts
from benchctl.engines.vllm.description import num_kv_blocks
from benchctl.engines.vllm.raw_step import RawStep, SpecDecoding
from benchctl.records.files import read_jsonl
from benchctl.records.schema import StepRecord
from benchctl.units import NS_PER_MS


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
