"""The parts of the measurement of one GPU, what matters most first: their commands, and the time each may take.

Standard library only. A part is skipped, with a reason, where something that it needs is not installed.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "scripts/gpu"
QUICK_S, FULL_S = 480, 1500
"""Time that all parts together may take."""
_PROBE_LIMIT_S = 60

Command = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the parts are run."""

    directory: Path
    torch_python: str
    has_benchctl: bool
    """True where this interpreter can run benchctl's commands."""
    device: str = "cuda"
    is_tiny: bool = False
    engine: str = "vllm-lenvm-gpu"
    model: str | None = None
    value_model: str | None = None

    @property
    def place(self) -> str:
        return "cuda:0" if self.device == "cuda" else self.device

    def torch_program(self, program: str, *arguments: str, name: str) -> Command:
        tiny = ("--tiny",) if self.is_tiny else ()
        kept = ("--json", str(self.directory / "parts" / f"{name}.numbers.json"))
        return (self.torch_python, str(HERE / program), *arguments, "--device", self.device, *tiny, *kept)

    def tool(self, *arguments: str) -> Command:
        return (sys.executable, "-m", "benchctl", *arguments)

    @property
    def short_load(self) -> Command:
        """For a trial: few prompts with short outputs."""
        return ("--set", "workload.num_prompts=4", "--set", "workload.output_len=16") if self.is_tiny else ()

    def preset(self, kind: str) -> str:
        """The preset of an engine for this device."""
        return f"{kind}-cpu" if self.device == "cpu" else kind

    def results(self, *below: str) -> str:
        return str(self.directory.joinpath("results", *below))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One section of the page."""

    name: str
    title: str
    estimate_s: int
    """On one H100, as far as it can be told without one."""
    limit_s: int
    commands: Callable[[Setup], list[Command]]
    writes_markdown: bool = False
    """True for programs of this folder; what others print stands in a block of its own."""
    needs: tuple[str, ...] = ()
    """Of ``benchctl``, ``vllm`` and ``transformers``."""


def _program(name: str, program: str, *arguments: str) -> Callable[[Setup], list[Command]]:
    return lambda setup: [setup.torch_program(program, *arguments, name=name)]


def _machine(setup: Setup) -> list[Command]:
    is_gpu = setup.device != "cpu"
    doctor = setup.tool("doctor", *(("--gpu",) if is_gpu else ()), "--output-dir", setup.results())
    return [("nvidia-smi",), doctor] if is_gpu else [doctor]


def _served(setup: Setup) -> list[Command]:
    """Guidance in a real server: four fresh servers, 64 streams, device clock."""
    pair = setup.directory / "pair"
    makes = []
    settings: list[str] = []
    sizes = () if setup.is_tiny else ("--like", "qwen2.5-7b", "--value-shape", "qwen2.5-1.5b")
    if setup.model is None:
        makes.append(
            setup.tool(
                "models", "make-tiny", "--value-model", "--no-weights", "--force", *sizes, str(pair),
            )
        )  # fmt: skip
        settings += ["engine.options.load_format=dummy", "engine.options.value_load_format=dummy"]
    if setup.engine.startswith("vllm"):
        settings += ["engine.options.max_num_seqs=64", "engine.options.max_model_len=2048"]
    if setup.engine.endswith("-gpu"):
        settings += ["engine.options.guidance_clock=device", "engine.options.kv_cache_memory_bytes=8G"]
    settings += [
        f"model={setup.model or pair / 'base'}",
        f"variants.guided.server.value_model={setup.value_model or pair / 'value'}",
        "sweep.top_k=[5]", "workload.num_prompts=16", "workload.arrival.max_concurrency=16",
        f"workload.output_len={16 if setup.is_tiny else 256}",
    ]  # fmt: skip
    run = setup.tool("run", "--profile", "topk-sweep", "--engine", setup.engine, "--blocks", "2", "--quiet")
    return [
        *makes,
        (*run, *_set(settings), "--output-dir", setup.results()),
        setup.tool("show", setup.results("topk-sweep", "latest")),
    ]


def _roofline(setup: Setup) -> list[Command]:
    short = ("--rounds", "2", "--value-ms", "1", "--size", "64", "--buffer-mb", "8") if setup.is_tiny else ()
    return [
        setup.tool("micro", "roofline", "--device", setup.place, "--python", setup.torch_python, *short),
    ]


def _micro(setup: Setup, command: str, model: str, batches: str, blocks: int) -> list[Command]:
    replays, context = ("4", "16") if setup.is_tiny else ("200", "256")
    results = setup.results(f"micro-{command}")
    measure = setup.tool(
        "micro", command, "--model", model, "--batch-size", "2" if setup.is_tiny else batches, "--context", context,
        "--replays", replays, "--blocks", "2" if setup.is_tiny else str(blocks), "--device", setup.place,
        "--python", setup.torch_python, "--quiet", "--output-dir", results,
    )  # fmt: skip
    return [measure]


def _forward(setup: Setup) -> list[Command]:
    return _micro(setup, "forward", "llama-68m" if setup.is_tiny else "qwen2.5-1.5b", "1,10,64", 4)


def _bonus(setup: Setup) -> list[Command]:
    return _micro(setup, "bonus", "llama-68m", "5,32,128", 6)


def _engine(setup: Setup) -> list[Command]:
    """A stock engine against itself, while NVML and nvidia-smi are read through benchctl's own readers.

    One block, because two take longer than there is time: a load of it lasted 25 s.
    """
    model, latest = setup.directory / "model", setup.results("aa", "latest")
    shape = () if setup.is_tiny else ("--shape", "qwen2.5-0.5b")
    run = setup.tool(
        "run", "--profile", "aa", "--engine", setup.preset("transformers"), "--set", f"model={model}",
        "--blocks", "1", "--quiet", "--output-dir", setup.results(), *setup.short_load,
    )  # fmt: skip
    read = () if setup.device == "cpu" else (sys.executable, "-m", "benchmarks.measure.nvml_agreement", "--")
    return [
        setup.tool("models", "make-tiny", "--force", *shape, str(model)),
        (*read, *run),
        setup.tool("compare", f"{latest}:baseline", f"{latest}:again"),
    ]


def _speculation(setup: Setup) -> list[Command]:
    """One server with a draft model and one without, of random weights."""
    pair = setup.directory / "draft-pair"
    settings = (
        f"model={pair / 'base'}",
        f"variants.speculative.server.draft_model={pair / 'draft'}",
        "engine.options.dtype=float32",
        "sweep.num_speculative_tokens=[3]",
    )
    return [
        setup.tool(
            "models", "make-tiny", "--draft", "--dtype", "float32", "--force", str(pair)
        ),
        setup.tool(
            "run", "--profile", "speculation", "--engine", setup.preset("vllm"), "--blocks", "1", "--quiet",
            "--output-dir", setup.results(), *_set(settings), *setup.short_load,
        ),
        setup.tool("show", setup.results("speculation", "latest")),
    ]  # fmt: skip


def _set(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


QUICK = (
    Part(
        name="goal", title="Guided step at the goal point", estimate_s=120, limit_s=170, writes_markdown=True,
        commands=_program("goal", "guided_step.py", "goal"),
    ),
    Part(
        name="kernels", title="Kernels against torch", estimate_s=40, limit_s=60, writes_markdown=True,
        commands=_program("kernels", "kernel_check.py"),
    ),
    Part(
        name="sweep", title="Guided step at other batch sizes", estimate_s=120, limit_s=135, writes_markdown=True,
        commands=_program("sweep", "guided_step.py", "sweep", "--seconds", "100"),
    ),
)  # fmt: skip
"""Those that need torch and numpy alone."""

FULL = (
    *QUICK,
    Part(
        name="machine", title="The machine", estimate_s=10, limit_s=30, commands=_machine, needs=("benchctl",),
    ),
    Part(
        name="served", title="Guidance in a server", estimate_s=280, limit_s=335, commands=_served,
        needs=("benchctl", "engine"),
    ),
    Part(
        name="roofline", title="Measured peaks", estimate_s=45, limit_s=60, commands=_roofline, needs=("benchctl",),
    ),
    Part(
        name="forward", title="Forward passes", estimate_s=70, limit_s=100, commands=_forward, needs=("benchctl",),
    ),
    Part(
        name="bonus", title="Bonus tokens", estimate_s=75, limit_s=100, commands=_bonus, needs=("benchctl",),
    ),
    Part(
        name="smaller", title="Guided step with a smaller value model", estimate_s=85, limit_s=95,
        writes_markdown=True,
        commands=_program(
            "smaller", "guided_step.py", "sweep", "--value-model", "qwen2.5-0.5b", "--seconds", "70"
        ),
    ),
    Part(
        name="speculation", title="Speculative decoding on vLLM", estimate_s=130, limit_s=150,
        commands=_speculation, needs=("benchctl", "vllm"),
    ),
    Part(
        name="engine", title="A stock engine against itself, and both ways to read a GPU", estimate_s=110,
        limit_s=135, commands=_engine, needs=("benchctl", "transformers"),
    ),
)  # fmt: skip


def missing(part: Part, setup: Setup) -> str | None:
    """Why a part cannot run here; None where all that it needs is there."""
    for need in part.needs:
        kind = setup.engine.partition("-")[0] if need == "engine" else need
        if need == "benchctl" and not setup.has_benchctl:
            return f"{sys.executable} cannot import benchctl's libraries: pip install -e . in this checkout"
        if kind in ("vllm", "transformers") and engine_python(kind) is None:
            return f"{kind} is not installed here: benchctl engines install {kind} --device cuda"
    return None


def engine_python(kind: str) -> str | None:
    """The interpreter of an engine that benchctl installed."""
    kept = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    engines = Path(os.environ.get("BENCHCTL_ENGINES_DIR") or Path(kept) / "benchctl/engines")
    python = engines / kind / "bin/python"
    return str(python) if python.exists() else None


def python_with(module: str, candidates: Sequence[str | None]) -> str | None:
    """The first interpreter that can import a module."""
    for python in candidates:
        if python is not None and _imports(python, module):
            return python
    return None


def torch_python(named: str | None) -> str | None:
    """The interpreter of the parts that need torch: the named one, else this one, else that of an engine."""
    if named is not None:
        return python_with("torch", [named])
    return python_with("torch", [sys.executable, engine_python("vllm"), engine_python("transformers")])


def has_benchctl() -> bool:
    return _imports(sys.executable, "benchctl.cli.app")


def _imports(python: str, module: str) -> bool:
    try:
        done = subprocess.run(
            (python, "-c", f"import {module}"), cwd=ROOT, capture_output=True, check=False, timeout=_PROBE_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
