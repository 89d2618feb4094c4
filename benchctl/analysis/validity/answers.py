"""Checks of the tokens of a run: those of the client, usage, the steps, and the server's counters.

Ends of answers: those for an unknown reason, and those that came early where the length was forced.
Planned against counted prompt tokens: the request set's numbers, and those of the server's ``usage``.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Final

from benchctl.analysis.metrics.latency import is_completed, known_values, measured, total
from benchctl.analysis.metrics.server_counters import COUNTERS, measure_growth
from benchctl.profile.model import VariantSettings
from benchctl.records.finish_reasons import ending_of, unknown_reasons
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ESTIMATE, ChoiceRecord, PreparedRequest, RequestRecord, RunRecord
from benchctl.records.schema import PrometheusSample, ResultWarning
from benchctl.records.warning_codes import warnings_of
from benchctl.units import count_of, first_of, range_of
from benchctl.untrusted.text import visible_line
from benchctl.workload.datasets.base import FileDataset, MadeDataset, names_of_datasets

if TYPE_CHECKING:
    from benchctl.records.columns import StepColumns

NUM_NAMED: Final = 3
"""Number of requests that a detail of a check names."""


@dataclass(frozen=True, slots=True)
class Check:
    """One reconciliation check. A fatal one that fails makes the measurement invalid, others cause a warning."""

    name: str
    ok: bool | None
    detail: str
    is_fatal: bool = False


def client_tokens(request: RequestRecord) -> int | None:
    """Tokens of an answer as the client counted them; None where it could not."""
    counts = ((choice.chunk_tokens, choice.output_tokens) for choice in request.choices)
    return total([output_tokens if of_chunks is None else sum(of_chunks) for of_chunks, output_tokens in counts])


def check_client_tokens(completed: Sequence[RequestRecord]) -> Check:
    """Tokens of usage = tokens that arrived at the client, request by request."""
    both = [(request, client_tokens(request), request.completion_tokens) for request in completed]
    compared = [(request, client, usage) for request, client, usage in both if None not in (client, usage)]
    if not compared:
        return Check("client-tokens", None, "no request has both usage and tokens counted by the client")
    wrong = [f"{request.request_id} {client} != {usage}" for request, client, usage in compared if client != usage]
    detail = f"client and usage agree in {len(compared)} requests"
    if wrong:
        detail = (
            f"client and usage differ in {len(wrong)} of {len(compared)} requests: {first_of(wrong, NUM_NAMED)}"
        )
    return Check("client-tokens", not wrong, detail, is_fatal=True)


def check_server_tokens(
    steps: "StepColumns",
    samples: Sequence[PrometheusSample],
    requests: Sequence[RequestRecord],
    completed: Sequence[RequestRecord],
) -> tuple[Check, ...]:
    """Output tokens of all steps = sum of usage, and so is the growth of the server's token counter.

    Where there is no usage, the steps are held against the tokens that the client counted.
    """
    usage = [request.completion_tokens for request in completed]
    counted = [client_tokens(r) if r.completion_tokens is None else r.completion_tokens for r in completed]
    by_step, grown = steps.total("output_tokens"), measure_growth(samples, COUNTERS.generated_tokens)
    source = "client" if None in usage else "usage"
    rows = (
        (
            "step-tokens",
            by_step,
            total(counted),
            f"steps {by_step}, {source} {total(counted)}",
            "steps or usage do not count tokens",
        ),
        (
            "counters",
            None if grown is None else grown.count,
            total(usage),
            "" if grown is None else f"{grown.name} grew by {grown.count}, usage {total(usage)}",
            "no two readings of a counter of output tokens, or no usage",
        ),
    )
    checks = []
    for name, count, expected, detail, unknown in rows:
        if count is None or expected is None:
            checks.append(Check(name, None, unknown))
        elif len(completed) < len(requests):
            checks.append(Check(name, None, f"{detail}; failed requests took tokens that no usage counts"))
        else:
            checks.append(Check(name, count == expected, detail, is_fatal=True))
    return tuple(checks)


def check_prefix_cache(
    samples: Sequence[PrometheusSample],
    requests: Sequence[RequestRecord],
    steps: "StepColumns",
    *,
    is_allowed: bool,
) -> Check:
    """No prompt token of the load came from a cache, by the server's counter, by usage and by the steps.

    Cached tokens cost nothing, so a run with a warmer cache would look faster. With ``is_allowed`` hits are part of
    the experiment and only reported.
    """
    name, grown = "prefix-cache", measure_growth(samples, COUNTERS.prefix_hits)
    by_usage, uncomputed = known_values(r.cached_tokens for r in requests), _uncomputed_tokens(steps, requests)
    counts: dict[str, int] = {}
    if grown is not None:
        counts[f"{grown.name} grew by {grown.count}"] = grown.count
    if by_usage:
        of_requests = f"{len(by_usage)} requests came from a cache"
        counts[f"usage says that {sum(by_usage)} prompt tokens of {of_requests}"] = sum(by_usage)
    if uncomputed is not None:
        counts[f"steps left out {uncomputed} of the prompt tokens that usage counts"] = uncomputed
    if not counts:
        return Check(name, None, "neither counters nor usage nor steps record hits in a prefix cache")
    if not any(counts.values()):
        return Check(name, ok=True, detail="; ".join(counts), is_fatal=True)
    if is_allowed:
        allowed = "the profile allows it (workload.allow_prefix_cache_hits)"
        return Check(name, None, "; ".join([*counts, allowed]))
    remedy = (
        "switch the server's prefix cache off (enable_prefix_caching: false; of an attached server leave "
        "bypass_prefix_cache on, with its dialect and samples_as: requests), or set "
        "workload.allow_prefix_cache_hits: true"
    )
    return Check(name, ok=False, detail="; ".join([*counts, remedy]), is_fatal=True)


HITS_TOLERANCE: Final = 0.02
"""Share of all prompt tokens by which hits may differ from their plan."""


def planned_hit_frac(prepared: Sequence[PreparedRequest], settings: VariantSettings | None = None) -> float | None:
    """Share of the prompt tokens that a server of these settings finds in its cache by plan; None without one."""
    shared, prompt = sum(each.shared_tokens for each in prepared), sum(each.prompt_tokens for each in prepared)
    if not (shared and prompt):
        return None
    has_cache = settings is None or getattr(settings.server, "enable_prefix_caching", True)
    return shared / prompt if has_cache else 0.0


def block_tokens(record: RunRecord) -> int | None:
    """Tokens that the server's cache finds together; None where it does not say."""
    config = record.effective_config
    stated = config.get("server.block_size") or config.get("server.page_size")
    return stated if isinstance(stated, int) and stated > 0 else None


