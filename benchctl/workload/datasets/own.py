"""Rows of the user's own: in a file on this machine, or in those of one commit at the Hugging Face Hub.

Each row has one of the first three fields; ``workload.columns`` names other columns for them.

| field | meaning |
|---|---|
| ``prompt`` | the prompt as plain text |
| ``messages`` | the prompt as a chat: a list of ``{"role", "content"}`` |
| ``input_len`` | in place of both: length of a prompt that is written; ``hash_ids``: blocks that it shares |
| ``output_len`` | tokens of the output with stop mode ``forced``; also called ``max_tokens`` |
| ``gold`` | the right answer |
| ``timestamp`` | arrival in milliseconds, for ``arrival.kind: trace`` |
| ``session`` | name of the conversation that the prompt is a turn of; recorded only |

At the hub ``workload.path`` names the data set, ``workload.revision`` the commit, ``workload.split`` and a folder
behind the name the files: those with the split in their names. Formats: JSON Lines, JSON, CSV and Parquet. Files
are fetched by ``huggingface_hub``: proxies, tokens, and ``$HF_ENDPOINT`` as the address of the hub.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from benchctl.errors import DatasetError, MissingPackageError, ProfileError
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Workload
from benchctl.records.record import Message
from benchctl.units import NS_PER_MS
from benchctl.untrusted import PROMPT_TOKENS, ROWS_BYTES
from benchctl.untrusted.files import DECODING_ERRORS, UnreadableError, decoding_problem, read_csv_records
from benchctl.workload.datasets.base import (
    OwnDataset,
    Prompt,
    Selection,
    SourceFile,
    own_file,
    read_file,
    read_jsonl_rows,
    sha256_of,
)
from benchctl.workload.seeded import blocks_problem, numbers_of_blocks
from benchctl.workload.tokenizers import Tokenizer

_FORMS: Final = ("prompt", "messages", "input_len")
_ROW: Final = "a row is a JSON object with prompt (text) or messages (a list of role and content)"
_REMEDY: Final = f"{_ROW}; workload.columns names other columns"
_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".parquet")
_NUM_NAMED: Final = 8
_Length: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=PROMPT_TOKENS)]
_TimestampMs: TypeAlias = Annotated[float, msgspec.Meta(ge=-4e12, le=4e12)]
"""Milliseconds, from a beginning of the file's own or since 1970 until 2096: differences fit into 64 bits of ns."""


class CustomRow(msgspec.Struct, frozen=True):
    """One row; exactly one of ``prompt``, ``messages`` and ``input_len`` is there."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    input_len: _Length | None = None
    output_len: _Length | None = None
    gold: str | int | float | None = None
    timestamp: _TimestampMs | None = None
    session: str | int | None = None
    hash_ids: tuple[int, ...] = ()


_FIELDS: Final = CustomRow.__struct_fields__


def _custom_file(workload: Workload) -> SourceFile:
    if workload.path is None:
        raise ProfileError(f"workload.path is missing with dataset custom; name a JSON Lines file in it: {_REMEDY}")
    return replace(own_file("custom", workload.path), columns=workload.columns)


def custom_prompts(file: SourceFile, selection: Selection, _tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The selected rows of a JSON Lines file. Arrivals count from the first, whichever rows are taken."""
    rows = read_jsonl_rows(file.path, dict[str, Any], _REMEDY)
    return _prompts_of_rows(((f"{file.path}:{number}", fields) for number, fields in rows), file, selection)


def _prompts_of_rows(
    located: Iterable[tuple[str, dict[str, Any]]], file: SourceFile, selection: Selection
) -> tuple[Prompt, ...]:
    """Prompts of the selected rows, each given with its location. Raises DatasetError at the first wrong row."""
    rows = _checked_rows(located, file)
    first_ms = min((row.timestamp for row in rows if row.timestamp is not None), default=0.0)
    prompts = (
        Prompt(
            prompt_id=f"{file.kind}-{i:05d}",
            source=f"{file.dataset}:{i}",
            messages=row.messages,
            text=row.prompt,
            token_numbers=None
            if row.input_len is None
            else numbers_of_blocks(row.hash_ids, row.input_len, i, selection.seed),
            output_tokens=row.output_len,
            answer=None if row.gold is None else str(row.gold),
            arrival_ns=None if row.timestamp is None else round((row.timestamp - first_ms) * NS_PER_MS),
            session=None if row.session is None else str(row.session),
        )
        for i, row in ((i, rows[i]) for i in selection.row_order(len(rows)))
    )
    return selection.take(prompts, file)


