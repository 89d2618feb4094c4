"""FLOPs of a measured run: by the published rule, by what its own records say, and why the two differ.

The published account knows totals and the requested top_k; it charges a value model that was asked for, whether
it ran or not. The observed account uses each sequence's length and the counts of the step log: a greedy or never
guided run costs nothing extra. Where the log does not tell, the observed account is None and a warning says why.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from benchctl.analysis.metrics.request_timing import choice_tokens, is_completed, measured
from benchctl.analysis.metrics.run_metrics import load_window_ns
from benchctl.analysis.metrics.unknown import known, total
from benchctl.costs.difference import Correction, explain_difference
from benchctl.costs.flops import (
    FlopsAccount,
    achieved_flops_per_s,
    observed_flops,
    published_flops,
    utilization_frac,
)
from benchctl.costs.hardware import Hardware
from benchctl.costs.shapes import ModelShape
from benchctl.costs.work import Lengths, RunLengths, StepLogCounts, spread_evenly
from benchctl.records.columns.step_columns import StepColumns
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ResultWarning
from benchctl.records.request import PreparedRequest, RequestRecord
from benchctl.units import s_from_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlops:
    """Both accounts of one run. ``corrections`` lead from the published total to the observed one exactly.

    ``wall_s`` is first send to last token in seconds of the engine's clock.
    """

    published: FlopsAccount | None
    observed: FlopsAccount | None
    corrections: tuple[Correction, ...]
    wall_s: float | None
    hardware: Hardware | None
    warnings: tuple[ResultWarning, ...]

    def achieved_flops_per_s(self, account: FlopsAccount | None) -> float | None:
        """FLOP/s of either account over this run's wall time."""
        return None if account is None else achieved_flops_per_s(account.total, self.wall_s)

    def utilization_frac(self, account: FlopsAccount | None) -> float | None:
        """Achieved FLOP/s of either account as a fraction of the hardware's peak."""
        return None if account is None else utilization_frac(account.total, self.wall_s, self.hardware)


def account_run(
    run: LoadedRun,
    *,
    base: ModelShape,
    value_model: ModelShape | None,
    top_k: int,
    hardware: Hardware | None,
    prepared: Sequence[PreparedRequest],
) -> RunFlops:
    """FLOPs of the completed requests of a run, warm-up excluded, by both accounts.

    ``value_model`` is None for a run that asks for no guidance.
    """
    doubts = _Doubts(run.record.run_id)
    published = observed = None
    corrections: tuple[Correction, ...] = ()
    lengths = _run_lengths(run, prepared, doubts)
    if lengths is not None:
        seen = _seen_counts(run, lengths, doubts, has_value_model=value_model is not None)
        published, observed, corrections = _priced(lengths, seen, base, value_model, top_k)
    window = load_window_ns(run)
    return RunFlops(
        published=published,
        observed=observed,
        corrections=corrections,
        wall_s=None if window is None else s_from_ns(window[1] - window[0]) * run.record.clock_factor,
        hardware=hardware,
        warnings=tuple(doubts.warnings),
    )


@lru_cache(maxsize=16)
def _priced(
    lengths: RunLengths, seen: StepLogCounts | None, base: ModelShape, value_model: ModelShape | None, top_k: int
) -> tuple[FlopsAccount, FlopsAccount | None, tuple[Correction, ...]]:
    """Both accounts and what leads from one to the other; runs of an arm with forced lengths have the same."""
    published = published_flops(lengths.totals(), base=base, value_model=value_model, top_k=top_k)
    if seen is None:
        return published, None, ()
    observed = observed_flops(lengths.sequences, seen, base=base, value_model=value_model)
    corrections = explain_difference(
        published, lengths=lengths, counts=seen, base=base, value_model=value_model, top_k=top_k
    )
    return published, observed, corrections


