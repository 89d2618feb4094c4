"""The server's own counters and gauges while a load runs, as its Prometheus page states them.

The first reading is taken before the first send and the last after the last token, so that the difference of a
counter belongs to the load alone.
"""

import time
from collections.abc import Iterator
from threading import Event
from typing import Final

import httpx

from benchctl.engines.metrics_page import series_of
from benchctl.records.run import PrometheusSample

_TIMEOUT_S: Final = 5.0


def prometheus_samples(url: str, hz: float, stopped: Event) -> Iterator[PrometheusSample]:
    """Readings of ``url`` at ``hz`` until ``stopped`` is set, and one more then.

    Raises OSError when the page cannot be had, ValueError when it cannot be read.
    """
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
        while True:
            is_last = stopped.is_set()
            yield _reading(client, url)
            if is_last:
                return
            stopped.wait(1 / hz)


def _reading(client: httpx.Client, url: str) -> PrometheusSample:
    try:
        response = client.get(url)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise OSError(f"GET {url}: {error}") from error
    return PrometheusSample(t_ns=time.monotonic_ns(), values=series_of(response.text))
