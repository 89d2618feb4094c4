"""The workload of a profile: dataset, lengths, arrival schedule, warm-up. Lengths are in tokens."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from benchctl.profile.choices import DatasetName
from benchctl.profile.sections.quantities import (
    Concurrency,
    Factor,
    Rate,
    RequestCount,
    TokenCount,
    WarmupCount,
)
from benchctl.profile.sections.ranges import MAX_OUTPUTS, MAX_TOKENS
from benchctl.profile.sections.section import Section

MAX_PROMPT_TOKENS = 500_000_000
"""Tokens of all prompts of a run, which are prepared in memory."""
MAX_SAMPLES_OF_A_REQUEST = 128
"""Largest ``n`` of the OpenAI API."""


class LengthRange(Section):
    """Lengths drawn log-normally around ``mean`` with coefficient of variation ``cv``, cut to [min, max]."""

    mean: float = Field(gt=0, le=MAX_TOKENS)
    """Mean length before cutting."""
    cv: float = Field(default=0.0, ge=0, le=5)
    """Standard deviation over mean; 0 gives every length the mean."""
    min: TokenCount = 1
    """Shortest length."""
    max: TokenCount = MAX_TOKENS
    """Longest length."""

    @model_validator(mode="after")
    def _ordered(self) -> "LengthRange":
        if not self.min <= self.mean <= self.max:
            raise ValueError(f"needs min <= mean <= max, got {self.min} <= {self.mean} <= {self.max}")
        return self


Length = TokenCount | LengthRange | Annotated[tuple[TokenCount, ...], Field(min_length=1)]
"""A list is taken in turn: request i has the length i modulo its number of lengths."""


class Arrival(Section):
    """The schedule of the requests: a closed loop, or precomputed times whatever the server does."""

    kind: Literal["closed-loop", "burst", "constant", "poisson", "gamma", "trace"] = "closed-loop"
    """``closed-loop`` sends when a slot frees, ``burst`` all at once, the others at precomputed times."""
    max_concurrency: Concurrency | None = None
    """Requests open at the same time; needed by ``closed-loop``, a cap for the others."""
    request_rate: Rate | None = None
    """Requests per second, on the engine's clock, of ``constant``, ``poisson`` and ``gamma``."""
    burstiness: Factor = 1.0
    """Shape of ``gamma``, as vLLM defines it: 1 is Poisson, below 1 burstier."""
    speedup: Factor = 1.0
    """Divides the recorded times of ``trace``."""
    launch_rate_limit: Rate | None = None
    """Requests per second at which sends are throttled, whatever the schedule says."""

    @property
    def is_open_loop(self) -> bool:
        """True if each request has a planned time, whatever the server does."""
        return self.kind in {"constant", "poisson", "gamma", "trace"}

    @model_validator(mode="after")
    def _complete(self) -> "Arrival":
        if self.kind == "closed-loop" and self.max_concurrency is None:
            raise ValueError("kind closed-loop needs max_concurrency")
        if self.kind in {"constant", "poisson", "gamma"} and self.request_rate is None:
            raise ValueError(f"kind {self.kind} needs request_rate")
        return self


def _longest(length: Length | None) -> int:
    """Tokens of the longest length, or 0; of a range those around its mean, which few exceed."""
    if isinstance(length, LengthRange):
        return min(length.max, math.ceil(length.mean * (1 + length.cv)))
    return max(length) if isinstance(length, tuple) else length or 0


class Workload(Section):
    """Request set and arrival schedule."""

    dataset: DatasetName
    """Source of the prompts."""
    path: str | None = None
    """File to read in place of the one in the data directory; needed by ``custom``. A relative path starts at the
    working directory, else among the profiles. With ``huggingface``, a data set of the hub as ``owner/name``, and
    behind it the folder or file to read where there are several."""
    revision: str | None = None
    """Commit of the data set that ``huggingface`` reads, 40 hex digits."""
    split: str | None = None
    """Part of the data set that ``huggingface`` reads, such as ``test``: files with it in their names."""
    columns: dict[str, str] = {}
    """Column of the file for each field of ``custom`` and ``huggingface`` rows that is called otherwise there,
    such as ``{prompt: question}``."""
    num_prompts: RequestCount = 50
    """Prompts taken from the dataset."""
    selection: Literal["first", "sample"] = "first"
    """The first prompts in file order, or a seeded sample."""
    repeat: bool = False
    """Begin the dataset again when it has fewer rows than num_prompts; recorded arrivals go on behind the last."""
    samples_per_prompt: RequestCount = 1
    """Answers per prompt."""
    samples_as: Literal["one-request", "requests"] = "one-request"
    """Samples as one request with ``n``, or as as many requests with distinct seeds."""
    on_missing_dataset: Literal["generate", "fail"] = "generate"
    """Action when the dataset is not available: ``generate`` uses generated prompts and warns, ``fail`` stops."""
    input_len: Length | None = None
    """Prompt length of the ``synthetic`` dataset: one, a range, or a list that prompts take in turn."""
    output_len: Length | None = None
    """Length of each output with stop mode ``forced``: one, a range, or a list that prompts take in turn, so that
    lists of one size in both keys pair prompts with outputs. null: the dataset's own lengths, if it has them."""
    max_tokens: TokenCount = 1500
    """Limit of each output with stop mode ``natural``, and of the natural lengths of ``replay-natural``."""
    lengths_from: str | None = None
    """Result directory of the same prompts with stop mode ``natural``; its baseline gives the natural length of
    each answer. null: ``replay-natural`` measures it first; with other modes it stays unknown."""
    tokenizer: str | None = None
    """Tokenizer that counts prompts and writes those of a planned length: a directory with tokenizer.json, or a
    repository of the model hub. null: that of the model, where it is on this machine; else the server's; else an
    estimate."""
    chat: bool = False
    """Sends each prompt that is plain text as a chat with one message of the user; a planned length includes the
    chat template."""
    arrival: Arrival
    """Schedule of the requests."""
    num_warmups: WarmupCount = 1
    """Requests sent to each fresh server before the measured ones; no metric includes them."""
    warmup_shapes: bool | None = None
    """Also warms up every batch size and prompt length of the load. null: on all engines but the simulator, unless
    num_warmups is 0."""
    allow_prefix_cache_hits: bool = False
    """Allows prompts to be found in a prefix cache; otherwise a run with cache hits is invalid."""

    @model_validator(mode="after")
    def _of_a_size(self) -> "Workload":
        num_outputs = self.num_prompts * self.samples_per_prompt
        if num_outputs > MAX_OUTPUTS:
            raise ValueError(f"asks for {num_outputs} outputs, more than {MAX_OUTPUTS}; lower num_prompts")
        if (tokens := self.num_prompts * _longest(self.input_len)) > MAX_PROMPT_TOKENS:
            raise ValueError(
                f"asks for {tokens:,} prompt tokens, which no memory holds, more than {MAX_PROMPT_TOKENS:,}; lower "
                "num_prompts or input_len"
            )
        if self.samples_as == "one-request" and self.samples_per_prompt > MAX_SAMPLES_OF_A_REQUEST:
            raise ValueError(
                f"asks for {self.samples_per_prompt} samples in one request, which takes at most "
                f"{MAX_SAMPLES_OF_A_REQUEST}; set samples_as: requests"
            )
        return self
