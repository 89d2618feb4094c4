"""Secrets in text: recognised by the name of a variable or option, by known values, by the shape of common keys.

The secrets that this process knows: variables of its environment, and the token of the model hub.
Redaction of text that comes in pieces, such as a log while it is written.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_MARK: Final = re.compile(r"\[redacted: [^\]\n]{1,120}\]")
OLD_MARK: Final = "***"
"""Stands for every secret in older result directories."""


class KnownValue(NamedTuple):
    """A secret in one of its spellings. ``is_word``: it counts only where no letter or digit touches it."""

    label: str
    value: bytes
    is_word: bool = False


class Span(NamedTuple):
    """The place of a secret in a text, and what it is."""

    start: int
    end: int
    label: str
    is_known: bool


class _Shape(NamedTuple):
    """Keys of one kind. Only a text with one of ``anchors`` is searched; the secret is the last group."""

    label: str
    anchors: tuple[bytes, ...]
    pattern: re.Pattern[bytes]
    has_any_case: bool = False
    has_prefix: bool = False
    """True where its keys begin with what ``_PREFIX`` matches."""


_PREFIX: Final = re.compile(
    rb"[-_](?:(?<=hf_)|(?<=sk-)|(?<=gh[oprsu]_)|(?<=_pat_)|(?<=lpat-)|(?<=xox[a-z]-)|(?<=vapi-)"
    rb"|(?=key|KEY|Key|token|TOKEN|Token))"
)
"""Dashes and underscores are rare in logs, so that this one search is ten times as fast as those that it saves."""
_ALONE: Final = rb"(?<![A-Za-z0-9])"
_VALUE: Final = (
    rb"[\"']?(?:[ \t]{0,4}[:=][ \t]{0,4}|(?<=-key) |(?<=-token) |(?<=-password) )(?:[bru]?[\"'`\[(]){0,3}"
    rb"(?![./~$<*]|redacted:|(?:none|null|true|false|required|missing|invalid|optional|default|str|string)\b)"
    rb"([^\s\"'`&,;<>()\[\]{}\\]{8,})"
)
"""A value after its name: neither a path nor a word that says that there is none."""
_KEY_BYTES: Final = rb"16384"
"""The longest private key is half as long. Of one without an end this much is taken."""


def _shape(
    label: str, anchors: Sequence[bytes], *pattern: bytes, any_case: bool = False, prefix: bool = False
) -> _Shape:
    flags = re.DOTALL | (re.IGNORECASE if any_case else 0)
    return _Shape(label, tuple(anchors), re.compile(b"".join(pattern), flags), any_case, prefix)


_NAMED: Final = "value of a secret name"
_SHAPES: Final = (
    _shape(
        "private key",
        [b"-----BEGIN"],
        rb"-----BEGIN [A-Z ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----",
        rb"(?:.{0,"
        + _KEY_BYTES
        + rb"}?-----END [A-Z ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----|.{0,"
        + _KEY_BYTES
        + rb"})",
    ),
    _shape("Hugging Face token", [b"hf_"], _ALONE, rb"hf_[A-Za-z0-9]{12,}", prefix=True),
    _shape("API key", [b"sk-"], _ALONE, rb"sk-[A-Za-z0-9_-]{12,}", prefix=True),
    _shape("GitHub token", [b"gh"], _ALONE, rb"(?:gh[oprsu]|github_pat)_[A-Za-z0-9_]{12,}", prefix=True),
    _shape("GitLab token", [b"glpat-"], _ALONE, rb"glpat-[A-Za-z0-9_-]{12,}", prefix=True),
    _shape("Slack token", [b"xox"], _ALONE, rb"xox[a-z]-[A-Za-z0-9-]{12,}", prefix=True),
    _shape("NVIDIA key", [b"nvapi-"], _ALONE, rb"nvapi-[A-Za-z0-9_-]{12,}", prefix=True),
    _shape("AWS key", [b"AKIA", b"ASIA"], _ALONE, rb"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _shape("Google key", [b"AIza"], _ALONE, rb"AIza[A-Za-z0-9_-]{35}"),
    _shape("JSON web token", [b"eyJ"], _ALONE, rb"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    _shape("password in a URL", [b"@"], rb"://([^/@\s\"'<>?#]{0,256}:[^/@\s\"'<>]{1,512})(?=@)"),
    _shape(
        "authorization",
        [b"bearer", b"authorization"],
        rb"(?:\bbearer[ \t]+|\bauthorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?(?:[a-z]{1,20}[ \t]+)?)",
        rb"(?!redacted:|(?:authentication|authorization|required|missing|invalid)\b)([A-Za-z0-9._~+/=-]{8,})",
        any_case=True,
    ),
    _shape(
        "value of a query",
        [b"?", b"&"],
        rb"[?&](?:amp;)?(?:[a-z_-]{0,20}(?:key|token|signature|credential)|sig|auth|secret|passw(?:or)?d)=",
        rb"([^&\s\"'<>`\\\[]{4,})",
        any_case=True,
    ),
    _shape(
        _NAMED,
        [b"key", b"token"],
        rb"[-_](?:(?:(?<=api.)|(?<=access.)|(?<=secret.)|(?<=private.)|(?<=signing.)|(?<=account.))key(?:[-_]id)?",
        rb"|(?:(?<=auth.)|(?<=access.)|(?<=refresh.)|(?<=api.)|(?<=hf.)|(?<=hub.)|(?<=session.)|(?<=bearer.)",
        rb"|(?<=github.)|(?<=gitlab.))token)",
        _VALUE,
        any_case=True,
        prefix=True,
    ),
    _shape(
        _NAMED,
        [b"apikey", b"secret", b"passw", b"passphrase"],
        rb"(?:apikey|secret|passw(?:or)?d|passphrase)",
        _VALUE,
        any_case=True,
    ),
)
_OPEN_KEY: Final = re.compile(
    rb"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?!.*-----END [A-Z ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----)", re.DOTALL
)
_LETTERS: Final = re.compile(rb"[A-Za-z0-9]")


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """True where a variable or option of this name holds a secret."""
    return _SECRET_NAME.search(name.lstrip("-")) is not None


def holds_key(text: str) -> bool:
    """True where ``text`` has the shape of a key or names one with its value."""
    return bool(Redactor().spans(text.encode("utf-8", "surrogatepass")))


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


def with_old_marks(text: str) -> str:
    """``text`` with marks as older result directories have them, which do not say what was there."""
    return _MARK.sub(OLD_MARK, text)


class Redactor:
    """Replaces known values and keys of common shapes; ``values`` are the spellings to look for, longest first."""

    def __init__(self, values: Iterable[KnownValue] = ()) -> None:
        self.values: Final = tuple(sorted(values, key=lambda each: -len(each.value)))

    def text(self, text: str) -> str:
        """``text`` without its secrets. A text without any is returned unchanged, and marks are none."""
        content = text.encode("utf-8", "surrogatepass")
        spans = self.spans(content)
        return replaced(content, spans).decode("utf-8", "surrogatepass") if spans else text

    def content(self, content: bytes) -> tuple[bytes, Counter[str]]:
        """``content`` without its secrets, and the number of these by label."""
        spans = self.spans(content)
        return (replaced(content, spans) if spans else content), Counter(span.label for span in spans)

    def spans(self, text: bytes) -> list[Span]:
        """The secrets in ``text``, in order and without overlap."""
        return _merged([*self._known_spans(text), *_shape_spans(text)])

    def _known_spans(self, text: bytes) -> Iterator[Span]:
        for label, value, is_word in self.values:
            start = text.find(value)
            while start >= 0:
                end = start + len(value)
                touches = _LETTERS.match(text[start - 1 : start]) or _LETTERS.match(text[end : end + 1])
                if not (is_word and touches):
                    yield Span(start, end, label, is_known=True)
                start = text.find(value, end)


def replaced(text: bytes, spans: Iterable[Span]) -> bytes:
    """``text`` with a mark for each of ``spans``."""
    pieces, position = [], 0
    for span in spans:
        pieces += [text[position : span.start], mark(span.label).encode()]
        position = span.end
    return b"".join((*pieces, text[position:]))


def _shape_spans(text: bytes) -> Iterator[Span]:
    low, has_prefix = text.lower(), _PREFIX.search(text) is not None
    for shape in _SHAPES:
        if shape.has_prefix and not has_prefix:
            continue
        searched = low if shape.has_any_case else text
        if any(anchor in searched for anchor in shape.anchors):
            for match in shape.pattern.finditer(text):
                start, end = match.span(shape.pattern.groups)
                yield Span(start, end, shape.label, is_known=False)


def _merged(spans: list[Span]) -> list[Span]:
    """Overlapping spans as one, with the label of a known value where there is one."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.end, not each.is_known)):
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            label = span.label if span.is_known and not last.is_known else last.label
            merged[-1] = Span(last.start, max(last.end, span.end), label, last.is_known or span.is_known)
        else:
            merged.append(span)
    return merged


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
    """``value``, of 8 characters or more, as it is, in URLs and in JSON strings."""
    whole = value.strip()
    parts = [part for part in whole.splitlines() if len(part) >= _LEAST_CHARS_OF_LINE] if "\n" in whole else [whole]
    for part in parts:
        in_urls = (
            encode(part, safe, errors="surrogateescape") for encode in (quote, quote_plus) for safe in ("", "/")
        )
        in_json = (json.dumps(part, ensure_ascii=escaped)[1:-1] for escaped in (True, False))
        for text in dict.fromkeys((part, *in_urls, *in_json)):
            yield text.encode("utf-8", "surrogateescape")


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


