"""Samples of a process of the load generator during a load: the lag of its event loop, and its processor time."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from benchctl.load.transport.client import StreamClient
from benchctl.records.schema import ClientSample
from benchctl.units import s_from_ns

_BEAT_NS: Final = 20_000_000
"""Often enough to see most stalls of the loop; it costs a thousandth of a core."""
_BEATS_PER_SAMPLE: Final = 5


async def beat(client: StreamClient, on_sample: Callable[[ClientSample], None], worker: int) -> None:
    """Report a sample ten times per second, with the longest lag since the one before; never returns."""
    num_offsets = 0
    while True:
        lag_ns = 0
        for _ in range(_BEATS_PER_SAMPLE):
            due_ns = time.monotonic_ns() + _BEAT_NS
            await asyncio.sleep(s_from_ns(_BEAT_NS))
            lag_ns = max(lag_ns, time.monotonic_ns() - due_ns)
        client.clock.sample()
        offsets = client.clock.offsets
        on_sample(
            ClientSample(
                t_ns=time.monotonic_ns(),
                worker=worker,
                loop_lag_ns=lag_ns,
                cpu_ns=time.process_time_ns(),
                num_open=client.activity().num_open,
                offset=offsets[-1] if len(offsets) > num_offsets else None,
            )
        )
        num_offsets = len(offsets)
