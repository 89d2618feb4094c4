"""Options of the engine ``sim``, and the table of its cost models."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import Field, model_validator

from benchctl.guided.params import REVISIONS_THAT_SKIP
from benchctl.profile.bounds import MOST
from benchctl.profile.choices import (
    BlockCount,
    BlockTokens,
    Concurrency,
    ContextLength,
    DeviceCount,
    DraftSource,
    DraftTokens,
    Factor,
    Port,
    Probability,
    ServerOptions,
    TokenCount,
    check_rules,
)


@dataclass(frozen=True, slots=True)
class CostModelChoice:
    """A cost model of the simulator: a module with a function ``cost_model``, and the facts that options depend on.

    ``uses_shapes`` is False where step times depend on neither the models' shapes nor the device. Such a cost model
    serves models of any name. ``verifies_drafts`` is True where steps with several new tokens of a decoding row
    have a price, ``prices_other_models`` where a draft model has one beside the model. ``file_option`` is the
    option that names the measurements that it prices steps by.
    """

    module: str
    uses_shapes: bool = True
    prices_value_model: bool = True
    verifies_drafts: bool = True
    prices_other_models: bool = True
    file_option: str | None = None


COST_MODELS: Final = {
    "lenvm-h100": CostModelChoice("benchctl.sim.costs.lenvm"),
    "roofline": CostModelChoice("benchctl.sim.costs.roofline"),
    "llm-mock": CostModelChoice(
        "benchctl.sim.costs.llm_mock", uses_shapes=False, prices_value_model=False, verifies_drafts=False
    ),
    "layer-profile": CostModelChoice(
        "benchctl.sim.costs.layer_profile",
        prices_value_model=False,
        prices_other_models=False,
        file_option="layer_profile",
    ),
    "fitted": CostModelChoice("benchctl.sim.costs.fitted", file_option="step_time_model"),
}
"""Values of the option ``cost_model``."""

if TYPE_CHECKING:
    CostModelName: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    CostModelName = Literal[tuple(COST_MODELS)]

FAULTS: Final = (
    "first_use_pause_s",
    "drift",
    "slow_first_steps",
    "slow_first_factor",
    "aftermath",
    "launch_scatter",
)
"""Options that plant a fault, to rehearse how it is found."""

Rule: TypeAlias = tuple[bool, str]
"""Whether it is broken, and the problem in words."""


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
    backfill: Literal["none", "expansion", "prefill"] = "none"
    """The draft model's pass over the token before a bonus token: free, as more rows of its next pass, or as a
    prefill pass of its own."""
    first_use_pause_s: Annotated[float, Field(ge=0, le=MOST)] = 0.0
    """Planted fault: a pause in the first step of a server with each number of sequences, as of a compiler."""
    drift: Annotated[float, Field(gt=-1, le=MOST)] = 0.0
    """Planted fault: the share by which steps take longer at the end of each load than at its beginning; it grows
    with the requests of the load that have ended."""
    slow_first_steps: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Planted fault: steps at the beginning of a server's life that are slow."""
    slow_first_factor: Factor = 3.0
    """Times as long as others that these steps take."""
    aftermath: Annotated[float, Field(gt=-1, le=MOST)] = 0.0
    """Planted fault: the share by which steps take longer whose batch is smaller than the largest of the load
    before, as on a server that keeps what a large load has left."""
    launch_scatter: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Planted scatter: standard deviation of the logarithm of a factor that all steps of one server have, as
    launches of a real one differ."""
    tokens_per_chunk: TokenCount = 1
    """Tokens in one streamed event."""
    port: Port | None = None
    """A fixed port; a free one where it is not given."""
    start_delay_s: Annotated[float, Field(ge=0, le=MOST)] = 0.0
    """Time the server takes to become ready, to rehearse slow starts."""

    @model_validator(mode="after")
    def _can_be_served(self) -> "SimOptions":
        budget = (
            f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: a "
            "step must have room for one token of each sequence; raise the former or lower the latter"
        )
        drafting = self._drafting_rules() if self.num_speculative_tokens else ()
        check_rules((self.max_num_batched_tokens < self.max_num_seqs, budget), *self._pricing_rules(), *drafting)
        return self

    def _pricing_rules(self) -> tuple[Rule, ...]:
        name, choice, devices = self.cost_model, COST_MODELS[self.cost_model], self.tensor_parallel_size
        owners = {each.file_option: name for name, each in COST_MODELS.items() if each.file_option is not None}
        guides = " or ".join(name for name, each in COST_MODELS.items() if each.prices_value_model)
        measured = " or ".join(owners.values())
        return (
            (
                self.value_model is not None and not choice.prices_value_model,
                f"cost_model {name} cannot price a value model; drop the value model, or take {guides}",
            ),
            *(
                (
                    option == choice.file_option and getattr(self, option) is None,
                    f"cost_model {name} prices steps by measurements; name them with {option}",
                )
                for option in owners
            ),
            *(
                (
                    option != choice.file_option and getattr(self, option) is not None,
                    f"cost_model {name} does not read {option}; drop it, or take {owner}",
                )
                for option, owner in owners.items()
            ),
            (
                self.noise == "fitted" and choice.file_option != "step_time_model",
                f"noise fitted is the uncertainty of a fitted model, which {name} is not; take none or published",
            ),
            (
                devices > 1 and choice.file_option is None,
                f"tensor_parallel_size is {devices}, and {name} prices one device; drop it, or take {measured}",
            ),
        )

    def _drafting_rules(self) -> tuple[Rule, ...]:
        name, choice, num_positions = self.cost_model, COST_MODELS[self.cost_model], len(self.acceptances)
        num_drafts = self.num_speculative_tokens
        drafts = f"num_speculative_tokens is {num_drafts}"
        verifies = " or ".join(name for name, each in COST_MODELS.items() if each.verifies_drafts)
        guided = "guides one token at a time and cannot score drafts; drop either"
        source = "whose passes the cost model prices, or draft_cost, their share of the model's own step"
        one_model = f"{name} has the times of one model; give draft_cost instead"
        return (
            (
                self.value_model is not None,
                f"{drafts}, and value_model is {self.value_model}: a value model {guided}",
            ),
            (
                not choice.verifies_drafts,
                f"cost_model {name} cannot price the verification of drafts; take {verifies}",
            ),
            (not num_positions, f"{drafts}; state with acceptance how many drafts are accepted"),
            (
                1 < num_positions < num_drafts,
                f"acceptance has {num_positions} positions for {num_drafts} draft tokens; give as many, or one",
            ),
            (
                (self.draft_model is None) == (self.draft_cost is None),
                f"{drafts}; name either draft_model, {source}",
            ),
            (
                self.draft_model is not None and not choice.prices_other_models,
                f"draft_model is {self.draft_model}, and {one_model}",
            ),
        )

    @property
    def faults(self) -> set[str]:
        """The options that plant faults and are set."""
        return {name for name in FAULTS if getattr(self, name) != SimOptions.model_fields[name].default}

    @property
    def acceptances(self) -> tuple[float, ...]:
        """The acceptance of each position; a single one holds for all."""
        if self.acceptance is None:
            return ()
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

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