def check_planned_hits(
    prepared: Sequence[PreparedRequest],
    planned: tuple[float, float],
    hits: float | None,
    record: RunRecord,
    *,
    is_allowed: bool,
) -> Check:
    """The share of prompt tokens from a cache is between the least and the most ``planned``, within 2 points.

    With ``is_allowed`` a difference is part of the experiment, as where the cache is too small, and only reported.
    """
    name, (least, most) = "prefix-cache", planned
    detail = f"planned {range_of(planned, '.2f')}"
    if hits is None:
        return Check(name, None, f"{detail}; neither counters nor usage record hits in a prefix cache")
    detail += f", measured {hits:.2f}"
    if least - HITS_TOLERANCE <= hits <= most + HITS_TOLERANCE:
        return Check(name, ok=True, detail=detail, is_fatal=True)
    if is_allowed:
        return Check(name, None, f"{detail}; the profile allows it (workload.allow_prefix_cache_hits)")
    block = block_tokens(record) or 1
    remedy = (
        "its cache may be too small beside the load: raise its memory, or lower the load or workload.prefix.groups"
    )
    if hits > most:
        remedy = "more than planned was in the cache: the server does not know cache_salt, or others use it"
    elif any(each.shared_chars and each.shared_tokens % block for each in prepared):
        remedy = f"the server finds whole blocks of {block} tokens: set workload.prefix.block: {block}"
    detail += f"; {remedy}; or set workload.allow_prefix_cache_hits: true to measure it as it is"
    return Check(name, ok=False, detail=detail, is_fatal=least == most)


