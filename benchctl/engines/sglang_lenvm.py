"""SGLang's LenVM fork as an engine: a value model beside the served one, which guides its sampler."""

import bisect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import httpx
import msgspec
from pydantic import model_validator

from benchctl.engines.engine import (
    LaunchSite,
    check_chats,
    own_options,
    profile_errors,
    raw_step_log,
    signatures,
    streamed,
)
from benchctl.engines.environment import engines_directory, interpreter_for, package_directory
from benchctl.engines.hub import checkpoint_for
from benchctl.engines.sglang import (
    DISTRIBUTION,
    SIGNATURES,
    SglangEngine,
    SglangOptions,
    is_deterministic,
    quiet_env,
    request_body,
    server_info,
    sglang_form,
    stated_config,
)
from benchctl.engines.sglang_lenvm_requests import ambiguities, custom_params, mixed_refusal, refusal
from benchctl.errors import EngineUnavailableError, RecordError, UnsupportedError
from benchctl.guided.parameter_table import REVISIONS_THAT_SKIP
from benchctl.interop.lenvm_log import SAMPLER, TimingRecord, record_from, revisions_of, step_records
from benchctl.profile.choices import Share, StepCount
from benchctl.profile.model import VariantSettings
from benchctl.records.files import read_jsonl
from benchctl.records.record import Call, PreparedRequest, RequestRecord
from benchctl.records.schema import StepRecord
from benchctl.units import NS_PER_MS
from benchctl.untrusted.reading import UnreadableError, read_json

LenvmRevision = Literal["V0", "V1", "V2", "V3", "V4"]
"""Generations of SGLang's LenVM fork, which understand requests differently; see docs/engines.md."""
_REVISIONS_WITH_STRIDES: Final = frozenset({"V1", "V3"})


class SglangLenvmOptions(SglangOptions):
    """Options of the engine ``sglang-lenvm``, SGLang's LenVM fork; null leaves the choice to the server."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset(
        {"value_model", "value_model_revision", "value_architecture", "value_mem_fraction_static"}
    )

    revision: LenvmRevision | None = None
    """Generation of the fork that is installed; null: unknown, and requests that depend on it are refused."""
    value_model: str | None = None
    """Value model that the server loads for guidance: a directory, a repository, or the size of a published one
    (``qwen2.5-0.5b``, ``qwen2.5-1.5b``); null: a server that cannot guide."""
    value_model_revision: str | None = None
    """Revision of the value model's repository."""
    value_architecture: (
        Literal["Qwen2ForLengthValueModel", "Qwen3ForLengthValueModel", "Qwen2_5_VLForLengthValueModel"] | None
    ) = None
    """Class that loads the value model; null: by its backbone."""
    value_mem_fraction_static: Share | None = None
    """Share of the device's memory for the value model and its cache, beside ``mem_fraction_static``."""
    guided_fn: str = "sglang.srt.lvm.lvm_guided_sampling:lvm_combined_guidance"
    """Function that tilts, as ``module:function``."""
    stride: StepCount = 1
    """Guide every n-th step of a request, if the revision can (``LENVM_STRIDE``)."""
    synchronised_timing_interval: StepCount | None = None
    """Calls of the sampler between two lines of averages in the log of a V2 server, which waits for the device
    around every section for their sake and becomes slower; null: none."""

    @model_validator(mode="after")
    def _of_one_revision(self) -> "SglangLenvmOptions":
        if self.stride != 1 and self.revision not in _REVISIONS_WITH_STRIDES:
            raise ValueError(
                f"stride is {self.stride} with revision {self.revision}; only some commits of V1 and V3 know "
                "strides: set revision, or leave stride out"
            )
        if self.synchronised_timing_interval is not None and self.revision != "V2":
            raise ValueError(
                f"synchronised_timing_interval is {self.synchronised_timing_interval} with revision "
                f"{self.revision}; only V2 prints averages: set revision: V2, or leave it out"
            )
        return self

    @property
    def skips_neutral_guidance(self) -> bool:
        return self.revision in REVISIONS_THAT_SKIP

    @property
    def guides_with(self) -> str | None:
        return self.value_model


Stamped = tuple[int, TimingRecord]
"""Arrival of a line, in nanoseconds of the monotonic clock, and its content."""


class _StampedLine(msgspec.Struct, frozen=True):
    t_ns: int
    line: str


