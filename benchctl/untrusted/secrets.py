"""Secrets in text: recognised by the name of a variable or option, by known values, by the shape of common keys.

Known are variables of this process's environment, and the token of the model hub. A text may come in pieces, such
as a log while it is written.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, quote_plus

_SECRET_NAME: Final = re.compile(
    r"(^|[-_.])(token|secret|secrets|[a-z]*password|passwd|passphrase|credential|credentials|auth|authorization"
    r"|apikey|(api|access|private|secret|signing)[-_]?key)([-_.]|$)",
    re.IGNORECASE,
)
"""A whole word of a name: ``HF_TOKEN`` and ``--api-key`` are secrets, ``--max-num-batched-tokens`` and
``TOKENIZERS_PARALLELISM`` are not."""


class KnownValue(NamedTuple):
    """A secret in one of its spellings. ``is_word``: it counts only where no letter or digit touches it."""

    label: str
    value: bytes
    is_word: bool = False


class _Shape(NamedTuple):
    """Keys of one kind. Only a text with one of ``anchors``, in lower case, is searched; the secret is the last
    group, or all of a pattern without one, and reaches to the end of the match.
    """

    label: str
    anchors: tuple[bytes, ...]
    pattern: re.Pattern[bytes]


_ALONE: Final = rb"(?<![A-Za-z0-9])"
_VALUE: Final = (
    rb"[\"']?(?:[ \t]{0,4}[:=][ \t]{0,4}|(?<=-key) |(?<=-token) |(?<=-password) )(?:[bru]?[\"'`\[(]){0,3}"
    rb"(?![./~$<*]|redacted:|(?:none|null|true|false|required|missing|invalid|optional|default|str|string)\b)"
    rb"([^\s\"'`&,;<>()\[\]{}\\]{8,})"
)
"""A value after its name: neither a path nor a word that says that there is none."""
_KEY_BEGINS: Final = rb"-----BEGIN [A-Z ]{0,40}PRIVATE KEY"
_KEY_ENDS: Final = rb"-----END [A-Z ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----"
_KEY: Final = rb"[A-Z ]{0,10}-----(?:.{0,16384}?" + _KEY_ENDS + rb"|.{0,16384})"
"""The longest private key is half as long. Of one without an end this much is taken."""
_NAMED: Final = "value of a secret name"
_SHAPES: Final = (
    _Shape("private key", (b"-----begin",), re.compile(_KEY_BEGINS + _KEY, re.DOTALL)),
    _Shape("Hugging Face token", (b"hf_",), re.compile(_ALONE + rb"hf_[A-Za-z0-9]{12,}")),
    _Shape("API key", (b"sk-",), re.compile(_ALONE + rb"sk-[A-Za-z0-9_-]{12,}")),
    _Shape(
        "GitHub token",
        (b"gho_", b"ghp_", b"ghr_", b"ghs_", b"ghu_", b"github_pat_"),
        re.compile(_ALONE + rb"(?:gh[oprsu]|github_pat)_[A-Za-z0-9_]{12,}"),
    ),
    _Shape("GitLab token", (b"glpat-",), re.compile(_ALONE + rb"glpat-[A-Za-z0-9_-]{12,}")),
    _Shape("Slack token", (b"xox",), re.compile(_ALONE + rb"xox[a-z]-[A-Za-z0-9-]{12,}")),
    _Shape("NVIDIA key", (b"nvapi-",), re.compile(_ALONE + rb"nvapi-[A-Za-z0-9_-]{12,}")),
    _Shape("AWS key", (b"akia", b"asia"), re.compile(_ALONE + rb"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])")),
    _Shape("Google key", (b"aiza",), re.compile(_ALONE + rb"AIza[A-Za-z0-9_-]{35}")),
    _Shape(
        "JSON web token",
        (b"eyj",),
        re.compile(_ALONE + rb"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    ),
    _Shape("password in a URL", (b"@",), re.compile(rb"://([^/@\s\"'<>?#]{0,256}:[^/@\s\"'<>]{1,512})(?=@)")),
    _Shape(
        "authorization",
        (b"bearer", b"authorization"),
        re.compile(
            rb"(?:\bbearer[ \t]+|\bauthorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?(?:[a-z]{1,20}[ \t]+)?)"
            rb"(?!redacted:|(?:authentication|authorization|required|missing|invalid)\b)([A-Za-z0-9._~+/=-]{8,})",
            re.IGNORECASE,
        ),
    ),
    _Shape(
        "value of a query",
        (b"?", b"&"),
        re.compile(
            rb"[?&](?:amp;)?(?:[a-z_-]{0,20}(?:key|token|signature|credential)|sig|auth|secret|passw(?:or)?d)="
            rb"([^&\s\"'<>`\\\[]{4,})",
            re.IGNORECASE,
        ),
    ),
    _Shape(
        _NAMED,
        (b"_key", b"-key", b"_token", b"-token"),
        re.compile(
            rb"[-_](?:(?:(?<=api.)|(?<=access.)|(?<=secret.)|(?<=private.)|(?<=signing.)|(?<=account.))"
            rb"key(?:[-_]id)?"
            rb"|(?:(?<=auth.)|(?<=access.)|(?<=refresh.)|(?<=api.)|(?<=hf.)|(?<=hub.)|(?<=session.)|(?<=bearer.)"
            rb"|(?<=github.)|(?<=gitlab.))token)" + _VALUE,
            re.IGNORECASE,
        ),
    ),
    _Shape(
        _NAMED,
        (b"apikey", b"secret", b"passw", b"passphrase"),
        re.compile(rb"(?:apikey|secret|passw(?:or)?d|passphrase)" + _VALUE, re.IGNORECASE),
    ),
)
_OPEN_KEY: Final = re.compile(_KEY_BEGINS + rb"(?!.*" + _KEY_ENDS + rb")", re.DOTALL)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """True where a variable or option of this name holds a secret."""
    return _SECRET_NAME.search(name.lstrip("-")) is not None


def holds_key(text: str) -> bool:
    """True where ``text`` has the shape of a key or names one with its value."""
    return Redactor().text(text) != text


def secret_options(words: Sequence[str]) -> Iterator[str]:
    """Options of a command line that take a secret, and words that look like one (those not shown)."""
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("-") and is_secret_name(name):
            yield name
        elif holds_key(word):
            yield "a token"


def mark(label: str) -> str:
    """The text in place of a secret."""
    return f"[redacted: {label}]"


class Redactor:
    """Replaces known values and keys of common shapes; ``values`` are the spellings to look for, longest first."""

    def __init__(self, values: Iterable[KnownValue] = ()) -> None:
        self.values: Final = tuple(sorted(values, key=lambda each: -len(each.value)))

    def text(self, text: str) -> str:
        """``text`` without its secrets. A text without any is returned unchanged, and marks are none."""
        content, counts = self.content(text.encode("utf-8", "surrogatepass"))
        return content.decode("utf-8", "surrogatepass") if counts else text

    def content(self, content: bytes) -> tuple[bytes, Counter[str]]:
        """``content`` without its secrets, and the number of these by label."""
        counts: Counter[str] = Counter()
        for label, value, is_word in self.values:
            if value in content:
                pattern = re.escape(value)
                pattern = _ALONE + pattern + rb"(?![A-Za-z0-9])" if is_word else pattern
                content = _replaced(re.compile(pattern), label, content, counts)
        low = content.lower()
        for shape in _SHAPES:
            if any(anchor in low for anchor in shape.anchors):
                content = _replaced(shape.pattern, shape.label, content, counts)
        return content, counts


def _replaced(pattern: re.Pattern[bytes], label: str, content: bytes, counts: Counter[str]) -> bytes:
    """``content`` with a mark for the secret of each match; ``counts`` gets their number."""

    def with_mark(match: re.Match[bytes]) -> bytes:
        name_bytes = match.start(pattern.groups) - match.start()
        return match[0][:name_bytes] + mark(label).encode()

    content, number = pattern.subn(with_mark, content)
    if number:
        counts[label] += number
    return content


_LEAST_CHARS: Final = 8
_ORDINARY: Final = re.compile(
    r"[\d.,:+-]+|[./~].*|[A-Za-z]:\\.*|none|null|true|false|default|disabled?|enabled?|required|optional|anonymous"
    r"|localhost|changeme|password|redacted|placeholder|undefined|unknown|keyring|oauth2?|basic|bearer|negotiate",
    re.IGNORECASE | re.DOTALL,
)


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
    secrets = [(name, value) for name, value in (*_hub_token(), *named) if not is_ordinary(value)]
    secrets += [(name, value) for name, value in sent if len(value) >= 4]
    spellings = {
        spelling: KnownValue(name, spelling, is_word=len(value) < _LEAST_CHARS)
        for name, value in secrets
        for spelling in spellings_of(value)
    }
    return Redactor(spellings.values())


def is_ordinary(value: str) -> bool:
    """True for the value of a variable that many texts hold by chance."""
    return len(value) < _LEAST_CHARS or _ORDINARY.fullmatch(value) is not None


def spellings_of(value: str) -> Iterator[bytes]:
    """``value`` as it is, in URLs and in JSON strings; of one with several lines, its longer lines."""
    whole = value.strip()
    # Of a value of several lines, each line of this length is a secret
    parts = [part for part in whole.splitlines() if len(part) >= 16] if "\n" in whole else [whole]
    for part in parts:
        in_urls = [
            write(part, safe, errors="surrogateescape") for write in (quote, quote_plus) for safe in ("", "/")
        ]
        in_json = [json.dumps(part, ensure_ascii=escaped)[1:-1] for escaped in (True, False)]
        for text in (part, *in_urls, *in_json):
            yield text.encode("utf-8", "surrogateescape")


def _hub_token() -> Iterator[tuple[str, str]]:
    """The token that ``huggingface-cli login`` stored, under the name of the variable that would hold it."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    path = Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token")
    with suppress(OSError, RuntimeError), path.expanduser().open("rb") as file:  # the latter without a home
        token = file.read(4096).decode("utf-8", "surrogateescape").strip()
        if token:
            yield "HF_TOKEN", token


_LINE_BYTES: Final = 1 << 17
"""Of a longer line, or of a longer private key, the beginning is passed on before its end has come."""
_PIECE_BYTES: Final = 1 << 17


def copy_redacted(source: Path, target: Path, redactor: Redactor) -> Counter[str]:
    """Copy a file of any size without its secrets; returns their number by label."""
    counts: Counter[str] = Counter()
    pending = b""
    with source.open("rb") as read, target.open("wb") as written:
        while piece := read.read(_PIECE_BYTES):
            pending += piece
            cut = _whole_lines(pending)
            content, replaced = redactor.content(pending[:cut])
            pending = pending[cut:]
            written.write(content)
            counts += replaced
        content, replaced = redactor.content(pending)
        written.write(content)
        return counts + replaced


def _whole_lines(pending: bytes) -> int:
    """The length of the lines in ``pending`` that are whole; of a very long one, that of its words until now."""
    cut = max(pending.rfind(b"\n"), pending.rfind(b"\r")) + 1
    if open_key := _OPEN_KEY.search(pending, 0, cut):
        cut = open_key.start()
    if not cut and len(pending) > _LINE_BYTES:
        cut = pending.rfind(b" ") + 1 or len(pending)
    return cut