def _uncomputed_tokens(steps: "StepColumns", requests: Sequence[RequestRecord]) -> int | None:
    """Prompt tokens of usage that no step computed, for servers that report hits nowhere else.

    At least 0, because a step may compute a prompt again. None unless the steps count all output tokens of usage.
    """
    prompt = total([request.prompt_tokens for request in requests])
    output = total([request.completion_tokens for request in requests])
    computed = steps.total("num_prefill_tokens")
    if prompt is None or output is None or computed is None or steps.total("output_tokens") != output:
        return None
    return max(0, prompt - computed)


_LEAST_TIME_FRAC: Final = 0.25
"""Share of the time of that many tokens below which they were not generated in it."""
_LEAST_ANSWERS: Final = 3


def answer_end_warnings(
    records: Iterable[RequestRecord], *, is_forced: bool, may_stop: bool = False
) -> tuple[ResultWarning, ...]:
    """Warnings about the ends of the answers of a load, without those of its warm-up.

    ``is_forced``: every answer was to have a certain length. ``may_stop``: the requests had stop strings or a form
    whose end ends the answer.
    """
    completed = [record for record in measured(records) if is_completed(record)]
    unknown = Counter(word for record in completed for word in unknown_reasons(record))
    words = [f"'{visible_line(word)}' ({count} answers)" for word, count in unknown.most_common()]
    named = f"answers ended with a finish_reason that is not known: {first_of(words, NUM_NAMED)}"
    early, unseen = _forced_ends(completed, may_stop=may_stop) if is_forced else (None, None)
    return warnings_of(
        {
            "finish-reason-unknown": named if words else None,
            "output-ended-early": early,
            "output-tokens-unseen": unseen,
        }
    )


def _forced_ends(completed: Iterable[RequestRecord], *, may_stop: bool) -> tuple[str | None, str | None]:
    """At most one message: that answers ended before their forced length; that nothing shows whether they did."""
    ends: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in completed:
        if record.completion_tokens and _num_chunks(record) and record.stamps != "whole":
            ends[_end_of(record, record.completion_tokens, may_stop=may_stop)].append(record)
    num_all, (whole, short) = sum(map(len, ends.values())), (ends["whole"], ends["short"])
    texts = []
    if ended := ends["ended"]:
        listed = [f"{r.request_id} ({_num_chunks(r)} chunks, {r.completion_tokens} tokens)" for r in ended]
        texts.append(
            f"{len(ended)} of {num_all} by their finish_reason in fewer chunks than tokens, or with many tokens in "
            f"a chunk without text or time: {first_of(listed, NUM_NAMED)}"
        )
    few = f"{len(short)} of {num_all} have {_chunks_per_token(short):.0%} as many chunks" if short else ""
    if (num_bytes := _bytes_of_whole_and_short(whole, short)) is not None:
        texts.append(
            f"{few} as tokens in usage, and {num_bytes[1]:.1f} bytes of text per token where the others have "
            f"{num_bytes[0]:.1f}"
        )
    if texts:
        return f"ignore_eos was sent, and answers ended early all the same: {'; '.join(texts)}", None
    if len(short) >= _LEAST_ANSWERS and len(whole) < _LEAST_ANSWERS:
        return None, f"{few} as usage counts tokens; nothing shows whether a chunk carries several"
    return None, None


def _end_of(record: RequestRecord, num_tokens: int, *, may_stop: bool) -> str:
    """``ended`` early by its finish_reason or its counts; else ``whole`` or ``short`` by its uncounted chunks."""
    num_chunks = _num_chunks(record)
    finishes = {ending_of(choice.finish_reason) for choice in record.choices}
    if "natural" in finishes and num_chunks < num_tokens and not may_stop:
        return "ended"
    if all(choice.chunk_tokens is not None for choice in record.choices):
        return "ended" if any(map(_has_lump, record.choices)) else "counted"
    # parts of tool calls have no text that is recorded
    have_text = all(c.chunk_tokens is None and min(c.chunk_chars or (0,)) > 0 for c in record.choices)
    if "tool-call" in finishes or not have_text:
        return "without text"
    if num_tokens - num_chunks <= _slack(num_tokens):
        return "whole"
    return "late" if _waited_for(record, num_tokens - num_chunks, num_tokens) else "short"


