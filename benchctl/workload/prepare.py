"""The prepared request set: what will be asked and when, the same bytes for the same profile and seed.

Nothing of paths, hosts or time goes in. Random choices come from named streams of the profile's seed:
``selection``, ``output-len``, ``request-seed``, ``arrival``, and those of the datasets.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from benchctl.errors import DatasetError, ProfileError
from benchctl.profile.model import Profile
from benchctl.profile.workload import Arrival, Workload
from benchctl.records.jsonl import encode
from benchctl.records.run import PreparedRequest, ResultWarning
from benchctl.workload.arrival import arrival_offsets_ns, trace_offsets_ns
from benchctl.workload.datasets.azure import azure_prompts
from benchctl.workload.datasets.files import DATA_DIRECTORY_VARIABLE, data_directory, dataset_file, find_source
from benchctl.workload.datasets.generated import generated_prompts
from benchctl.workload.datasets.gsm8k import gsm8k_prompts
from benchctl.workload.datasets.prompt import Prompt, Selection, SourceFile
from benchctl.workload.datasets.replay import replay_prompts
from benchctl.workload.datasets.sharegpt import sharegpt_prompts
from benchctl.workload.datasets.synthetic import synthetic_prompts
from benchctl.workload.length import draw_length
from benchctl.workload.natural_lengths import KEY as LENGTHS_KEY
from benchctl.workload.natural_lengths import natural_lengths, needs_lengths, with_lengths
from benchctl.workload.stream import named_stream

_READERS: Final[dict[str, Callable[[SourceFile, Selection], tuple[Prompt, ...]]]] = {
    "gsm8k": gsm8k_prompts,
    "sharegpt": sharegpt_prompts,
    "sharegpt-replay": replay_prompts,
    "azure-trace": azure_prompts,
}
_REPLACEABLE: Final = {"gsm8k", "sharegpt"}
"""Datasets for which a generated set may step in; a recorded trace has no equal."""
_SEED_BITS: Final = 31
"""Every engine takes a seed of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSet:
    """A request set, and the exact bytes of its JSON Lines whose sha256 identifies it."""

    requests: tuple[PreparedRequest, ...]
    content: bytes
    sha256: str
    dataset: str
    """What it was truly made from, for example ``gsm8k/test`` or ``generated``."""
    warnings: tuple[ResultWarning, ...] = ()
    lengths_from: str | None = None
    """Result directory in which the natural lengths were measured."""


_Chosen: TypeAlias = tuple[str, tuple[Prompt, ...], tuple[ResultWarning, ...]]


def prepare_requests(
    profile: Profile, directory: Path | None = None, *, lengths_from: Path | None = None
) -> PreparedSet:
    """Prepare the request set of a profile; ``directory`` stands in for the data directory.

    ``lengths_from`` is where natural lengths are read when the profile itself does not name a result directory.
    Raises DatasetError when the dataset cannot be had or is damaged, ProfileError when the profile asks for
    what the dataset or the natural lengths do not have.
    """
    if profile.workload.lengths_from is not None:
        lengths_from = Path(profile.workload.lengths_from)
    if lengths_from is None and needs_lengths(profile):
        raise ProfileError(
            f"stop is forced-natural, but {LENGTHS_KEY} names no result directory with the lengths of the answers; "
            "measure them with stop: natural, or let 'benchctl run' do it"
        )
    dataset, prompts, warnings = _choose_prompts(profile, directory or data_directory())
    if profile.workload.arrival.kind == "trace":
        prompts = tuple(sorted(prompts, key=lambda prompt: prompt.arrival_ns or 0))
    requests = tuple(_requests(profile, prompts))
    if lengths_from is not None:
        lengths = natural_lengths(lengths_from, profile, requests)
        is_forced_to = profile.stop == "forced-natural"
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
    """The doubt that natural lengths are none, because a limit ended the answers."""
    if not num_cut:
        return ()
    message = (
        f"{num_cut} of {num_lengths} natural lengths are those of answers that max_tokens cut, which would have "
        "been longer; raise workload.max_tokens where natural lengths are measured"
    )
    return (ResultWarning(code="natural-lengths-cut", message=message, where=LENGTHS_KEY),)


def _choose_prompts(profile: Profile, directory: Path) -> _Chosen:
    workload, seed = profile.workload, profile.seed
    _check_keys_apply(workload)
    if workload.input_len is not None:
        return "synthetic", synthetic_prompts(workload.input_len, workload.num_prompts, seed), ()
    if workload.dataset == "generated":
        return "generated", generated_prompts(workload.num_prompts, seed), ()
    source = find_source(workload.dataset, workload.path, directory)
    if source is None:
        return _substitute(workload, seed, directory)
    selection = Selection(num_prompts=workload.num_prompts, method=workload.selection, seed=seed)
    return source.dataset, _READERS[workload.dataset](source, selection), ()


