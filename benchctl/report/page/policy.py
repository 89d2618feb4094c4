"""The content security policy of a page: what a browser runs and loads of it, whatever else gets into its text.

Every text of a page is escaped, so the policy is the second wall: a script that slipped in through a mistake, or
that somebody planted in the file, does not run, and nothing is asked of the network.
"""

import hashlib
from base64 import b64encode
from collections.abc import Iterable


def content_policy(*, scripts: Iterable[str], styles: Iterable[str]) -> str:
    """The policy under which the given inline scripts and styles are the only ones of a document.

    Pictures may be ``data:`` addresses: the empty icon. The empty style is that of plotly.js, which adds an empty
    element and fills it by rules of the object model, as it sets all its ``style`` attributes; a policy judges only
    those in the text. So neither ``unsafe-inline`` nor ``unsafe-eval`` is needed.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(scripts)}",
            f"style-src {_hashes((*styles, ''))}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hashes(texts: Iterable[str]) -> str:
    """Source expressions of Content Security Policy Level 3: ``'sha256-`` and the digest of the UTF-8 in base64."""
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)
