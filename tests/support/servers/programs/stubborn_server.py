"""A paced server with the bad habits of real ones: engine processes, runaways, orphans, last wills, long farewells.

Everything that ``paced_server.py`` takes is taken here, too.
"""
# ruff: noqa: T201 - what it prints is a server's log

import argparse
import asyncio
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import paced_server

CORE = "Stubborn::EngineCore"
"""Title of the process without which this server cannot go on."""
SLEEP = "import time; time.sleep(300)"
RUNAWAY = (
    "import os; os.fork() and os._exit(0); os.setsid(); "
    f"os.write(1, b'runaway %d\\n' % os.getpid()); {SLEEP}"  # in one piece: its server writes at the same time
)


def arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--core", choices=["leave", "stay"], help="have an engine process; leave or stay when it dies"
    )
    parser.add_argument("--leave-after-s", type=float, default=0.2, help="how long leaving takes")
    parser.add_argument("--runaway", action="store_true", help="a descendant in a session and a family of its own")
    parser.add_argument("--segment", help="a file in /dev/shm to create and keep mapped")
    parser.add_argument("--port-taken", action="store_true", help="say that the port is taken and live on")
    parser.add_argument("--serve-from-child", choices=["leave", "stay"], help="and leave it an orphan, or stay")
    parser.add_argument("--drain", action="store_true", help="when asked to end, wait for open streams")
    parser.add_argument("--chatter-bytes", type=int, default=0, help="how much to log at the start, in one line")
    return parser.parse_known_args()


class StubbornStream(paced_server.Stream):
    """An answer that is counted while it is open, and does not begin when the server is closing."""

    num_open = 0
    is_closing = False

    async def answer(self):
        if StubbornStream.is_closing:
            return
        StubbornStream.num_open += 1
        try:
            await super().answer()
        finally:
            StubbornStream.num_open -= 1


def mourn(core, options):
    """Wait for the end of the engine process and do as the habit is."""
    core.wait()
    print("engine core died", flush=True)
    if options.core == "leave":
        time.sleep(options.leave_after_s)
        os._exit(0)


def leave_when_idle(_signal, _frame):
    StubbornStream.is_closing = True

    def wait():
        while StubbornStream.num_open:
            time.sleep(0.01)
        os._exit(0)

    threading.Thread(target=wait).start()


def take_habits(options):
    if options.chatter_bytes:
        print("x" * options.chatter_bytes, end="\n\x1b[1mloading\x1b[0m 10%\rloading 90%\n", flush=True)
    if options.core:
        core = subprocess.Popen([sys.executable, "-c", SLEEP, CORE])
        threading.Thread(target=mourn, args=(core, options), daemon=True).start()
    if options.runaway:
        subprocess.run([sys.executable, "-c", RUNAWAY], check=True)
    if options.segment:
        handle = os.open(f"/dev/shm/{options.segment}", os.O_CREAT | os.O_EXCL | os.O_RDWR)
        os.ftruncate(handle, 4096)
        globals()["kept"] = mmap.mmap(handle, 4096)
        os.close(handle)
    if options.drain:
        signal.signal(signal.SIGTERM, leave_when_idle)


def main():
    options, rest = arguments()
    take_habits(options)
    if options.port_taken:
        print("ERROR: [Errno 98] address already in use", flush=True)
        time.sleep(300)
    if options.serve_from_child:
        child = subprocess.Popen([sys.executable, __file__, *rest])
        if options.serve_from_child == "stay":
            child.wait()
        time.sleep(options.leave_after_s)
        return
    sys.argv = [sys.argv[0], *rest]
    paced_server.Stream = StubbornStream
    asyncio.run(paced_server.main())


if __name__ == "__main__":
    main()