def _check_keys_apply(workload: Workload) -> None:
    """Refuse keys that the dataset would leave unread: whoever wrote them expects an effect."""
    if (workload.input_len is not None) != (workload.dataset == "synthetic"):
        length = "null" if workload.input_len is None else workload.input_len
        raise ProfileError(
            f"workload.input_len is {length} with dataset {workload.dataset}; dataset synthetic needs it, the "
            "others have their own prompts: set it for synthetic, and to null for the others"
        )
    if workload.path is not None and workload.dataset not in _READERS:
        raise ProfileError(
            f"workload.path is {workload.path}, but dataset {workload.dataset} reads no file; leave it out, or "
            f"choose one of {', '.join(_READERS)}"
        )


def _substitute(workload: Workload, seed: int, directory: Path) -> _Chosen:
    """Let a generated set step in for a missing dataset where that is allowed."""
    file = dataset_file(workload.dataset)
    remedy = (
        f"get it with 'benchctl data fetch {file.name}', set {DATA_DIRECTORY_VARIABLE} to a directory that has "
        f"{file.folder}/{file.filename}, or name a file in workload.path"
    )
    if workload.on_missing_dataset == "fail" or workload.dataset not in _REPLACEABLE:
        raise DatasetError(f"dataset {file.name} is not at {file.path_in(directory)}; {remedy}")
    warning = ResultWarning(
        code="dataset-substituted",
        message=(
            f"dataset {file.name} is not on this machine: generated word problems stand in for it, and the numbers "
            f"say nothing about {file.name}; {remedy}"
        ),
        where="workload.dataset",
    )
    return "generated", generated_prompts(workload.num_prompts, seed), (warning,)


def _requests(profile: Profile, prompts: tuple[Prompt, ...]) -> Iterator[PreparedRequest]:
    workload = profile.workload
    as_one = workload.samples_as == "one-request"
    copies = 1 if as_one else workload.samples_per_prompt
    offsets = _offsets_ns(workload.arrival, prompts, copies, profile.seed)
    limits = _max_tokens(profile, prompts)
    seeds = _distinct_seeds(profile.seed)
    for i, prompt in enumerate(prompts):
        for sample in range(copies):
            index = i * copies + sample
            yield PreparedRequest(
                request_id=prompt.prompt_id if copies == 1 else f"{prompt.prompt_id}-s{sample:02d}",
                index=index,
                arrival_ns=offsets[index],
                messages=prompt.messages,
                prompt=prompt.text,
                prompt_tokens=prompt.prompt_tokens,
                max_tokens=limits[i],
                ignore_eos=profile.stop != "natural",
                n=workload.samples_per_prompt if as_one else 1,
                seed=next(seeds),
                source=prompt.source,
                sample=sample,
                answer=prompt.answer,
            )


def _offsets_ns(arrival: Arrival, prompts: tuple[Prompt, ...], copies: int, seed: int) -> tuple[int, ...]:
    """Arrival of each request; the samples of a prompt share its recorded arrival."""
    if arrival.kind != "trace":
        return arrival_offsets_ns(arrival, len(prompts) * copies, seed)
    recorded = [prompt.arrival_ns for prompt in prompts if prompt.arrival_ns is not None]
    if len(recorded) < len(prompts):
        raise ProfileError(
            "workload.arrival.kind is trace, but the dataset has no recorded arrivals; choose dataset "
            "sharegpt-replay or azure-trace, or another kind of arrival such as poisson with a request_rate"
        )
    return tuple(offset for offset in trace_offsets_ns(recorded, arrival.speedup) for _ in range(copies))


def _max_tokens(profile: Profile, prompts: tuple[Prompt, ...]) -> tuple[int, ...]:
    """Output limit of each prompt, the same for all its samples so that both ways of sampling ask equal work."""
    workload = profile.workload
    if profile.stop != "forced":
        return (workload.max_tokens,) * len(prompts)
    if workload.output_len is not None:
        stream = named_stream(profile.seed, "output-len")
        return tuple(draw_length(workload.output_len, stream) for _ in prompts)
    recorded = tuple(prompt.output_tokens for prompt in prompts if prompt.output_tokens is not None)
    if len(recorded) < len(prompts):
        source = prompts[0].source.partition(":")[0]
        if source == "generated" != workload.dataset:
            source = f"generated, in place of the missing {workload.dataset},"
        raise ProfileError(
            f"stop is forced, but the prompts of {source} have no output lengths of their own; "
            "set workload.output_len, or stop: natural"
        )
    return recorded


def _distinct_seeds(seed: int) -> Iterator[int]:
    """One seed for each request, none twice: equal seeds would give equal samples of a prompt."""
    stream = named_stream(seed, "request-seed")
    used: set[int] = set()
    while True:
        drawn = stream.getrandbits(_SEED_BITS)
        if drawn not in used:
            used.add(drawn)
            yield drawn
