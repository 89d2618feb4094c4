"""Serves ``benchctl`` as processes whose modules are loaded already: each command is a fork of this one.

``preloaded_benchctl.py SOCKET`` ends with its standard input. A client (``benchctl_client.py``) sends arguments,
directory, environment and three standard streams, and receives the process id and the exit code. Imports take
longer than most commands.
"""
# ruff: noqa: T201 - its output says that it is ready

import gc
import json
import os
import selectors
import signal
import socket
import sys
from importlib import import_module

MODULES = (
    "benchctl.cli.app",
    "benchctl.cli.commands.blocks",
    "benchctl.cli.commands.compare",
    "benchctl.cli.commands.experiment",
    "benchctl.cli.commands.results",
    "benchctl.cli.commands.run",
    "benchctl.cli.commands.simulate",
    "benchctl.cli.outcome",
    "benchctl.measure.experiment",
    "benchctl.report.export",
    "benchctl.report.experiment_tables",
    "scipy.special",
)
OF_A_BUSY_MACHINE = frozenset(
    {
        "arrival-times-unreliable", "client-bunching", "client-cpu", "client-crowded", "event-loop-stalls",
        "rate-missed", "sends-delayed", "sends-unlike-poisson", "slots-idle", "times-bounded",
    }
)  # fmt: skip
"""Warnings that a machine can cause in any run, and for which functions of their own are tested."""
RECEIVED_BYTES = 1 << 20


def make_what_every_experiment_needs() -> None:
    """Compile the templates of pages, pack what draws in them, and build the reader of profiles: half a second."""
    page = import_module("benchctl.report.page.page")
    templates = vars(page)["_environment"]()
    for name in templates.list_templates():
        templates.get_template(name)
    page.packed_vega()
    import_module("benchctl.profile.model").Profile.model_rebuild()


def become_command(request: bytes, streams: list[int]) -> None:
    """In the fork: take directory, environment, arguments and streams of the client, and run."""
    asked = json.loads(request)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = ["benchctl", *asked["argv"]]
    if os.environ.pop("BENCHCTL_TEST_WITHOUT_PICTURES", ""):
        import_module("benchctl.report.export").why_not_drawn = lambda: "a test does without"
    if os.environ.pop("BENCHCTL_TEST_WITHOUT_SERVERS", ""):
        import_module("benchctl.cli.conduct").measure_run = import_module("benchctl.measure.virtual").simulate_run
    forgive_the_machine()
    import_module("benchctl.cli").main()


def forgive_the_machine() -> None:
    """Take pauses of a machine that runs tests, of half a second and more, for what they are: no run is suspect."""
    vars(import_module("benchctl.engines.sim.engine"))["_HICCUP_S"] = 60.0
    measured_run = import_module("benchctl.measure.measured_run").MeasuredRun
    warn = measured_run.warn
    measured_run.warn = lambda run, *warnings: warn(
        run, *[warning for warning in warnings if warning.code not in OF_A_BUSY_MACHINE]
    )


def receive(client: socket.socket) -> tuple[bytes, list[int]]:
    """The whole request, which ends with a zero byte, and the descriptors that came with its first part."""
    content, streams, _, _ = socket.recv_fds(client, RECEIVED_BYTES, 3)
    while content and not content.endswith(b"\0"):
        content += client.recv(RECEIVED_BYTES)
    return content[:-1], streams


def serve(listener: socket.socket) -> None:
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wakes.fileno())
    clients: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for source in (listener, woken, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                return
            if woken in ready:
                woken.recv(4096)
                tell_ended(clients)
            if listener in ready:
                client = listener.accept()[0]
                request, streams = receive(client)
                if (pid := os.fork()) == 0:
                    selector.close()
                    for other in (listener, woken, wakes, client, *clients.values()):
                        other.close()
                    become_command(request, streams)
                for stream in streams:
                    os.close(stream)
                client.sendall(f"{pid}\n".encode())
                clients[pid] = client


def tell_ended(clients: dict[int, socket.socket]) -> None:
    """Tell each client whose command has ended its exit code; negative: the signal that ended it."""
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with clients.pop(pid) as client:
            try:
                client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            except BrokenPipeError:  # the client was killed
                continue


if __name__ == "__main__":
    for module in MODULES:
        import_module(module)
    make_what_every_experiment_needs()
    gc.freeze()  # no command searches what was loaded for cycles
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(sys.argv[1])
        server.listen()
        print("ready", flush=True)
        serve(server)
    os._exit(0)
