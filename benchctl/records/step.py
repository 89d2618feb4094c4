"""Steps of an engine, and the sections that they consist of."""

from typing import Literal, TypeAlias

from benchctl.records.record import Int64, Record

Clock: TypeAlias = Literal["host", "device", "virtual"]
StepPhase: TypeAlias = Literal["prefill", "decode", "mixed"]


class StepRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One forward iteration of the engine over a batch."""

    step: Int64
    """Number of the step, ascending."""
    start_ns: Int64
    """Start, on ``clock``."""
    dur_ns: Int64
    """Duration, on ``clock``; see ``steps_cover`` of the run."""
    clock: Clock
    """``host`` time (asynchronous unless the engine synchronises), ``device`` time, or the ``virtual`` time of a
    simulator."""
    phase: StepPhase
    """Kind of tokens in the batch."""
    is_warmup: bool = False
    """Whether it served the warm-up, which no metric counts."""
    num_seqs: Int64
    """Sequences in the batch."""
    num_prefill_tokens: Int64 | None = None
    """Prompt tokens computed."""
    num_decode_tokens: Int64 | None = None
    """Tokens computed for decoding sequences."""
    context_tokens: Int64 | None = None
    """Sum of the contexts over the batch, after the step."""
    output_tokens: Int64 | None = None
    """Tokens that clients get from this step."""
    is_greedy: bool | None = None
    """Whether every row takes the most probable token."""
    guided_rows: Int64 | None = None
    """Rows whose candidates a value model scored."""
    candidates: Int64 | None = None
    """Candidates scored, summed over the guided rows."""
    fused: bool | None = None
    """Whether the value model extended its prefixes and scored in one pass."""
    drafts: Int64 | None = None
    """Sequences for which tokens were drafted."""
    draft_tokens: Int64 | None = None
    """Tokens proposed by speculative decoding."""
    accepted_tokens: Int64 | None = None
    """Proposed tokens that were accepted."""
    accepted_by_position: tuple[Int64, ...] | None = None
    """Sequences whose first, second, … draft token was accepted; their sum is ``accepted_tokens``."""
    preempted: Int64 | None = None
    """Sequences that lost their key-value memory and start again."""
    kv_used_blocks: Int64 | None = None
    """Blocks of key-value memory in use."""
    value_prefill_tokens: Int64 | None = None
    """Prompt tokens that the value model prefilled."""
    value_extend_tokens: Int64 | None = None
    """Tokens by which the value model extended its prefixes."""
    sections_ns: dict[str, Int64] = {}
    """Parts of ``dur_ns`` by name; see *Sections of a step*."""


SECTION_PARENT: dict[str, str | None] = {
    "schedule": None,
    "draft": None,
    "backfill": None,
    "model_forward": None,
    "sampler_total": None,
    "pre_lvm": "sampler_total",
    "lvm_apply_outer": "sampler_total",
    "sample": "sampler_total",
    "lvm_build_pending": "lvm_apply_outer",
    "lvm_forward": "lvm_apply_outer",
    "lvm_apply_guidance": "lvm_apply_outer",
    "value_model_load": "lvm_apply_outer",
}
"""Parent of each known section; ``None`` is the step itself. Children of one parent are disjoint, so the
parent less the sum of its children is the time not named. The LenVM names are those of the fork's timing log
without ``t_`` and ``_ms``."""
