"""The files of a directory of the LenVM timing scripts: one server's life for each tag."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from benchctl.errors import InvalidDataError, UsageError
from benchctl.untrusted.reading import DECODING_ERRORS, UnreadableError, decoding_problem, read_bytes

BASELINE: Final = "baseline"
_META: Final = ".meta.json"
_TIMING: Final = ".timing.jsonl"
_RESPONSES: Final = ".responses.jsonl"
_NOT_META: Final = (
    "it is not a meta.json of a LenVM timing run: copy it again, or remove it; its own values are then unknown"
)
_SAMPLES: Final = ".gpu_samples.csv"
_LOG: Final = ".log"
_SUFFIXES: Final = (_META, _TIMING, _RESPONSES, _SAMPLES, _LOG)
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 32), le=1 << 32)]
_Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``<tag>.meta.json`` that are used; None for those that a run did not write.

    ``wall_clock_s`` is that of the client's process, including its start, imports and the loading of the dataset.
    """

    tag: str | None = None
    dataset: str | None = None
    max_questions: _Count | None = None
    n_samples_per_q: _Count | None = None
    max_concurrency: _Count | None = None
    max_tokens: _Count | None = None
    top_k: _Number | None = None
    value_scale: _Finite | None = None
    value_mode: str | None = None
    value_gamma: _Finite | None = None
    wall_clock_s: _Seconds | None = None
    wall_start_epoch_s: _Seconds | None = None
    wall_end_epoch_s: _Seconds | None = None
    responses_path: str | None = None
    cmd: tuple[str, ...] = ()

    def argument(self, flag: str) -> str | None:
        """The word after a flag on the command line of the client."""
        words = list(self.cmd)
        index = words.index(flag) + 1 if flag in words else len(words)
        return words[index] if index < len(words) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFiles:
    """The files of one tag; None for those that do not exist."""

    tag: str
    meta: Path | None
    timing: Path | None
    responses: Path | None
    gpu_samples: Path | None
    server_log: Path | None

    @property
    def paths(self) -> Mapping[str, Path]:
        """Each file that exists, by the name of its copy."""
        by_name = {
            "meta.raw.json": self.meta,
            "steps.raw.jsonl": self.timing,
            "responses.raw.jsonl": self.responses,
            "gpu.raw.csv": self.gpu_samples,
            "server.log": self.server_log,
        }
        return {name: path for name, path in by_name.items() if path is not None}


def find_arms(directory: Path) -> tuple[ArmFiles, ...]:
    """The arms of a directory, the baseline first. Raises UsageError without a baseline."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; name one that the LenVM timing scripts wrote")
    names = _names_in(directory)
    tags = {name.removesuffix(end) for name in names for end in (_META, _TIMING) if name.endswith(end)}
    if BASELINE not in tags:
        raise UsageError(
            f"{directory} has neither {BASELINE}{_META} nor {BASELINE}{_TIMING}; name a directory that the LenVM "
            "timing scripts wrote"
        )
    return tuple(_files_of(directory, tag, names) for tag in sorted(tags, key=lambda tag: (tag != BASELINE, tag)))


def _names_in(directory: Path) -> list[str]:
    """Names of the files, without links: what they lead to would be copied into the results."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_file())
    except OSError as error:
        raise UsageError(f"{directory} cannot be read: {error.strerror}; correct its permissions") from error
    links = [path for path in paths if path.is_symlink()]
    if link := next((path for path in links if path.name.endswith(_SUFFIXES)), None):
        raise UsageError(f"{link} is a link; put a copy of the file in its place")
    return [path.name for path in paths if path not in links]


def _files_of(directory: Path, tag: str, names: Iterable[str]) -> ArmFiles:
    def existing(name: str) -> Path | None:
        return directory / name if name in names else None

    meta = existing(f"{tag}{_META}")
    recorded_path = read_meta(meta).responses_path if meta is not None else None
    answers = existing(Path(recorded_path).name) if recorded_path else None
    if answers is None:  # the path in the meta file is one of the machine that measured
        matches = [
            name for name in names if name.endswith(_RESPONSES) and _is_of(name.removesuffix(_RESPONSES), tag)
        ]
        answers = directory / matches[0] if len(matches) == 1 else None
    logs = [name for name in names if name.endswith(_LOG) and _is_of(name.removesuffix(_LOG), tag)]
    return ArmFiles(
        tag=tag,
        meta=meta,
        timing=existing(f"{tag}{_TIMING}"),
        responses=answers,
        gpu_samples=existing(f"{tag}{_SAMPLES}"),
        server_log=directory / logs[0] if len(logs) == 1 else None,
    )


def _is_of(stem: str, tag: str) -> bool:
    """``gsm8k.baseline_q50_n16`` and ``server.baseline`` are of the tag ``baseline``."""
    return any(part == tag or part.startswith(f"{tag}_q") for part in stem.split("."))


def read_meta(path: Path | None) -> Meta:
    """The meta file of a run; an empty one for None. Raises InvalidDataError when it is damaged."""
    if path is None:
        return Meta()
    try:
        document: Any = msgspec.json.decode(read_bytes(path))
        return msgspec.convert(document, Meta, strict=False)
    except UnreadableError as error:
        raise InvalidDataError(f"{error}; {_NOT_META}") from error
    except DECODING_ERRORS as error:
        raise InvalidDataError(f"{path}: {decoding_problem(error)}; {_NOT_META}") from error
