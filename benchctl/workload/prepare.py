"""The prepared request set: prompts, limits and arrivals, the same bytes for the same profile and seed.

Nothing of paths, hosts or time goes in. Random choices come from named streams of the profile's seed:
``selection``, ``output-len``, ``request-seed``, ``arrival``, and those of the data sets.

Natural lengths of answers come from a result directory in which the baseline's model ended them itself. A longer
forced length makes the model go on after its end of sequence, where its tokens are arbitrary and say nothing about
real use; a shorter one cuts answers. Measured lengths avoid both, and every variant still does equal work.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from itertools import chain, count, islice
from pathlib import Path
from statistics import median_low
from typing import Final, TypeAlias

import msgspec

from benchctl.errors import DatasetError, ProfileError, UsageError
from benchctl.profile.arrival import Arrival, arrival_offsets_ns, trace_offsets_ns
from benchctl.profile.load import stored_profile
from benchctl.profile.model import Profile, Workload, most_of
from benchctl.profile.planning import variant_settings
from benchctl.profile.settings import is_load_factor, load_points, setting_of, under_load
from benchctl.records.directory import RequestSets, ResultDirectory, cell_name, open_results
from benchctl.records.files import encode
from benchctl.records.finish_reasons import is_cut, may_be_whole
from benchctl.records.loads import counting
from benchctl.records.record import PreparedRequest, RequestRecord, RequestSet
from benchctl.records.schema import Cell, ResultWarning
from benchctl.workload.datasets.base import (
    DATA_DIRECTORY_VARIABLE,
    Dataset,
    FileDataset,
    MadeDataset,
    OwnDataset,
    Prompt,
    Selection,
    TraceRow,
    data_directory,
    dataset_named,
    find_source,
    lap_ns,
    names_of_datasets,
)
from benchctl.workload.datasets.made import generated_prompts
from benchctl.workload.seeded import distinct_seeds, draw_lengths, named_stream
from benchctl.workload.tokenizers import Estimate, Tokenizer
from benchctl.workload.turns import as_conversations
from benchctl.workload.written_texts import counted_prompts

LENGTHS_KEY: Final = "workload.lengths_from"


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
            "loads_per_server": 1,
            "stopping": None,
            "stop": "natural",
            "variants": {profile.baseline: profile.variants[profile.baseline]},
            "sweep": {},
            "cells": (),
            "per_server": "fresh",
            "workload": profile.workload.model_copy(update={"prompts_per_slot": None}),
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
        raise ProfileError(f"{LENGTHS_KEY}: {error}") from error
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
        run = directory.read()
        # A run that is suspect for its times has still counted its tokens
        numbers = [load.number for load in counting(run.loads)] or [1] if run.state in {"done", "suspect"} else []
        for record in chain.from_iterable(directory.of_load(number).requests() for number in numbers):
            if (length := _length_of(record)) is not None:
                lengths.setdefault(record.request_id, []).append(length)
    return lengths


def _length_of(record: RequestRecord) -> tuple[int, bool] | None:
    # without a whole answer: failed by an older version's record, or ended for a reason that nobody knows
    is_whole = record.error is None and all(may_be_whole(choice.finish_reason) for choice in record.choices)
    if record.is_warmup or record.completion_tokens is None or not is_whole:
        return None
    return record.completion_tokens, any(is_cut(choice.finish_reason) for choice in record.choices)


def _typical(lengths: Sequence[tuple[int, bool]]) -> tuple[int, bool]:
    """The lower median over blocks, a measured length and never a mean of two, and whether a limit ended it.

    An answer without a token is forced to one.
    """
    typical = median_low(num_tokens for num_tokens, _ in lengths)
    return max(1, typical), any(was_cut for num_tokens, was_cut in lengths if num_tokens == typical)


def _refusal(path: Path, what: str, remedy: str) -> ProfileError:
    return ProfileError(f"{LENGTHS_KEY}: {path} {what}; {remedy}")


_HUB: Final = "huggingface"
_ESTIMATE: Final = Estimate()


@dataclass(frozen=True, kw_only=True)
class PreparedSet:
    """A request set, identified by the sha256 of the exact bytes of its JSON Lines."""

    content: bytes
    """Its JSON Lines: requests that are read from them one by one take no memory."""
    sha256: str
    dataset: str
    """The true source, for example ``gsm8k/test`` or ``generated``."""
    warnings: tuple[ResultWarning, ...] = ()
    lengths_from: str | None = None
    """Result directory in which the natural lengths were measured."""
    cell: Cell = field(default_factory=dict)
    """Load factors in which it differs from ``others``."""
    others: "tuple[PreparedSet, ...]" = ()
    """The sets of further load points."""

    @property
    def sets(self) -> RequestSets:
        """This set and the others in memory."""
        return RequestSets(tuple((each.cell, each.requests) for each in (self, *self.others)))

    @property
    def listed(self) -> tuple[RequestSet, ...]:
        """This set and the others as a manifest lists them; empty where there are none."""
        sets = enumerate((self, *self.others), start=1) if self.others else ()
        return tuple(
            RequestSet(cell=each.cell, file=f"requests{f'-{i}' if i > 1 else ''}.jsonl", sha256=each.sha256)
            for i, each in sets
        )

    @cached_property
    def requests(self) -> tuple[PreparedRequest, ...]:
        """All of it in memory."""
        return tuple(self)

    def __iter__(self) -> Iterator[PreparedRequest]:
        decode_lines, lines = msgspec.json.Decoder(PreparedRequest).decode_lines, BytesIO(self.content)
        while some := lines.readlines(1 << 16):
            yield from decode_lines(b"".join(some))


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLoad:
    """A trace without its texts, as columns for a million requests: arrivals from the beginning of the recording,
    ascending, and the tokens of each prompt and output.
    """

    arrival_ns: "array[int]"
    prompt_tokens: "array[int]"
    output_tokens: "array[int]"

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @classmethod
    def of(cls, rows: Iterable[TraceRow]) -> "RecordedLoad":
        """The load of all rows of a trace."""
        in_time = sorted(rows, key=lambda row: row.arrival_ns)
        return cls(
            arrival_ns=array("q", (row.arrival_ns for row in in_time)),
            prompt_tokens=array("q", (row.prompt_tokens for row in in_time)),
            output_tokens=array("q", (row.output_tokens for row in in_time)),
        )

    def repeated(self, count: int) -> "RecordedLoad":
        """The first ``count`` requests of the recording, which begins again behind its last arrival."""
        num_laps = -(-count // len(self))
        period_ns = lap_ns(self.arrival_ns[0], self.arrival_ns[-1], len(self))
        arrivals = chain.from_iterable(
            (arrival + lap * period_ns for arrival in self.arrival_ns) for lap in range(num_laps)
        )
        return RecordedLoad(
            arrival_ns=array("q", islice(arrivals, count)),
            prompt_tokens=(self.prompt_tokens * num_laps)[:count],
            output_tokens=(self.output_tokens * num_laps)[:count],
        )

    def faster(self, speedup: float) -> "RecordedLoad":
        """The same requests, arriving ``speedup`` times as fast."""
        arrivals = array("q", (round(arrival / speedup) for arrival in self.arrival_ns))
        return RecordedLoad(arrivals, self.prompt_tokens, self.output_tokens)


_Chosen: TypeAlias = tuple[str, Sequence[Prompt], tuple[ResultWarning, ...]]


def prepare_requests(
    profile: Profile,
    directory: Path | None = None,
    *,
    lengths_from: Path | None = None,
    tokenizer: Tokenizer = _ESTIMATE,
) -> PreparedSet:
    """Prepare the request sets of a profile, one for all load points that send the same requests at the same times;
    ``directory`` replaces the data directory.

    ``tokenizer`` counts the prompts as the server will. ``lengths_from`` is where natural lengths are read when the
    profile itself does not name a result directory. Raises DatasetError when the dataset cannot be had or is
    damaged, ProfileError when the profile asks for what the dataset or the natural lengths do not have.
    """
    if profile.workload.lengths_from is not None:
        lengths_from = Path(profile.workload.lengths_from)
    if lengths_from is None and needs_lengths(profile):
        raise ProfileError(
            f"stop is replay-natural, but {LENGTHS_KEY} names no result directory with the lengths of the answers; "
            "measure them with stop: natural, or let 'benchctl run' do it"
        )
    in_all = {"max_concurrency"} if profile.workload.prompts_per_slot is None else set()
    cells = dict[str, tuple[Cell, Cell]]()
    for point in load_points(profile):
        cell = {factor: value for factor, value in point.items() if setting_of(factor)[-1] not in in_all}
        cells.setdefault(cell_name(cell), (cell, point))
    first, *others = (
        replace(
            _prepare_set(under_load(profile, point), directory or data_directory(), lengths_from, tokenizer),
            cell=cell if len(cells) > 1 else {},
        )
        for cell, point in cells.values()
    )
    warnings = dict.fromkeys(chain(first.warnings, *(each.warnings for each in others)))
    return replace(first, warnings=tuple(warnings), others=tuple(others))


def _prepare_set(profile: Profile, directory: Path, lengths_from: Path | None, tokenizer: Tokenizer) -> PreparedSet:
    """The request set of one load point."""
    dataset, prompts, warnings = _choose_prompts(profile, directory, tokenizer)
    if profile.workload.arrival.kind == "trace":
        prompts = tuple(sorted(prompts, key=lambda prompt: prompt.arrival_ns or 0))
    requests: Iterable[PreparedRequest] = _requests(profile, prompts, tokenizer)
    if lengths_from is not None:
        requests, num_cut = with_natural_lengths(tuple(requests), lengths_from, profile)
        if num_cut:
            message = (
                f"{num_cut} of {len(requests)} natural lengths are those of answers that max_tokens cut, which "
                "would have been longer; raise workload.max_tokens where natural lengths are measured"
            )
            warnings = (*warnings, ResultWarning(code="natural-lengths-cut", message=message, where=LENGTHS_KEY))
    lines = BytesIO()
    lines.writelines(encode(request) + b"\n" for request in requests)
    content = lines.getvalue()
    return PreparedSet(
        content=content,
        sha256=hashlib.sha256(content).hexdigest(),
        dataset=dataset,
        warnings=warnings,
        lengths_from=None if lengths_from is None else str(lengths_from),
    )


def _choose_prompts(profile: Profile, directory: Path, tokenizer: Tokenizer) -> _Chosen:
    workload, seed = profile.workload, profile.seed
    dataset = dataset_named(workload.dataset)
    _refuse_unread_keys(workload, dataset)
    if isinstance(dataset, MadeDataset):
        return workload.dataset, dataset.make(workload, seed), ()
    if isinstance(dataset, OwnDataset):
        source = dataset.find(workload)
    elif (pinned := find_source(dataset.file, workload.path, directory)) is not None:
        source = pinned
    else:
        return _substitute(workload, dataset, seed, directory)
    selection = Selection(
        num_prompts=workload.num_prompts,
        method=workload.selection,
        seed=seed,
        repeats=workload.repeat,
        turns=1 if workload.turns is None else most_of(workload.turns.number),
    )
    return source.dataset, dataset.read(source, selection, tokenizer), ()


def _refuse_unread_keys(workload: Workload, dataset: Dataset) -> None:
    """Raise ProfileError for a key that the data set would leave unread: its author expects an effect."""
    is_own, is_made = isinstance(dataset, OwnDataset), isinstance(dataset, MadeDataset)
    needs_input_len = isinstance(dataset, MadeDataset) and dataset.needs_input_len
    not_made = names_of_datasets(lambda other: not isinstance(other, MadeDataset))
    own = names_of_datasets(lambda other: isinstance(other, OwnDataset))
    of_lengths = names_of_datasets(lambda other: isinstance(other, MadeDataset) and other.needs_input_len)
    of_hub = (_HUB,) if workload.dataset != _HUB else ()
    unread = (
        ("input_len", not needs_input_len, "whose prompts have their own lengths", of_lengths),
        ("prefix", not needs_input_len, "whose prompts have texts of their own", of_lengths),
        ("path", is_made, "which reads no file", not_made),
        ("columns", not is_own, "whose rows have a format of their own", own),
        ("revision", bool(of_hub), "which has none", of_hub),
        ("split", bool(of_hub), "which has none", of_hub),
    )
    for key, is_unread, why, others in unread:
        if is_unread and (value := getattr(workload, key)):
            raise ProfileError(
                f"workload.{key} is {value} with dataset {workload.dataset}, {why}; leave it out, or choose "
                f"dataset {' or '.join(others)}"
            )


def _substitute(workload: Workload, dataset: FileDataset, seed: int, directory: Path) -> _Chosen:
    """Generated prompts in place of a missing dataset, if the profile and the dataset allow it."""
    file = dataset.file
    remedy = (
        f"get it with 'benchctl data fetch {file.name}', set {DATA_DIRECTORY_VARIABLE} to a directory that has "
        f"{file.folder}/{file.filename}, or name a file in workload.path"
    )
    if workload.on_missing_dataset == "fail" or not dataset.is_replaceable or workload.turns is not None:
        raise DatasetError(f"dataset {file.name} is not at {file.path_in(directory)}; {remedy}")
    warning = ResultWarning(
        code="dataset-substituted",
        message=(
            f"dataset {file.name} is not on this machine: generated word problems replace it, and the numbers "
            f"say nothing about {file.name}; {remedy}"
        ),
        where="workload.dataset",
    )
    return "generated", generated_prompts(workload.num_prompts, seed), (warning,)


def _requests(profile: Profile, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Iterator[PreparedRequest]:
    workload = profile.workload
    as_one = workload.samples_as == "one-request"
    copies = 1 if as_one else workload.samples_per_prompt
    offsets, offset_ns = iter(_offsets_ns(workload.arrival, prompts, copies, profile.seed)), 0
    turns, limits = workload.turns, _max_tokens(profile, prompts)
    seeds = distinct_seeds(named_stream(profile.seed, "request-seed"))
    indices = count()
    written = counted_prompts(prompts, tokenizer, chat=workload.chat or turns is not None)
    pairs = (
        zip(written, limits, strict=True)
        if turns is None
        else as_conversations(written, limits, turns, tokenizer, profile.seed)
    )
    for prompt, max_tokens in pairs:
        for sample in range(copies):
            offset_ns = offset_ns if prompt.turn else next(offsets)
            yield PreparedRequest(
                request_id=prompt.prompt_id if copies == 1 else f"{prompt.prompt_id}-s{sample:02d}",
                index=next(indices),
                arrival_ns=offset_ns,
                messages=prompt.messages,
                prompt=prompt.text,
                prompt_tokens=prompt.num_tokens or 0,
                prompt_tokens_from=tokenizer.source,
                max_tokens=max_tokens,
                ignore_eos=profile.stop != "natural",
                n=workload.samples_per_prompt if as_one else 1,
                seed=next(seeds),
                source=prompt.source,
                sample=sample,
                answer=prompt.answer,
                session=prompt.session,
                turn=None if turns is None else prompt.turn,
                think_ns=prompt.think_ns,
                shared_tokens=prompt.shared,
                shared_chars=prompt.shared_chars,
            )


def _offsets_ns(arrival: Arrival, prompts: Sequence[Prompt], copies: int, seed: int) -> tuple[int, ...]:
    """Arrival of each request; the samples of a prompt share its recorded arrival."""
    if arrival.kind != "trace":
        return arrival_offsets_ns(arrival, len(prompts) * copies, named_stream(seed, "arrival"))
    recorded = [prompt.arrival_ns for prompt in prompts if prompt.arrival_ns is not None]
    if len(recorded) < len(prompts):
        without = next(prompt.source for prompt in prompts if prompt.arrival_ns is None)
        raise ProfileError(
            f"workload.arrival.kind is trace, but {without} has no recorded arrival; choose dataset "
            f"{' or '.join(_names_of_traces())}, a custom one with timestamps, or another kind of arrival "
            "such as poisson with a request_rate"
        )
    return tuple(offset for offset in trace_offsets_ns(recorded, arrival.speedup) for _ in range(copies))


def _max_tokens(profile: Profile, prompts: Sequence[Prompt]) -> tuple[int, ...]:
    """Output limit of each prompt, the same for all its samples so that both ways of sampling ask equal work."""
    workload = profile.workload
    if profile.stop != "forced":
        return (workload.max_tokens,) * len(prompts)
    if workload.output_len is not None:
        stream = named_stream(profile.seed, "output-len")
        return tuple(islice(draw_lengths(workload.output_len, stream), len(prompts)))
    recorded = tuple(prompt.output_tokens for prompt in prompts if prompt.output_tokens is not None)
    if len(recorded) < len(prompts):
        source = prompts[0].source.partition(":")[0]
        if source == "generated" != workload.dataset:
            source = f"generated, in place of the missing {workload.dataset},"
        without = next(prompt.source for prompt in prompts if prompt.output_tokens is None)
        raise ProfileError(
            f"stop is forced, but the prompts of {source} have no output lengths of their own (the first without: "
            f"{without}); set workload.output_len, or stop: natural"
        )
    return recorded


def recorded_load(profile: Profile, directory: Path | None = None) -> RecordedLoad:
    """Arrivals and lengths of the first ``num_prompts`` requests of the profile's trace, repeated and scaled as the
    profile says, without texts.

    Raises ProfileError where the profile asks for anything but a trace with its own lengths and arrivals, and
    DatasetError where the file is not there or too short.
    """
    workload, dataset = profile.workload, dataset_named(profile.workload.dataset)
    if not isinstance(dataset, FileDataset) or dataset.read_trace is None or workload.arrival.kind != "trace":
        raise ProfileError(
            f"workload.dataset is {workload.dataset} with arrival {workload.arrival.kind}: only summaries of "
            f"a trace can be kept; take {' or '.join(_names_of_traces())} with arrival.kind trace, or keep the "
            "requests"
        )
    of_replay = (
        ("samples_per_prompt", workload.samples_per_prompt, 1),
        ("selection", workload.selection, "first"),
        ("output_len", workload.output_len, None),
        ("stop", profile.stop, "forced"),
        ("load factors", ", ".join(filter(is_load_factor, profile.sweep)), ""),
    )
    if changed := [f"{key} {value}" for key, value, plain in of_replay if value != plain]:
        raise ProfileError(f"{', '.join(changed)}: a trace of which only summaries are kept is replayed as it is")
    source = find_source(dataset.file, workload.path, directory or data_directory())
    if source is None:
        raise DatasetError(
            f"dataset {dataset.file.name} is not on this machine; get it with 'benchctl data fetch "
            f"{dataset.file.name}', or set {DATA_DIRECTORY_VARIABLE}"
        )
    load = RecordedLoad.of(dataset.read_trace(source))
    if len(load) < workload.num_prompts and not workload.repeat:
        raise DatasetError(
            f"{source.path}: {workload.num_prompts} requests are asked for, and it has {len(load)}; lower "
            "workload.num_prompts, or set workload.repeat"
        )
    return load.repeated(workload.num_prompts).faster(workload.arrival.speedup)


def _names_of_traces() -> tuple[str, ...]:
    return names_of_datasets(lambda dataset: isinstance(dataset, FileDataset) and dataset.read_trace is not None)
