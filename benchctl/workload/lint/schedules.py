"""Rules about schedules: constant rates, loads that overlap, saturation, and reports without token times."""

from dataclasses import dataclass
from typing import Final

from benchctl.interop.readers.inference_perf import ConfigFile
from benchctl.interop.readers.inference_perf_schema import Config
from benchctl.steptime.queueing import PredictedLoad, load_at_concurrency, load_at_rate
from benchctl.steptime.serving_times import RequestSize
from benchctl.steptime.source import StepTimeSource
from benchctl.workload.lint.findings import LintFindings, finding
from benchctl.workload.lint.offered import PromptSet, Stage

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