def read_lenvm_steps(directory: Path) -> Iterator[StepRecord]:
    """The steps of a run. Raises RecordError at the first line that is damaged, with those before it yielded."""
    stamped, damage = stamped_records(directory)
    starts = busy_starts(read_jsonl(directory / "requests.jsonl", RequestRecord))
    yield from step_records([record for _, record in stamped], spans(stamped, starts))
    if damage is not None:
        raise damage


def stamped_records(directory: Path) -> tuple[list[Stamped], RecordError | None]:
    """The readable beginning of a run's log, and the error in the rest."""
    path, records = raw_step_log(directory), list[Stamped]()
    try:
        for number, stamped in enumerate(read_jsonl(path, _StampedLine), start=1):
            record = record_from(stamped.line)
            if record is None:
                return records, RecordError(
                    f"{path}:{number}: this line is not a step: {stamped.line[:60]!r}; it may be another "
                    "revision of the fork than this benchctl knows"
                )
            records.append((stamped.t_ns, record))
    except RecordError as error:
        return records, error
    return records, None


def busy_starts(requests: Iterable[RequestRecord]) -> list[int]:
    """Times at which a request was sent while none was in flight, ascending."""
    sent = sorted((r.sent_ns, r.done_ns or r.sent_ns) for r in requests if r.sent_ns is not None)
    until = accumulate((done for _, done in sent), max, initial=-1)
    return [start for (start, _), busy_until in zip(sent, until, strict=False) if start > busy_until]


