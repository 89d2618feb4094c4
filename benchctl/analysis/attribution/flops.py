"""FLOPs of a measured run: by the published rule, from its own records, and the difference of the two.

Published FLOPs follow from totals and the requested top_k; they charge a requested value model whether it ran or
not. Observed FLOPs follow from each sequence's length and the counts of the step log, so a greedy or unguided run
costs nothing extra. Without these counts they are None, and a warning gives the reason. Drafts are charged in the
observed FLOPs alone; the published rule knows none.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from benchctl.analysis.attribution.work import value_count
from benchctl.analysis.metrics.latency import choice_tokens, is_completed, known_values, measured, total
from benchctl.analysis.metrics.run import DraftCounts, Drafter, run_drafts
from benchctl.costs.flops import (
    Correction,
    FlopsAccount,
    explain_difference,
    mean_account,
    observed_flops,
    published_flops,
)
from benchctl.costs.run_work import Lengths, RunLengths, StepLogCounts, spread_evenly
from benchctl.costs.shapes import ModelShape
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import PreparedRequest, RequestRecord
from benchctl.records.schema import ResultWarning


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlops:
    """Published and observed FLOPs of one run; ``corrections`` add up to their difference exactly."""

    warnings: tuple[ResultWarning, ...]
    published: FlopsAccount | None = None
    observed: FlopsAccount | None = None
    corrections: tuple[Correction, ...] = ()

    @property
    def charges_drafts(self) -> bool:
        """False where a part of what drafts cost is left out of ``observed``."""
        return all(warning.code != "drafts-not-charged" for warning in self.warnings)


def count_run_flops(
    run: LoadedRun,
    *,
    base: ModelShape,
    value_model: ModelShape | None,
    top_k: int,
    prepared: Sequence[PreparedRequest],
    drafter: Drafter | None = None,
) -> RunFlops:
    """Count the FLOPs of the completed requests of a run.

    ``value_model`` is None without guidance, ``drafter`` without speculation.
    """
    messages: dict[str, str] = {}
    published = observed = None
    corrections: tuple[Correction, ...] = ()
    lengths = _run_lengths(run, prepared, messages)
    if lengths is not None:
        counts = _counts_of_steps(run, lengths, messages, has_value_model=value_model is not None)
        if counts is not None:
            counts = _with_drafts(counts, run, lengths, drafter, messages)
        draft_model = None if drafter is None else drafter.shape
        published, observed, corrections = _priced(lengths, counts, base, value_model, draft_model, top_k)
    return RunFlops(
        published=published,
        observed=observed,
        corrections=corrections,
        warnings=tuple(
            ResultWarning(code=code, message=text, where=run.record.run_id) for code, text in messages.items()
        ),
    )


def mean_flops(loads: Sequence[RunFlops]) -> RunFlops | None:
    """The mean over loads, each number cut to a whole one; None without loads. What a load lacks is unknown."""
    if not loads or all(load == loads[0] for load in loads):
        return loads[0] if loads else None
    sums = Counter[tuple[str, str]]()
    for load in loads:
        sums.update({(each.code, each.meaning): each.flops for each in load.corrections})
    observed = [load.observed for load in loads if load.observed is not None]
    published = [load.published for load in loads if load.published is not None]
    return RunFlops(
        warnings=tuple(dict.fromkeys(warning for load in loads for warning in load.warnings)),
        published=mean_account(published) if len(published) == len(loads) else None,
        observed=mean_account(observed) if len(observed) == len(loads) else None,
        corrections=tuple(
            Correction(code=code, meaning=meaning, flops=flops // len(loads))
            for (code, meaning), flops in sums.items()
        ),
    )


@lru_cache(maxsize=16)
def _priced(
    lengths: RunLengths,
    counts: StepLogCounts | None,
    base: ModelShape,
    value_model: ModelShape | None,
    draft_model: ModelShape | None,
    top_k: int,
) -> tuple[FlopsAccount, FlopsAccount | None, tuple[Correction, ...]]:
    """Published and observed FLOPs and corrections; runs of an arm with forced lengths share them."""
    published = published_flops(lengths.totals(), base=base, value_model=value_model, top_k=top_k)
    if counts is None:
        return published, None, ()
    observed = observed_flops(
        lengths.sequences, counts, base=base, value_model=value_model, draft_model=draft_model
    )
    corrections = explain_difference(
        published,
        lengths=lengths,
        counts=counts,
        base=base,
        value_model=value_model,
        draft_model=draft_model,
        top_k=top_k,
    )
    return published, observed, corrections


def _run_lengths(
    run: LoadedRun, prepared: Sequence[PreparedRequest], messages: dict[str, str]
) -> RunLengths | None:
    """Lengths of all sequences of completed requests; None without any, or if tokens are unknown."""
    prepared_of = {request.request_id: request for request in prepared}
    question_of = _questions(prepared)
    question_prompts: dict[tuple[str, int], int] = {}
    sequences: list[Lengths] = []
    requests = measured(run.requests)
    completed = [request for request in requests if is_completed(request)]
    for request in completed:
        prompt_tokens = request.prompt_tokens
        if prompt_tokens is None and request.request_id in prepared_of:
            prompt_tokens = prepared_of[request.request_id].prompt_tokens
            message = "FLOPs: the engine reported no prompt tokens; those of the workload replace them"
            messages.setdefault("prompt-tokens-estimated", message)
        outputs = _output_tokens(request, messages)
        if prompt_tokens is None or outputs is None:
            messages.setdefault("tokens-unknown", f"no FLOPs: tokens of request {request.request_id} are unknown")
            return None
        question = question_of.get(request.request_id, (request.request_id, 0))
        question_prompts.setdefault(question, prompt_tokens)
        sequences.extend(Lengths(prompt_tokens, output) for output in outputs)
    if not sum(prompt * output for prompt, output in sequences):
        messages.setdefault("no-completed-requests", "no FLOPs: no request with prompt and output was completed")
        return None
    if len(completed) < len(requests):
        messages.setdefault(
            "failed-requests-in-step-log",
            f"observed FLOPs: {len(requests) - len(completed)} of {len(requests)} requests did not complete; "
            "their output is excluded, but the step log's counts for them are included",
        )
    return RunLengths(question_prompts=tuple(question_prompts.values()), sequences=tuple(sequences))


def _questions(prepared: Sequence[PreparedRequest]) -> dict[str, tuple[str, int]]:
    """The question of each request: requests with the same source and different sample numbers are samples of one
    question. A source that repeats with the same sample number is another question.
    """
    num_uses: Counter[tuple[str, int]] = Counter()
    questions = {}
    for request in prepared:
        questions[request.request_id] = (request.source, num_uses[request.source, request.sample])
        num_uses[request.source, request.sample] += 1
    return questions


def _output_tokens(request: RequestRecord, messages: dict[str, str]) -> tuple[int, ...] | None:
    """Tokens of each choice; their sum is ``usage`` if that is known."""
    counts = [choice_tokens(request, choice) for choice in request.choices]
    usage, counted = request.completion_tokens, total(counts)
    if counted is not None and usage in {None, counted}:
        return tuple(known_values(counts))
    if usage is None:
        return None
    num_choices = max(len(counts), 1)
    if num_choices > 1:
        messages.setdefault(
            "choice-lengths-assumed",
            "observed FLOPs: the lengths of single choices are unknown or disagree with usage; "
            "usage is divided evenly over the choices of its request",
        )
    return tuple(spread_evenly(usage, num_choices))


def _counts_of_steps(
    run: LoadedRun, lengths: RunLengths, messages: dict[str, str], *, has_value_model: bool
) -> StepLogCounts | None:
    """Counts of the step log without drafts; None if the value model's candidates are unknown."""
    steps = run.columns
    base_prefill_tokens = steps.total("num_prefill_tokens")
    if base_prefill_tokens is None:
        base_prefill_tokens = sum(lengths.question_prompts)
        messages["base-prefill-assumed"] = (
            "observed FLOPs: the step log does not count prefill tokens; one prompt for each question is assumed"
        )
    counts = StepLogCounts(base_prefill_tokens=base_prefill_tokens)
    if not has_value_model:
        return counts
    candidates, prefill, extend = (
        None if not len(steps) or (values := value_count(steps, name)) is None else int(values.sum())
        for name in ("candidates", "value_prefill_tokens", "value_extend_tokens")
    )
    if candidates is None:
        messages["candidates-unknown"] = (
            "no observed FLOPs: the step log does not count the candidates that the value model scored; "
            "published FLOPs charge top_k for each token"
        )
        return None
    if candidates and (prefill is None or extend is None):
        messages["value-prefixes-assumed"] = (
            "observed FLOPs: the step log does not count the tokens of the value model's prefixes; each sequence's "
            "prompt and output but the last token are assumed"
        )
        prefill = sum(prompt for prompt, _ in lengths.sequences) if prefill is None else prefill
        extend = sum(max(output - 1, 0) for _, output in lengths.sequences) if extend is None else extend
    return replace(
        counts, value_prefill_tokens=prefill or 0, value_extend_tokens=extend or 0, candidates=candidates
    )