def _num_chunks(record: RequestRecord) -> int:
    return sum(len(choice.chunk_ns) for choice in record.choices)


def _chunks_per_token(records: Iterable[RequestRecord]) -> float:
    return fmean(_num_chunks(record) / (record.completion_tokens or 1) for record in records)


def _bytes_per_token(record: RequestRecord) -> float:
    num_bytes = sum(len(choice.text.encode("utf-8", "surrogatepass")) for choice in record.choices)
    return num_bytes / (record.completion_tokens or 1)


def _bytes_of_whole_and_short(
    whole: Sequence[RequestRecord], short: Sequence[RequestRecord]
) -> tuple[float, float] | None:
    """Bytes per token, where answers with few chunks have the text of their chunks alone; None elsewhere.

    With the text of all their tokens they would have as many bytes per token as answers with a chunk for each,
    within four standard errors; the decision lies halfway.
    """
    if len(short) < _LEAST_ANSWERS or len(whole) < _LEAST_ANSWERS:
        return None
    per_token = list(map(_bytes_per_token, whole))
    expected, received = fmean(per_token), fmean(map(_bytes_per_token, short))
    # Relative standard deviation of bytes per token that is assumed at least
    spread = max(pstdev(per_token), 0.05 * expected)
    is_far = expected - received > 4.0 * spread / sqrt(len(short))
    lacks_text = is_far and received < expected * (1 + _chunks_per_token(short)) / 2
    return (expected, received) if lacks_text else None


def _slack(num_tokens: int) -> float:
    # Tokens that may lack a chunk or text of their own: parts of characters, text that a detokenizer holds back
    return max(8, 0.2 * num_tokens)


def _has_lump(choice: ChoiceRecord) -> bool:
    """True when a write counts tokens that neither its text can hold nor its time could make."""
    counts, chars = choice.chunk_tokens or (), choice.chunk_chars or ()
    slack = _slack(sum(counts))
    if len(counts) != len(chars) or max(counts, default=0) <= slack:
        return False
    num_after_first = sum(counts) - counts[0]
    pace_ns = (choice.chunk_ns[-1] - choice.chunk_ns[0]) / num_after_first if num_after_first else 0.0
    num_hidden: Counter[int] = Counter()
    for t_ns, count, num_chars in zip(choice.chunk_ns, counts, chars, strict=True):
        # A character takes at most as many tokens as bytes; those with four are rare
        num_hidden[t_ns] += count - 1 - 3 * num_chars
    return any(
        num_hidden[t_ns] > slack and t_ns - before_ns < _LEAST_TIME_FRAC * num_hidden[t_ns] * pace_ns
        for before_ns, t_ns in pairwise(num_hidden)
    )


def _waited_for(record: RequestRecord, num_missing: int, num_tokens: int) -> bool:
    """True when pauses between chunks and after the last are long enough for tokens that sent nothing."""
    times_ns = sorted(t_ns for choice in record.choices for t_ns in choice.chunk_ns)
    end_ns = max(record.done_ns or 0, times_ns[-1])
    gaps_ns = [after - before for before, after in pairwise((*times_ns, end_ns))]
    typical_ns = median(gaps_ns)
    # Gaps so much longer hold tokens that sent nothing
    waited_ns = sum(gap_ns - typical_ns for gap_ns in gaps_ns if gap_ns > 3.0 * typical_ns)
    return waited_ns >= 2 * _LEAST_TIME_FRAC * (end_ns - times_ns[0]) * num_missing / num_tokens


