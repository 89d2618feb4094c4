"""All rules over one configuration."""

from dataclasses import dataclass
from pathlib import Path

from benchctl.interop.readers.inference_perf import ConfigFile, read_config
from benchctl.interop.readers.inference_perf_schema import COMMIT
from benchctl.steptime.source import StepTimeSource
from benchctl.workload.lint.findings import LintFinding, LintFindings, finding
from benchctl.workload.lint.offered import prompt_set, stages_of
from benchctl.workload.lint.prompts import early_ends, missing_prompts, repeated_prompts, unseeded_prompts
from benchctl.workload.lint.schedules import (
    PredictedStage,
    no_token_times,
    overlapping_requests,
    predict_stages,
    random_constant,
    saturating_stages,
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
    predicted = _predicted(file, options)
    return LintResult(path=file.path, findings=_in_order(_findings(file, options, predicted)), predicted=predicted)


def _in_order(findings: LintFindings) -> tuple[LintFinding, ...]:
    return tuple(sorted(findings, key=lambda each: each.line))


def _schema_findings(file: ConfigFile) -> LintFindings:
    for error in file.errors:
        remedy = f"correct it by the schema of inference-perf ({COMMIT})"
        if error.path == ("inference_perf",):  # a whole configuration, one level too deep
            remedy = "move the sections below it to the top of the file, and delete it"
        yield finding(file, error.path, "schema", "error", problem=error.problem, remedy=remedy)


def _predicted(file: ConfigFile, options: LintOptions) -> tuple[PredictedStage, ...]:
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
