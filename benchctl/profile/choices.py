"""Values of the keys of a profile: names of data sets, and quantities with unit and range.

Beyond its range a quantity is a mistake. Options of the command line share these ranges.
"""

from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, Field

DEFAULT_THRESHOLD: Final = 0.01
"""The smallest change that counts where nobody says another."""
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


if TYPE_CHECKING:
    DatasetName: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    DatasetName = Literal[tuple(DATASETS)]


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
