"""Lint of load-generator configurations: loads that do not measure what their file says."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from benchctl.interop.inference_perf import ConfigFile, KeyPath, WrongValueError, read_config
from benchctl.steptime.queueing import PredictedLoad, RequestSize, StepTimeSource, load_at_concurrency, load_at_rate
from benchctl.untrusted.text import visible_value

Severity: TypeAlias = Literal["error", "warning"]
"""``error``: the load does not measure what the file says. ``warning``: it does, with a restriction."""
BLOCK_TOKENS: Final = 16
"""Tokens of a block of vLLM's prefix cache: whole blocks are found, and at least one token is computed."""
SURELY_CACHED_TOKENS: Final = 32_768
"""A cache of this size is below that of any server measured so far (2,588 blocks on an RTX 4090)."""
LOW_RATE_PER_S: Final = 1.0
"""Rates up to this are meant for one request at a time."""
MOST_OVERLAP: Final = 0.1
"""Mean concurrency up to which random arrivals rarely meet: a request then sees 0.1 others."""
REACHED_SHARE: Final = 0.65
"""Share of a roofline's rate that servers reach: on 1,967 measured steps it undercuts them by a third."""
_LEAST_RATE_PER_S: Final = 1e-9
_AT_A_RATE: Final = ("constant", "poisson")
_TYPES: Final = (*_AT_A_RATE, "concurrent", "trace_replay", "trace_session_replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class LintOptions:
    """Facts about the server, which the file does not describe."""

    source: StepTimeSource | None = None
    kv_tokens: float | None = None
    has_prefix_cache: bool = True


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """Findings in the order of their lines, and the predicted load of each stage where a source was named."""

    path: str
    findings: tuple[LintFinding, ...]
    predicted: "tuple[PredictedStage, ...]" = ()

    @property
    def has_errors(self) -> bool:
        return any(each.severity == "error" for each in self.findings)


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
    key: KeyPath


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStage:
    """A stage with the load that a server would have; ``is_saturated`` counts a bound as never reached."""

    stage: Stage
    load: PredictedLoad
    is_saturated: bool


def lint_config(path: Path, options: LintOptions | None = None) -> LintResult:
    """Check one configuration of inference-perf. Raises UsageError for a file that cannot be read as one."""
    options = options or LintOptions()
    file = read_config(path)
    predicted: tuple[PredictedStage, ...] = ()
    try:
        stages, prompts = stages_of(file), prompt_set(file)
        if options.source is not None and prompts is not None:
            predicted = predict_stages(prompts, stages, options.source, has_prefix_cache=options.has_prefix_cache)
        findings = list(_findings(file, stages, prompts, predicted, options))
    except WrongValueError as error:
        remedy = "correct it as inference-perf has it"
        findings = [_finding(file, error.key, "schema", "error", problem=str(error), remedy=remedy)]
    return LintResult(
        path=file.path, findings=tuple(sorted(findings, key=lambda each: each.line)), predicted=predicted
    )


def _finding(
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


def stages_of(file: ConfigFile) -> tuple[Stage, ...]:
    """Stages whose load is known before the run: those of a sweep and of a trace are not."""
    kind = file.value("load", "type", default="constant")
    if kind not in _TYPES:
        raise WrongValueError(("load", "type"), f"{kind!r} is none of {', '.join(_TYPES)}")
    written = file.value("load", "stages", default=[])
    if not isinstance(written, list):
        raise WrongValueError(("load", "stages"), f"{visible_value(written)} is not a list of stages")
    stages = []
    for i in range(len(written)):
        key = ("load", "stages", i)
        if kind in _AT_A_RATE:
            rate = file.number(*key, "rate", least=_LEAST_RATE_PER_S)
            num_requests = int(rate * file.number(*key, "duration", least=1))
            stages.append(Stage(index=i, num_requests=num_requests, rate=rate))
        elif kind == "concurrent":
            num_requests = int(file.number(*key, "num_requests", least=1))
            concurrency = int(file.number(*key, "concurrency_level", least=1))
            stages.append(Stage(index=i, num_requests=num_requests, concurrency=concurrency))
    return tuple(stages)


def prompt_set(file: ConfigFile) -> PromptSet | None:
    """The prompts of a configuration; None for data whose size or lengths its file does not state."""
    kind = file.value("data", "type")
    if kind == "shared_prefix":
        return _shared_prompts(file)
    if kind not in {"synthetic", "random"} or file.value("data", "trace"):
        return None
    distributions = (("data", "input_distribution"), ("data", "output_distribution"))
    if any(file.value(*key, "total_count") is None for key in distributions):
        return None
    prompts, outputs = distributions
    return PromptSet(
        num_distinct=int(min(file.number(*key, "total_count") for key in distributions)),
        prompt_tokens=max(1.0, _mean_tokens(file, prompts)),
        output_tokens=max(1.0, _mean_tokens(file, outputs)),
        is_exhaustible=True,
        key=(*prompts, "total_count"),
    )


def _shared_prompts(file: ConfigFile) -> PromptSet:
    """Every prompt is a system prompt and a question, also where its group has no other prompt."""
    prefix = ("data", "shared_prefix")
    if not file.value(*prefix):
        raise WrongValueError(("data",), "type shared_prefix needs the section shared_prefix")
    num_groups, num_per_group = (  # each by either of its names
        int(file.number(*prefix, name, default=file.number(*prefix, older, default=10)))
        for name, older in (
            ("num_unique_system_prompts", "num_groups"),
            ("num_users_per_system_prompt", "num_prompts_per_group"),
        )
    )
    system, question, output = (
        _mean_tokens(file, (*prefix, distribution if file.value(*prefix, distribution) else length), default)
        for distribution, length, default in (
            ("", "system_prompt_len", 100.0),
            ("question_distribution", "question_len", 50.0),
            ("output_distribution", "output_len", 50.0),
        )
    )
    return PromptSet(
        num_distinct=num_groups * num_per_group,
        prompt_tokens=max(1.0, system + question),
        output_tokens=max(1.0, output),
        cached_tokens=system * (1 - 1 / max(1, num_per_group)),
        key=(*prefix, "num_unique_system_prompts"),
    )


def _mean_tokens(file: ConfigFile, key: KeyPath, default: float = 0.0) -> float:
    """A length in tokens, or the mean of a distribution of lengths, cut to its range."""
    if not isinstance(file.value(*key), dict):
        return file.number(*key, default=default)
    shortest, longest = file.number(*key, "min", default=10), file.number(*key, "max", default=1024)
    return min(max(file.number(*key, "mean", default=512), shortest), longest)


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


def _findings(
    file: ConfigFile,
    stages: tuple[Stage, ...],
    prompts: PromptSet | None,
    predicted: tuple[PredictedStage, ...],
    options: LintOptions,
) -> Iterator[LintFinding]:
    if "inference_perf" in file.document:
        yield _finding(
            file,
            ("inference_perf",),
            "schema",
            "error",
            problem="unknown key, which inference-perf forbids: a whole configuration, one level too deep",
            remedy="move the sections below it to the top of the file, and delete it",
        )
        return
    yield from no_token_times(file)
    yield from random_constant(file)
    yield from unseeded_prompts(file)
    if prompts is not None:
        num_requests = sum(stage.num_requests for stage in stages)
        if options.has_prefix_cache and not file.value("data", "shared_prefix", "enable_multi_turn_chat"):
            kv_tokens = options.kv_tokens
            if kv_tokens is None and options.source is not None:
                kv_tokens = options.source.limits.kv_tokens
            yield from repeated_prompts(file, prompts, num_requests, kv_tokens)
        yield from missing_prompts(file, prompts, num_requests)
        yield from early_ends(file, prompts)
    for each in predicted:
        if options.source is not None:
            yield from overlapping_requests(file, each, options.source.words)
            yield from saturated_stage(file, each, options.source.words)


def computed_tokens(prompt_tokens: int) -> int:
    """Tokens of a fully cached prompt that are computed again: q - 16 floor((q - 1) / 16)."""
    return prompt_tokens - BLOCK_TOKENS * ((prompt_tokens - 1) // BLOCK_TOKENS)


def repeated_prompts(
    file: ConfigFile, prompts: PromptSet, num_requests: int, kv_tokens: float | None
) -> Iterator[LintFinding]:
    """Prompts that come again while a prefix cache still holds them: their prefill costs almost nothing.

    An error where any server's cache holds all of them; a warning where that of ``kv_tokens`` tokens does, for the
    decoding steps between are then still those of the file.
    """
    if prompts.is_exhaustible or num_requests <= prompts.num_distinct:
        return
    apart = prompts.num_distinct * (prompts.prompt_tokens + prompts.output_tokens)
    if apart > max(SURELY_CACHED_TOKENS, kv_tokens or 0):
        return
    length = round(prompts.prompt_tokens)
    yield _finding(
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


def missing_prompts(file: ConfigFile, prompts: PromptSet, num_requests: int) -> Iterator[LintFinding]:
    """Fewer prompts than requests where the generator does not start over."""
    if prompts.is_exhaustible and num_requests > prompts.num_distinct:
        yield _finding(
            file,
            prompts.key,
            "too-few-prompts",
            "error",
            problem=f"{num_requests} requests and lengths for {prompts.num_distinct}: the run ends in an error",
            remedy=f"set total_count of both distributions to {num_requests}",
        )


def unseeded_prompts(file: ConfigFile) -> Iterator[LintFinding]:
    """Prompts that differ between two runs of the same file."""
    kind = file.value("data", "type")
    section: KeyPath = ("data", "shared_prefix") if kind == "shared_prefix" else ("load",)
    seed = "seed" if kind == "shared_prefix" else "base_seed"
    if kind in {"shared_prefix", "synthetic", "random"} and file.value(*section, seed) is None:
        key = ".".join(map(str, (*section, seed)))
        yield _finding(
            file,
            section,
            "unseeded-prompts",
            "warning",
            problem=f"{key} is not set, so every run draws other prompts",
            remedy=f"set {key}",
        )


def early_ends(file: ConfigFile, prompts: PromptSet) -> Iterator[LintFinding]:
    """Lengths of answers that are only limits, because the model may end an answer before."""
    if not file.value("server", "ignore_eos", default=True) and prompts.output_tokens > 1:
        yield _finding(
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


def random_constant(file: ConfigFile) -> Iterator[LintFinding]:
    """``constant`` draws exponential gaps, scaled to the duration, from a generator without a seed."""
    is_constant = file.value("load", "type", default="constant") == "constant"
    if is_constant and (file.value("load", "stages") or file.value("load", "sweep")):
        yield _finding(
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


def overlapping_requests(file: ConfigFile, predicted: PredictedStage, words: str) -> Iterator[LintFinding]:
    """A low rate whose requests still overlap, by Little's law N = rate x latency."""
    stage, load = predicted.stage, predicted.load
    is_low = stage.rate is not None and stage.rate <= LOW_RATE_PER_S
    if is_low and load.concurrency > MOST_OVERLAP and not predicted.is_saturated:
        yield _finding(
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


def saturated_stage(file: ConfigFile, predicted: PredictedStage, words: str) -> Iterator[LintFinding]:
    """A rate that a server cannot complete, or more open requests than it runs together."""
    stage, load = predicted.stage, predicted.load
    if predicted.is_saturated and stage.rate is None:
        yield _finding(
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
    elif predicted.is_saturated:
        most = load.max_requests_per_s
        yield _finding(
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


def no_token_times(file: ConfigFile) -> Iterator[LintFinding]:
    """Without streaming, the report has no times of tokens."""
    if not file.value("api", "streaming"):
        yield _finding(
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
