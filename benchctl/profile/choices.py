"""Values of the keys of a profile: names of data sets, quantities with unit and range, and options of servers.

Beyond its range a quantity is a mistake. Options of the command line share these ranges. Of servers, these are the
options that several kinds share, and their spelling as flags; those of each kind are beside its engine, under the
name that ``engine_table`` has for them.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo

from benchctl.profile.bounds import (
    LEAST,
    MAX_CONCURRENCY,
    MAX_CONTEXT,
    MAX_DEVICES,
    MAX_DRAFT_TOKENS,
    MAX_OUTPUTS,
    MAX_THREADS,
    MAX_TOKENS,
    MOST,
)
from benchctl.untrusted.secrets import holds_key, is_secret_name, secret_options

DEFAULT_THRESHOLD: Final = 0.01
"""The smallest change that counts where nobody says another."""
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
CONVERSATIONS: Final = ("synthetic", "sharegpt")
"""Those of them that have conversations."""


if TYPE_CHECKING:
    DatasetName: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    DatasetName = Literal[tuple(DATASETS)]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """The source of a server's drafts.

    Without ``model`` and ``problem`` they are looked up in text, which takes no pass of a model.
    """

    model: str | None = None
    """Name or directory of the model whose passes are drafts."""
    problem: str | None = None
    """The reason why no such model can be named."""
    has_backfill: bool = True
    """The model also forwards the last of its drafts, where all of them were accepted and a bonus token follows."""


_INSTEAD: Final = (
    "remove it: a server on the loopback interface needs no key, and HF_TOKEN is taken from your environment"
)


@dataclass(frozen=True, slots=True)
class Flag:
    """The spelling of an option on its server's command line, as metadata of the option's field."""

    name: str = ""
    """``--max-num-seqs``; where it is empty, that of the option."""
    when: bool | None = None
    """Value of a switch at which the flag is given. None: ``--flag`` for true, ``--no-flag`` for false."""

    def spelling(self, option: str) -> str:
        """The flag of ``option``, with its dashes."""
        return self.name or f"--{option.replace('_', '-')}"

    def words(self, option: str, value: Any) -> tuple[str, ...]:
        """The words for the value of an option; none where it is left to the server."""
        name = self.spelling(option)
        if value is None:
            return ()
        if isinstance(value, bool):
            if self.when is not None:
                return (name,) if value is self.when else ()
            return (name,) if value else (f"--no-{name.removeprefix('--')}",)
        return name, json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)


def flag_of(field: FieldInfo) -> Flag | None:
    """The flag of an option; None where the engine's code says what becomes of it."""
    return next((entry for entry in field.metadata if isinstance(entry, Flag)), None)


class ServerOptions(Section):
    """Options and properties of every engine."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset()
    """Options that load a value model: a server without them is the same one without guidance."""

    @property
    def fixed_port(self) -> int | None:
        """The port that the profile insists on."""
        port: int | None = getattr(self, "port", None)
        return port

    @property
    def secret_variables(self) -> frozenset[str]:
        """The variables of the environment that hold secrets of requests."""
        return frozenset()

    @property
    def guides_with(self) -> str | None:
        """The value model that the server loads for guidance; None where it cannot guide."""
        value_model: str | None = getattr(self, "value_model", None)
        return value_model

    @property
    def skips_neutral_guidance(self) -> bool:
        """True for a server that leaves out the value model where its guidance changes no probability."""
        return False

    @property
    def simulated_hardware(self) -> str | None:
        """The device whose step times a simulated server has; None where it has those of no device."""
        return None

    @property
    def speculates(self) -> bool | None:
        """True for a server that drafts tokens; None where its options do not say."""
        has_option = "num_speculative_tokens" in type(self).model_fields
        return bool(getattr(self, "num_speculative_tokens")) if has_option else None  # noqa: B009

    @property
    def uses_gpu(self) -> bool | None:
        """True for a server that does not start without a GPU; None where its options do not say."""
        return None

    @property
    def forward_pass(self) -> ForwardPass | None:
        """The pass that a run measures; None for servers that answer requests."""
        return None

    @property
    def draft_source(self) -> DraftSource:
        """The source of its drafts, if it speculates."""
        return DraftSource(problem="the options do not say what drafts")

    @property
    def request_model(self) -> str | None:
        """Name of the model in requests; None for the profile's."""
        return None

    @classmethod
    def flags(cls) -> dict[str, Flag]:
        """The flag of each option that is spelled by one, in the order of the options."""
        return {name: flag for name, field in cls.model_fields.items() if (flag := flag_of(field))}

    def flag_words(self) -> tuple[str, ...]:
        """The command line that these flags make of the options."""
        flags = type(self).flags().items()
        return tuple(word for name, flag in flags for word in flag.words(name, getattr(self, name)))


class LaunchedOptions(ServerOptions):
    """Options of servers that benchctl starts and others wrote."""

    port: Port | None = None
    """A fixed port; a free one where it is not given."""
    env: dict[str, str] = {}
    """Variables of the server's environment beyond ours."""
    extra_args: tuple[str, ...] = ()
    """Words added to the server's command line as they are, after those that the options give."""
    client_cores: Literal["auto"] | Annotated[int, Field(ge=0, le=4096)] = "auto"
    """Processor cores that are the client's alone: the server is started on the others, the client runs on the last
    ones. ``auto``: one, or one for each process of the load, where these are no more than an eighth of the cores;
    else none. The server always keeps one; on a machine with one core nothing is bound."""

    needs_gpu: bool | None = None
    """Refuse to start where no GPU is seen, as the presets for GPUs do; null: by the option ``device``, if there is
    one."""

    @field_validator("env")
    @classmethod
    def _env_has_no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if is_secret_name(name) or holds_key(value):
                raise ValueError(
                    f"{name} looks like a secret, which profiles and results must not hold; {_INSTEAD}"
                )
        return env

    @field_validator("extra_args")
    @classmethod
    def _words_have_no_secrets(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for secret in secret_options(words):
            raise ValueError(f"{secret} looks like a secret, which profiles and results must not hold; {_INSTEAD}")
        return words

    @property
    def uses_gpu(self) -> bool | None:
        device = str(getattr(self, "device", None) or "auto")
        if device.partition(":")[0] not in {"auto", "cuda"}:
            return False
        return self.needs_gpu if self.needs_gpu is not None or device == "auto" else True


class PythonOptions(LaunchedOptions):
    """Options of servers that are Python programs, each in an environment of its own."""

    python: str | None = None
    """Interpreter of the environment that has the engine; searched for where it is not given."""
    dtype: Annotated[str | None, Flag("--dtype")] = None
    """Type of weights and activations, as the engine names it; the engine's choice where it is not given."""
