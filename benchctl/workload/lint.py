"""Lint of load-generator configurations: loads that do not measure what their file says."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from benchctl.interop.inference_perf import (
    ConfigFile,
    KeyPath,
    PromptSet,
    Stage,
    WrongValueError,
    prompt_set,
    read_config,
    stages_of,
)
from benchctl.steptime.queueing import PredictedLoad, RequestSize, StepTimeSource, load_at_concurrency, load_at_rate

Severity: TypeAlias = Literal["error", "warning"]
"""``error``: the load does not measure what the file says. ``warning``: it does, with a restriction."""
BLOCK_TOKENS: Final = 16
"""Tokens of a block of vLLM's prefix cache: whole blocks are found, and at least one token is computed."""
SURELY_CACHED_TOKENS: Final = 32_768
"""A cache of this size is below that of any server measured so far (2,588 blocks on an RTX 4090)."""


Rule: TypeAlias = tuple[bool, str, Severity, KeyPath, str, str]
"""One rule as it came out for a configuration: True where the load breaks it, its code and severity, the key, the
problem, and the remedy."""


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
            size = RequestSize(
                prompt_tokens=prompts.prompt_tokens,
                output_tokens=prompts.output_tokens,
                cached_tokens=prompts.cached_tokens if options.has_prefix_cache else 0.0,
            )
            predicted = tuple(_predicted(stage, size, options.source) for stage in stages)
        rules = list(_rules(file, stages, prompts, predicted, options))
    except WrongValueError as error:
        rules = [(True, "schema", "error", error.key, str(error), "correct it as inference-perf has it")]
    findings = (_finding(file, rule) for rule in rules if rule[0])
    return LintResult(
        path=file.path, findings=tuple(sorted(findings, key=lambda each: each.line)), predicted=predicted
    )


def _finding(file: ConfigFile, rule: Rule) -> LintFinding:
    _, code, severity, key, problem, remedy = rule
    return LintFinding(
        code=code,
        severity=severity,
        path=file.path,
        line=file.line(key),
        key="".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in key).removeprefix("."),
        problem=problem,
        remedy=remedy,
    )


def _predicted(stage: Stage, size: RequestSize, source: StepTimeSource) -> PredictedStage:
    """The load of a stage, by Little's law over the step times of ``source``."""
    if stage.rate is None:
        load = load_at_concurrency(stage.concurrency or 1, size, source.step_s, source.limits)
        return PredictedStage(stage=stage, load=load, is_saturated=load.utilisation > 1)
    load = load_at_rate(stage.rate, size, source.step_s, source.limits)
    # Share of a roofline's rate that servers reach: on 1,967 measured steps it undercuts them by a third
    share = 0.65 if source.is_bound else 1.0
    return PredictedStage(stage=stage, load=load, is_saturated=load.utilisation >= share)


def _rules(
    file: ConfigFile,
    stages: tuple[Stage, ...],
    prompts: PromptSet | None,
    predicted: tuple[PredictedStage, ...],
    options: LintOptions,
) -> Iterator[Rule]:
    """All rules that apply. A whole configuration one level too deep has none of the keys that the others read."""
    if "inference_perf" in file.document:
        yield (
            True,
            "schema",
            "error",
            ("inference_perf",),
            "unknown key, which inference-perf forbids: a whole configuration, one level too deep",
            "move the sections below it to the top of the file, and delete it",
        )
        return
    yield from _file_rules(file)
    if prompts is not None:
        yield from _prompt_rules(file, prompts, sum(stage.num_requests for stage in stages), options)
    if options.source is not None:
        for each in predicted:
            yield from _stage_rules(each, options.source.words)


def _file_rules(file: ConfigFile) -> tuple[Rule, ...]:
    """Rules that no prediction and no length matters to.

    ``constant`` draws exponential gaps, scaled to the duration, from a generator without a seed.
    """
    is_constant = file.value("load", "type", default="constant") == "constant"
    has_rates = bool(file.value("load", "stages") or file.value("load", "sweep"))
    by_default = "" if ("api", "streaming") in file.lines else " by default"
    kind = file.value("data", "type")
    seed: tuple[str, ...] = ("data", "shared_prefix", "seed") if kind == "shared_prefix" else ("load", "base_seed")
    return (
        (
            not file.value("api", "streaming"),
            "no-token-times",
            "warning",
            ("api", "streaming"),
            (
                f"streaming is false{by_default}: the report has no time to first token, per output token or "
                "between tokens"
            ),
            "set api.streaming to true",
        ),
        (
            is_constant and has_rates,
            "constant-is-random",
            "warning",
            ("load", "type"),
            (
                "constant sends at random times: exponential gaps scaled to the duration, from a generator that "
                "base_seed does not seed, so neither is the rate constant nor can the run be repeated"
            ),
            "use concurrent for a fixed number of open requests, or poisson where random arrivals are meant",
        ),
        (
            kind in {"shared_prefix", "synthetic", "random"} and file.value(*seed) is None,
            "unseeded-prompts",
            "warning",
            seed[:-1],
            f"{'.'.join(seed)} is not set, so every run draws other prompts",
            f"set {'.'.join(seed)}",
        ),
    )