DIFFER: Final = "prompt-tokens-differ"
UNCONFIRMED: Final = "prompt-tokens-unconfirmed"
TOLERANCE_TOKENS: Final = 4
"""Tokens that a server may add to a prompt, such as one for its beginning ..."""
TOLERANCE_FRAC: Final = 0.02
"""... or this fraction of the planned ones, if that is more."""


def prompt_warnings(
    prepared: Iterable[PreparedRequest], records: Iterable[RequestRecord]
) -> tuple[ResultWarning, ...]:
    """The warning about prompts of other lengths than planned, or about those that nobody counted; at most one.

    Each prompt counts once, however many answers were asked for. The request set is read only once, and one number
    of each request is kept.
    """
    planned_of, first = array("q"), None
    for request in prepared:
        first = first or request
        planned_of.append(request.prompt_tokens)
    # of later turns nobody can plan how long the answers before them are
    completed = [r for r in measured(records) if is_completed(r) and r.index < len(planned_of) and not r.turn]
    checked = [(r.prompt_tokens, planned_of[r.index]) for r in completed if r.prompt_tokens is not None]
    num_beyond = sum(
        abs(counted - planned) > max(TOLERANCE_TOKENS, TOLERANCE_FRAC * planned) for counted, planned in checked
    )
    num_unknown = len(completed) - len(checked)
    unchecked = f"no usage, so no check of the prompt, in {count_of(num_unknown, 'request')}"
    if first is None or not num_beyond:
        return (ResultWarning(code=UNCONFIRMED, message=unchecked),) if num_unknown else ()
    source, dataset = first.prompt_tokens_from, first.source.replace("/", ":").partition(":")[0]
    is_asked = source != ESTIMATE or dataset in _datasets_of_lengths()
    if source == ESTIMATE:
        planner = "benchctl's own rule" if is_asked else "an estimate"
    else:
        planner = "the server" if source == "server" else f"the {source[:25]}"
    counted_mean, planned_mean = (fmean(column) for column in zip(*checked, strict=True))
    message = (
        f"the server counted {counted_mean:.1f} tokens in a prompt on average, and {planned_mean:.1f} were planned "
        f"(by {planner}; ratio {counted_mean / planned_mean:.3f}): {num_beyond} of {len(checked)} requests differ "
        f"by more than {TOLERANCE_TOKENS} tokens and {TOLERANCE_FRAC:.0%}"
    )
    message += f"; {unchecked}" if num_unknown else ""
    return (ResultWarning(code=DIFFER if is_asked else UNCONFIRMED, message=message),)


def differing_counts(
    a_runs: Sequence[LoadedRun], b_runs: Sequence[LoadedRun], names: tuple[str, str]
) -> tuple[ResultWarning, ...]:
    """A warning where the servers of two sides count the same prompts differently, as different tokenizers do."""
    a, b = (
        {
            record.request_id: record.prompt_tokens
            for run in reversed(runs)
            for record in measured(run.requests)
            if record.prompt_tokens is not None and is_completed(record) and not record.turn
        }
        for runs in (a_runs, b_runs)
    )
    shared = a.keys() & b.keys()
    num_different = sum(a[request_id] != b[request_id] for request_id in shared)
    if not num_different:
        return ()
    a_mean, b_mean = (fmean(side[request_id] for request_id in shared) for side in (a, b))
    message = (
        f"the servers count the same prompts differently: {a_mean:.1f} tokens on average in {names[0]}, "
        f"{b_mean:.1f} in {names[1]} (ratio {b_mean / a_mean:.3f}; {num_different} of {len(shared)} requests): "
        "their tokenizers or chat templates differ, so equal requests are not equal work"
    )
    return (ResultWarning(code=DIFFER, message=message),)


@cache
def _datasets_of_lengths() -> frozenset[str]:
    """Data sets whose prompts were written to have a certain length: synthetic ones, and those of traces."""
    of_made = names_of_datasets(lambda dataset: isinstance(dataset, MadeDataset) and dataset.needs_input_len)
    of_files = names_of_datasets(
        lambda dataset: isinstance(dataset, FileDataset) and dataset.read_trace is not None
    )
    return frozenset((*of_made, *of_files))
