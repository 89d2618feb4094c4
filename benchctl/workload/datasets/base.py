"""Data sets: each is read from a published file or one of the user's own, or made from the seed of the profile.

``published.py``, ``own.py`` and ``made.py`` have a table ``DATASETS`` each; ``benchctl/profile/choices.py`` says
which of them has which name. A data set turns rows into prompts, ``prepare`` turns prompts into requests.

Files lie in the data directory, $BENCHCTL_DATA_DIR or the user's cache directory, as ``<folder>/<filename>``.
Addresses name a revision, so their content never changes.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
import platformdirs

from benchctl.errors import DatasetError
from benchctl.profile.choices import DATASETS
from benchctl.profile.files import profile_directories
from benchctl.profile.model import Workload
from benchctl.records.record import Message
from benchctl.untrusted import PROMPT_TOKENS, ROWS_BYTES
from benchctl.untrusted.files import DECODING_ERRORS, UnreadableError, decoding_problem, read_bytes, read_lines
from benchctl.workload.seeded import blocks_problem, named_stream, numbers_of_blocks
from benchctl.workload.tokenizers import Tokenizer

DATA_DIRECTORY_VARIABLE: Final = "BENCHCTL_DATA_DIR"
_REMEDIES: Final = {
    "llm-mock-served.jsonl": "the commands under 'The cache' in docs/tasks/llm-mock.md make it in this directory"
}
"""The remedy for files that a profile of benchctl names and does not bring."""
_FETCH_AGAIN: Final = (
    "the file is damaged or of another format: fetch it again with 'benchctl data fetch', or correct workload.path"
)
FileState: TypeAlias = Literal["present", "missing", "damaged"]
Length: TypeAlias = Annotated[int, msgspec.Meta(le=PROMPT_TOKENS)]
"""Tokens of a prompt or an output."""
R = TypeVar("R")


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with everything that its data set records.

    Exactly one of ``messages``, ``text`` and ``token_numbers`` is set; ``token_numbers`` has a number for each
    token of a text that is to be written, equal numbers for equal tokens. ``num_tokens`` are those of ``text`` by
    the tokenizer of the request set, where the data set had to count them. ``output_tokens`` and ``arrival_ns``,
    from the beginning of the data set, are recorded ones. ``session`` names the conversation of which the prompt is
    a turn; ``turn`` is its position, from 0, where turns are sent in order, ``reply`` the recorded answer, and
    ``think_ns`` the time until a user has thought. ``later`` are the turns behind a first one.
    ``shared`` tokens at its beginning are in a prefix cache by plan; of a written text ``shared_chars`` are these.
    """

    prompt_id: str
    """Stable over selections and sizes, for example ``gsm8k-00017``."""
    source: str
    """Data set and row, for example ``gsm8k/test:17``; rows count from 0."""
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    num_tokens: int | None = None
    token_numbers: tuple[int, ...] | None = None
    output_tokens: int | None = None
    answer: str | None = None
    arrival_ns: int | None = None
    session: str | None = None
    turn: int = 0
    think_ns: int = 0
    reply: str | None = None
    later: "tuple[Prompt, ...]" = ()
    shared: int = 0
    shared_chars: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """One published file, pinned by its sha256.

    ``name`` is that of ``workload.dataset``, ``label`` the source that a request set made from it records.
    """

    name: str
    label: str
    folder: str
    filename: str
    url: str
    sha256: str
    size_bytes: int
    licence: str
    source_page: str

    def path_in(self, directory: Path) -> Path:
        """Its location in a data directory."""
        return directory / self.folder / self.filename


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of a data set on this machine.

    ``kind`` is the data set as profiles name it, ``dataset`` its true source, without a path. ``more_paths`` are
    files with the rows behind those of ``path``. ``columns`` has the column of the file for each field of a custom
    row that is not called as the field.
    """

    path: Path
    kind: str
    dataset: str
    more_paths: tuple[Path, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selection of rows: the first in file order, or a seeded sample.

    ``repeats``: begin again where there are fewer rows. ``turns``: of a conversation at most so many, with 1
    single prompts. Law: more prompts extend the same selection.
    """

    num_prompts: int
    method: Literal["first", "sample"]
    seed: int
    repeats: bool = False
    turns: int = 1

    def row_order(self, num_rows: int) -> Sequence[int]:
        """Rows in the order in which they are considered."""
        if self.method == "first":
            return range(num_rows)
        order = list(range(num_rows))
        named_stream(self.seed, "selection").shuffle(order)
        return order

    def take(self, prompts: Iterable[Prompt], file: SourceFile) -> tuple[Prompt, ...]:
        """The first ``num_prompts`` of ``prompts``, which are drawn only as far as needed.

        Raises DatasetError when there are fewer.
        """
        selected = tuple(islice(prompts, self.num_prompts))
        if len(selected) == self.num_prompts:
            return selected
        if self.repeats and selected:
            return tuple(islice(_laps(selected), self.num_prompts))
        fewer = (
            f"set workload.num_prompts to at most {len(selected)}, begin again with workload.repeat, or take "
            "several samples of each prompt with workload.samples_per_prompt"
        )
        raise DatasetError(
            f"{file.path}: {self.num_prompts} prompts are asked for, but {file.kind} has only {len(selected)} "
            f"usable rows; {fewer if selected else 'correct its rows, or name another file'}"
        )


