"""Machines to pull results from: an ``ssh`` that runs the remote command here, and a real server on loopback."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCAL_SSH = """#!/bin/sh
# ssh [OPTION...] HOST COMMAND: runs COMMAND in the home directory of the machine, as a login shell would
while :; do case "$1" in -[lpoFi]) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift
echo "$host $*" >> {log}
[ "$host" = unreachable ] && {{ echo "ssh: Could not resolve hostname unreachable" >&2; exit 255; }}
[ "$host" = bare ] && {{ echo "sh: 1: rsync: not found" >&2; exit 127; }}
cd {home} && exec sh -c "$*"
"""


def fake_ssh(folder: Path, home: Path) -> Path:
    """A directory for PATH whose ``ssh`` runs commands in ``home``; what it was asked is in its ``log``."""
    folder.mkdir()
    program = folder / "ssh"
    program.write_text(_LOCAL_SSH.format(home=home, log=folder / "log"))
    program.chmod(0o755)
    return folder


@contextmanager
def ssh_server(folder: Path) -> Iterator[str]:
    """A real sshd on loopback with keys of its own; yields the command that reaches ``loopback`` there."""
    folder.mkdir(mode=0o700)
    port = _free_port()
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=30
        )
    shutil.copyfile(folder / "user.pub", folder / "authorized")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nPidFile {folder / 'pid'}\n"
        f"AuthorizedKeysFile {folder / 'authorized'}\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "UsePAM no\nStrictModes no\nPermitRootLogin prohibit-password\nLogLevel ERROR\n"
    )
    host_key = (folder / "host.pub").read_text().split()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {host_key[0]} {host_key[1]}\n")
    (folder / "ssh_config").write_text(
        f"Host loopback\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder / 'user'}\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known'}\n"
        "  BatchMode yes\n"
    )
    argv = [shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"), "-D", "-f", str(folder / "sshd_config")]
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd of root keeps its privileges apart
    server = subprocess.Popen([*argv, "-E", str(folder / "log")])
    try:
        _await_port(port, server, folder / "log")
        yield f"ssh -F {folder / 'ssh_config'}"
    finally:
        server.terminate()
        server.wait(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _await_port(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(100):
        if server.poll() is not None:
            break
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"sshd does not answer: {log.read_text() if log.exists() else 'no log'}")
