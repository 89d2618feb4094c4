"""vLLM with guidance of a value model: a stock server, with our logits processor where a value model is named.

* **One runner.** Guidance runs on either of vLLM's model runners, and a difference between runners is not one of a
  value model. Every server of this engine, the baseline included, therefore gets VLLM_USE_V2_MODEL_RUNNER=0: the
  runner on which guidance is tested in whole servers. ``env`` of a profile or a variant chooses the other one.
* **Requests** carry guidance in ``vllm_xargs``, and sampling parameters as ever: the processor moves top_k, top_p
  and min_p to where they are applied once, before the tilt (``guided/vllm/requests.py``). With top_k 1 a request is
  greedy and guidance never acts, so vLLM's own path takes it.
* **Neutral guidance** is computed unless ``skip_noop`` is set, because its price is the question.
* **Steps** are vLLM's, joined with what guidance did in each. Both logs are written by different processes and
  count the steps of the server alike, so the number joins them; the size of the batch, which both know, proves
  that it is the same step. Durations are vLLM's, on the clock of the host. Where guidance was timed on the clock
  of the device as well, those times carry its name, ``device.lvm_forward``: they are listed beside the step and
  are no parts of it, because a device may still be busy with one step when the host has gone on to the next.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import msgspec

from benchctl import __version__
from benchctl.costs.shapes import ConfigKeys, shape_from_config
from benchctl.engines.engine import Client, LaunchSite, own_options, profile_errors
from benchctl.engines.hub import context_of, json_object, pair_remedy
from benchctl.engines.vllm import SIGNATURES, VllmEngine
from benchctl.engines.vllm_lenvm.options import VllmLenvmOptions
from benchctl.engines.vllm_steps import read_numbered_steps
from benchctl.errors import EngineUnavailableError, RecordError, UnsupportedError
from benchctl.guided.params import VLLM_PREFIX, GuideStep
from benchctl.guided.value_model.sizes import ValueModelMemory, value_model_memory
from benchctl.profile.model import VariantSettings
from benchctl.records.files import encode, read_jsonl
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import StepRecord

MAX_CANDIDATES: Final = 64
_ITEM_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
_STORED: Final = "bfloat16"
"""Type of the weights where a ``config.json`` does not state it, as the server takes it."""


def _backbone(directory: str) -> Any:
    """The keys of a ``config.json`` by which a value model's tensors have their shapes, and ``dtype``, the type of
    its stored weights. Raises UsageError that names file and key.
    """
    path = Path(directory).expanduser() / "config.json"
    shape, keys = shape_from_config(path), ConfigKeys.read(path)
    return SimpleNamespace(
        model_type=keys.model_type,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        dtype=str(keys.values.get("dtype") or keys.values.get("torch_dtype") or _STORED),
    )


def value_model_of(settings: VariantSettings, max_num_seqs: int, max_model_len: int) -> ValueModelMemory:
    """The memory of the value model that an arm's server loads, on a server with these limits.

    Requests are guided with the arm's top_k, so its passes score so many candidates; without guidance none.
    Raises UsageError where there is no such model.
    """
    options = own_options(settings, VllmLenvmOptions)
    assert options.value_model is not None  # noqa: S101
    backbone = _backbone(options.value_model)
    top_k = settings.sampling.top_k if settings.guidance is not None else 1
    return value_model_memory(
        backbone,
        _ITEM_BYTES.get(backbone.dtype if options.value_dtype == "auto" else options.value_dtype, 2),
        max_slots=max_num_seqs,
        max_tokens=max_model_len,
        max_candidates=MAX_CANDIDATES,
        candidates=top_k if 1 <= top_k <= MAX_CANDIDATES else MAX_CANDIDATES,
        kernels=options.value_kernels,
    )


def disallowed(settings: VariantSettings, memory: ValueModelMemory) -> str | None:
    """The reason why ``value_memory_bytes`` refuses the prefixes of a value model; None where it does not."""
    options = own_options(settings, VllmLenvmOptions)
    allowed = options.value_memory_bytes
    if allowed is None or memory.prefixes <= allowed:
        return None
    return (
        f"the value model {options.value_model} takes: {memory}; its prefixes are {memory.prefixes} bytes, and "
        f"value_memory_bytes allows {allowed}; lower max_num_seqs or max_model_len, or raise it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedLine(GuideStep):
    """One line of the log of guidance, which ``guided.timing`` writes."""

    step: int
    num_seqs: int
    clock: Literal["host", "device"] = "host"
    """Of ``sections_ns``."""
    sections_ns: dict[str, int] = field(default_factory=dict)
    host_sections_ns: dict[str, int] = field(default_factory=dict)
    """Times of the host, where ``sections_ns`` are those of the device."""

    @property
    def named_sections_ns(self) -> dict[str, int]:
        """Times of the host by their names, those of the device by names that say so."""
        if self.clock == "host":
            return self.sections_ns
        # Prefix of sections that are device times in a step of the host
        return self.host_sections_ns | {"device." + name: time for name, time in self.sections_ns.items()}


_STEP_LOG: Final = "steps.guided.jsonl"
"""The log of guidance in the directory of a run."""
_PROCESSOR_FLAG: Final = "--logits-processors"
_DESCRIPTION: Final = "value_model.json"
_SIGNATURES: Final = (
    *profile_errors(
        "bad-value-model",
        "the value model cannot be loaded: the log says what is missing or does not fit; correct "
        "engine.options.value_model",
        "CheckpointError",
    ),
    *profile_errors(
        "bad-guidance", "the value model does not fit this server: the log says what to change", "GuidanceError"
    ),
)  # fmt: skip
_OWN_SETTINGS: Final = (
    "value_model", "value_dtype", "value_load_format", "value_memory_bytes", "value_graphs", "value_kernels",
    "value_skips_early", "fused", "lazy", "skip_noop", "stride", "guidance_clock",
)  # fmt: skip
"""Options that vLLM's own description does not contain."""


