"""Drafts in the FLOPs of a run: the model that drafts, and the counts of what both models did for drafts."""

from dataclasses import dataclass, replace

from benchctl.analysis.metrics.speculation import DraftCounts, run_drafts
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.costs.work import RunLengths, StepLogCounts
from benchctl.errors import UsageError
from benchctl.profile.sections.engine_options import ServerOptions
from benchctl.records.loaded import LoadedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """The source of the drafts of a run; without ``shape`` and ``problem``, no pass of any model."""

    shape: ModelShape | None = None
    problem: str | None = None
    """The reason why the shape of the model is unknown."""
    has_backfill: bool = True
    """See ``DraftSource``."""
    is_in_use: bool = True
    """The options say that the server speculates; False where they do not say."""


def drafter_of(server: ServerOptions) -> Drafter | None:
    """The drafter of a server with these options; None where they say that it does not speculate."""
    if server.speculates is False:
        return None
    source, is_in_use = server.draft_source, bool(server.speculates)
    if source.model is None:
        return Drafter(problem=source.problem, is_in_use=is_in_use)
    try:
        shape = shape_for(source.model)
    except UsageError as error:
        return Drafter(problem=str(error), is_in_use=is_in_use)
    return Drafter(shape=shape, has_backfill=source.has_backfill, is_in_use=is_in_use)


def with_drafts(
    counts: StepLogCounts, run: LoadedRun, lengths: RunLengths, drafter: Drafter | None, messages: dict[str, str]
) -> StepLogCounts:
    """The counts with the drafts of a run; what is unknown is not charged, and ``messages`` say so."""
    drafts = run_drafts(run)
    if not drafts.draft_tokens:
        if drafts.draft_tokens is None and drafter is not None and drafter.is_in_use:
            message = (
                "observed FLOPs: drafts are not counted, so they are not charged, neither proposed nor verified"
            )
            messages.setdefault("drafts-not-charged", message)
        return counts
    verified = _verification_tokens(run, lengths, drafts)
    if verified is None:
        message = (
            "observed FLOPs: accepted drafts are not counted, so drafts are not charged, not even verified ones"
        )
        messages.setdefault("drafts-not-charged", message)
        return counts
    counts = replace(counts, verification_tokens=verified)
    return _with_passes(counts, drafts, drafter or Drafter(problem="the profile names no drafts"), messages)


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


def _with_passes(
    counts: StepLogCounts, drafts: DraftCounts, drafter: Drafter, messages: dict[str, str]
) -> StepLogCounts:
    """The counts with the draft model's passes.

    It forwards the prompts that the base model prefills, and a token for each that it proposes. Of a draft accepted
    whole, the last token is not in its cache when a bonus token follows: a backfill computes it.
    """
    if drafter.problem is not None:
        messages.setdefault(
            "drafts-not-charged",
            f"observed FLOPs: verification is charged, the passes that proposed drafts are not: {drafter.problem}",
        )
        return counts
    if drafter.shape is None:
        messages.setdefault(
            "drafts-without-model",
            "observed FLOPs: drafts are looked up in text, which costs no FLOPs; their verification is charged",
        )
        return counts
    by_position = drafts.accepted_by_position
    if drafter.has_backfill and by_position is None:
        messages.setdefault(
            "drafts-not-charged",
            "observed FLOPs: acceptance by position is unknown, so the backfill of bonus tokens is not charged",
        )
    return replace(
        counts,
        draft_prefill_tokens=counts.base_prefill_tokens,
        draft_tokens=drafts.draft_tokens or 0,
        backfill_tokens=by_position[-1] if drafter.has_backfill and by_position else 0,
    )
