"""The prepared request set: prompts, limits and arrivals, the same bytes for the same profile and seed."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, TypeAlias

from benchctl.errors import DatasetError, ProfileError
from benchctl.profile.model import Arrival, Profile, Workload
from benchctl.records.files import encode
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import ResultWarning
from benchctl.workload.arrival import arrival_offsets_ns, trace_offsets_ns
from benchctl.workload.datasets.base import (
    DATA_DIRECTORY_VARIABLE,
    Dataset,
    FileDataset,
    MadeDataset,
    OwnDataset,
    Prompt,
    RecordedLoad,
    Selection,
    data_directory,
    dataset_named,
    find_source,
    names_of_datasets,
)
from benchctl.workload.datasets.made.generated import generated_prompts
from benchctl.workload.natural_lengths import KEY as LENGTHS_KEY
from benchctl.workload.natural_lengths import natural_lengths, needs_lengths, with_lengths
from benchctl.workload.seeded import distinct_seeds, draw_lengths, named_stream
from benchctl.workload.tokenizers import Estimate, Tokenizer
from benchctl.workload.written_texts import counted_prompts

_HUB: Final = "huggingface"


def refuse_unread_keys(workload: Workload, dataset: Dataset) -> None:
    """Raise ProfileError for a key that the dataset does not read."""
    _refuse_lengths(workload, dataset)
    if workload.path is not None and isinstance(dataset, MadeDataset):
        names = names_of_datasets(lambda other: not isinstance(other, MadeDataset))
        raise ProfileError(
            f"workload.path is {workload.path}, but dataset {workload.dataset} reads no file; leave it out, or "
            f"choose one of {', '.join(names)}"
        )
    if workload.columns and not isinstance(dataset, OwnDataset):
        names = names_of_datasets(lambda other: isinstance(other, OwnDataset))
        raise ProfileError(
            f"workload.columns is {workload.columns}, but rows of {workload.dataset} have a format of their own; "
            f"leave it out, or choose one of {', '.join(names)}"
        )
    for key in ("revision", "split"):
        if (value := getattr(workload, key)) is not None and workload.dataset != _HUB:
            raise ProfileError(
                f"workload.{key} is {value} with dataset {workload.dataset}, which has none; leave it out, or "
                f"choose dataset {_HUB}"
            )


def _refuse_lengths(workload: Workload, dataset: Dataset) -> None:
    needs_input_len = isinstance(dataset, MadeDataset) and dataset.needs_input_len
    if workload.input_len is not None and not needs_input_len:
        names = names_of_datasets(lambda other: isinstance(other, MadeDataset) and other.needs_input_len)
        raise ProfileError(
            f"workload.input_len is {workload.input_len} with dataset {workload.dataset}, whose prompts have their "
            f"own lengths; set it to null, or choose dataset {' or '.join(names)}"
        )


_ESTIMATE: Final = Estimate()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSet:
    """A request set, and the exact bytes of its JSON Lines whose sha256 identifies it."""

    requests: tuple[PreparedRequest, ...]
    content: bytes
    sha256: str
    dataset: str
    """The true source, for example ``gsm8k/test`` or ``generated``."""
    warnings: tuple[ResultWarning, ...] = ()
    lengths_from: str | None = None
    """Result directory in which the natural lengths were measured."""


_Chosen: TypeAlias = tuple[str, tuple[Prompt, ...], tuple[ResultWarning, ...]]


def prepare_requests(
    profile: Profile,
    directory: Path | None = None,
    *,
    lengths_from: Path | None = None,
    tokenizer: Tokenizer = _ESTIMATE,
) -> PreparedSet:
    """Prepare the request set of a profile; ``directory`` replaces the data directory.

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
    dataset, prompts, warnings = _choose_prompts(profile, directory or data_directory(), tokenizer)
    if profile.workload.arrival.kind == "trace":
        prompts = tuple(sorted(prompts, key=lambda prompt: prompt.arrival_ns or 0))
    requests = tuple(_requests(profile, prompts, tokenizer))
    if lengths_from is not None:
        lengths = natural_lengths(lengths_from, profile, requests)
        is_forced_to = profile.stop == "replay-natural"
        requests = tuple(with_lengths(requests, lengths, is_forced_to=is_forced_to))
        warnings = (*warnings, *_cut_lengths(sum(length.is_cut for length in lengths), len(lengths)))
    content = b"".join(encode(request) + b"\n" for request in requests)
    return PreparedSet(
        requests=requests,
        content=content,
        sha256=hashlib.sha256(content).hexdigest(),
        dataset=dataset,
        warnings=warnings,
        lengths_from=None if lengths_from is None else str(lengths_from),
    )


def _cut_lengths(num_cut: int, num_lengths: int) -> tuple[ResultWarning, ...]:
    """A warning if a limit ended answers, whose natural lengths are then longer."""
    if not num_cut:
        return ()
    message = (
        f"{num_cut} of {num_lengths} natural lengths are those of answers that max_tokens cut, which would have "
        "been longer; raise workload.max_tokens where natural lengths are measured"
    )
    return (ResultWarning(code="natural-lengths-cut", message=message, where=LENGTHS_KEY),)


