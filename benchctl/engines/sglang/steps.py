"""Step records from the lines of our plugin in an SGLang server.

**Time.** A step ends when its tokens are about to be sent. It starts when the previous step ended, if the scheduler
has not been idle since; otherwise when the turn of the loop began that chose its batch. Such steps do not overlap
and leave no gap while there is work: sending the tokens of the step before, taking in requests, scheduling, the
model and sampling are all inside. Where the scheduler works while the device does (SGLang's default), the device
computes a batch while the host hands out the one before, and the time between two such moments is what a token
takes; on the CPU, where nothing goes on beside the host, it is then the next batch whose computation falls into a
step.

**Tokens.** ``output_tokens`` are those by which the answers grew: their sum is the usage. Rows of requests that
have ended, which an overlapping scheduler learns one batch late, count in ``num_seqs`` and not there; a drafted
token counts once it is part of an answer. The first request of several choices (``n``) is computed once more for
its prompt alone: that step has no output.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchctl.engines.engine import phase_of, raw_step_log
from benchctl.records.files import read_jsonl
from benchctl.records.schema import StepRecord


class _RawStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the plugin, whose docstring explains the fields."""

    began_ns: int
    ended_ns: int
    after_idle: bool
    num_seqs: int
    prefill_tokens: int
    decode_tokens: int
    output_tokens: int
    context_tokens: int
    preempted: int
    is_greedy: bool
    is_overlapped: bool
    schedule_ns: int
    compute_ns: int | None = None
    sampler_ns: int | None = None

    @property
    def sections_ns(self) -> dict[str, int]:
        """Its parts; with an overlapping scheduler what the host does in a step belongs to the next batch."""
        if self.is_overlapped:
            return {}
        if self.compute_ns is None or self.sampler_ns is None:
            return {"schedule": self.schedule_ns}
        return {
            "schedule": self.schedule_ns,
            "model_forward": max(self.compute_ns - self.sampler_ns, 0),
            "sampler_total": self.sampler_ns,
        }


def read_sglang_steps(directory: Path) -> Iterator[StepRecord]:
    """The steps of a run. Raises RecordError at the first line that is damaged."""
    last_end_ns = 0
    for index, raw in enumerate(read_jsonl(raw_step_log(directory), _RawStep)):
        start_ns = max(raw.began_ns, last_end_ns) if raw.after_idle or not index else last_end_ns
        last_end_ns = raw.ended_ns
        yield StepRecord(
            step=index,
            start_ns=start_ns,
            dur_ns=max(raw.ended_ns - start_ns, 0),
            clock="host",
            phase=phase_of(raw.prefill_tokens, raw.decode_tokens),
            num_seqs=raw.num_seqs,
            num_prefill_tokens=raw.prefill_tokens,
            num_decode_tokens=raw.decode_tokens,
            context_tokens=raw.context_tokens,
            output_tokens=raw.output_tokens,
            is_greedy=raw.is_greedy,
            preempted=raw.preempted,
            sections_ns=raw.sections_ns,
        )
