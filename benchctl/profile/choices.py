"""Values of the keys of a profile: names of data sets and cost models, and quantities with unit and range.

Beyond its range a quantity is a mistake. Options of the command line share these ranges.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, Field

DEFAULT_MODEL: Final = "qwen2.5-7b"
"""Model of a profile that names none."""
NO_REQUESTS: Final = "none"
"""Name of the dataset without prompts."""
DATASETS: Final = {
    "gsm8k": "benchctl.workload.datasets.published",
    "sharegpt": "benchctl.workload.datasets.published",
    "sharegpt-replay": "benchctl.workload.datasets.published",
    "azure-trace": "benchctl.workload.datasets.published",
    "mooncake": "benchctl.workload.datasets.published",
    "custom": "benchctl.workload.datasets.own",
    "huggingface": "benchctl.workload.datasets.own",
    "synthetic": "benchctl.workload.datasets.made",
    "generated": "benchctl.workload.datasets.made",
    NO_REQUESTS: "benchctl.workload.datasets.made",
}
"""Values of ``workload.dataset``, and the modules that have them in their ``DATASETS``."""


@dataclass(frozen=True, slots=True)
class CostModelChoice:
    """A cost model of the simulator: a module with a function ``cost_model``.

    ``uses_shapes`` is False where step times depend on neither the models' shapes nor the device. Such a cost model
    serves models of any name. ``verifies_drafts`` is True where steps with several new tokens of a decoding row
    have a price, ``prices_other_models`` where a draft model has one beside the model. ``file_option`` is the
    engine option that names the measurements that it prices steps by.
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
"""Values of the engine option ``cost_model``."""

if TYPE_CHECKING:
    DatasetName: TypeAlias = str
    CostModelName: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    DatasetName = Literal[tuple(DATASETS)]
    CostModelName = Literal[tuple(COST_MODELS)]


def acceptance_by_position(acceptance: float | tuple[float, ...] | None) -> tuple[float, ...]:
    """The acceptances that an option names; a single one holds for every position."""
    if acceptance is None:
        return ()
    return acceptance if isinstance(acceptance, tuple) else (acceptance,)


Rule: TypeAlias = tuple[bool, str, str]
"""Whether it is broken, the option that breaks it, and the reason."""


def simulation_error(
    *,
    cost_model: str,
    value_model: str | None,
    layer_profile: str | None,
    step_time_model: str | None,
    noise: str,
    tensor_parallel_size: int,
    num_speculative_tokens: int,
    acceptance: float | tuple[float, ...] | None,
    acceptance_spread: float,
    draft_model: str | None,
    draft_cost: float | None,
    **_: object,
) -> tuple[str, str] | None:
    """The first option of a simulated server that cannot be as it is, and the reason; None where all fit together.

    Its other options may be what they are.
    """
    files = {"layer_profile": layer_profile, "step_time_model": step_time_model}
    drafts, accepted = num_speculative_tokens, acceptance_by_position(acceptance)
    rules = (
        *_pricing_rules(cost_model, value_model, files, noise, tensor_parallel_size),
        *_range_rules(drafts, accepted, acceptance_spread, draft_cost),
        *_drafting_rules(cost_model, value_model, drafts, accepted, draft_model, draft_cost),
    )
    return next(((option, reason) for is_broken, option, reason in rules if is_broken), None)


