"""Removal of secrets from records, by name and by the pattern of well-known tokens."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchctl.profile.secret import SECRET_VALUE, is_secret_name
from benchctl.records.jsonl import write_bytes_atomic
from benchctl.untrusted.files import is_file, read_file
from benchctl.untrusted.limits import LOG_BYTES

REDACTED: Final = "***"

_MODEL_HUB: Final = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
_RECORDED: Final = (
    "CUDA_", "NVIDIA_", "NCCL_", "VLLM_", "SGLANG_", "LVM_", "LENVM_", "TORCH", "PYTORCH_", "TRITON_", "OMP_",
    "MKL_", "OPENBLAS_", "GGML_", "LLAMA_", "HF_", "TOKENIZERS_", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH",
    "MALLOC_",
)  # fmt: skip
"""Prefixes of inherited variables that change the behaviour of a server, and are therefore recorded."""


def _redacted_value(value: str) -> str:
    return SECRET_VALUE.sub(REDACTED, value)


def redacted_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """``argv`` with the values of secret options replaced, as ``--api-key X`` and as ``--api-key=X``."""
    words: list[str] = []
    hides_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-")
        if hides_next and not is_option:
            words.append(REDACTED)
        elif is_option and equals and is_secret_name(name):
            words.append(f"{name}={REDACTED}")
        else:
            words.append(_redacted_value(word))
        hides_next = is_option and not equals and is_secret_name(word)
    return tuple(words)


def redacted_env(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` by name, with secret values replaced."""
    return {name: REDACTED if is_secret_name(name) else _redacted_value(env[name]) for name in sorted(env)}


def server_env(
    inherited: Mapping[str, str], own: Mapping[str, str], withheld: Collection[str] = ()
) -> dict[str, str]:
    """The environment of a server: ours, without its secrets, and the engine's own variables.

    It keeps the token with which a server downloads its model, and none of the variables that are ``withheld``.
    """
    passed_on = {
        name: value
        for name, value in inherited.items()
        if name not in withheld and (name in _MODEL_HUB or not is_secret_name(name))
    }
    return passed_on | dict(own)


def without_values(text: str, secrets: Iterable[str]) -> str:
    """``text`` with these values replaced."""
    for secret in secrets:
        text = text.replace(secret, REDACTED) if secret else text
    return text


def redact_file(path: Path, secrets: Iterable[str]) -> None:
    """Replace these values in a file that is no longer written to, where it holds any."""
    present = [secret for secret in secrets if secret]
    if not present or not is_file(path, within=path.parent):
        return
    content = read_file(path, within=path.parent, max_bytes=LOG_BYTES)
    if any(secret.encode() in content for secret in present):
        text = content.decode("utf-8", errors="surrogateescape")
        write_bytes_atomic(path, without_values(text, present).encode("utf-8", errors="surrogateescape"))


def recorded_env(env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The part of a server's environment for a record: the engine's own variables and others that change its
    work.
    """
    return redacted_env({name: value for name, value in env.items() if name in own or name.startswith(_RECORDED)})
