"""The engine ``micro``, whose passes ``benchctl micro`` measures: its options, and what readers ask of it."""

from pydantic import Field, model_validator

from benchctl.engines.engine import Engine
from benchctl.errors import EngineUnavailableError
from benchctl.profile.bounds import MAX_TOKENS
from benchctl.profile.choices import (
    Concurrency,
    DataType,
    ForwardPass,
    ForwardPoint,
    KvLayout,
    Mode,
    Phase,
    RequestCount,
    ServerOptions,
    ThreadCount,
    TokenCount,
)
from benchctl.profile.model import VariantSettings


class MicroOptions(ServerOptions):
    """Options of the engine ``micro``, whose experiments ``benchctl micro`` writes and measures."""

    python: str | None = None
    """Interpreter of an environment that has torch; searched for where it is not given."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda:\d+)$")
    """Device as torch names it: ``cpu`` or ``cuda:0``."""
    threads: ThreadCount | None = None
    """Threads of an operator on a CPU; null: torch's own choice, one for each core."""
    dtype: DataType = "bfloat16"
    """Type of weights, activations and key-value cache."""
    kv_layout: KvLayout = "contiguous"
    """Layout of the key-value cache: one stretch for each sequence, or blocks in an order of their own."""
    mode: Mode = "eager"
    """``eager`` launches every kernel from the host; ``graph`` replays a captured CUDA graph."""
    phase: Phase = "decode"
    """``decode`` computes one new token of each sequence, ``prefill`` several."""
    batch_size: Concurrency = 1
    """Sequences of a pass."""
    length: int = Field(default=128, ge=0, le=MAX_TOKENS)
    """Tokens of each sequence: those in the cache before a decode, and those of the prompt of a prefill."""
    new_tokens: TokenCount | None = None
    """Tokens of each sequence that a prefill computes behind ``length`` tokens in the cache; null: the ``length``
    tokens themselves, behind an empty cache."""
    warmups: int = Field(default=3, ge=1, le=10_000)
    """Passes before those that count."""
    replays: RequestCount = 25
    """Passes of one run that count."""

    @model_validator(mode="after")
    def _has_new_tokens(self) -> "MicroOptions":
        if self.phase == "prefill" and self.new_tokens is None and self.length == 0:
            raise ValueError("length is 0, and a prefill has at least one token; give a length, or new_tokens")
        return self

    @property
    def computed_tokens(self) -> int:
        """Tokens of each sequence that a pass computes."""
        if self.phase == "decode":
            return 1
        return self.length if self.new_tokens is None else self.new_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of each sequence whose keys and values are in the cache before a pass."""
        return 0 if self.phase == "prefill" and self.new_tokens is None else self.length

    @property
    def forward_pass(self) -> ForwardPass:
        point = ForwardPoint(
            phase=self.phase,
            batch_size=self.batch_size,
            new_tokens=self.computed_tokens,
            context_tokens=self.cached_tokens,
        )
        return point, self.mode


class MicroEngine(Engine):
    """Forward passes in a process of their own."""

    kind = "micro"
    is_launched = False
    needs_first_generation = False

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError: nothing can be started that requests could be sent to."""
        raise EngineUnavailableError(
            "engine 'micro' computes forward passes and serves no requests: 'benchctl micro forward' measures such "
            "an experiment, and 'benchctl micro forward --resume DIR' continues one"
        )

    def has_steps(self, settings: VariantSettings) -> bool:
        """Each pass is a step."""
        return True
