"""Natural lengths of answers, from a result directory in which the baseline's model ended them itself.

A longer forced length makes the model go on after its end of sequence, where its tokens are arbitrary and say
nothing about real use; a shorter one cuts answers. Measured lengths avoid both, and every variant still does
equal work.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import Final

import msgspec

from benchctl.errors import ProfileError, UsageError
from benchctl.profile.load import stored_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import ResultDirectory, open_results
from benchctl.records.finish_reasons import is_cut, may_be_whole
from benchctl.records.record import PreparedRequest, RequestRecord

KEY: Final = "workload.lengths_from"
_MEASURED_STATES: Final = {"done", "suspect"}
"""A run that is suspect for its times has still counted its tokens."""


def needs_lengths(profile: Profile) -> bool:
    """True if natural lengths must be measured before the request set of ``profile`` can be made."""
    return profile.stop == "replay-natural" and profile.workload.lengths_from is None


def lengths_profile(profile: Profile) -> Profile:
    """The experiment that measures them: the baseline alone, once, its answers ending naturally."""
    return profile.model_copy(
        update={
            "name": f"{profile.name}-lengths",
            "description": f"Natural lengths of the answers of {profile.name}",
            "blocks": 1,
            "stopping": None,
            "stop": "natural",
            "variants": {profile.baseline: profile.variants[profile.baseline]},
            "sweep": {},
        }
    )


def with_natural_lengths(
    requests: Sequence[PreparedRequest], path: Path, profile: Profile
) -> tuple[tuple[PreparedRequest, ...], int]:
    """The request set with the natural length of each answer, as the baseline of ``path`` measured it, and the
    number of answers that a limit ended, whose true length is unknown and at least that.

    Where answers are replayed, each output is forced to its own length. Raises UsageError when ``path`` is not a
    result directory, RecordError when it is damaged, ProfileError when it did not measure these answers: other
    prompts, another model or sampling, forced lengths, or no length for some request.
    """
    try:
        results = open_results(path)
    except UsageError as error:
        raise ProfileError(f"{KEY}: {error}") from error
    _check_same_baseline(path, results, profile)
    stored = {request.request_id: request for request in results.prepared_requests()}
    for request in requests:
        _check_same_prompt(path, request, stored.get(request.request_id))
    lengths = _measured_lengths(results)
    if not lengths:
        raise _refusal(path, "has no finished run of its baseline", "resume it, or measure again")
    missing = [request.request_id for request in requests if request.request_id not in lengths]
    if missing:
        what = f"has no length for {missing[0]!r} and {len(missing) - 1} other requests"
        raise _refusal(path, what, "measure again; its requests.jsonl say why they failed")
    with_lengths, num_cut = [], 0
    for request in requests:
        natural_tokens, was_cut = _typical(lengths[request.request_id])
        max_tokens = natural_tokens if profile.stop == "replay-natural" else request.max_tokens
        known_tokens = natural_tokens if not was_cut or max_tokens <= natural_tokens else None
        with_lengths.append(msgspec.structs.replace(request, max_tokens=max_tokens, natural_tokens=known_tokens))
        num_cut += was_cut
    return tuple(with_lengths), num_cut


def _check_same_baseline(path: Path, results: ResultDirectory, profile: Profile) -> None:
    """The baseline of ``path`` must be the baseline of ``profile``, as far as lengths depend on it."""
    manifest = results.manifest()
    if manifest.stop != "natural":
        raise _refusal(
            path, f"was measured with stop {manifest.stop}", "name one that was measured with stop: natural"
        )
    theirs = stored_profile(results.profile_yaml(), str(path / "profile.yaml"))
    then, now = (variant_settings(each, each.baseline, {}) for each in (theirs, profile))
    for name, left, right in (
        ("model", then.model, now.model),
        ("sampling", then.sampling, now.sampling),
        ("request", then.request, now.request),
        ("guidance", then.guidance, now.guidance),
    ):
        if left != right:
            what = f"was measured with another {name} of its baseline: {left}, not {right}"
            raise _refusal(path, what, "measure natural lengths with the same baseline")


def _check_same_prompt(path: Path, request: PreparedRequest, stored: PreparedRequest | None) -> None:
    remedy = "name one of the same dataset, num_prompts, selection and seed"
    if stored is None:
        raise _refusal(path, f"has no request {request.request_id!r}", remedy)
    if (stored.messages, stored.prompt) != (request.messages, request.prompt):
        raise _refusal(path, f"has another prompt as {request.request_id!r}", remedy)
    if stored.n > 1:
        what = f"asked for {stored.n} answers in one request, which has only their total length"
        raise _refusal(path, what, "measure it with workload.samples_as: requests")


def _measured_lengths(results: ResultDirectory) -> dict[str, list[tuple[int, bool]]]:
    """Each successful request's lengths in the baseline's runs, each with True if its limit ended it."""
    baseline, lengths = results.manifest().baseline, dict[str, list[tuple[int, bool]]]()
    for planned in results.plan().runs:
        directory = results.run(planned.run_id)
        if planned.variant != baseline or not directory.is_begun():
            continue
        if directory.read().state not in _MEASURED_STATES:
            continue
        for record in directory.requests():
            if (length := _length_of(record)) is not None:
                lengths.setdefault(record.request_id, []).append(length)
    return lengths


def _length_of(record: RequestRecord) -> tuple[int, bool] | None:
    if record.is_warmup or record.error is not None or record.completion_tokens is None:
        return None
    if not all(may_be_whole(choice.finish_reason) for choice in record.choices):
        return None  # failed by an older version's record, or ended for a reason that nobody knows
    return record.completion_tokens, any(is_cut(choice.finish_reason) for choice in record.choices)


def _typical(lengths: Sequence[tuple[int, bool]]) -> tuple[int, bool]:
    """The lower median over blocks, a measured length and never a mean of two, and whether a limit ended it.

    An answer without a token is forced to one.
    """
    typical = median_low(num_tokens for num_tokens, _ in lengths)
    return max(1, typical), any(was_cut for num_tokens, was_cut in lengths if num_tokens == typical)


def _refusal(path: Path, what: str, remedy: str) -> ProfileError:
    return ProfileError(f"{KEY}: {path} {what}; {remedy}")
