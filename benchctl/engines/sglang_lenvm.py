"""SGLang's LenVM fork as an engine: a value model beside the served one, which guides its sampler.

* **Revisions** (V0 to V4) share their command line and differ in their records and in how they understand a
  request: ``REVISIONS``, and docs/engines.md. ``engine.options.revision`` declares the installed one, and the
  output of every server is checked against it.
* **Loading.** The value model is loaded by the first request that is sampled, on some revisions guided or not,
  seconds after the server is ready. The first request of every run asks as its load does, before the warm-up.
* **Steps** are the fork's own lines (V1, V3, V4), sent through a pipe so that each gets its time; their sections
  are host time without waiting for the device and never GPU time. V2 prints averages, which stay in its log.
* **Requests.** The fork checks little. One that its sampler has no path for raises an exception inside the
  scheduler, which ends all other requests too; a setting that the path in use does not know is silently ignored.
  Both are refused here, before anything is sent.
* **Health, seeds, several choices, the taken port**: as with stock SGLang.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple

from pydantic import model_validator

from benchctl.engines.engine import (
    Client,
    Device,
    LaunchSite,
    Recipe,
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
)
from benchctl.errors import EngineUnavailableError
from benchctl.guided.params import EXPONENTIAL_MODES, REVISIONS_THAT_SKIP, SERVER_MODE
from benchctl.interop.lenvm_log import read_lenvm_steps, revisions_of, stamped_records
from benchctl.profile.choices import Share, StepCount, check_rules
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import StepRecord
from benchctl.untrusted.files import UnreadableError, read_json

LenvmRevision = Literal["V0", "V1", "V2", "V3", "V4"]


class Revision(NamedTuple):
    """One generation of the fork, by what it knows."""

    writes_lines: bool = False
    """A line for each call of its sampler."""
    knows_strides: bool = False
    """Some of its commits guide every n-th step (``LENVM_STRIDE``)."""
    prints_averages: bool = False
    """Averages over calls of its sampler, in its log."""
    has_targets: bool = True
    """Values and lengths to reach, in place of a mode and its scale."""
    guides_all_tokens: bool = True
    """Guidance where ``top_k`` leaves the whole vocabulary."""


REVISIONS: Final[dict[LenvmRevision, Revision]] = {
    "V0": Revision(),
    "V1": Revision(writes_lines=True, knows_strides=True),
    "V2": Revision(prints_averages=True),
    "V3": Revision(writes_lines=True, knows_strides=True),
    "V4": Revision(writes_lines=True, has_targets=False, guides_all_tokens=False),
}
"""Generations of SGLang's LenVM fork."""


