"""The secrets that this process knows: variables of its environment, and the token of the model hub.

A value is looked for in every text of others, so it must not be an ordinary one: of variables whose name says
``secret``, values count that have 8 characters or more, and are neither a number, nor a path, nor a plain word such
as ``disabled``. A value that the profile sends (``${NAME}`` in headers, ``api_key_env``) counts whatever it is; one
of 4 to 7 characters where no letter or digit touches it, and a shorter one not at all.
"""

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import quote, quote_plus

from benchctl.untrusted.secrets import KnownValue, Redactor, is_secret_name

_LEAST_CHARS: Final = 8
_LEAST_CHARS_OF_SENT: Final = 4
_LEAST_CHARS_OF_LINE: Final = 16
"""Of a value of several lines, each line of this length is a secret."""
_ORDINARY: Final = re.compile(
    r"[\d.,:+-]+|[./~].*|[A-Za-z]:\\.*|none|null|true|false|default|disabled?|enabled?|required|optional|anonymous"
    r"|localhost|changeme|password|redacted|placeholder|undefined|unknown|keyring|oauth2?|basic|bearer|negotiate",
    re.IGNORECASE | re.DOTALL,
)
_HUB_TOKEN: Final = "HF_TOKEN"  # noqa: S105 - the name of a variable
_HUB_TOKEN_BYTES: Final = 4096


def redacted(text: str, sent: Mapping[str, str] | None = None) -> str:
    """``text`` without secrets: those of the environment, of the hub, and keys of common shapes.

    For every text that is written or printed and that others may have written: messages of errors, tracebacks,
    answers of servers, logs. ``sent`` are further values by the name of their variable, such as those of headers.
    """
    return environment_redactor(sent).text(text)


def environment_redactor(sent: Mapping[str, str] | None = None) -> Redactor:
    """The redactor for the present environment, and the values in ``sent``."""
    named = tuple((name, value) for name, value in os.environ.items() if is_secret_name(name))
    return _redactor(named, tuple((sent or {}).items()))


@lru_cache(maxsize=32)
def _redactor(named: tuple[tuple[str, str], ...], sent: tuple[tuple[str, str], ...]) -> Redactor:
    names = {value: name for name, value in (*_hub_token(), *named) if not is_ordinary(value)}
    spellings = {
        spelling: KnownValue(name, spelling)
        for value, name in (*names.items(), *((value, name) for name, value in sent))
        if len(value) >= _LEAST_CHARS
        for spelling in spellings_of(value)
    }
    for name, value in sent:
        if _LEAST_CHARS_OF_SENT <= len(value) < _LEAST_CHARS:
            spellings[value.encode()] = KnownValue(name, value.encode("utf-8", "surrogateescape"), is_word=True)
    return Redactor(spellings.values())


def is_ordinary(value: str) -> bool:
    """True for the value of a variable that many texts hold by chance."""
    return len(value) < _LEAST_CHARS or _ORDINARY.fullmatch(value) is not None


def spellings_of(value: str) -> Iterable[bytes]:
    """``value``, of 8 characters or more, as it is, in URLs, in JSON strings and within Base64 of a longer text."""
    whole = value.strip()
    parts = [part for part in whole.splitlines() if len(part) >= _LEAST_CHARS_OF_LINE] if "\n" in whole else [whole]
    for part in parts:
        in_urls = (
            encode(part, safe, errors="surrogateescape") for encode in (quote, quote_plus) for safe in ("", "/")
        )
        in_json = (json.dumps(part, ensure_ascii=escaped)[1:-1] for escaped in (True, False))
        for text in dict.fromkeys((part, *in_urls, *in_json)):
            yield text.encode("utf-8", "surrogateescape")
        yield from _base64_cores(part.encode("utf-8", "surrogateescape"))


def _base64_cores(value: bytes) -> Iterator[bytes]:
    """The characters that ``value`` alone decides in Base64, after 0, 1 or 2 bytes of something else in a group."""
    for before in range(3):
        first = (before * 8 + 5) // 6
        last = (before + len(value)) * 8 // 6
        padded = bytes(before) + value + bytes(2)
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(padded)[first:last]


def _hub_token() -> Iterator[tuple[str, str]]:
    """The token that ``huggingface-cli login`` stored, under the name of the variable that would hold it."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    path = Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token")
    try:
        with path.expanduser().open("rb") as file:
            token = file.read(_HUB_TOKEN_BYTES).decode("utf-8", "surrogateescape").strip()
    except (OSError, RuntimeError):
        return
    if token:
        yield _HUB_TOKEN, token