_LINE_BYTES: Final = 1 << 17
"""Of a longer line, or of a longer private key, the beginning is passed on before its end has come."""


def copy_redacted(source: Path, target: Path, redactor: Redactor) -> None:
    """Copy a file of any size without its secrets."""
    stream = RedactedStream(redactor)
    with source.open("rb") as read, target.open("wb") as written:
        while piece := read.read(_LINE_BYTES):
            written.write(stream.feed(piece))
        written.write(stream.end())


class RedactedStream:
    """Passes a stream of bytes on without its secrets, line by line; ``counts`` are the secrets replaced."""

    def __init__(self, redactor: Redactor) -> None:
        self.counts: Counter[str] = Counter()
        self._redactor = redactor
        self._pending = b""

    def feed(self, piece: bytes) -> bytes:
        """Take the next piece; returns what can be passed on."""
        self._pending += piece
        cut = max(self._pending.rfind(b"\n"), self._pending.rfind(b"\r")) + 1
        cut = _open_key_from(self._pending[:cut])
        if not cut and len(self._pending) > _LINE_BYTES:
            cut = self._pending.rfind(b" ") + 1 or len(self._pending)
        return self._pass_on(cut)

    def end(self) -> bytes:
        """Nothing more comes; returns the rest."""
        return self._pass_on(len(self._pending))

    def _pass_on(self, num_bytes: int) -> bytes:
        passed, self._pending = self._pending[:num_bytes], self._pending[num_bytes:]
        content, counts = self._redactor.content(passed)
        self.counts.update(counts)
        return content


def _open_key_from(text: bytes) -> int:
    """The position of a private key whose end is not in ``text``; its length where there is none."""
    key = _OPEN_KEY.search(text) if b"-----BEGIN " in text else None
    return len(text) if key is None else key.start()