class SglangLenvmOptions(SglangOptions):
    """Options of the engine ``sglang-lenvm``, SGLang's LenVM fork; null leaves the choice to the server."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset(
        {"value_model", "value_model_revision", "value_architecture", "value_mem_fraction_static"}
    )

    revision: LenvmRevision | None = None
    """Generation of the fork that is installed, which has to be named to measure it."""
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
        revision = Revision() if self.revision is None else REVISIONS[self.revision]
        check_rules(
            (
                self.stride != 1 and not revision.knows_strides,
                (
                    f"stride is {self.stride} with revision {self.revision}; only some commits of V1 and V3 know "
                    "strides: set revision, or leave stride out"
                ),
            ),
            (
                self.synchronised_timing_interval is not None and not revision.prints_averages,
                (
                    f"synchronised_timing_interval is {self.synchronised_timing_interval} with revision "
                    f"{self.revision}; only V2 prints averages: set revision: V2, or leave it out"
                ),
            ),
        )
        return self

    @property
    def skips_neutral_guidance(self) -> bool:
        return self.revision in REVISIONS_THAT_SKIP


_KIND: Final = "sglang-lenvm"
_PIPE: Final = "steps.pipe"
_LAUNCHER: Final = Path(__file__).parent / "inside" / "sglang_lenvm" / "stamped.py"
PUBLISHED_VALUE_MODELS: Final = {
    "qwen2.5-0.5b": "namezz/lvm-a-qwen2.5-7b-instruct-b-qwen2.5-0.5b-instruct",
    "qwen2.5-1.5b": "namezz/lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct",
}
"""Published value models for Qwen2.5-7B-Instruct by their backbone. The smaller one is not only smaller: it was
trained on general texts, the larger one on mathematics."""
_BUILT_IN_GAMMA: Final = 0.997
"""Discount of the path for finitely many candidates, whatever a request says."""
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

    def check_requests(self, requests: Iterable[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for what would end the server or be passed over, and for an unknown revision."""
        options, params = own_options(settings, SglangLenvmOptions), custom_params(settings.guidance)
        super().check_requests(requests, settings)
        if options.revision is None:
            raise self.refusal(
                settings,
                "is of an unknown revision of the fork, and each of them understands requests in its own way",
                (
                    "say which is installed: --set engine.options.revision=V0 for the released code, V1 to V4 for "
                    "its later branches"
                ),
            )
        overlap = ("cannot guide while its scheduler overlaps the device", "set overlap_schedule: false")
        one_answer = (
            "gives all choices of a request one seed when it is deterministic, so that they are one answer",
            "set workload.samples_as: requests",
        )
        has_choices = any(request.n > 1 for request in requests)
        problems = (
            request_problem(params, settings.sampling, options.revision),
            overlap if params is not None and options.overlap_schedule else None,
            one_answer if is_deterministic(options) and has_choices else None,
        )
        if problem := next(filter(None, problems), None):
            raise self.refusal(settings, *problem)

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
        interval = options.synchronised_timing_interval
        averages = {"SGLANG_LVM_TIMING": "1", "SGLANG_LVM_TIMING_INTERVAL": str(interval)}
        return {
            **own,
            **({"SGLANG_LVM_TIMING_LOG": str(site.directory / _PIPE)} if _has_lines(options) else {}),
            **({"LENVM_STRIDE": str(options.stride)} if options.stride != 1 else {}),
            **(averages if interval is not None else {}),
            **options.env,
        }

    def request_fields(self, request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
        """Ask for ``request`` as this variant does; ``custom_params`` only with guidance."""
        body, params = request_body(request, settings), custom_params(settings.guidance)
        body |= {} if params is None else {"custom_params": params}
        return streamed(request, settings, body, form=sglang_form(settings.request))

    async def effective_config(self, client: Client, settings: VariantSettings, site: LaunchSite) -> dict[str, Any]:
        """The settings that the server reports, and the declared revision.

        Raises UnsupportedError when the server's output during its first request cannot come from that revision,
        or when it reports another value model than the requested one.
        """
        options, info = own_options(settings, SglangLenvmOptions), await server_info(client)
        declared = None if options.value_model is None else value_checkpoint(options.value_model)
        guides = info.get("enable_lvm_guided_sampling")
        loaded = info.get("lvm_guided_inproc_model_path") if guides else None
        if guides is not None and loaded != declared:
            raise self.refusal(
                settings,
                f"reports the value model {loaded}, and {declared} was requested",
                "look for such flags in engine.options.extra_args",
            )
        lines = site.log.read_text(encoding="utf-8", errors="replace").splitlines() if site.log.is_file() else []
        fits = revisions_of((record for _, record in stamped_records(site.step_log)[0]), lines)
        is_shown = _has_lines(options) or options.synchronised_timing_interval is not None
        if is_shown and options.revision not in fits:
            raise self.refusal(
                settings,
                f"is not {options.revision}: its output fits {' or '.join(fits)}",
                "correct engine.options.revision",
            )
        own = {"value_model": options.value_model, "revision": options.revision, "stride": options.stride}
        return await super().effective_config(client, settings, site) | own

    def has_steps(self, settings: VariantSettings) -> bool:
        """Lines of one process are a series; several ranks would write theirs between one another."""
        return _has_lines(own_options(settings, SglangLenvmOptions))

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        return read_lenvm_steps(raw_step_log(directory), *directory.glob("requests*.jsonl"))

    def find_interpreter(self, named: str | None) -> Path:
        """The named interpreter, or that of the fork's own environment; stock SGLang is refused."""
        return fork_interpreter(named, engines_directory())

    def recipe(self, device: Device) -> Recipe | None:
        """None: the fork has no package."""
        return None


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
    flags = {
        "--lvm-guided-inproc-model-path": checkpoint,
        "--lvm-guided-inproc-json-model-override-args": json.dumps({"architectures": [architecture]}),
        "--lvm-guided-inproc-model-revision": options.value_model_revision,
        "--lvm-guided-inproc-mem-fraction-static": options.value_mem_fraction_static,
        "--lvm-guided-fn": options.guided_fn,
    }
    yield from ("--enable-lvm-guided-sampling", "--lvm-guided-inproc")
    for flag, value in flags.items():
        if value is not None:
            yield from (flag, str(value))


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
    return (
        options.step_log
        and is_one_rank
        and options.revision is not None
        and REVISIONS[options.revision].writes_lines
    )


def custom_params(guidance: Guidance | None) -> dict[str, Any] | None:
    """``custom_params`` as the fork reads them. None without guidance: a key alone activates it.

    A target takes the place of mode and scale, which would only choose a path that targets do not have.
    """
    if guidance is None:
        return None
    return guidance.model_dump(exclude_none=True, exclude={"mode", "value_scale"} if guidance.has_target else None)


def request_problem(
    params: Mapping[str, Any] | None, sampling: Sampling, revision: LenvmRevision
) -> tuple[str, str] | None:
    """The error that the server would make with such a request, and the remedy; None for a request without one.

    ``top_k`` 1 and temperature 0 are allowed: greedy decoding, where guidance never acts on any revision.
    """
    if params is None or sampling.is_greedy:
        return None
    mode, has_all, knows = params.get("mode", SERVER_MODE), sampling.top_k < 1, REVISIONS[revision]
    has_target = not params.keys().isdisjoint({"target_value", "target_length"})
    finite, gamma = "set sampling.top_k to 2 or more", params.get("gamma", _BUILT_IN_GAMMA)
    problems = (
        (
            has_target and not knows.has_targets,
            f"dies of a target, for which {revision} has no path",
            "leave the target out, or take another revision",
        ),
        (
            has_all and not has_target and mode in EXPONENTIAL_MODES,
            f"dies of mode {mode} with top_k {sampling.top_k}, for which its sampler has no path",
            finite,
        ),
        (
            has_all and not knows.guides_all_tokens,
            f"dies of guidance with top_k {sampling.top_k} on {revision}",
            finite,
        ),
        (
            not has_all and not has_target and "value_min" in params,
            "ignores value_min where top_k is finite and nothing has a target",
            "leave value_min out",
        ),
        (
            not has_all and not has_target and mode == "length_mul" and gamma != _BUILT_IN_GAMMA,
            f"computes lengths with gamma {_BUILT_IN_GAMMA} with a finite top_k, not with {gamma}",
            f"set guidance.gamma to {_BUILT_IN_GAMMA}",
        ),
    )
    return next(((what, remedy) for applies, what, remedy in problems if applies), None)


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