class _Doubts:
    """Collects the warnings of one run, each code once."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.warnings: list[ResultWarning] = []

    def add(self, code: str, message: str) -> None:
        if all(warning.code != code for warning in self.warnings):
            self.warnings.append(ResultWarning(code=code, message=message, where=self._run_id))


def _run_lengths(run: LoadedRun, prepared: Sequence[PreparedRequest], doubts: _Doubts) -> RunLengths | None:
    """Lengths of all sequences of completed requests; None when there are none, or tokens are unknown."""
    prepared_of = {request.request_id: request for request in prepared}
    question_of = _questions(prepared)
    question_prompts: dict[tuple[str, int], int] = {}
    sequences: list[Lengths] = []
    requests = measured(run.requests)
    completed = [request for request in requests if is_completed(request)]
    for request in completed:
        prompt_tokens = _prompt_tokens(request, prepared_of.get(request.request_id), doubts)
        outputs = _output_tokens(request, doubts)
        if prompt_tokens is None or outputs is None:
            doubts.add("tokens-unknown", f"no FLOPs: tokens of request {request.request_id} are unknown")
            return None
        question = question_of.get(request.request_id, (request.request_id, 0))
        question_prompts.setdefault(question, prompt_tokens)
        sequences.extend(Lengths(prompt_tokens, output) for output in outputs)
    if not sum(prompt * output for prompt, output in sequences):
        doubts.add("no-completed-requests", "no FLOPs: no request with prompt and output was completed")
        return None
    if len(completed) < len(requests):
        doubts.add(
            "failed-requests-in-step-log",
            f"observed FLOPs: {len(requests) - len(completed)} of {len(requests)} requests did not complete; "
            "their output is left out, but what the step log counts for them is not",
        )
    return RunLengths(question_prompts=tuple(question_prompts.values()), sequences=tuple(sequences))


def _questions(prepared: Sequence[PreparedRequest]) -> dict[str, tuple[str, int]]:
    """Which question each request asks: requests are samples of one question when their source is the same and
    their sample numbers differ. A source that comes again with the same sample number is another question.
    """
    seen: Counter[tuple[str, int]] = Counter()
    questions = {}
    for request in prepared:
        questions[request.request_id] = (request.source, seen[request.source, request.sample])
        seen[request.source, request.sample] += 1
    return questions


def _prompt_tokens(request: RequestRecord, prepared: PreparedRequest | None, doubts: _Doubts) -> int | None:
    if request.prompt_tokens is not None or prepared is None:
        return request.prompt_tokens
    doubts.add(
        "prompt-tokens-estimated", "FLOPs: the engine reported no prompt tokens; those of the workload stand in"
    )
    return prepared.prompt_tokens


def _output_tokens(request: RequestRecord, doubts: _Doubts) -> tuple[int, ...] | None:
    """Tokens of each choice; their sum is ``usage`` where that is known."""
    counts = [choice_tokens(request, choice) for choice in request.choices]
    usage, counted = request.completion_tokens, total(counts)
    if counted is not None and usage in {None, counted}:
        return tuple(known(counts))
    if usage is None:
        return None
    num_choices = max(len(counts), 1)
    if num_choices > 1:
        doubts.add(
            "choice-lengths-assumed",
            "observed FLOPs: the lengths of single choices are unknown or disagree with usage; "
            "usage is spread evenly over the choices of its request",
        )
    return tuple(spread_evenly(usage, num_choices))


def _seen_counts(
    run: LoadedRun, lengths: RunLengths, doubts: _Doubts, *, has_value_model: bool
) -> StepLogCounts | None:
    """Counts of the step log; None when the value model's candidates are unknown."""
    steps = run.columns
    if steps.known_values("draft_tokens").any():
        doubts.add(
            "drafts-not-charged", "observed FLOPs: draft tokens are not charged, neither proposed nor verified"
        )
    base_prefill_tokens = steps.total("num_prefill_tokens")
    if base_prefill_tokens is None:
        base_prefill_tokens = sum(lengths.question_prompts)
        doubts.add(
            "base-prefill-assumed",
            "observed FLOPs: the step log does not count prefill tokens; one prompt for each question is assumed",
        )
    seen = StepLogCounts(base_prefill_tokens=base_prefill_tokens)
    return _with_value_counts(seen, steps, lengths, doubts) if has_value_model else seen


def _with_value_counts(
    seen: StepLogCounts, steps: StepColumns, lengths: RunLengths, doubts: _Doubts
) -> StepLogCounts | None:
    candidates = _value_total(steps, "candidates")
    if candidates is None:
        doubts.add(
            "candidates-unknown",
            "no observed FLOPs: the step log does not say how many candidates the value model scored; "
            "the published account charges top_k for each token",
        )
        return None
    prefill = _value_total(steps, "value_prefill_tokens")
    extend = _value_total(steps, "value_extend_tokens")
    if candidates and (prefill is None or extend is None):
        doubts.add(
            "value-prefixes-assumed",
            "observed FLOPs: the step log does not count the tokens of the value model's prefixes; each sequence's "
            "prompt and output but the last token are assumed",
        )
        prefill = sum(prompt for prompt, _ in lengths.sequences) if prefill is None else prefill
        extend = sum(max(output - 1, 0) for _, output in lengths.sequences) if extend is None else extend
    return replace(seen, value_prefill_tokens=prefill or 0, value_extend_tokens=extend or 0, candidates=candidates)


def _value_total(steps: StepColumns, name: str) -> int | None:
    """A count of value-model work: zero where a step says that nothing was guided, unknown where one is silent."""
    unsaid = np.full(len(steps), np.nan)
    counts, greedy, rows = (
        unsaid if values is None else values for values in map(steps.optional, (name, "is_greedy", "guided_rows"))
    )
    is_silent = np.isnan(counts)
    if not len(steps) or (is_silent & (greedy != 1) & (rows != 0)).any():
        return None
    return int(counts[~is_silent].sum())
