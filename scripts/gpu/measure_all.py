"""Everything that one GPU must show, by one call: at most 25 minutes, what matters most first, one page at the end.

    python scripts/gpu/measure_all.py [--quick] [DIRECTORY]

``--quick`` takes 8 minutes at most and needs nothing but torch and numpy: it runs from a bare checkout. The other
parts need benchctl's libraries in the interpreter that runs this script, and some an engine; what is not installed
is skipped, with the reason, and nothing is ever fetched.

The directory (``gpu-measurements``) gets ``gpu.md``, a page for ``docs/measurements/``, written anew after each
part, and in ``parts/`` the text, log, clocks and numbers of each. A call that is interrupted, or whose time is
over, keeps what is done: the same call goes on from there. Where a part fails, the page says so and the next runs.

Exit code: 0 all is measured or skipped for a reason, 2 there is no GPU or no torch, 5 a part failed or had no time,
130 interrupted.

``--dry-run`` lists the parts with their times. They are estimates for one H100, where no part has been timed yet:
torch starts in 10 s, weights of 7B are drawn in seconds, kernels compile once in half a minute, a base step takes
5 to 8 ms and a guided one half as much again, so a pair of rounds of 24 steps 0.4 s; the 40 to 60 passes of one
server are recorded in 2 s; a vLLM server starts in a minute.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from part_runs import Outcome, Parts
from parts import FULL, FULL_S, QUICK, QUICK_S, ROOT, Part, Setup, has_benchctl, torch_python
from smi import said

_PROBE_LIMIT_S = 120
_PROBE = """
import json, platform, torch
try:
    import triton
    has_triton = triton.__version__
except ImportError:
    has_triton = "none"
