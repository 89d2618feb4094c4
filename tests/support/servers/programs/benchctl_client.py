"""Runs ``benchctl`` as a fork of the server at SOCKET, with the streams, arguments and signals of this process."""

import json
import os
import signal
import socket
import sys

SOCKET = os.environ["BENCHCTL_TEST_SERVER"]


def main() -> None:
    asked = {
        "argv": sys.argv[1:],
        "cwd": os.getcwd(),  # noqa: PTH109 - pathlib would take longer to import than all else here
        "env": dict(os.environ),
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(SOCKET)
        request = json.dumps(asked).encode() + b"\0"
        sent = socket.send_fds(server, [request], [0, 1, 2])
        server.sendall(request[sent:])
        answers = server.makefile("r")
        pid = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _frame: os.kill(pid, number))
        code = int(answers.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