def own_rows(path: str, option: str) -> list[CustomRow]:
    """Every row of a file that ``option`` names. Raises DatasetError where it cannot be read, or has none."""
    file = own_file("custom", path, key=option)
    rows = read_jsonl_rows(file.path, dict[str, Any], _ROW)
    return _checked_rows(((f"{file.path}:{number}", fields) for number, fields in rows), file, _ROW)


def _checked_rows(
    located: Iterable[tuple[str, dict[str, Any]]], file: SourceFile, remedy: str = _REMEDY
) -> list[CustomRow]:
    """The rows, each given with its location. Raises DatasetError at the first wrong one, or without any."""
    rows = []
    for where, fields in located:
        try:
            row = msgspec.convert(_named(fields, file.columns), CustomRow)
            problem = _problem(row, fields)
        except DECODING_ERRORS as error:
            problem = decoding_problem(error)
        if problem is not None:
            raise DatasetError(f"{where}: {problem}; {remedy}")
        rows.append(row)
    if not rows:
        raise DatasetError(f"{file.path} has no rows; {remedy}")
    return rows


def _named(fields: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Values by the fields of ``CustomRow``; a column that is another field is not read under its own name."""
    if unknown := set(columns) - set(_FIELDS):
        raise ValueError(f"workload.columns maps {', '.join(sorted(unknown))}; fields are {', '.join(_FIELDS)}")
    for field, column in columns.items():
        if column not in fields:
            raise ValueError(f"column {column}, which is {field}, is not among {', '.join(fields) or '(none)'}")
    own = {name: value for name, value in fields.items() if name not in columns.values()}
    if "max_tokens" in own:  # as requests call it
        own.setdefault("output_len", own["max_tokens"])
    return own | {field: fields[column] for field, column in columns.items()}


def _problem(row: CustomRow, fields: Mapping[str, Any]) -> str | None:
    """The sentence about a row without a prompt, with several, or with values that cannot be."""
    given = [name for name in _FORMS if getattr(row, name) is not None]
    if not given:
        hints = (did_you_mean(name, _FORMS) for name in fields if name not in _FIELDS)
        near = next((f"; {hint}" for hint in hints if hint), "")
        return f"no prompt among its fields {', '.join(fields) or '(none)'}{near}"
    if len(given) > 1:
        return f"{' and '.join(given)} in one row; keep one of them"
    if row.prompt == "" or row.messages == ():
        return f"{given[0]} is empty"
    if row.input_len is not None:
        return blocks_problem(row.hash_ids, row.input_len)
    return (
        "hash_ids describe a prompt that is written; give input_len in place of its text" if row.hash_ids else None
    )


def _hub_files(workload: Workload) -> SourceFile:
    """The files of the split, fetched. Raises ProfileError for keys that do not name them."""
    parts = [] if workload.path is None else workload.path.strip("/").split("/")
    if len(parts) < 2:  # an owner and a name
        raise ProfileError(
            f"workload.path is {workload.path or 'missing'} with dataset huggingface; name a data set as "
            "owner/name, such as openai/gsm8k, or openai/gsm8k/main for one folder of it"
        )
    repository, folder, revision = "/".join(parts[:2]), "/".join(parts[2:]), workload.revision
    if revision is None or not re.fullmatch("[0-9a-f]{40}", revision):
        raise ProfileError(
            f"workload.revision is {revision or 'missing'}, but data sets change; name the commit, 40 hex digits, "
            "that the page 'Files and versions' of the data set shows"
        )
    endpoint = os.environ.get("HF_ENDPOINT")
    with _reaching_hub(repository, revision):
        from huggingface_hub import HfApi, hf_hub_download  # noqa: PLC0415 - an optional package, and slow to import

        names = [folder]  # a file comes from the library's cache, where it is, without a network
        if not folder.endswith(_SUFFIXES):
            names = sorted(HfApi(endpoint).list_repo_files(repository, repo_type="dataset", revision=revision))
            names = _names_of_split(names, folder, workload)
        paths = [
            Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision, endpoint=endpoint))
            for name in names
        ]
    digests = [sha256_of(path) for path in paths]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return SourceFile(
        path=paths[0],
        more_paths=tuple(paths[1:]),
        kind="huggingface",
        dataset=f"{repository}@{revision[:12]}/sha256-{digest[:16]}",
        columns=workload.columns,
    )


@contextmanager
def _reaching_hub(repository: str, revision: str) -> Iterator[None]:
    """Translates errors of ``huggingface_hub``, and its absence."""
    try:
        yield
    except ImportError as error:
        raise _package_missing("huggingface_hub", repository) from error
    except (ProfileError, DatasetError):
        raise
    except (OSError, ValueError) as error:  # its errors of HTTP are such
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DatasetError(
            f"data set {repository} at revision {revision} cannot be had from the Hugging Face Hub: {reason}; "
            "correct workload.path and workload.revision, log in with 'hf auth login' where access is restricted, "
            "or download the file elsewhere and read it with dataset custom"
        ) from error


def _package_missing(package: str, repository: str) -> MissingPackageError:
    return MissingPackageError((package,), f"data set {repository} of the Hugging Face Hub cannot be read")


def _names_of_split(names: Sequence[str], folder: str, workload: Workload) -> list[str]:
    """Data files below the folder with the split in their names, all in one folder. Raises ProfileError else."""
    below = f"{folder}/" if folder else ""
    inside = [name for name in names if name.endswith(_SUFFIXES) and name.startswith(below)]
    split = workload.split
    chosen = [name for name in inside if split is None or split in re.split(r"[/._-]", name)]
    if not chosen:
        what = "data file" if split is None else f"file of split {split}"
        listed = ", ".join((inside or list(names))[:_NUM_NAMED])
        raise ProfileError(
            f"workload.path is {workload.path}, where no {what} ({', '.join(_SUFFIXES)}) was found; it has {listed}"
        )
    if len({re.sub(r"\d+-of-\d+", "", name) for name in chosen}) > 1:
        raise ProfileError(
            f"workload.path is {workload.path} and workload.split {split}, which are several sets of rows: "
            f"{', '.join(chosen[:_NUM_NAMED])}; name the split, or one folder or file behind owner/name"
        )
    return chosen


def huggingface_prompts(file: SourceFile, selection: Selection, _tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The selected rows of all files of the split, in the order of the files' names."""
    located = (
        (f"{path}:{number}", fields)
        for path in (file.path, *file.more_paths)
        for number, fields in _hub_rows(path, file.dataset)
    )
    return _prompts_of_rows(located, file, selection)


def _hub_rows(path: Path, dataset: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows by name of column, numbered from 1. Raises DatasetError for a file that is not what its suffix says."""
    remedy = f"the file of {dataset} is damaged or of another format"
    try:
        match path.suffix:
            case ".jsonl":
                yield from read_jsonl_rows(path, dict[str, Any], remedy)
            case ".json":
                yield from enumerate(msgspec.json.decode(read_file(path), type=list[dict[str, Any]]), start=1)
            case ".csv":
                yield from ((number - 1, fields) for number, fields in read_csv_records(path, ROWS_BYTES))
            case _:
                yield from enumerate(_parquet_rows(path, dataset), start=1)
    except UnreadableError as error:
        raise DatasetError(f"{error}; {remedy}") from error
    except DECODING_ERRORS as error:
        raise DatasetError(f"{path}: {decoding_problem(error)}; {remedy}") from error


def _parquet_rows(path: Path, dataset: str) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - an optional package, and large
    except ImportError as error:
        raise _package_missing("pyarrow", dataset) from error
    try:
        metadata = parquet.read_metadata(path)
        num_bytes = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
        if num_bytes > ROWS_BYTES:
            raise DatasetError(f"{path}: holds {num_bytes / 1e9:.1f} GB of rows; name a smaller file of {dataset}")
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise ValueError(decoding_problem(error)) from error
    return rows


DATASETS: Final = {
    "custom": OwnDataset(
        meaning="Prompts of one's own, as JSON Lines: prompt or messages in each row, and all that is known of it.",
        find=_custom_file,
        read=custom_prompts,
    ),
    "huggingface": OwnDataset(
        meaning="Data sets of the Hugging Face Hub: files of one commit, whose columns are fields of custom rows.",
        find=_hub_files,
        read=huggingface_prompts,
    ),
}
