"""Removal of secrets from the records of a run: command lines, environments, settings, messages."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from benchctl.profile.engine_table import own_variables
from benchctl.records.files import write_bytes_atomic
from benchctl.untrusted.files import is_file, read_file
from benchctl.untrusted.secrets import Redactor, environment_redactor, is_secret_name, mark

T = TypeVar("T")

_HEADER: Final = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9-]*)(?:: ?|=)(?=.)(?!.*\$\{)")
_KEY_OF_SETTING: Final = re.compile(
    r"(^|[-_.])(api[-_]?key|password|secret([-_](access[-_])?key)?)$", re.IGNORECASE
)
"""Settings of servers that are secrets; fewer than names of variables, because models have tokens of their own."""
_RECORDED: Final = (
    "CUDA_", "NVIDIA_", "NCCL_", "VLLM_", "SGLANG_", "LVM_", "LENVM_", "TORCH", "PYTORCH_", "TRITON_", "OMP_",
    "MKL_", "OPENBLAS_", "GGML_", "LLAMA_", "HF_", "TOKENIZERS_", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH",
    "MALLOC_",
)  # fmt: skip
"""Prefixes of inherited variables that change the behaviour of a server, and are therefore recorded."""


def redacted_argv(argv: Sequence[str], redactor: Redactor | None = None) -> tuple[str, ...]:
    """``argv`` with the values of secret options replaced, as ``--api-key X`` and as ``--api-key=X``, those of
    secret headers (``X-Api-Key: X``), and secrets in other words.
    """
    redactor = redactor or environment_redactor()
    words: list[str] = []
    hidden_by = ""
    for word in argv:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-")
        if hidden_by and not is_option:
            words.append(mark(hidden_by))
        elif is_option and equals and is_secret_name(name):
            words.append(f"{name}={mark(name)}")
        elif not is_option and (header := _HEADER.match(word)) is not None and is_secret_name(header["name"]):
            words.append(f"{header[0]}{mark(header['name'])}")
        else:
            words.append(redactor.text(word))
        hidden_by = word if is_option and not equals and is_secret_name(word) else ""
    return tuple(words)


def server_env(
    inherited: Mapping[str, str], own: Mapping[str, str], withheld: Collection[str] = ()
) -> dict[str, str]:
    """The environment of a server: ours, without its secrets, and the engine's own variables.

    It keeps the token with which a server downloads its model, and none of the variables that are ``withheld``, nor
    those by which benchctl tells servers what to do: these come from the profile alone.
    """
    left_out = {*withheld, *own_variables()}
    return {
        name: value
        for name, value in inherited.items()
        if name not in left_out and (name in {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"} or not is_secret_name(name))
    } | dict(own)


def redact_file(path: Path, redactor: Redactor) -> Counter[str]:
    """Replace the secrets in a small file that is no longer written to; returns their number by label."""
    if not is_file(path, within=path.parent):
        return Counter()
    content, counts = redactor.content(read_file(path, within=path.parent))
    if counts:
        write_bytes_atomic(path, content)
    return counts


def redacted_tree(value: T, redactor: Redactor) -> T:
    """``value``, made of records, mappings, sequences and scalars, with the secrets in its texts replaced.

    So is the value of every key such as ``api_key``, whatever it looks like.
    """
    if isinstance(value, str):
        return cast("T", redactor.text(value))
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(
            value, **{name: redacted_tree(getattr(value, name), redactor) for name in value.__struct_fields__}
        )
    if isinstance(value, dict):
        return cast("T", {key: _redacted_entry(key, entry, redactor) for key, entry in value.items()})
    if isinstance(value, (list, tuple)):
        return cast("T", type(value)(redacted_tree(entry, redactor) for entry in value))
    return value


def _redacted_entry(key: object, value: Any, redactor: Redactor) -> Any:
    is_named = isinstance(value, str) and isinstance(key, str) and _KEY_OF_SETTING.search(key) is not None
    return mark(str(key).rpartition(".")[2]) if is_named and value else redacted_tree(value, redactor)


def recorded_env(
    env: Mapping[str, str], own: Mapping[str, str], redactor: Redactor | None = None
) -> dict[str, str]:
    """The part of a server's environment for a record, by name and without secrets: the engine's own variables and
    others that change its work.
    """
    redactor = redactor or environment_redactor()
    recorded = sorted(name for name in env if name in own or name.startswith(_RECORDED))
    return {name: mark(name) if is_secret_name(name) else redactor.text(env[name]) for name in recorded}
