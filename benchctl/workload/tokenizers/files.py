"""Directories with the tokenizer of a model: on this machine, in the cache of the model hub, or at the hub."""

from pathlib import Path
from typing import Final

from benchctl.errors import MissingPackageError, UsageError

TOKENIZER_FILE: Final = "tokenizer.json"
TEMPLATE_FILES: Final = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
"""Files that may hold a chat template; the first that has one counts."""
TOKEN_FILES: Final = ("special_tokens_map.json", "tokenizer_config.json")
"""Files that name special tokens; the last that names one counts."""
KEY: Final = "workload.tokenizer"
_OTHER_FILES: Final = tuple(dict.fromkeys((*TOKEN_FILES, *TEMPLATE_FILES)))
"""Files beside tokenizer.json, none of which every model has."""


def directory_on_disk(model: str, repository: str | None) -> Path | None:
    """The directory of a model, or of its repository in the cache of the hub, if it has a tokenizer.json."""
    directory = Path(model).expanduser()
    if (directory / TOKENIZER_FILE).is_file():
        return directory
    return None if repository is None else _cached(repository)


def directory_named(name: str) -> Path:
    """The directory that ``workload.tokenizer`` names, or that of its repository, fetched from the hub if need be.

    Raises UsageError where neither is to be had.
    """
    directory = Path(name).expanduser()
    if directory.is_dir() or name.startswith(("/", "~", ".")):
        if (directory / TOKENIZER_FILE).is_file():
            return directory
        problem = f"has no {TOKENIZER_FILE}" if directory.is_dir() else "is not a directory"
        raise UsageError(f"{KEY} is {name!r}, which {problem}; name the directory of a model that has the file")
    return _cached(name) or _fetched(name)


def _cached(repository: str) -> Path | None:
    """The files of a repository that a server or another program has fetched; None without them."""
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - its import takes a while

        path = try_to_load_from_cache(repository, TOKENIZER_FILE)
    except (ImportError, ValueError):  # ValueError: what cannot be a repository
        return None
    return Path(path).parent if isinstance(path, str) else None


def _fetched(repository: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - its import takes a while
        from huggingface_hub.errors import EntryNotFoundError  # noqa: PLC0415
    except ImportError as error:
        purpose = f"{KEY} {repository!r}, which is not a directory, cannot be looked for at the hub"
        otherwise = f"name a directory with {TOKENIZER_FILE}"
        raise MissingPackageError(("huggingface_hub",), purpose, otherwise=otherwise) from error
    try:
        path = Path(hf_hub_download(repository, TOKENIZER_FILE))
    except (OSError, ValueError, EntryNotFoundError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{KEY} is {repository!r}, which is neither a directory nor a repository whose {TOKENIZER_FILE} can be "
            f"had ({type(error).__name__}: {reason}); correct it, or name a directory with {TOKENIZER_FILE}"
        ) from error
    for name in _OTHER_FILES:
        try:
            hf_hub_download(repository, name)
        except (OSError, EntryNotFoundError):
            continue
    return path.parent