def _with_drafts(
    counts: StepLogCounts, run: LoadedRun, lengths: RunLengths, drafter: Drafter | None, messages: dict[str, str]
) -> StepLogCounts:
    """The counts with the drafts of a run; what is unknown is not charged, and ``messages`` say so.

    The draft model forwards the prompts that the base model prefills, and a token for each that it proposes. Of a
    draft accepted whole, the last token is not in its cache when a bonus token follows: a backfill computes it.
    """
    drafts, not_charged = run_drafts(run), None
    verified = _verification_tokens(run, lengths, drafts)
    if not drafts.draft_tokens:
        if drafts.draft_tokens is None and drafter is not None and drafter.is_in_use:
            not_charged = "drafts are not counted, so they are not charged, neither proposed nor verified"
    elif verified is None:
        not_charged = "accepted drafts are not counted, so drafts are not charged, not even verified ones"
    else:
        counts = replace(counts, verification_tokens=verified)
        if drafter is None or drafter.problem is not None:
            problem = "the profile names no drafts" if drafter is None else drafter.problem
            not_charged = f"verification is charged, the passes that proposed drafts are not: {problem}"
        elif drafter.shape is None:
            messages["drafts-without-model"] = (
                "observed FLOPs: drafts are looked up in text, which costs no FLOPs; their verification is charged"
            )
        else:
            by_position = drafts.accepted_by_position if drafter.has_backfill else (0,)
            if by_position is None:
                not_charged = "acceptance by position is unknown, so the backfill of bonus tokens is not charged"
            counts = replace(
                counts,
                draft_prefill_tokens=counts.base_prefill_tokens,
                draft_tokens=drafts.draft_tokens,
                backfill_tokens=by_position[-1] if by_position else 0,
            )
    if not_charged is not None:
        messages["drafts-not-charged"] = f"observed FLOPs: {not_charged}"
    return counts


def _verification_tokens(run: LoadedRun, lengths: RunLengths, drafts: DraftCounts) -> int | None:
    """Tokens that the base model forwarded for decoding sequences, drafts among them; None where it is unknown.

    By the step log where it counts drafts; else each output token but the first, and the rejected drafts, without
    those after the end of an output.
    """
    logged = run.columns.total("num_decode_tokens")
    if logged is not None and len(run.columns.known_values("draft_tokens")):
        return logged
    if drafts.draft_tokens is None or drafts.accepted_tokens is None:
        return None
    decoded = sum(max(output - 1, 0) for _, output in lengths.sequences)
    return decoded + drafts.draft_tokens - drafts.accepted_tokens
