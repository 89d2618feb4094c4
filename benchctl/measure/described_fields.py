"""Fields of requests that a server does not know, by its own description of its API.

vLLM and other servers ignore unknown fields without a word: a misspelt one changes nothing and nobody notices.
"""

from collections.abc import Collection
from typing import Any, Final

import httpx

from benchctl.untrusted.http import fetch_json

_DESCRIPTION: Final = "/openapi.json"
_PATHS: Final = ("/v1/completions", "/v1/chat/completions")


async def undescribed_fields(client: httpx.AsyncClient, names: Collection[str]) -> tuple[str, ...]:
    """Those of ``names`` that no request of the server has; none where it does not describe its requests."""
    if not names:
        return ()
    try:
        document = await fetch_json(client, _DESCRIPTION)
    except httpx.HTTPError:
        return ()
    described = {field for path in _PATHS for field in _fields(document, path)}
    return tuple(name for name in names if name not in described) if described else ()


def _fields(document: Any, path: str) -> Collection[str]:
    """The fields of a request to ``path`` in an OpenAPI document, whose schemas may refer to one another."""
    try:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        if "$ref" in body:
            body = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        properties = body["properties"]
    except (KeyError, TypeError, AttributeError):
        return ()
    return properties if isinstance(properties, dict) else ()
