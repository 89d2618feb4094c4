"""A line of our plugin in a vLLM server, with vLLM's own names and numbers."""

import msgspec

from benchctl.engines.engine import phase_of
from benchctl.records.schema import StepPhase


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
