"""What commands take before and after their work: help, a list, reading results, and the smallest experiment.

Help of every command, the list, and commands that read the result of that experiment stand beside Python itself and
beside Python with typer, which reads the command line. The smallest experiment is one run of one request on a
simulated server; beside it stands the same by hand: start that server, wait until it listens, read one answer, and
end it. A run also draws pictures, the first of which takes as long as V8 takes to start.

    python -m benchmarks.measure.start_up [--rounds 5]
"""

import http.client
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchctl.cli.app import COMMANDS
from benchmarks.common.harness import FailedError, Figures, compared, options, write
from benchmarks.common.measured_process import spent

BENCHCTL = (sys.executable, "-m", "benchctl")
READING = ("show", "verify", "report")
LATEST = "results/smallest/latest"
LIMIT_S = 30
PICTURE = "import vl_convert; vl_convert.vegalite_to_png({'data': {'values': [{'a': 1}]}, 'mark': 'bar'})"
PROFILE = """\
name: smallest
seed: 1
blocks: 1
engine: {kind: sim, options: {time_scale: 100.0}}
model: qwen2.5-7b
hardware: h100-sxm
workload:
  dataset: generated
  num_prompts: 1
  samples_per_prompt: 1
  output_len: 16
  arrival: {kind: closed-loop, max_concurrency: 1}
  num_warmups: 0
variants:
  baseline: {}
"""


def main() -> None:
    asked = options(__doc__, rounds=5)
    with tempfile.TemporaryDirectory() as root:
        work = Path(root)
        (work / "smallest.yaml").write_text(PROFILE)
        run = (*BENCHCTL, "run", "smallest.yaml", "--quiet", "--output-dir", "results")
        for command in (run, (*BENCHCTL, "profiles", "list")):  # compiles their modules
            spent(command, work)

        def took(*argv: str) -> Figures:
            return spent(argv, work)

        python = partial(took, sys.executable, "-c")
        commands = compared(
            "before the work",
            {
                "python": partial(python, "pass"),
                "python with typer": partial(python, "import typer"),
                "benchctl --help": partial(took, *BENCHCTL, "--help"),
                **{f"benchctl {name} --help": partial(took, *BENCHCTL, name, "--help") for name in COMMANDS},
                "benchctl profiles list": partial(took, *BENCHCTL, "profiles", "list"),
                **{f"benchctl {name}": partial(took, *BENCHCTL, name, LATEST) for name in READING},
            },
            rounds=asked.rounds,
            ratios=("wall s", "cpu s"),
        )
        smallest = compared(
            "one run of one request",
            {
                "by hand": partial(by_hand, work),
                "one picture by V8 alone": partial(python, PICTURE),
                "benchctl run": partial(took, *run),
            },
            rounds=asked.rounds,
            ratios=("wall s", "cpu s"),
        )
    write(asked.json, {"commands": commands, "smallest run": smallest})


def by_hand(work: Path) -> Figures:
    """Start the server of the smallest run, read one answer, and end it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = work / "config.json"
    config.write_text(json.dumps({"time_scale": 100.0}))
    argv = [sys.executable, "-m", "benchctl.sim", "--port", str(port), "--config", str(config)]
    body = json.dumps({"model": "qwen2.5-7b", "prompt": "one", "max_tokens": 16, "ignore_eos": True})
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    with subprocess.Popen([*argv, "--step-log", str(work / "steps")], stderr=subprocess.DEVNULL) as server:
        try:
            connection = connected(port)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            server.terminate()
    if answer.status != http.client.OK:
        raise FailedError(f"{answer.status}: {text}")
    return {"wall s": time.perf_counter() - began_s, "cpu s": cpu_s() - began_cpu_s}


def cpu_s() -> float:
    """Processor time of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def connected(port: int) -> http.client.HTTPConnection:
    connection, deadline_s = http.client.HTTPConnection("127.0.0.1", port), time.perf_counter() + LIMIT_S
    while True:
        try:
            connection.connect()
        except OSError:
            if time.perf_counter() > deadline_s:
                raise
            time.sleep(0.005)
        else:
            return connection


if __name__ == "__main__":
    main()