def _prompt_rules(
    file: ConfigFile, prompts: PromptSet, num_requests: int, options: LintOptions
) -> tuple[Rule, ...]:
    """Rules on the prompts: those that come again, those that are missing, and answers that end early.

    A prefill costs almost nothing where a prefix cache still holds a prompt that comes again. That is an error
    where any server's cache holds all of them; a warning where the one of these options does, for the decoding
    steps between are then still those of the file.
    """
    kv_tokens = options.kv_tokens
    if kv_tokens is None and options.source is not None:
        kv_tokens = options.source.limits.kv_tokens
    apart = prompts.num_distinct * (prompts.prompt_tokens + prompts.output_tokens)
    is_cached = options.has_prefix_cache and apart <= max(SURELY_CACHED_TOKENS, kv_tokens or 0)
    is_short, length = num_requests > prompts.num_distinct, round(prompts.prompt_tokens)
    count = "the same prompt" if prompts.num_distinct == 1 else f"{prompts.num_distinct} different prompts"
    takes_turns = bool(file.value("data", "shared_prefix", "enable_multi_turn_chat"))
    ends_early = not file.value("server", "ignore_eos", default=True)
    return (
        (
            is_short and is_cached and not prompts.is_exhaustible and not takes_turns,
            "repeated-prompt",
            "error" if apart <= SURELY_CACHED_TOKENS else "warning",
            prompts.key,
            (
                f"{num_requests} requests send {count}; a prefix cache, on by default, still holds a prompt that "
                f"comes again, and of its {length} tokens only {computed_tokens(length)} are computed"
            ),
            (
                f"set num_unique_system_prompts to {num_requests}, or start the server without prefix caching and "
                "lint with --no-prefix-caching"
            ),
        ),
        (
            is_short and prompts.is_exhaustible,
            "too-few-prompts",
            "error",
            prompts.key,
            f"{num_requests} requests and lengths for {prompts.num_distinct}: the run ends in an error",
            f"set total_count of both distributions to {num_requests}",
        ),
        (
            ends_early and prompts.output_tokens > 1,
            "answers-end-early",
            "warning",
            ("server", "ignore_eos"),
            (
                f"ignore_eos is false: the model ends answers where it likes, and the {prompts.output_tokens:g} "
                "output tokens are only a limit, so lengths and load differ between models and runs"
            ),
            "set server.ignore_eos to true, unless answers of natural length are meant",
        ),
    )


def computed_tokens(prompt_tokens: int) -> int:
    """Tokens of a fully cached prompt that are computed again: q - 16 floor((q - 1) / 16)."""
    return prompt_tokens - BLOCK_TOKENS * ((prompt_tokens - 1) // BLOCK_TOKENS)


def _stage_rules(predicted: PredictedStage, words: str) -> tuple[Rule, ...]:
    """Rules on the predicted load: low rates whose requests still overlap, by Little's law N = rate x latency,
    rates that a server cannot complete, and more open requests than it runs together.
    """
    stage, load, is_saturated = predicted.stage, predicted.load, predicted.is_saturated
    if stage.rate is None:
        return (
            (
                is_saturated,
                "queue-in-server",
                "warning",
                stage.key,
                (
                    f"{stage.concurrency} open requests, of which {load.concurrency:.0f} run together ({words}): "
                    "the others wait, and time to first token is their wait"
                ),
                f"lower concurrency_level to {load.concurrency:.0f}, or use it for throughput only",
            ),
        )
    return (
        (
            # Such rates are meant for one request at a time; random arrivals rarely meet up to a mean of 0.1
            stage.rate <= 1.0 and load.concurrency > 0.1 and not is_saturated,
            "overlapping-requests",
            "error",
            stage.key,
            (
                f"{stage.rate:g} requests per second of {load.e2el_s:.3g} s each are {load.concurrency:.2g} at a "
                f"time on average (Little's law; {words}), not one"
            ),
            "for one at a time use load.type concurrent with concurrency_level 1",
        ),
        (
            is_saturated,
            "saturated",
            "error",
            stage.key,
            (
                f"{stage.rate:g} requests per second are {load.utilisation:.0%} of the "
                f"{load.max_requests_per_s:.3g} that fit ({words}): the queue grows for as long as the stage "
                "lasts, and latencies measure its duration"
            ),
            f"lower rate to {load.max_requests_per_s / 2:.2g}, or use type concurrent",
        ),
    )
