"""Steps of an engine, and the sections that they consist of."""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from benchctl.records.record import Count, DurationNs, MomentNs, Record

Clock: TypeAlias = Literal["host", "device", "virtual"]
StepPhase: TypeAlias = Literal["prefill", "decode", "mixed"]
MOST_SECTIONS: Final = 256
"""Sections of a step: each that any step of a log has is a column of all its steps."""
MOST_POSITIONS: Final = 256
"""Positions of a draft, which are columns as well."""


class StepRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One forward iteration of the engine over a batch."""

    step: Count
    """Number of the step, ascending."""
    start_ns: MomentNs
    """Start, on ``clock``."""
    dur_ns: DurationNs
    """Duration, on ``clock``; see ``steps_cover`` of the run."""
    clock: Clock
    """``host`` time (asynchronous unless the engine synchronises), ``device`` time, or the ``virtual`` time of a
    simulator."""
    phase: StepPhase
    """Kind of tokens in the batch."""
    is_warmup: bool = False
    """Whether it served the warm-up, which no metric counts."""
    num_seqs: Count
    """Sequences in the batch."""
    num_prefill_tokens: Count | None = None
    """Prompt tokens computed."""
    num_decode_tokens: Count | None = None
    """Tokens computed for decoding sequences."""
    context_tokens: Count | None = None
    """Sum of the contexts over the batch, after the step."""
    output_tokens: Count | None = None
    """Tokens that clients get from this step."""
    is_greedy: bool | None = None
    """Whether every row takes the most probable token."""
    guided_rows: Count | None = None
    """Rows whose candidates a value model scored."""
    candidates: Count | None = None
    """Candidates scored, summed over the guided rows."""
    fused: bool | None = None
    """Whether the value model extended its prefixes and scored in one pass."""
    drafts: Count | None = None
    """Sequences for which tokens were drafted."""
    draft_tokens: Count | None = None
    """Tokens proposed by speculative decoding."""
    accepted_tokens: Count | None = None
    """Proposed tokens that were accepted."""
    accepted_by_position: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_POSITIONS)] | None = None
    """Sequences whose first, second, … draft token was accepted; their sum is ``accepted_tokens``."""
    preempted: Count | None = None
    """Sequences that lost their key-value memory and start again."""
    kv_used_blocks: Count | None = None
    """Blocks of key-value memory in use."""
    value_prefill_tokens: Count | None = None
    """Prompt tokens that the value model prefilled."""
    value_extend_tokens: Count | None = None
    """Tokens by which the value model extended its prefixes."""
    value_reuse_tokens: Count | None = None
    """Tokens by which prefixes grew without being computed: drawn candidates whose keys and values were kept."""
    value_replayed: bool | None = None
    """Whether every pass that scored repeated a recorded one."""
    value_recordings: Count | None = None
    """Passes of the value model that were recorded in this step, because their sizes had not been foreseen."""
    sections_ns: Annotated[dict[str, DurationNs], msgspec.Meta(max_length=MOST_SECTIONS)] = {}
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