is_cuda = torch.cuda.is_available()
device = torch.cuda.get_device_properties(0) if is_cuda else None
print(json.dumps({
    "device": device.name if device else platform.processor() or platform.machine(),
    "memory": f"{device.total_memory / 2**30:.1f} GiB" if device else "",
    "torch": torch.__version__, "CUDA": str(torch.version.cuda), "Triton": has_triton,
    "Python": platform.python_version(), "has_cuda": is_cuda,
}))
"""


def main() -> None:
    options = parse()
    parts = chosen_parts(options)
    if options.dry_run:
        print_plan(parts, whole_s(options))
        return
    start = time.monotonic()
    options.directory.mkdir(parents=True, exist_ok=True)
    setup, machine = found(options)
    runs = Parts(setup, f"{machine['commit']} on {machine['device']}", gpu_of_this_process())
    outcomes: dict[str, Outcome | None] = {part.name: runs.outcome(part) for part in parts}
    signal.signal(signal.SIGTERM, lambda *_: _interrupt())
    try:
        for number, part in enumerate(parts, 1):
            kept = outcomes[part.name]
            if kept is not None and kept.ending == "done":
                tell(f"{number}/{len(parts)} {part.name}: done in an earlier call, skipped")
                continue
            tell(f"{number}/{len(parts)} {part.name}: up to {part.limit_s} s")
            outcomes[part.name] = None
            outcomes[part.name] = outcome = runs.run(part, whole_s(options) - (time.monotonic() - start))
            tell(f"    {outcome.ending} after {outcome.seconds:.0f} s {outcome.reason}".rstrip())
            write_page(options.directory, parts, outcomes, runs, machine)
    except KeyboardInterrupt:
        write_page(options.directory, parts, outcomes, runs, machine)
        tell(f"interrupted; what is done is in {options.directory}, and the same call goes on from there")
        sys.exit(130)
    page = write_page(options.directory, parts, outcomes, runs, machine)
    bad = [name for name, outcome in outcomes.items() if outcome is not None and outcome.is_bad]
    tell(f"in {page}; " + (f"not measured: {', '.join(bad)}" if bad else "nothing failed"))
    sys.exit(5 if bad else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("gpu-measurements"))
    parser.add_argument("--quick", action="store_true", help="only what needs torch alone, in 8 minutes")
    parser.add_argument("--dry-run", action="store_true", help="list the parts with their times; run nothing")
    parser.add_argument("--only", metavar="PART,PART", help="these parts alone")
    parser.add_argument("--torch-python", metavar="PATH", help="interpreter with torch; searched for by default")
    parser.add_argument("--engine", default="vllm-lenvm-gpu", help="of the part 'served' (vllm-lenvm-gpu)")
    parser.add_argument("--model", help="base model of that part; by default one of random weights")
    parser.add_argument("--value-model", help="value model of that part")
    parser.add_argument("--commit", help="of this checkout, where git cannot tell")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a toy's size: tries the script anywhere")
    options = parser.parse_args()
    if (options.model is None) != (options.value_model is None):
        parser.error("--model and --value-model belong together; name both or none")
    options.directory = options.directory.absolute()
    return options


def chosen_parts(options: argparse.Namespace) -> tuple[Part, ...]:
    parts = QUICK if options.quick else FULL
    if options.only is None:
        return parts
    wanted = options.only.split(",")
    known = [part.name for part in parts]
    if unknown := [name for name in wanted if name not in known]:
        refuse(f"--only {','.join(unknown)}: no such part; choose from {', '.join(known)}")
    return tuple(part for part in parts if part.name in wanted)


def whole_s(options: argparse.Namespace) -> int:
    return QUICK_S if options.quick else FULL_S


def print_plan(parts: Sequence[Part], limit_s: int) -> None:
    print(f"{'part':12} {'estimate s':>10} {'limit s':>8}  what")
    for part in parts:
        needs = f" (needs {', '.join(part.needs)})" if part.needs else ""
        print(f"{part.name:12} {part.estimate_s:>10} {part.limit_s:>8}  {part.title}{needs}")
    print(
        f"{'':12} {sum(part.estimate_s for part in parts):>10} {sum(part.limit_s for part in parts):>8}  "
        f"no part begins, and none goes on, after {limit_s} s in all"
    )


def found(options: argparse.Namespace) -> tuple[Setup, Mapping[str, Any]]:
    """What is installed here, and the machine; refuses a machine that cannot measure."""
    python = torch_python(options.torch_python)
    if python is None:
        named = options.torch_python or sys.executable
        refuse(f"{named} cannot import torch; name an interpreter that can: --torch-python PATH")
    probe = subprocess.run(
        (python, "-c", _PROBE), capture_output=True, text=True, check=False, timeout=_PROBE_LIMIT_S
    )
    if probe.returncode != 0:
        refuse(f"{python} cannot say what it sees: {probe.stderr.strip().splitlines()[-1:]}")
    machine = json.loads(probe.stdout)
    if options.device.startswith("cuda") and not machine["has_cuda"]:
        refuse(f"torch of {python} sees no GPU; '--quick --tiny --device cpu' tries the script without one")
    setup = Setup(
        directory=options.directory,
        torch_python=python,
        has_benchctl=not options.quick and has_benchctl(),
        device=options.device,
        is_tiny=options.tiny,
        engine=options.engine,
        model=options.model,
        value_model=options.value_model,
    )
    driver = (said("--query-gpu=driver_version", "--format=csv,noheader") or "unknown").split("\n")[0].strip()
    return setup, machine | {"driver": driver, "commit": options.commit or commit()}


def commit() -> str:
    try:
        done = subprocess.run(
            ("git", "describe", "--always", "--dirty", "--abbrev=12"),
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def gpu_of_this_process() -> str:
    """The first GPU that this process may use, as nvidia-smi names it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def write_page(
    directory: Path,
    parts: Sequence[Part],
    outcomes: Mapping[str, Outcome | None],
    runs: Parts,
    machine: Mapping[str, Any],
) -> Path:
    """The page with all that is known so far."""
    about = ("device", "memory", "driver", "torch", "CUDA", "Triton", "Python", "commit")
    lines = [
        f"# What one {machine['device']} shows",
        "",
        f"Measured on {time.strftime('%Y-%m-%d', time.gmtime())} by `scripts/gpu/measure_all.py`.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {machine[name]} |" for name in about if machine[name]),
        "",
        *(runs.section(part, outcomes[part.name]) for part in parts),
    ]
    page = directory / "gpu.md"
    partial = directory / "gpu.md.partial"
    partial.write_text("\n".join(lines), encoding="utf-8")
    partial.replace(page)
    return page


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def refuse(text: str) -> NoReturn:
    tell(f"measure_all: {text}")
    sys.exit(2)


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
