"""The load that a configuration of inference-perf asks for: its prompts and its stages."""

from dataclasses import dataclass

from benchctl.interop.readers.inference_perf import KeyPath
from benchctl.interop.readers.inference_perf_schema import (
    ConcurrentStage,
    Config,
    Data,
    Distribution,
    RateStage,
    SharedPrefix,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts of a configuration: how many differ, and their mean lengths in tokens.

    ``cached_tokens`` of each begin another prompt of its group, on purpose, and were computed for the first of
    them. ``is_exhaustible`` for a generator that ends after ``num_distinct`` instead of starting over.
    """

    num_distinct: int
    prompt_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0
    is_exhaustible: bool = False
    key: KeyPath = ("data",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the load: at a rate, or with a fixed number of open requests."""

    index: int
    num_requests: int
    rate: float | None = None
    concurrency: int | None = None

    @property
    def key(self) -> KeyPath:
        name = "rate" if self.rate is not None else "concurrency_level"
        return ("load", "stages", self.index, name)


def prompt_set(data: Data) -> PromptSet | None:
    """The prompts of a configuration; None for data whose size or lengths its file does not state."""
    if data.type == "shared_prefix" and data.shared_prefix is not None:
        return _shared(data.shared_prefix)
    if data.type not in {"synthetic", "random"} or data.trace is not None:
        return None
    prompts, outputs = data.input_distribution, data.output_distribution
    if prompts is None or outputs is None or prompts.total_count is None or outputs.total_count is None:
        return None
    return PromptSet(
        num_distinct=min(prompts.total_count, outputs.total_count),
        prompt_tokens=mean_tokens(prompts),
        output_tokens=mean_tokens(outputs),
        is_exhaustible=True,
        key=("data", "input_distribution", "total_count"),
    )


def _shared(prefix: SharedPrefix) -> PromptSet:
    """Every prompt is a system prompt and a question, also where its group has no other prompt."""
    system_tokens = mean_tokens(prefix.system_prompt_len, fewest=0)
    question_tokens = mean_tokens(prefix.question_distribution or prefix.question_len, fewest=0)
    return PromptSet(
        num_distinct=prefix.num_groups * prefix.num_prompts_per_group,
        prompt_tokens=max(1.0, system_tokens + question_tokens),
        output_tokens=mean_tokens(prefix.output_distribution or prefix.output_len),
        cached_tokens=system_tokens * (1 - 1 / max(1, prefix.num_prompts_per_group)),
        key=("data", "shared_prefix", "num_unique_system_prompts"),
    )


def mean_tokens(length: int | Distribution, *, fewest: int = 1) -> float:
    """The mean of a length, at least ``fewest``: that of a distribution, cut to its range."""
    if isinstance(length, int):
        return float(max(fewest, length))
    return max(float(fewest), min(max(length.mean, float(length.min)), float(length.max)))


def stages_of(config: Config) -> tuple[Stage, ...]:
    """Stages whose load is known before the run: those of a sweep and of a trace are not."""
    stages = []
    for i, stage in enumerate(config.load.stages):
        if isinstance(stage, RateStage) and config.load.type in {"constant", "poisson"}:
            stages.append(Stage(index=i, num_requests=stage.num_requests, rate=stage.rate))
        elif isinstance(stage, ConcurrentStage):
            stages.append(Stage(index=i, num_requests=stage.num_requests, concurrency=stage.concurrency_level))
    return tuple(stages)