def _choose_prompts(profile: Profile, directory: Path, tokenizer: Tokenizer) -> _Chosen:
    workload, seed = profile.workload, profile.seed
    dataset = dataset_named(workload.dataset)
    refuse_unread_keys(workload, dataset)
    if isinstance(dataset, MadeDataset):
        return workload.dataset, dataset.make(workload, seed), ()
    if isinstance(dataset, OwnDataset):
        source = dataset.find(workload)
    elif (pinned := find_source(dataset.file, workload.path, directory)) is not None:
        source = pinned
    else:
        return _substitute(workload, dataset, seed, directory)
    selection = Selection(
        num_prompts=workload.num_prompts, method=workload.selection, seed=seed, repeats=workload.repeat
    )
    return source.dataset, dataset.read(source, selection, tokenizer), ()


def _substitute(workload: Workload, dataset: FileDataset, seed: int, directory: Path) -> _Chosen:
    """Generated prompts in place of a missing dataset, if the profile and the dataset allow it."""
    file = dataset.file
    remedy = (
        f"get it with 'benchctl data fetch {file.name}', set {DATA_DIRECTORY_VARIABLE} to a directory that has "
        f"{file.folder}/{file.filename}, or name a file in workload.path"
    )
    if workload.on_missing_dataset == "fail" or not dataset.is_replaceable:
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


def _requests(profile: Profile, prompts: tuple[Prompt, ...], tokenizer: Tokenizer) -> Iterator[PreparedRequest]:
    workload = profile.workload
    counted = counted_prompts(prompts, tokenizer, chat=workload.chat)
    as_one = workload.samples_as == "one-request"
    copies = 1 if as_one else workload.samples_per_prompt
    offsets = _offsets_ns(workload.arrival, prompts, copies, profile.seed)
    limits = _max_tokens(profile, prompts)
    seeds = distinct_seeds(named_stream(profile.seed, "request-seed"))
    for i, prompt in enumerate(prompts):
        for sample in range(copies):
            index = i * copies + sample
            yield PreparedRequest(
                request_id=prompt.prompt_id if copies == 1 else f"{prompt.prompt_id}-s{sample:02d}",
                index=index,
                arrival_ns=offsets[index],
                messages=counted[i].messages,
                prompt=counted[i].text,
                prompt_tokens=counted[i].num_tokens,
                prompt_tokens_from=tokenizer.source,
                max_tokens=limits[i],
                ignore_eos=profile.stop != "natural",
                n=workload.samples_per_prompt if as_one else 1,
                seed=next(seeds),
                source=prompt.source,
                sample=sample,
                answer=prompt.answer,
                session=prompt.session,
            )


def _offsets_ns(arrival: Arrival, prompts: tuple[Prompt, ...], copies: int, seed: int) -> tuple[int, ...]:
    """Arrival of each request; the samples of a prompt share its recorded arrival."""
    if arrival.kind != "trace":
        return arrival_offsets_ns(arrival, len(prompts) * copies, seed)
    recorded = [prompt.arrival_ns for prompt in prompts if prompt.arrival_ns is not None]
    if len(recorded) < len(prompts):
        traces = names_of_datasets(lambda dataset: isinstance(dataset, FileDataset) and dataset.has_arrivals)
        without = next(prompt.source for prompt in prompts if prompt.arrival_ns is None)
        raise ProfileError(
            f"workload.arrival.kind is trace, but {without} has no recorded arrival; choose dataset "
            f"{' or '.join(traces)}, a custom one with timestamps, or another kind of arrival such as poisson with "
            "a request_rate"
        )
    return tuple(offset for offset in trace_offsets_ns(recorded, arrival.speedup) for _ in range(copies))


def _max_tokens(profile: Profile, prompts: tuple[Prompt, ...]) -> tuple[int, ...]:
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
    """Arrivals and lengths of the first ``num_prompts`` requests of the profile's trace.

    Raises ProfileError where the profile asks for anything but a trace with its own lengths and arrivals, and
    DatasetError where the file is not there or too short.
    """
    workload, dataset = profile.workload, dataset_named(profile.workload.dataset)
    if not isinstance(dataset, FileDataset) or dataset.read_lengths is None or workload.arrival.kind != "trace":
        names = names_of_datasets(lambda each: isinstance(each, FileDataset) and each.read_lengths is not None)
        raise ProfileError(
            f"workload.dataset is {workload.dataset} with arrival {workload.arrival.kind}: only summaries of "
            f"a trace can be kept; take {' or '.join(names)} with arrival.kind trace, or keep the requests"
        )
    odd = {"samples_per_prompt": 1, "selection": "first", "output_len": None}
    changed = [f"{key} {getattr(workload, key)}" for key, plain in odd.items() if getattr(workload, key) != plain]
    if profile.stop != "forced":
        changed.append(f"stop {profile.stop}")
    if changed:
        raise ProfileError(f"{', '.join(changed)}: a trace of which only summaries are kept is replayed as it is")
    source = find_source(dataset.file, workload.path, directory or data_directory())
    if source is None:
        raise DatasetError(
            f"dataset {dataset.file.name} is not on this machine; get it with 'benchctl data fetch "
            f"{dataset.file.name}', or set {DATA_DIRECTORY_VARIABLE}"
        )
    load = dataset.read_lengths(source)
    if len(load) < workload.num_prompts and not workload.repeat:
        raise DatasetError(
            f"{source.path}: {workload.num_prompts} requests are asked for, and it has {len(load)}; lower "
            "workload.num_prompts, or set workload.repeat"
        )
    return load.repeated(workload.num_prompts).faster(workload.arrival.speedup)
