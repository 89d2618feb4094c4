"""benchctl with a fault: whoever fills a slot of a closed loop is held up by ``BENCH_REFILL_DELAY_MS``.

For benches that show that the guards find it. The product has no such switch: its driver is changed from here.

    BENCH_REFILL_DELAY_MS=80 python -m benchmarks.load.peers.delayed_client load http://127.0.0.1:8000 …
"""

import asyncio
import os
from typing import Any

from benchctl.cli import main
from benchctl.load.schedule import Load

# ruff: noqa: SLF001 - a fault is planted from outside, for which the product has no place

_DELAY_S = float(os.environ.get("BENCH_REFILL_DELAY_MS", "80")) / 1000


def delay_refills() -> None:
    start = Load._start

    def late(load: Load, exchange: Any, slot_freed: Any = None) -> None:
        if slot_freed is None:
            start(load, exchange)
        else:
            load._in_slots.add(exchange)
            asyncio.get_running_loop().call_later(_DELAY_S, start, load, exchange, slot_freed)

    Load._start = late  # type: ignore[method-assign]


if __name__ == "__main__":
    delay_refills()
    main()