def spans(stamped: Sequence[Stamped], starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and duration of each step; ``starts`` are those of the server's busy times.

    A line arrives after its step, and late if its reader was delayed: then the sampler of the next step shows how
    early the step must have ended.
    """
    last_end_ns = None
    for end_ns, record in zip(_ends(stamped), (record for _, record in stamped), strict=True):
        sampler_start_ns = end_ns - _sampler_ns(record)
        index = bisect.bisect_right(starts, end_ns) - 1
        earlier_ns = [ns for ns in (last_end_ns, starts[index] if index >= 0 else None) if ns is not None]
        # Its sampler is part of a step, also where a request of ours was sent while the server asked itself.
        start_ns = min(max(earlier_ns, default=sampler_start_ns), sampler_start_ns)
        last_end_ns = end_ns
        yield start_ns, end_ns - start_ns


def _ends(stamped: Sequence[Stamped]) -> list[int]:
    """Latest possible end of each step: its line had arrived, and the next one's sampler had not begun."""
    ends: list[int] = []
    latest_ns: int | None = None
    for t_ns, record in reversed(stamped):
        ends.append(t_ns if latest_ns is None else min(t_ns, latest_ns))
        latest_ns = ends[-1] - _sampler_ns(record)
    return ends[::-1]


def _sampler_ns(record: TimingRecord) -> int:
    return round(record.sections_ms[SAMPLER] * NS_PER_MS)


_KIND: Final = "sglang-lenvm"
_PIPE: Final = "steps.pipe"
_LAUNCHER: Final = Path(__file__).parent / "inside" / "sglang_lenvm" / "stamped.py"
PUBLISHED_VALUE_MODELS: Final = {
    "qwen2.5-0.5b": "namezz/lvm-a-qwen2.5-7b-instruct-b-qwen2.5-0.5b-instruct",
    "qwen2.5-1.5b": "namezz/lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct",
}
"""Published value models for Qwen2.5-7B-Instruct by their backbone. The smaller one is not only smaller: it was
trained on general texts, the larger one on mathematics."""
_SILENT: Final = frozenset({"V0", "V2"})
"""Revisions that write no lines."""
_SIGNATURES: Final = (
    *signatures(
        "unguidable-request",
        "its sampler has no path for this mode without a finite top_k: set sampling.top_k to 2 or more",
        "Not implemented, cpu should not be used",
    ),
    *profile_errors(
        "bad-flag", "correct guided_fn: it names no function", "Failed to load guidance function", "is not callable"
    ),
    *signatures(
        "guidance-failed", "the log says which part of guidance failed",
        "LenVM GPU guidance path failed", "LenVM guidance function failed", "LenVM in-proc tree_value failed",
    ),
    *profile_errors(
        "bad-value-model",
        "correct engine.options.value_model: the checkpoint must have the value head and nothing else beside it",
        "v_head.fc", "v_head.summary",
    ),
    *SIGNATURES,
)  # fmt: skip


class SglangLenvmEngine(SglangEngine):
    """Servers of the fork's ``python -m sglang.launch_server``, with and without a value model."""

    kind = _KIND
    signatures = _SIGNATURES

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when the fork is not installed, or cannot load one of the models."""
        super().check_available(settings)
        if (value_model := own_options(settings, SglangLenvmOptions).value_model) is not None:
            value_checkpoint(value_model)

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for what would end the server, be passed over, or mean one thing or another."""
        options, params = own_options(settings, SglangLenvmOptions), custom_params(settings.guidance)
        check_chats(requests, settings)
        self.require_context(requests, settings)
        problem = refusal(params, settings.sampling, options.revision) or mixed_refusal([params])
        if problem is not None:
            raise self.refusal(settings, *problem)
        if params is not None and options.overlap_schedule:
            what = "cannot guide while its scheduler overlaps the device"
            raise self.refusal(settings, what, "set overlap_schedule: false")
        if is_deterministic(options) and any(request.n > 1 for request in requests):
            what = "gives all choices of a request one seed when it is deterministic, so that they are one answer"
            raise self.refusal(settings, what, "set workload.samples_as: requests")
        if options.revision is None and (unclear := ambiguities([params])):
            listed = "\n".join(f"  {text}" for text in unclear)
            raise UnsupportedError(
                f"engine {_KIND!r}, variant {settings.variant!r}: the meaning of these requests depends on the "
                f"revision of the fork:\n{listed}\n"
                "Say which is installed: --set engine.options.revision=V0 for the released code, V1 to V4 for "
                "its later branches"
            )

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        """The command line of the server; where its lines get their times, behind the launcher that takes those."""
        options = own_options(settings, SglangLenvmOptions)
        words = (*self.launch_words(settings, site), *_guided_words(options), *options.extra_args)
        launcher = (str(_LAUNCHER), str(site.directory / _PIPE), str(site.step_log)) if _has_lines(options) else ()
        return (str(self.interpreter(settings)), *launcher, *words)

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        """The target of the step lines, the variables that the revision reads, and those of the profile."""
        options, own = own_options(settings, SglangLenvmOptions), quiet_env(settings.model)
        own.pop("HF_HUB_OFFLINE", None)  # a value model may have to be fetched, and no variant is to differ in it
        if _has_lines(options):
            own["SGLANG_LVM_TIMING_LOG"] = str(site.directory / _PIPE)
        if options.stride != 1:
            own["LENVM_STRIDE"] = str(options.stride)
        if options.synchronised_timing_interval is not None:
            own["SGLANG_LVM_TIMING"] = "1"
            own["SGLANG_LVM_TIMING_INTERVAL"] = str(options.synchronised_timing_interval)
        return own | dict(options.env)

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> Call:
        """Ask for ``request`` as this variant does; ``custom_params`` only with guidance."""
        body, params = request_body(request, settings), custom_params(settings.guidance)
        body |= {} if params is None else {"custom_params": params}
        return streamed(request, settings, body, form=sglang_form(settings.request))

    async def effective_config(
        self, client: httpx.AsyncClient, settings: VariantSettings, site: LaunchSite
    ) -> dict[str, Any]:
        """The settings that the server reports, and the declared revision.

        Raises UnsupportedError when the server's output cannot come from that revision, or when it has not loaded
        the requested value model.
        """
        options, info = own_options(settings, SglangLenvmOptions), await server_info(client)
        self._require_value_model(settings, info)
        self._require_revision(settings, site)
        config = stated_config(info)
        config["value_model"], config["revision"] = options.value_model, options.revision or "unknown"
        config["enforce_eager"], config["stride"] = options.enforce_eager, options.stride
        config["request_seed"] = "honoured" if is_deterministic(options) else "ignored"
        if options.extra_args:
            config["extra_args"] = " ".join(options.extra_args)
        return config

    def has_steps(self, settings: VariantSettings) -> bool:
        """Lines of one process are a series; several ranks would write theirs between one another."""
        return _has_lines(own_options(settings, SglangLenvmOptions))

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        return read_lenvm_steps(directory)

    def find_interpreter(self, named: str | None) -> Path:
        """The named interpreter, or that of the fork's own environment; stock SGLang is refused."""
        return fork_interpreter(named, engines_directory())

    def _require_value_model(self, settings: VariantSettings, info: Mapping[str, Any]) -> None:
        """Check the value model that the server reports, if it does, against the one that it was started with."""
        if "enable_lvm_guided_sampling" not in info:
            return
        value_model = own_options(settings, SglangLenvmOptions).value_model
        declared = None if value_model is None else value_checkpoint(value_model)
        loaded = info.get("lvm_guided_inproc_model_path") if info["enable_lvm_guided_sampling"] else None
        if loaded != declared:
            what = f"reports the value model {loaded}, and {declared} was requested"
            raise self.refusal(settings, what, "look for such flags in engine.options.extra_args")

    def _require_revision(self, settings: VariantSettings, site: LaunchSite) -> None:
        """Check the server's output during its first request against the declared revision."""
        options = own_options(settings, SglangLenvmOptions)
        log = site.directory / "server.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        fits = revisions_of((record for _, record in stamped_records(site.directory)[0]), lines)
        looked = _has_lines(options) or options.synchronised_timing_interval is not None
        if options.revision is not None and looked and options.revision not in fits:
            what = f"is not {options.revision}: its output fits {' or '.join(fits)}"
            raise self.refusal(settings, what, "correct engine.options.revision")


def value_checkpoint(value_model: str) -> str:
    """The directory (absolute) or repository of a value model; names of sizes stand for the published ones.

    Raises EngineUnavailableError for anything else.
    """
    published = PUBLISHED_VALUE_MODELS.get(value_model.lower())
    if published is not None:
        return published
    if "/" not in value_model and not Path(value_model).expanduser().exists():
        raise EngineUnavailableError(
            f"engine {_KIND!r}: no value model is published for {value_model!r}, only for "
            f"{', '.join(PUBLISHED_VALUE_MODELS)}; name the directory of a checkpoint, or a repository (owner/name)"
        )
    return checkpoint_for(value_model, _KIND)


def _guided_words(options: SglangLenvmOptions) -> Iterator[str]:
    if options.value_model is None:
        return
    checkpoint = value_checkpoint(options.value_model)
    architecture = options.value_architecture or _architecture_of(checkpoint)
    yield from ("--enable-lvm-guided-sampling", "--lvm-guided-inproc")
    yield from ("--lvm-guided-inproc-model-path", checkpoint)
    yield from ("--lvm-guided-inproc-json-model-override-args", json.dumps({"architectures": [architecture]}))
    if options.value_model_revision is not None:
        yield from ("--lvm-guided-inproc-model-revision", options.value_model_revision)
    if options.value_mem_fraction_static is not None:
        yield from ("--lvm-guided-inproc-mem-fraction-static", str(options.value_mem_fraction_static))
    yield from ("--lvm-guided-fn", options.guided_fn)


def _architecture_of(checkpoint: str) -> str:
    """The class for a value model by what its config.json calls its backbone, or else by its name."""
    try:
        family = str(read_json(Path(checkpoint) / "config.json").get("model_type"))
    except (UnreadableError, AttributeError):
        family = checkpoint.rpartition("-b-")[2].lower()
    if "vl" in family.replace("-", "_").split("_"):
        return "Qwen2_5_VLForLengthValueModel"
    return "Qwen3ForLengthValueModel" if family.startswith("qwen3") else "Qwen2ForLengthValueModel"


def _has_lines(options: SglangLenvmOptions) -> bool:
    is_one_rank = options.tensor_parallel_size * options.data_parallel_size == 1
    return options.step_log and is_one_rank and options.revision not in _SILENT


@cache
def fork_interpreter(named: str | None, directory: Path) -> Path:
    """The interpreter that the profile names, or that of the fork's own environment; stock SGLang is refused."""
    python = named or str(directory / _KIND / "bin" / "python")
    remedy = (
        "install the fork in an environment of its own (pip install -e sglang-LenVM/python in a checkout) and name "
        "its interpreter: --set engine.python=/path/to/venv/bin/python"
    )
    if named is None and not Path(python).exists():
        raise EngineUnavailableError(f"engine {_KIND!r} is not installed: there is no {python}; {remedy}")
    interpreter = interpreter_for(_KIND, python, (DISTRIBUTION,))
    package = package_directory(interpreter, DISTRIBUTION)
    if package is None or not (package / "srt" / "lvm").is_dir():
        raise EngineUnavailableError(
            f"engine {_KIND!r}: the SGLang of {python} is not the LenVM fork: it has no sglang/srt/lvm; {remedy}"
        )
    return interpreter
