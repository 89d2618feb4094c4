"""Every reader of files and answers, with honest inputs to damage."""

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from support import layer_tables
from support.peaks import cpu_peaks
from support.results import builders, lenvm_results
from support.step_time import MODELS, planted_run

from benchctl.analysis.analyzed import analyze_directory
from benchctl.costs.shapes import shape_from_config
from benchctl.engines.metrics_page import series_of
from benchctl.engines.sglang import SglangEngine
from benchctl.engines.transformers import TransformersEngine
from benchctl.engines.vllm import VllmEngine
from benchctl.errors import BenchctlError
from benchctl.interop.foreign_readers import read_foreign
from benchctl.interop.layer_profile import read_layer_tables
from benchctl.interop.lenvm.import_directory import import_lenvm
from benchctl.interop.tables import TableDefaults, read_step_table
from benchctl.load.answer import Answer, error_of
from benchctl.measure.directory import reopen_experiment
from benchctl.profile.load import load_profile
from benchctl.records.archive import contents_of, import_archive, write_archive
from benchctl.records.files import write_json_atomic
from benchctl.records.integrity import verify_directory
from benchctl.records.peaks import PEAKS
from benchctl.records.record import Message, PreparedRequest
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.model import read_model, write_model
from benchctl.workload.chat_template import ChatTemplate
from benchctl.workload.datasets.base import Prompt, Selection, SourceFile, prompts_of_trace
from benchctl.workload.datasets.own import custom_prompts
from benchctl.workload.datasets.published import (
    azure_trace,
    gsm8k_prompts,
    mooncake_trace,
    replay_trace,
    sharegpt_prompts,
)
from benchctl.workload.lint import lint_config
from benchctl.workload.tokenizers import Estimate, Tokenizer
from fuzz.mutations import kind_of, mutated

