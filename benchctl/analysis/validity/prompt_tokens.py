"""Planned against counted prompt tokens: the request set's numbers, and those of the server's ``usage``.

A run whose prompts were to have certain lengths and had others did not do what the profile asks for. Nobody asks
for the length of a text that somebody wrote: a wrong estimate concerns predictions and the check of the context.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Final

import msgspec

from benchctl.analysis.metrics.request_timing import is_completed
from benchctl.formats import count_of
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ResultWarning
from benchctl.records.request import ESTIMATE, PreparedRequest, RequestRecord
from benchctl.workload.datasets.dataset import FileDataset, MadeDataset, names_of_datasets

DIFFER: Final = "prompt-tokens-differ"
UNCONFIRMED: Final = "prompt-tokens-unconfirmed"
TOLERANCE_TOKENS: Final = 4
"""Tokens that a server may add to a prompt, such as one for its beginning ..."""
TOLERANCE_FRAC: Final = 0.02
"""... or this fraction of the planned ones, if that is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts:
    """Planned and counted prompt tokens of the completed requests of a load."""

    source: str
    """Source of the planned numbers, as in ``PreparedRequest.prompt_tokens_from``."""
    is_asked: bool
    """The length was asked for or counted beforehand, and not estimated of a text that somebody wrote."""
    num_checked: int
    num_beyond: int
    """Requests whose two numbers are further apart than the tolerance."""
    num_unknown: int
    """Completed requests without usage, which cannot be checked."""
    planned: int
    """Sum over the checked requests."""
    counted: int
    """Sum over the checked requests."""


def count_prompts(prepared: Iterable[PreparedRequest], records: Iterable[RequestRecord]) -> PromptCounts:
    """Both counts, request by request; each prompt counts once, however many answers were asked for.

    Reads both only once and keeps one number for each prepared request, so that a load of any length fits.
    """
    planned_of, first = array("q"), None
    for request in prepared:
        first = first or request
        planned_of.append(request.prompt_tokens)
    checked = beyond = unknown = planned = counted = 0
    for record in records:
        if record.is_warmup or not is_completed(record) or record.index >= len(planned_of):
            continue
        if record.prompt_tokens is None:
            unknown += 1
            continue
        of_plan = planned_of[record.index]
        checked += 1
        planned += of_plan
        counted += record.prompt_tokens
        beyond += abs(record.prompt_tokens - of_plan) > max(TOLERANCE_TOKENS, TOLERANCE_FRAC * of_plan)
    return PromptCounts(
        source=ESTIMATE if first is None else first.prompt_tokens_from,
        is_asked=first is not None and (first.prompt_tokens_from != ESTIMATE or _is_made_to_length(first)),
        num_checked=checked,
        num_beyond=beyond,
        num_unknown=unknown,
        planned=planned,
        counted=counted,
    )


def prompt_warnings(counts: PromptCounts) -> tuple[ResultWarning, ...]:
    """The warning about prompts of other lengths than planned, or about those that nobody counted; at most one."""
    unchecked = f"no usage, so no check of the prompt, in {count_of(counts.num_unknown, 'request')}"
    if counts.num_beyond:
        means = counts.counted / counts.num_checked, counts.planned / counts.num_checked
        message = (
            f"the server counted {means[0]:.1f} tokens in a prompt on average, and {means[1]:.1f} were planned "
            f"(by {_source_text(counts)}; ratio {means[0] / means[1]:.3f}): {counts.num_beyond} of "
            f"{counts.num_checked} requests differ by more than {TOLERANCE_TOKENS} tokens and {TOLERANCE_FRAC:.0%}"
        )
        message += f"; {unchecked}" if counts.num_unknown else ""
        return (ResultWarning(code=DIFFER if counts.is_asked else UNCONFIRMED, message=message),)
    return (ResultWarning(code=UNCONFIRMED, message=unchecked),) if counts.num_unknown else ()


def unreported_prompt_warnings(run: LoadedRun, prepared: Sequence[PreparedRequest]) -> tuple[ResultWarning, ...]:
    """The same warning about a run that does not carry it: one that an older version measured.

    Such a run counts as it did; the warning limits what may be concluded from it.
    """
    if any(warning.code in {DIFFER, UNCONFIRMED} for warning in run.record.warnings):
        return ()
    where = run.record.run_id
    return tuple(
        msgspec.structs.replace(warning, where=where)
        for warning in prompt_warnings(count_prompts(prepared, run.requests))
    )


def differing_counts(
    a_runs: Sequence[LoadedRun], b_runs: Sequence[LoadedRun], names: tuple[str, str]
) -> tuple[ResultWarning, ...]:
    """A warning where the servers of two sides count the same prompts differently, as different tokenizers do."""
    a, b = _counted_by_request(a_runs), _counted_by_request(b_runs)
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


def _counted_by_request(runs: Sequence[LoadedRun]) -> Mapping[str, int]:
    return {
        record.request_id: record.prompt_tokens
        for run in reversed(runs)
        for record in run.requests
        if record.prompt_tokens is not None and not record.is_warmup and is_completed(record)
    }


def _source_text(counts: PromptCounts) -> str:
    if counts.source != ESTIMATE:
        return "the server" if counts.source == "server" else f"the {counts.source[:25]}"
    return "benchctl's own rule" if counts.is_asked else "an estimate"


def _is_made_to_length(request: PreparedRequest) -> bool:
    """True for prompts that were written to have a certain length: synthetic ones, and those of traces."""
    return request.source.replace("/", ":").partition(":")[0] in _datasets_of_lengths()


@cache
def _datasets_of_lengths() -> frozenset[str]:
    of_made = names_of_datasets(lambda dataset: isinstance(dataset, MadeDataset) and dataset.needs_input_len)
    of_files = names_of_datasets(lambda dataset: isinstance(dataset, FileDataset) and dataset.has_arrivals)
    return frozenset((*of_made, *of_files))