def _laps(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """The prompts again and again; those of later laps have names of their own and later arrivals."""
    yield from prompts
    arrivals = [prompt.arrival_ns for prompt in prompts if prompt.arrival_ns is not None]
    period_ns = lap_ns(min(arrivals), max(arrivals), len(arrivals)) if arrivals else 0
    for lap in count(1):
        for prompt in prompts:
            arrival_ns = None if prompt.arrival_ns is None else prompt.arrival_ns + lap * period_ns
            yield msgspec.structs.replace(
                prompt, prompt_id=f"{prompt.prompt_id}-lap{lap:02d}", arrival_ns=arrival_ns
            )


def lap_ns(first_ns: int, last_ns: int, num_arrivals: int) -> int:
    """Time after which a recording begins again: its length and one mean gap."""
    return last_ns - first_ns + (last_ns - first_ns) // max(num_arrivals - 1, 1)


Reader: TypeAlias = Callable[[SourceFile, Selection, Tokenizer], tuple[Prompt, ...]]
"""Takes the tokenizer for rules on lengths; prompts need no count here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDataset:
    """A published file, and the reader of its prompts.

    ``meaning`` is one sentence on the prompts. ``has_output_lengths``: each prompt has the length of its output.
    ``read_trace``: of a recorded trace, its rows, with arrivals as ``arrival.kind: trace`` needs them.
    ``is_replaceable``: generated prompts may replace a missing file; a recorded trace has no equal.
    """

    meaning: str
    file: DatasetFile
    read: Reader
    read_trace: "Callable[[SourceFile], list[TraceRow]] | None" = None
    has_output_lengths: bool = False
    is_replaceable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDataset:
    """Rows of the user's own, which ``workload.path`` names; they may have arrivals and lengths of outputs."""

    meaning: str
    find: Callable[[Workload], SourceFile]
    read: Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeDataset:
    """Prompts made from a seed, without a file.

    ``make`` takes the workload, for its ``num_prompts`` and lengths, and the seed of the profile.
    ``needs_input_len``: ``workload.input_len`` must be set; for all other data sets it must not.
    """

    meaning: str
    make: Callable[[Workload, int], Sequence[Prompt]]
    needs_input_len: bool = False


Dataset: TypeAlias = FileDataset | OwnDataset | MadeDataset


def dataset_named(name: str) -> Dataset:
    """The data set of a name in ``DATASETS``."""
    dataset: Dataset = import_module(DATASETS[name]).DATASETS[name]
    return dataset


def names_of_datasets(accepts: Callable[[Dataset], bool]) -> tuple[str, ...]:
    """Names of the data sets that ``accepts`` holds for, in the order of ``DATASETS``."""
    return tuple(name for name in DATASETS if accepts(dataset_named(name)))


@cache
def dataset_files() -> dict[str, DatasetFile]:
    """The published file of each data set that has one, by name."""
    datasets = {name: dataset_named(name) for name in DATASETS}
    return {name: dataset.file for name, dataset in datasets.items() if isinstance(dataset, FileDataset)}


def dataset_file(name: str) -> DatasetFile:
    """The published file of a data set. Raises DatasetError for a name without one."""
    files = dataset_files()
    if name not in files:
        raise DatasetError(f"{name!r} is not a dataset with a file; choose one of {', '.join(files)}")
    return files[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One recorded request; ``arrival_ns`` counts from the beginning of the recording.

    Of its prompt either ``token_ids`` are recorded, or ``block_ids``, one for each block of 512 tokens begun: a
    prompt that has the ids of another has its tokens.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    token_ids: tuple[int, ...] | None = None
    block_ids: tuple[int, ...] = ()


def checked_trace(file: SourceFile, numbered: Iterable[tuple[int, TraceRow]]) -> list[TraceRow]:
    """The rows of a trace, given with their lines. Raises DatasetError for one that cannot be."""
    rows = []
    for number, row in numbered:
        lengths = (row.prompt_tokens, row.output_tokens)
        problem = blocks_problem(row.block_ids, row.prompt_tokens)
        if not 1 <= min(lengths) <= max(lengths) <= PROMPT_TOKENS:
            problem = f"lengths are {lengths[0]} and {lengths[1]} tokens; each must be from 1 to {PROMPT_TOKENS}"
        elif row.arrival_ns < 0:
            problem = "its arrival is before the beginning of the recording"
        if problem is not None:
            raise damaged_row(file.path, number, problem)
        rows.append(row)
    return rows


def prompts_of_trace(rows: Sequence[TraceRow], file: SourceFile, selection: Selection) -> tuple[Prompt, ...]:
    """The selected requests of a trace, whose texts are to be written."""
    prompts = (
        Prompt(
            prompt_id=f"{file.kind}-{i:05d}",
            source=f"{file.dataset}:{i}",
            token_numbers=rows[i].token_ids
            or numbers_of_blocks(rows[i].block_ids, rows[i].prompt_tokens, i, selection.seed),
            output_tokens=rows[i].output_tokens,
            arrival_ns=rows[i].arrival_ns,
        )
        for i in selection.row_order(len(rows))
    )
    return selection.take(prompts, file)


def data_directory() -> Path:
    """$BENCHCTL_DATA_DIR, or ``data`` in the user's cache directory of benchctl."""
    directory = os.environ.get(DATA_DIRECTORY_VARIABLE)
    return Path(directory).expanduser() if directory else Path(platformdirs.user_cache_dir("benchctl")) / "data"


def in_data_directory(path: str) -> Path:
    """A path as it is if it exists, else the one of that name below the data directory."""
    direct = Path(path).expanduser()
    return direct if direct.exists() else data_directory() / direct


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's content. Raises DatasetError when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read: {error.strerror}; correct the path or its permissions"
        ) from error


def file_state(file: DatasetFile, directory: Path, *, full: bool) -> FileState:
    """The state of a file, judged by its size, or with ``full`` by its sha256."""
    path = file.path_in(directory)
    if not path.is_file():
        return "missing"
    is_whole = sha256_of(path) == file.sha256 if full else path.stat().st_size == file.size_bytes
    return "present" if is_whole else "damaged"


def find_source(file: DatasetFile, explicit: str | None, directory: Path) -> SourceFile | None:
    """The file that a workload reads: ``explicit`` if it is set, else the pinned one of the data directory.

    None when the data directory lacks it. An explicit file may have any content; unless it is the pinned one,
    its data set is named after its hash. Raises DatasetError for an explicit path that does not exist, and for a
    file of the data directory that is not the pinned one.
    """
    if explicit is not None:
        source = own_file(file.name, explicit, "correct it, or leave it out to use the data directory")
        return replace(source, dataset=file.label) if sha256_of(source.path) == file.sha256 else source
    path = file.path_in(directory)
    if not path.is_file():
        return None
    digest = sha256_of(path)
    if digest != file.sha256:
        raise DatasetError(
            f"{path} is not the pinned file of {file.name}: its sha256 is {digest}, expected {file.sha256}. Run "
            f"'benchctl data fetch {file.name}' to replace it, or name it in workload.path to use it as it is"
        )
    return SourceFile(path=path, kind=file.name, dataset=file.label)


def own_file(kind: str, path_text: str, remedy: str = "correct it", *, key: str = "workload.path") -> SourceFile:
    """A file of the user's, called after its sha256: at its path, else among the profiles that use it.

    Raises DatasetError where there is none; ``key`` names it.
    """
    direct = Path(path_text).expanduser()
    beside = (directory / direct for directory in profile_directories())
    path = next((path for path in (direct, *beside) if path.is_file()), None)
    if path is None:
        problem = "a directory" if direct.is_dir() else "not a file"
        raise DatasetError(f"{key} is {path_text}, which is {problem}; {_REMEDIES.get(direct.name, remedy)}")
    return SourceFile(path=path, kind=kind, dataset=f"{kind}/sha256-{sha256_of(path)[:16]}")


def read_file(path: Path) -> bytes:
    """The whole file; DatasetError where it cannot be read or is too large."""
    try:
        return read_bytes(path, ROWS_BYTES)
    except UnreadableError as error:
        raise unreadable(error) from error


def unreadable(error: UnreadableError) -> DatasetError:
    """The error for a file of a data set that cannot be read."""
    return DatasetError(f"{error}; {_FETCH_AGAIN}")


def read_jsonl_rows(path: Path, kind: type[R], remedy: str = _FETCH_AGAIN) -> list[tuple[int, R]]:
    """All rows of a JSON Lines file with their line numbers; blank lines are skipped.

    All rows are read, however few are needed, to notice damage anywhere in the file.
    """
    decoder = msgspec.json.Decoder(kind)
    rows: list[tuple[int, R]] = []
    try:
        for number, line in read_lines(path, ROWS_BYTES):
            try:
                if line.strip():
                    rows.append((number, decoder.decode(line)))
            except DECODING_ERRORS as error:
                beginning = line[:60].rstrip(b"\r\n").decode(errors="replace")
                problem = f"{decoding_problem(error)}; the line begins {beginning!r}"
                raise damaged_row(path, number, problem, remedy) from error
    except UnreadableError as error:
        raise unreadable(error) from error
    return rows


def damaged_row(path: Path, number: int, problem: str, remedy: str = _FETCH_AGAIN) -> DatasetError:
    """The error for line ``number`` (from 1) of a file."""
    return DatasetError(f"{path}:{number}: {problem}; {remedy}")