CORPUS: Final = Path(__file__).parent / "corpus"
EXAMPLE: Final = Path(__file__).parents[2] / "results" / "example"
"""A measured experiment."""
MESSAGE_CHARS: Final = 20_000
"""No message is longer, whatever is in a file."""
_ASKED: Final = PreparedRequest(
    request_id="r00000",
    index=0,
    arrival_ns=0,
    messages=(Message(role="user", content="What?"),),
    prompt_tokens=9,
    max_tokens=4,
    ignore_eos=True,
    n=2,
    seed=1,
    source="x:0",
)
_SELECTION: Final = Selection(num_prompts=3, method="first", seed=0)


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of what lies in a directory. ``write`` puts honest files there, by default those of the corpus."""

    name: str
    read: Callable[[Path], object]
    write: Callable[[Path], object] | None = None
    refuses_by: tuple[type[Exception], ...] = (BenchctlError,)

    def honest_files(self, directory: Path) -> Path:
        """The directory with honest files, made once."""
        path = directory / self.name
        if not path.exists():
            path.mkdir()
            if self.write is None:
                shutil.copytree(CORPUS / self.name, path, dirs_exist_ok=True)
            else:
                self.write(path)
        return path

    def problem(self, directory: Path) -> str | None:
        """What is wrong with the refusal of damaged files; other exceptions are left to the caller."""
        try:
            self.read(directory)
        except self.refuses_by as error:
            message = str(error)
            if len(message) > MESSAGE_CHARS:
                return f"{type(error).__name__} with {len(message)} characters: {message[:300]}"
            if not message.strip() and isinstance(error, BenchctlError):
                return f"{type(error).__name__} without a message"
        return None


def damage(honest: Path, target: Path, draw: random.Random) -> Path:
    """A copy of ``honest`` at ``target`` in which one or two files are damaged; returns the first of them."""
    shutil.copytree(honest, target)
    files = sorted(path for path in target.rglob("*") if path.is_file())
    chosen = [draw.choice(files) for _ in range(draw.choice((1, 1, 1, 2)))]
    for path in chosen:
        path.write_bytes(mutated(path.read_bytes(), kind_of(path.name), draw))
    return chosen[0]


def _dataset(
    name: str, read_rows: Callable[[SourceFile, Selection, Tokenizer], object] | Callable[[SourceFile], object]
) -> Reader:
    def read(directory: Path) -> None:
        (path,) = (path for path in directory.iterdir() if path.is_file())
        file = SourceFile(path=path, kind=name, dataset=name)
        if read_rows.__name__.endswith("trace"):
            prompts = prompts_of_trace(read_rows(file), file, _SELECTION)  # type: ignore[call-arg, arg-type]
        else:
            prompts = read_rows(file, _SELECTION, Estimate())  # type: ignore[call-arg, assignment]
        assert all(isinstance(prompt, Prompt) for prompt in prompts)

    return Reader(name, read)


def _answer(directory: Path) -> None:
    for path in directory.iterdir():
        wire = path.read_bytes()
        for size in (1 << 20, 7):
            answer = Answer(2)
            parts = [wire[i : i + size] for i in range(0, min(len(wire), 40_000), size)]
            for t_ns, part in enumerate(parts, start=1):
                answer.feed(t_ns, 0, part)
                if answer.is_over:
                    break
            answer.finish(len(parts) + 1)
            answer.reader.choices()
            error = error_of(answer, _ASKED)
            assert error is None or len(error.message) < MESSAGE_CHARS


def _import(directory: Path) -> None:
    out = directory.parent / "imported"
    try:
        import_lenvm(directory, out, model="qwen2.5-7b", value_model="qwen2.5-1.5b", argv=("benchctl",))
        analyze_directory(out)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def write_results(path: Path) -> Path:
    """Results of two blocks with telemetry."""
    factors = [{"baseline": 1.0, "guided": 1.1}, {"baseline": 1.02, "guided": 1.09}]
    builders.write_samples(builders.write_results(path, block_factors=factors, num_requests=3))
    return path


def _write_archive(path: Path) -> None:
    results = builders.write_results(path.parent / "packed" / "x", num_requests=1)
    write_archive(results, contents_of(results.path), path / "x.tar.gz")


def _import_archive(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        import_archive(directory / "x.tar.gz", Path(made) / "x", Path(made))


def _write_model(path: Path) -> None:
    planted = {"compute": 1.5, "memory": 1.2, "all_reduce": 1.0, "layers": 40.0, "requests": 8.0, "steps": 90.0}
    runs = [planted_run(*deployment, planted, noise=0.02, num_steps=60) for deployment in MODELS[:2]]
    write_model(path / "model.json", fit_model(runs, FitOptions(num_draws=4), fitted_on="2026-01-01"))


READERS: Final = (
    Reader("profile", lambda directory: load_profile(str(directory / "profile.yaml"))),
    Reader("results", analyze_directory, write_results),
    Reader(
        "resume",
        lambda directory: reopen_experiment(directory, None),
        lambda path: shutil.copytree(
            EXAMPLE, path, ignore=shutil.ignore_patterns("plots", "runs"), dirs_exist_ok=True
        ),
    ),
    Reader("digests", verify_directory, write_results),
    Reader("archive", _import_archive, _write_archive),
    *(
        Reader(name, lambda directory: read_foreign(str(directory)))
        for name in ("vllm", "sglang", "aiperf", "guidellm")
    ),
    Reader("lenvm", _import, lambda path: lenvm_results.write_directory(path, num_questions=2, num_samples=2)),
    _dataset("gsm8k", gsm8k_prompts),
    _dataset("custom", custom_prompts),
    _dataset("sharegpt", sharegpt_prompts),
    _dataset("mooncake", mooncake_trace),
    _dataset("azure", azure_trace),
    _dataset("replay", replay_trace),
    Reader("step-time-model", lambda directory: read_model(directory / "model.json"), _write_model),
    Reader(
        "peaks",
        lambda directory: PEAKS.read(directory / "peaks.json"),
        lambda path: write_json_atomic(path / "peaks.json", cpu_peaks()),
    ),
    Reader("answer", _answer),
    Reader(
        "metrics",
        lambda directory: series_of((directory / "page.txt").read_text(errors="replace")),
        refuses_by=(BenchctlError, ValueError),
    ),
    Reader("config", lambda directory: shape_from_config(directory / "config.json")),
    Reader("config-experts", lambda directory: shape_from_config(directory / "config.json")),
    Reader("chat-template", lambda directory: ChatTemplate(directory).render(_ASKED.messages)),
    Reader("layers", read_layer_tables, layer_tables.write_tables),
    Reader("lint", lambda directory: lint_config(directory / "config.yaml")),
    Reader("step-table", lambda directory: read_step_table(directory / "steps.csv", TableDefaults())),
    Reader("vllm-steps", lambda directory: list(VllmEngine().read_steps(directory))),
    Reader("sglang-steps", lambda directory: list(SglangEngine().read_steps(directory))),
    Reader("transformers-steps", lambda directory: list(TransformersEngine().read_steps(directory))),
)
