"""Checks of speculative decoding: drafts by the steps, by the server's counters, and by the profile."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

from benchctl.analysis.metrics.server_counters import (
    ACCEPTED_BY_POSITION,
    ACCEPTED_TOKENS,
    DRAFT_TOKENS,
    DRAFTS,
    measure_growth,
    measure_growth_by_position,
)
from benchctl.analysis.metrics.speculation import DraftCounts
from benchctl.analysis.metrics.unknown import known_values
from benchctl.analysis.validity.token_checks import Check
from benchctl.records.samples import PrometheusSample

_COUNTERS: Final = {"drafts": DRAFTS, "draft tokens": DRAFT_TOKENS, "accepted tokens": ACCEPTED_TOKENS}


def check_draft_counters(samples: Sequence[PrometheusSample], counts: DraftCounts) -> Check:
    """Growth of the server's counters of drafts during the load = sums over the steps, also by position."""
    name = "draft-counters"
    by_steps = dict(zip(_COUNTERS, (counts.drafts, counts.draft_tokens, counts.accepted_tokens), strict=True))
    agreed: list[str] = []
    wrong: list[str] = []
    for noun, counters in _COUNTERS.items():
        grown, of_steps = measure_growth(samples, counters), by_steps[noun]
        if grown is None or of_steps is None:
            continue
        text = f"{noun} {of_steps} by steps, {grown.count} by {grown.name}"
        (agreed if grown.count == of_steps else wrong).append(text)
    positions = measure_growth_by_position(samples, ACCEPTED_BY_POSITION)
    if positions and counts.accepted_by_position is not None:
        text = f"accepted by position {counts.accepted_by_position} by steps, {positions} by counters"
        pairs = zip_longest(positions, counts.accepted_by_position, fillvalue=0)  # unused positions are left out
        (agreed if all(left == right for left, right in pairs) else wrong).append(text)
    if not agreed and not wrong:
        return Check(name, None, "steps or counters do not count drafts")
    return Check(name, not wrong, "; ".join(wrong or agreed), is_fatal=True)


def check_accepted(counts: DraftCounts) -> Check:
    """Accepted tokens <= draft tokens; by position they never increase and add up to all accepted tokens."""
    name, accepted, drafted = "accepted-drafts", counts.accepted_tokens, counts.draft_tokens
    if accepted is None or drafted is None:
        return Check(name, None, "the steps do not count draft tokens")
    problems = [] if accepted <= drafted else ["more than were drafted"]
    detail = f"{accepted} of {drafted} draft tokens accepted"
    positions = counts.accepted_by_position
    if positions is not None and counts.drafts is not None:
        detail += f", by position {positions} of {counts.drafts} drafts"
        if any(later > earlier for earlier, later in zip((counts.drafts, *positions), positions, strict=False)):
            problems.append("a position was accepted more often than the one before it")
        if sum(positions) != accepted:
            problems.append(f"the positions add up to {sum(positions)}")
    return Check(name, not problems, "; ".join([detail, *problems]), is_fatal=True)


def check_speculation(
    samples: Sequence[PrometheusSample], counts: DraftCounts, *, is_speculative: bool | None
) -> Check:
    """A variant with speculative decoding drafted tokens, by its steps or by the server's counters; others none.

    Without drafts the variant measures the plain path under another name. ``is_speculative`` is None where the
    options of the server do not say.
    """
    name, grown = "speculation", measure_growth(samples, DRAFT_TOKENS)
    drafted = known_values([counts.draft_tokens, None if grown is None else grown.count])
    if is_speculative is None or not drafted:
        unknown = "the options do not say whether the server speculates"
        reason = unknown if is_speculative is None else "neither steps nor counters count draft tokens"
        return Check(name, None, reason)
    observed = f"{max(drafted)} draft tokens"
    if is_speculative:
        return Check(name, max(drafted) > 0, f"speculation declared; {observed}", is_fatal=True)
    return Check(name, max(drafted) == 0, f"no speculation declared; {observed}")
