"""The server's own counters and gauges during a load, from its Prometheus page.

The first sample is taken before the first send and the last after the last token, so that the difference of a
counter belongs to the load alone. Servers count a moment after they answer: both samples are repeated until the
counters are up to date.
"""

import ssl
import time
from collections.abc import Iterator
from threading import Event
from typing import Final

import httpx

from benchctl.analysis.metrics.server_counters import is_idle, token_counts
from benchctl.engines.metrics_page import series_of
from benchctl.records.schema import PrometheusSample
from benchctl.untrusted import METRICS_BYTES
from benchctl.untrusted.http import fetch_now

_TIMEOUT_S: Final = 5.0
_SETTLE_LIMIT_S: Final = 2.0
_SETTLE_POLL_S: Final = 0.1


def prometheus_samples(url: str, hz: float, stopped: Event, *, settles: bool = False) -> Iterator[PrometheusSample]:
    """Samples of ``url`` at ``hz`` until ``stopped`` is set, and one more then.

    With ``settles`` the first and the last sample wait, at most two seconds, for counters that are up to date: the
    server reports no running request, and its token counters were the same a tenth of a second before. Raises
    OSError when the page cannot be fetched, ValueError when it cannot be parsed.
    """
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=_trust_for(url)) as client:
        is_first = True
        while True:
            is_last = stopped.is_set()
            yield _settled(client, url) if settles and (is_first or is_last) else _reading(client, url)
            if is_last:
                return
            is_first = False
            stopped.wait(1 / hz)


def _trust_for(url: str) -> ssl.SSLContext:
    """The certificates to trust: those of the system, 1 MB and 20 ms to load, only for an https address."""
    return ssl.create_default_context() if url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _settled(client: httpx.Client, url: str) -> PrometheusSample:
    """The first sample that repeats the one before while the server is idle, or the last within the limit."""
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    before = _reading(client, url)
    while True:
        time.sleep(_SETTLE_POLL_S)
        now = _reading(client, url)
        has_caught_up = is_idle(now.values) and token_counts(now.values) == token_counts(before.values)
        if has_caught_up or time.monotonic() >= deadline:
            return now
        before = now


def _reading(client: httpx.Client, url: str) -> PrometheusSample:
    try:
        response = fetch_now(client, url, limit_s=_TIMEOUT_S, max_bytes=METRICS_BYTES)
    except httpx.HTTPError as error:
        raise OSError(f"GET {url}: {error}") from error
    if response.status_code != httpx.codes.OK:
        remedy = "start the server with its counters switched on, or set telemetry.prometheus_hz to 0"
        raise OSError(f"GET {url}: answered {response.status_code} {response.reason_phrase}; {remedy}")
    return PrometheusSample(t_ns=time.monotonic_ns(), values=series_of(response.text))