def _pricing_rules(
    cost_model: str,
    value_model: str | None,
    files: Mapping[str, str | None],
    noise: str,
    tensor_parallel_size: int,
) -> tuple[Rule, ...]:
    choice, choices = COST_MODELS[cost_model], COST_MODELS.items()
    owners = {each.file_option: name for name, each in choices}
    measured = " or ".join(name for name, each in choices if each.file_option is not None)
    guides = " or ".join(name for name, each in choices if each.prices_value_model)
    return (
        (
            value_model is not None and not choice.prices_value_model,
            "cost_model",
            f"{cost_model} cannot price a value model; drop the value model, or take {guides}",
        ),
        *(
            (
                file is None and name == choice.file_option,
                "cost_model",
                f"{cost_model} prices steps by measurements; name them with {name}",
            )
            for name, file in files.items()
        ),
        *(
            (
                file is not None and name != choice.file_option,
                "cost_model",
                f"{cost_model} does not read {name}; drop it, or take {owners[name]}",
            )
            for name, file in files.items()
        ),
        (
            noise == "fitted" and choice.file_option != "step_time_model",
            "noise",
            f"fitted is the uncertainty of a fitted model, which {cost_model} is not; take none or published",
        ),
        (tensor_parallel_size < 1, "tensor_parallel_size", f"is {tensor_parallel_size}; it must be at least 1"),
        (
            tensor_parallel_size > 1 and choice.file_option is None,
            "tensor_parallel_size",
            f"is {tensor_parallel_size}, and {cost_model} prices one device; leave it out, or take {measured}",
        ),
    )


def _range_rules(
    drafts: int, accepted: Sequence[float], acceptance_spread: float, draft_cost: float | None
) -> tuple[Rule, ...]:
    impossible = ", ".join(f"{each:g}" for each in accepted if not 0 <= each <= 1)
    return (
        (drafts < 0, "num_speculative_tokens", f"is {drafts}; it must not be negative"),
        (bool(impossible), "acceptance", f"has {impossible}; it is a probability from 0 to 1"),
        (
            not 0 <= acceptance_spread <= 1,
            "acceptance_spread",
            f"is {acceptance_spread:g}; it is a share from 0 to 1",
        ),
        (
            draft_cost is not None and not 0 <= draft_cost < math.inf,
            "draft_cost",
            f"is {draft_cost or 0:g}; it is a share of the model's own step, 0 or more",
        ),
    )


def _drafting_rules(
    cost_model: str,
    value_model: str | None,
    drafts: int,
    accepted: Sequence[float],
    draft_model: str | None,
    draft_cost: float | None,
) -> tuple[Rule, ...]:
    choice = COST_MODELS[cost_model]
    verifies = " or ".join(name for name, each in COST_MODELS.items() if each.verifies_drafts)
    return (
        (
            drafts > 0 and value_model is not None,
            "num_speculative_tokens",
            (
                f"is {drafts}, and value_model is {value_model}: a value model guides one token at a time "
                "and cannot score drafts; drop either"
            ),
        ),
        (
            drafts > 0 and not choice.verifies_drafts,
            "cost_model",
            f"{cost_model} cannot price the verification of drafts; take {verifies}",
        ),
        (
            drafts > 0 and not accepted,
            "num_speculative_tokens",
            f"is {drafts}; state with acceptance how many drafts are accepted",
        ),
        (
            1 < len(accepted) < drafts,
            "acceptance",
            f"has {len(accepted)} positions for {drafts} draft tokens; give one for each, or one number for all",
        ),
        (
            drafts > 0 and (draft_model is None) == (draft_cost is None),
            "num_speculative_tokens",
            (
                f"is {drafts}; name either draft_model, whose passes the cost model prices, or draft_cost, their "
                "share of the model's own step"
            ),
        ),
        (
            drafts > 0 and draft_model is not None and not choice.prices_other_models,
            "draft_model",
            f"is {draft_model}, and {cost_model} has the times of one model; give draft_cost instead",
        ),
    )


PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Parameters of sampling that depend on the tokens so far, and that few requests have."""


MAX_OUTPUTS: Final = 1_000_000
"""Answers to all requests of a run."""
MAX_TOKENS: Final = 1_000_000
"""Tokens of one prompt or answer."""
MAX_CONTEXT: Final = 1 << 24
"""Tokens of prompt and answer together, and tokens of one step."""
MAX_CONCURRENCY: Final = 65_536
"""Requests open at the same time, and sequences in one batch."""
MAX_DRAFT_TOKENS: Final = 256
MAX_DEVICES: Final = 4096
MAX_THREADS: Final = 4096
MAX_WARMUPS: Final = 10_000
MAX_BLOCKS: Final = 10_000
"""Complete replicates of an experiment."""
MAX_SEED: Final = 2**63 - 1
MAX_LAYERS: Final = 1000
MAX_TOTAL_TOKENS: Final = 10**15
"""Tokens of all answers together."""


LEAST, MOST = 1e-6, 1e6
"""Rates, factors and durations lie between, so that no time computed from them overflows."""
NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9._-]*$"
"""A name that is a part of a path as well."""

Seconds = Annotated[float, Field(ge=LEAST, le=MOST)]
Rate = Annotated[float, Field(ge=LEAST, le=MOST)]
"""Per second."""
Factor = Annotated[float, Field(ge=LEAST, le=MOST)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
"""A part of something, which cannot be none of it."""
Penalty = Annotated[float, Field(ge=-2, le=2)]

RequestCount = Annotated[int, Field(ge=1, le=MAX_OUTPUTS)]
Concurrency = Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)]
"""Requests open at the same time, and sequences in one batch."""
TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
"""Tokens of one prompt or answer."""
ContextLength = Annotated[int, Field(ge=1, le=MAX_CONTEXT)]
"""Tokens of prompt and answer together, and tokens of one step."""
BlockCount = Annotated[int, Field(ge=1, le=1 << 30)]
"""Blocks of a KV cache."""
BlockTokens = Annotated[int, Field(ge=1, le=1 << 16)]
"""Tokens in one block of a KV cache."""
DraftTokens = Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)]
"""Tokens drafted in one step."""
StepCount = Annotated[int, Field(ge=1, le=MAX_OUTPUTS)]
DeviceCount = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
ThreadCount = Annotated[int, Field(ge=1, le=MAX_THREADS)]
LayerCount = Annotated[int, Field(ge=0, le=100_000)]
AdapterCount = Annotated[int, Field(ge=1, le=65_536)]
ByteCount = Annotated[int, Field(ge=1, le=1 << 50)]
Port = Annotated[int, Field(ge=1, le=65_535)]


Phase: TypeAlias = Literal["decode", "prefill"]
Mode: TypeAlias = Literal["eager", "graph"]
"""``eager`` launches every kernel from the host; ``graph`` replays a captured CUDA graph."""
KvLayout: TypeAlias = Literal["contiguous", "paged"]
DataType: TypeAlias = Literal["float32", "bfloat16", "float16"]

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
MODES: Final[tuple[Mode, ...]] = get_args(Mode)


class ForwardPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass over a batch of equal sequences.

    A decode has one new token for each sequence; a prefill has ``new_tokens`` for each, by the attention path of
    prompts. All of them see ``context_tokens`` that are in the cache already.
    """

    phase: Phase
    batch_size: int
    new_tokens: int = 1
    """New tokens of one sequence."""
    context_tokens: int = 0
    """Tokens of one sequence whose keys and values the cache holds before the pass."""

    @property
    def total_new_tokens(self) -> int:
        """New tokens of the whole batch."""
        return self.batch_size * self.new_tokens


ForwardPass: TypeAlias = tuple[ForwardPoint, Mode]
"""A point, and the mode in which it is computed."""


class Section(BaseModel):
    """A part of a profile: frozen, closed, and strict about types (``"5"`` is text).

    A section's validator is built when something is first validated against it: most commands need few. The meaning
    of a key stands below it; that of a required one is its description, which the message that it is missing tells.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True, allow_inf_nan=False)


def check_rules(*rules: tuple[bool, str]) -> None:
    """Raise ValueError with the first problem that is there; each stands behind its condition."""
    for is_there, problem in rules:
        if is_there:
            raise ValueError(problem)
