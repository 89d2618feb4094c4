"""Recognition of secrets by the name of a variable or option, or by the shape of well-known tokens.

Secrets belong neither into a profile nor into a result directory.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

_SECRET_NAME: Final = re.compile(
    r"(^|[-_.])(token|secret|secrets|password|passwd|passphrase|credential|credentials|auth|authorization"
    r"|apikey|(api|access|private|secret|signing)[-_]?key)([-_.]|$)",
    re.IGNORECASE,
)
"""A whole word of a name: ``HF_TOKEN`` and ``--api-key`` are secrets, ``--max-num-batched-tokens`` and
``TOKENIZERS_PARALLELISM`` are not."""
SECRET_VALUE: Final = re.compile(
    r"\b(hf_|sk-|ghp_|glpat-|xox[abp]-)[A-Za-z0-9_-]{12,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)"
)


def is_secret_name(name: str) -> bool:
    """True where a variable or option of this name holds a secret."""
    return _SECRET_NAME.search(name.lstrip("-")) is not None


def secret_options(words: Sequence[str]) -> Iterator[str]:
    """Options of a command line that take a secret, and words that look like one (those not shown)."""
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("-") and is_secret_name(name):
            yield name
        elif SECRET_VALUE.search(word):
            yield "a token"
