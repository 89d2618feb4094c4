"""Lint of load-generator configurations: loads that do not measure what their file says."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from benchctl.interop.readers.inference_perf import ConfigFile, KeyPath, read_config
from benchctl.interop.readers.inference_perf_schema import (
    COMMIT,
    ConcurrentStage,
    Config,
    Data,
    Distribution,
    RateStage,
    Server,
    SharedPrefix,
)
from benchctl.steptime.queueing import PredictedLoad, RequestSize, StepTimeSource, load_at_concurrency, load_at_rate

Severity: TypeAlias = Literal["error", "warning"]
"""``error``: the load does not measure what the file says. ``warning``: it does, with a restriction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """One finding; ``problem`` states the value and its effect."""

    code: str
    severity: Severity
    path: str
    line: int
    key: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        location = f"{self.path}:{self.line}: {self.key}: " if self.key else f"{self.path}:{self.line}: "
        return f"{location}{self.severity}: {self.problem}; {self.remedy} [{self.code}]"


LintFindings: TypeAlias = Iterator[LintFinding]


def finding(
    file: ConfigFile, key: KeyPath, code: str, severity: Severity, *, problem: str, remedy: str
) -> LintFinding:
    """A finding at a key of ``file``."""
    dotted = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in key).removeprefix(".")
    return LintFinding(
        code=code,
        severity=severity,
        path=file.path,
        line=file.line(key),
        key=dotted,
        problem=problem,
        remedy=remedy,
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


BLOCK_TOKENS: Final = 16
"""Tokens of a block of vLLM's prefix cache: whole blocks are found, and at least one token is computed."""
SURELY_CACHED_TOKENS: Final = 32_768
"""A cache of this size is below that of any server measured so far (2,588 blocks on an RTX 4090)."""


def computed_tokens(prompt_tokens: int) -> int:
    """Tokens of a fully cached prompt that are computed again: q - 16 floor((q - 1) / 16)."""
    return prompt_tokens - BLOCK_TOKENS * ((prompt_tokens - 1) // BLOCK_TOKENS)


def repeated_prompts(
    file: ConfigFile, prompts: PromptSet, stages: tuple[Stage, ...], kv_tokens: float | None
) -> LintFindings:
    """Prompts that come again while a prefix cache still holds them: their prefill costs almost nothing.

    An error where any server's cache holds all of them; a warning where that of ``kv_tokens`` tokens does, for the
    decoding steps between are then still those of the file.
    """
    num_requests = sum(stage.num_requests for stage in stages)
    if prompts.is_exhaustible or num_requests <= prompts.num_distinct:
        return
    apart = prompts.num_distinct * (prompts.prompt_tokens + prompts.output_tokens)
    if apart > max(SURELY_CACHED_TOKENS, kv_tokens or 0):
        return
    length = round(prompts.prompt_tokens)
    yield finding(
        file,
        prompts.key,
        "repeated-prompt",
        "error" if apart <= SURELY_CACHED_TOKENS else "warning",
        problem=(
            f"{num_requests} requests send {_count(prompts.num_distinct)}; a prefix cache, on by default, still "
            f"holds a prompt that comes again, and of its {length} tokens only "
            f"{computed_tokens(length)} are computed"
        ),
        remedy=(
            f"set num_unique_system_prompts to {num_requests}, or start the server without prefix caching and lint "
            "with --no-prefix-caching"
        ),
    )


def _count(num_prompts: int) -> str:
    return "the same prompt" if num_prompts == 1 else f"{num_prompts} different prompts"


def missing_prompts(file: ConfigFile, prompts: PromptSet, stages: tuple[Stage, ...]) -> LintFindings:
    """Fewer prompts than requests where the generator does not start over."""
    num_requests = sum(stage.num_requests for stage in stages)
    if prompts.is_exhaustible and num_requests > prompts.num_distinct:
        yield finding(
            file,
            prompts.key,
            "too-few-prompts",
            "error",
            problem=f"{num_requests} requests and lengths for {prompts.num_distinct}: the run ends in an error",
            remedy=f"set total_count of both distributions to {num_requests}",
        )


def unseeded_prompts(file: ConfigFile, data: Data, base_seed: int | None) -> LintFindings:
    """Prompts that differ between two runs of the same file."""
    if data.type == "shared_prefix" and data.shared_prefix is not None and data.shared_prefix.seed is None:
        key: KeyPath = ("data", "shared_prefix")
        seed = "data.shared_prefix.seed"
    elif data.type in {"synthetic", "random"} and base_seed is None:
        key, seed = ("load",), "load.base_seed"
    else:
        return
    yield finding(
        file,
        key,
        "unseeded-prompts",
        "warning",
        problem=f"{seed} is not set, so every run draws other prompts",
        remedy=f"set {seed}",
    )


def early_ends(file: ConfigFile, prompts: PromptSet, server: Server | None) -> LintFindings:
    """Lengths of answers that are only limits, because the model may end an answer before."""
    if server is not None and not server.ignore_eos and prompts.output_tokens > 1:
        yield finding(
            file,
            ("server", "ignore_eos"),
            "answers-end-early",
            "warning",
            problem=(
                f"ignore_eos is false: the model ends answers where it likes, and the {prompts.output_tokens:g} "
                "output tokens are only a limit, so lengths and load differ between models and runs"
            ),
            remedy="set server.ignore_eos to true, unless answers of natural length are meant",
        )


LOW_RATE_PER_S: Final = 1.0
"""Rates up to this are meant for one request at a time."""
MOST_OVERLAP: Final = 0.1
"""Mean concurrency up to which random arrivals rarely meet: a request then sees 0.1 others."""
REACHED_SHARE: Final = 0.65
"""Share of a roofline's rate that servers reach: on 1,967 measured steps it undercuts them by a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStage:
    """A stage with the load that a server would have; ``is_saturated`` counts a bound as never reached."""

    stage: Stage
    load: PredictedLoad
    is_saturated: bool


def predict_stages(
    prompts: PromptSet, stages: tuple[Stage, ...], source: StepTimeSource, *, has_prefix_cache: bool
) -> tuple[PredictedStage, ...]:
    """The load of every stage, by Little's law over the step times of ``source``."""
    size = RequestSize(
        prompt_tokens=prompts.prompt_tokens,
        output_tokens=prompts.output_tokens,
        cached_tokens=prompts.cached_tokens if has_prefix_cache else 0.0,
    )
    return tuple(_predicted(stage, size, source) for stage in stages)


def _predicted(stage: Stage, size: RequestSize, source: StepTimeSource) -> PredictedStage:
    if stage.rate is None:
        load = load_at_concurrency(stage.concurrency or 1, size, source.step_s, source.limits)
        return PredictedStage(stage=stage, load=load, is_saturated=load.utilisation > 1)
    load = load_at_rate(stage.rate, size, source.step_s, source.limits)
    share = REACHED_SHARE if source.is_bound else 1.0
    return PredictedStage(stage=stage, load=load, is_saturated=load.utilisation >= share)


def random_constant(file: ConfigFile, config: Config) -> LintFindings:
    """``constant`` draws exponential gaps, scaled to the duration, from a generator without a seed."""
    if config.load.type == "constant" and (config.load.stages or config.load.sweep):
        yield finding(
            file,
            ("load", "type"),
            "constant-is-random",
            "warning",
            problem=(
                "constant sends at random times: exponential gaps scaled to the duration, from a generator that "
                "base_seed does not seed, so neither is the rate constant nor can the run be repeated"
            ),
            remedy="use concurrent for a fixed number of open requests, or poisson where random arrivals are meant",
        )


def overlapping_requests(file: ConfigFile, predicted: tuple[PredictedStage, ...], words: str) -> LintFindings:
    """A low rate whose requests still overlap, by Little's law N = rate x latency."""
    for each in predicted:
        stage, load = each.stage, each.load
        if stage.rate is None or stage.rate > LOW_RATE_PER_S or load.concurrency <= MOST_OVERLAP:
            continue
        if each.is_saturated:
            continue
        yield finding(
            file,
            stage.key,
            "overlapping-requests",
            "error",
            problem=(
                f"{stage.rate:g} requests per second of {load.e2el_s:.3g} s each are {load.concurrency:.2g} at a "
                f"time on average (Little's law; {words}), not one"
            ),
            remedy="for one at a time use load.type concurrent with concurrency_level 1",
        )


def saturating_stages(file: ConfigFile, predicted: tuple[PredictedStage, ...], words: str) -> LintFindings:
    """Rates that a server cannot complete, and more open requests than it runs together."""
    for each in predicted:
        stage, load = each.stage, each.load
        if not each.is_saturated:
            continue
        if stage.rate is None:
            yield finding(
                file,
                stage.key,
                "queue-in-server",
                "warning",
                problem=(
                    f"{stage.concurrency} open requests, of which {load.concurrency:.0f} run together ({words}): "
                    "the others wait, and time to first token is their wait"
                ),
                remedy=f"lower concurrency_level to {load.concurrency:.0f}, or use it for throughput only",
            )
            continue
        most = load.max_requests_per_s
        yield finding(
            file,
            stage.key,
            "saturated",
            "error",
            problem=(
                f"{stage.rate:g} requests per second are {load.utilisation:.0%} of the {most:.3g} that fit "
                f"({words}): the queue grows for as long as the stage lasts, and latencies measure its duration"
            ),
            remedy=f"lower rate to {most / 2:.2g}, or use type concurrent",
        )


def no_token_times(file: ConfigFile, config: Config) -> LintFindings:
    """Without streaming, the report has no times of tokens."""
    if not config.api.streaming:
        yield finding(
            file,
            ("api", "streaming"),
            "no-token-times",
            "warning",
            problem=(
                f"streaming is false{'' if ('api', 'streaming') in file.lines else ' by default'}: the report has "
                "no time to first token, per output token or between tokens"
            ),
            remedy="set api.streaming to true",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LintOptions:
    """Facts about the server, which the file does not describe."""

    source: StepTimeSource | None = None
    kv_tokens: float | None = None
    has_prefix_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """Findings in the order of their lines, and the predicted load of each stage where a source was named."""

    path: str
    findings: tuple[LintFinding, ...]
    predicted: tuple[PredictedStage, ...] = ()

    @property
    def has_errors(self) -> bool:
        return any(each.severity == "error" for each in self.findings)


def lint_config(path: Path, options: LintOptions | None = None) -> LintResult:
    """Check one configuration of inference-perf. Raises UsageError for a file that cannot be read as one."""
    options = options or LintOptions()
    file = read_config(path)
    if file.config is None:
        return LintResult(path=file.path, findings=_in_order(_schema_findings(file)))
    predicted = _predicted_lint(file, options)
    return LintResult(path=file.path, findings=_in_order(_findings(file, options, predicted)), predicted=predicted)


def _in_order(findings: LintFindings) -> tuple[LintFinding, ...]:
    return tuple(sorted(findings, key=lambda each: each.line))


def _schema_findings(file: ConfigFile) -> LintFindings:
    for error in file.errors:
        remedy = f"correct it by the schema of inference-perf ({COMMIT})"
        if error.path == ("inference_perf",):  # a whole configuration, one level too deep
            remedy = "move the sections below it to the top of the file, and delete it"
        yield finding(file, error.path, "schema", "error", problem=error.problem, remedy=remedy)


def _predicted_lint(file: ConfigFile, options: LintOptions) -> tuple[PredictedStage, ...]:
    prompts = prompt_set(file.config.data) if file.config else None
    if file.config is None or prompts is None or options.source is None:
        return ()
    return predict_stages(
        prompts, stages_of(file.config), options.source, has_prefix_cache=options.has_prefix_cache
    )


def _findings(file: ConfigFile, options: LintOptions, predicted: tuple[PredictedStage, ...]) -> LintFindings:
    config = file.config
    assert config is not None  # noqa: S101 - lint_config ends before without one
    prompts, stages = prompt_set(config.data), stages_of(config)
    yield from no_token_times(file, config)
    yield from random_constant(file, config)
    yield from unseeded_prompts(file, config.data, config.load.base_seed)
    if prompts is not None:
        is_conversation = config.data.shared_prefix is not None and config.data.shared_prefix.enable_multi_turn_chat
        if options.has_prefix_cache and not is_conversation:
            yield from repeated_prompts(file, prompts, stages, _kv_tokens(options))
        yield from missing_prompts(file, prompts, stages)
        yield from early_ends(file, prompts, config.server)
    if options.source is not None:
        yield from overlapping_requests(file, predicted, options.source.words)
        yield from saturating_stages(file, predicted, options.source.words)


def _kv_tokens(options: LintOptions) -> float | None:
    if options.kv_tokens is not None or options.source is None:
        return options.kv_tokens
    return options.source.limits.kv_tokens
