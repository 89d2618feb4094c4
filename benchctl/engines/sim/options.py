"""Options of the engine ``sim``."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from benchctl.guided.params import REVISIONS_THAT_SKIP
from benchctl.profile.choices import (
    COST_MODELS,
    MOST,
    BlockCount,
    BlockTokens,
    Concurrency,
    ContextLength,
    CostModelName,
    DeviceCount,
    DraftTokens,
    Factor,
    Port,
    Probability,
    TokenCount,
    simulation_error,
)
from benchctl.profile.engine_options import DraftSource, ServerOptions
from benchctl.steptime.work import Backfill


class SimOptions(ServerOptions):
    """Options of the engine ``sim``."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset({"value_model"})

    cost_model: CostModelName = "lenvm-h100"
    """Cost of a step: calibrated to published LenVM timings, computed from hardware peaks, llm-mock's law, the sum
    of measured layers, or a fitted step-time model."""
    layer_profile: str | None = None
    """Folder of measured layers for the cost model ``layer-profile``: a path, or one below the data directory."""
    step_time_model: str | None = None
    """File of a step-time model for the cost model ``fitted``, as ``benchctl steptime fit`` writes it."""
    tensor_parallel_size: DeviceCount = 1
    """Devices that share each layer; more than one for the cost models ``fitted`` and ``layer-profile``."""
    hardware: str = "h100-sxm"
    """Device whose peaks the cost model computes with: a name of the hardware table, peaks as name:TFLOP/s:GB/s, or
    ``measured`` for those on file."""
    time_scale: Factor = 1.0
    """Virtual seconds per wall second."""
    noise: Literal["none", "published", "fitted"] = "none"
    """Seeded run-to-run variation of step times: none, of the size that was published, or the uncertainty of the
    fitted model's coefficients."""
    revision: Literal["V1", "V2", "V4"] = "V1"
    """Generation of the guided fork to emulate: V2 skips the value model at a neutral scale."""
    value_model: str | None = None
    """Value model that the server loads for guidance; none on a stock server."""
    overlap_schedule: bool = True
    """Overlap the scheduler with the device."""
    async_scheduling: bool = False
    """Plan each step while the one before it runs: a request that arrives in the meantime joins one step later."""
    max_num_seqs: Concurrency = 1024
    """Sequences in one batch at most."""
    max_num_batched_tokens: ContextLength = 8192
    """Tokens in one step at most; longer prompts are prefilled in chunks."""
    num_kv_blocks: BlockCount = 65536
    """Blocks of the KV cache."""
    block_size: BlockTokens = 16
    """Tokens in one KV block."""
    enable_prefix_caching: bool = False
    """Share KV blocks between prompts with a common beginning."""
    cached_prompts: str | None = None
    """JSON Lines of prompts, whose most frequent beginnings fill a prefix cache that never changes (llm-mock's)."""
    cached_prompt_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 500
    """Tokens that this cache keeps."""
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    """Order of requests: by arrival, or by priority and then by arrival."""
    guided_rows: Literal["exact", "aggregate"] = "exact"
    """Draws of guided rows: each row from a stream of its own, or all rows together, which is fast and has the same
    distribution."""
    num_speculative_tokens: DraftTokens = 0
    """Tokens that are drafted for each decoding row and verified in its step; 0 without speculation."""
    acceptance: Probability | Annotated[tuple[Probability, ...], Field(min_length=1, max_length=256)] | None = None
    """Probability that a draft token is accepted when all before it are: one number, or a list with one for each
    position."""
    acceptance_spread: Probability = 0.0
    """Each request draws its acceptance evenly from a ± spread · min(a, 1 - a), at all positions alike; 0: all
    requests have the same."""
    draft_model: str | None = None
    """Model that drafts: a built-in shape or a directory, whose passes the cost model prices."""
    draft_cost: Annotated[float, Field(ge=0, le=1000)] | None = None
    """Time of one drafting pass as a share of the model's own decode step, in place of ``draft_model``."""
    bonus_token: bool = True
    """A step whose drafts are all accepted yields one token more, which its verification has computed anyway."""
    backfill: Backfill = "none"
    """The draft model's pass over the token before a bonus token: free, as more rows of its next pass, or as a
    prefill pass of its own."""
    tokens_per_chunk: TokenCount = 1
    """Tokens in one streamed event."""
    port: Port | None = None
    """A fixed port; a free one where it is not given."""
    start_delay_s: Annotated[float, Field(ge=0, le=MOST)] = 0.0
    """Time the server takes to become ready, to rehearse slow starts."""

    @model_validator(mode="after")
    def _can_be_served(self) -> "SimOptions":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: "
                "a step must have room for one token of each sequence; raise the former or lower the latter"
            )
        if problem := simulation_error(**self.model_dump()):
            raise ValueError(" ".join(problem))
        return self

    @property
    def fixed_port(self) -> int | None:
        return self.port

    @property
    def guides_with(self) -> str | None:
        return self.value_model

    @property
    def skips_neutral_guidance(self) -> bool:
        return self.revision in REVISIONS_THAT_SKIP

    @property
    def simulated_hardware(self) -> str | None:
        return self.hardware if COST_MODELS[self.cost_model].uses_shapes else None

    @property
    def draft_source(self) -> DraftSource:
        if self.draft_model is None:
            return DraftSource(problem="draft_cost states the time of its passes alone")
        return DraftSource(model=self.draft_model, has_backfill=self.bonus_token and self.backfill != "none")
