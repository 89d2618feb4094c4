"""Configuration of one simulated server."""

from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias

from benchctl.errors import UsageError
from benchctl.profile.choices import CostModelName, simulation_error
from benchctl.profile.engine_options import option_text
from benchctl.steptime.work import Backfill

Noise: TypeAlias = Literal["none", "published", "fitted"]
Revision: TypeAlias = Literal["V1", "V2", "V4"]
GuidedRowsMode: TypeAlias = Literal["exact", "aggregate"]
Scheduling: TypeAlias = Literal["fcfs", "priority"]

MAX_MODEL_LEN: Final = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Options of a server at its start. ``value_model`` is None on a stock server.

    ``revision`` is the generation of the guided fork: V2 skips the value model at a neutral scale and extends
    and scores in one pass when no row lags; V4 scores at every scale and always in one pass; V1 does neither.
    ``max_model_len`` bounds prompt and output together.
    """

    model: str = "qwen2.5-7b"
    value_model: str | None = None
    cost_model: CostModelName = "lenvm-h100"
    layer_profile: str | None = None
    step_time_model: str | None = None
    tensor_parallel_size: int = 1
    """Devices that share each layer; more than one for cost models that were measured so."""
    hardware: str = "h100-sxm"
    time_scale: float = 1.0
    noise: Noise = "none"
    noise_seed: int = 0
    revision: Revision = "V1"
    overlap_schedule: bool = True
    async_scheduling: bool = False
    """Each step is planned while the one before it runs, so that a request which arrives joins one step later."""
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    num_kv_blocks: int = 65536
    block_size: int = 16
    max_model_len: int = MAX_MODEL_LEN
    enable_prefix_caching: bool = False
    cached_prompts: str | None = None
    """JSON Lines of prompts whose most frequent beginnings are in a cache that never changes, as in llm-mock."""
    cached_prompt_tokens: int = 500
    """Tokens that this cache keeps."""
    scheduling: Scheduling = "fcfs"
    """Order of requests: by arrival, or by ``Request.priority`` and then by arrival."""
    guided_rows: GuidedRowsMode = "exact"
    """Draws of guided rows: each row from a stream of its own, or all together, with the same distribution."""
    num_speculative_tokens: int = 0
    """Tokens that are drafted for each decoding row and verified in its step; 0 without speculation."""
    acceptance: float | tuple[float, ...] | None = None
    """Probability that a draft is accepted when all before it are: of each position, or one for all."""
    acceptance_spread: float = 0.0
    """Each request draws its acceptance evenly from a +- spread min(a, 1 - a), at all positions alike."""
    draft_model: str | None = None
    """Model whose passes are drafts, with a price of their own."""
    draft_cost: float | None = None
    """Time of a drafting pass as a share of the model's own decode step, in place of a draft model."""
    bonus_token: bool = True
    """A step whose drafts are all accepted yields one token more, which the verification has computed anyway."""
    backfill: Backfill = "none"
    """The draft model's pass over the token before a bonus token: free, as more rows of the next pass, or as a
    prefill of its own."""
    tokens_per_chunk: int = 1
    start_delay_s: float = 0.0
    schedule_patience_s: float = 30.0
    """Time that the core waits for an announced request before it gives up the schedule."""

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, below --max-num-seqs "
                f"{self.max_num_seqs}: a step must have room for one token of each sequence; raise the former or "
                "lower the latter"
            )
        if problem := simulation_error(**asdict(self)):
            raise UsageError(f"--{problem[0].replace('_', '-')} {problem[1]}")

    def _check_numbers(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_kv_blocks", "block_size", "tokens_per_chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if not self.time_scale > 0:
            raise UsageError(f"--time-scale is {self.time_scale}; it must be above 0")
        for name in ("start_delay_s", "cached_prompt_tokens"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must not be negative")

    @property
    def has_cache(self) -> bool:
        """Prompts may be found in a cache, so that usage counts the tokens that were."""
        return self.enable_prefix_caching or self.cached_prompts is not None

    def server_info(self) -> dict[str, str | int | float | bool | None]:
        """The settings that the server reports: those that two servers of one configuration share."""
        settings = {name: getattr(self, name) for name in self.__slots__ if name not in _PRIVATE}
        return {"clock": "virtual", **{name: option_text(value) for name, value in settings.items()}}


_PRIVATE: Final = frozenset({"noise_seed", "start_delay_s", "schedule_patience_s"})