class VllmLenvmEngine(VllmEngine):
    """Servers of vLLM that may load a value model."""

    kind = "vllm-lenvm"
    signatures = (*_SIGNATURES, *SIGNATURES)

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when vLLM or one of the models is not here."""
        value_model = own_options(settings, VllmLenvmOptions).value_model
        if value_model is not None and context_of(value_model) is None:
            remedy = pair_remedy(value_model, "value", "the value_model of the variants")
            raise EngineUnavailableError(
                f"engine 'vllm-lenvm': the value model {value_model!r} is not a directory with a config.json; name "
                f"one, or make a small pair to try it with: {remedy}"
            )
        _require_model(settings.model)
        super().check_available(settings)

    def check_requests(self, requests: Iterable[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for guidance that the server would refuse, and for lengths beyond its context."""
        top_k, is_greedy = settings.sampling.top_k, settings.sampling.temperature == 0
        if settings.guidance is not None and not is_greedy and not 1 <= top_k <= MAX_CANDIDATES:
            raise UnsupportedError(
                f"engine {self.kind!r}, variant {settings.variant!r}: sampling.top_k is {top_k}, and every "
                f"candidate of a guided request is scored; set it to a number from 2 to {MAX_CANDIDATES}"
            )
        words = getattr(settings.server, "extra_args", ())
        names_processor = any(word.partition("=")[0].replace("_", "-") == _PROCESSOR_FLAG for word in words)
        if settings.server.guides_with is not None and names_processor:
            raise UnsupportedError(
                f"engine {self.kind!r}, variant {settings.variant!r}: extra_args name {_PROCESSOR_FLAG}, which "
                "benchctl sets for the value model, and vLLM heeds it once; remove it, or drop value_model"
            )
        super().check_requests(requests, settings)

    def build(self, settings: VariantSettings) -> Mapping[str, str]:
        """vLLM's, and ours for a server that runs our code for its value model."""
        own = {} if settings.server.guides_with is None else {"benchctl": __version__}
        return {**super().build(settings), **own}

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        guidance = (_PROCESSOR_FLAG, "benchctl_lenvm:LenvmLogitsProcessor")
        return super().argv(settings, site) + (() if settings.server.guides_with is None else guidance)

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        """vLLM's, the model runner, and the settings of the processor."""
        options = own_options(settings, VllmLenvmOptions)
        own = {"VLLM_USE_V2_MODEL_RUNNER": "0", **super().env(settings, site)}
        if options.value_model is None:
            return own
        log = {
            "BENCHCTL_LENVM_STEP_LOG": str(site.directory / _STEP_LOG),
            "BENCHCTL_LENVM_CLOCK": options.guidance_clock,
        }
        return own | {
            "BENCHCTL_LENVM_MODEL": str(Path(options.value_model).expanduser().resolve()),
            "BENCHCTL_LENVM_SETTINGS": encode(_server_settings(options, settings)).decode(),
            "BENCHCTL_LENVM_DESCRIPTION": str(site.directory / _DESCRIPTION),
            **(log if options.step_log else {}),
        }

    def request_fields(self, request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
        body = super().request_fields(request, settings)
        if settings.guidance is None:
            return body
        guidance = settings.guidance.model_dump(exclude_none=True)
        extra: dict[str, Any] = {VLLM_PREFIX + name: value for name, value in guidance.items()}
        options = own_options(settings, VllmLenvmOptions)
        extra |= {f"{VLLM_PREFIX}skip_noop": int(options.skip_noop), f"{VLLM_PREFIX}stride": options.stride}
        return {**body, "vllm_xargs": extra}

    async def effective_config(self, client: Client, settings: VariantSettings, site: LaunchSite) -> dict[str, Any]:
        config = await super().effective_config(client, settings, site)
        config.pop("logits_processors", None)  # says no more than value_model
        config["overlap_schedule"] = config.pop("async_scheduling", None)
        options = own_options(settings, VllmLenvmOptions)
        config |= {name: value for name in _OWN_SETTINGS if (value := getattr(options, name)) is not None}
        config["value_reuse"] = options.reuses
        described = json_object(site.directory / _DESCRIPTION) or {}  # a lazy one may not be loaded yet
        return config | {f"value_model.{name}": value for name, value in described.items()}

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        """The steps of a run on a server that has a value model.

        Raises RecordError at the first damaged line of either log, and where the two describe different steps.
        """
        path = directory / _STEP_LOG
        lines = iter(read_jsonl(path, GuidedLine)) if path.exists() else iter(())
        line = next(lines, None)
        for number, step in read_numbered_steps(directory):
            if line is None or number is None or number < line.step:
                yield msgspec.structs.replace(step, guided_rows=0, candidates=0)
                continue
            if number > line.step or step.num_seqs != line.num_seqs:
                raise RecordError(
                    f"{path}: step {line.step} with {line.num_seqs} sequences is not the server's step {number} "
                    f"with {step.num_seqs}; the two logs are of different servers, or one is incomplete: measure "
                    "again"
                )
            counts = {each.name: getattr(line, each.name) for each in fields(GuideStep)}
            yield msgspec.structs.replace(step, **counts, sections_ns=line.named_sections_ns)
            line = next(lines, None)


def _server_settings(options: VllmLenvmOptions, settings: VariantSettings) -> dict[str, Any]:
    """The fields of ``guided.vllm.settings.VllmSettings`` that are set here."""
    is_guided = settings.guidance is not None and not settings.sampling.is_greedy
    num_candidates = max(0, min(settings.sampling.top_k, MAX_CANDIDATES)) if is_guided else 0
    server_settings = {
        "fused": options.fused,
        "reuse": options.reuses,
        "graphs": options.value_graphs,
        "record": num_candidates,
        "kernels": options.value_kernels,
        "lazy": options.lazy,
        "dtype": options.value_dtype,
        "random_weights": options.value_load_format == "dummy",
        "max_candidates": MAX_CANDIDATES,
        "memory_bytes": options.value_memory_bytes,
        "skips_early": options.value_skips_early,
    }
    return {name: value for name, value in server_settings.items() if value is not None}


def _require_model(path: str) -> None:
    """Raises EngineUnavailableError for a path that is not there; what may be a repository is for vLLM to find."""
    if "models/" not in path or Path(path).expanduser().is_dir():
        return
    remedy = (
        f"a small pair: {pair_remedy(path, 'value', 'the value_model of the variants', is_base=True)}"
        if Path(path).name == "base"
        else f"a small one: benchctl models make-tiny {shlex.quote(path)}"
    )
    raise EngineUnavailableError(
        f"engine 'vllm-lenvm': the model {path!r} is not a directory with a config.json; name one, or make {remedy}"
    )
