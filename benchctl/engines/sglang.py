"""SGLang as an engine: its OpenAI server, with a plugin of ours that records steps.

* **Steps** come from ``inside/sglang``, which reaches the schedulers by ``PYTHONPATH`` and SGLang's own plugins
  (since 0.5.15) and defines them. SGLang's own records are too coarse: its log and
  ``step_time_dict`` have averages since the previous line, prefills and pauses included.
* **Sampling** is sent in full with every request, the repetition penalty included: SGLang takes anything that a
  request leaves out from the model's own ``generation_config.json``.
* **Seeds** of requests are honoured only with ``--enable-deterministic-inference`` (through ``extra_args``), which
  uses other kernels. The server's own seed is fixed, so that servers do not differ in it.
* **Several choices** (``n``) cost an additional pass over each prompt, by which SGLang fills its prefix cache, also
  where that is off.
* **Health.** By default each call of ``/health`` generates a token and takes a second; here that is switched off.
* **A taken port** is detected late and is final: the server reports it, and lives on without ever serving.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from benchctl.engines.engine import (
    LOOPBACK,
    Client,
    Device,
    LaunchSite,
    PromptCounter,
    Recipe,
    get_json,
    offered_json,
    own_options,
    plain_body,
    plugged_in,
    profile_errors,
    signatures,
    streamed,
)
from benchctl.engines.environment import PythonServer
from benchctl.engines.hub import checkpoint_for, is_local
from benchctl.errors import EngineUnavailableError
from benchctl.profile.choices import Concurrency, ContextLength, DeviceCount, Flag, PythonOptions, Share
from benchctl.profile.model import VariantSettings
from benchctl.profile.sections import RequestOptions
from benchctl.records.record import PreparedRequest


class SglangOptions(PythonOptions):
    """Options of the engine ``sglang``; null leaves the choice to SGLang."""

    device: Annotated[str | None, Flag()] = None
    """Kind of device to run on."""
    max_model_len: Annotated[ContextLength | None, Flag("--context-length")] = None
    """Longest prompt and output together, in tokens."""
    mem_fraction_static: Annotated[Share | None, Flag()] = None
    """Share of the device's memory for weights and KV cache."""
    tensor_parallel_size: Annotated[DeviceCount, Flag("--tp-size")] = 1
    """Devices that each layer is spread over."""
    data_parallel_size: Annotated[DeviceCount, Flag("--dp-size")] = 1
    """Replicas of the engine."""
    enable_prefix_caching: Annotated[bool, Flag("--disable-radix-cache", when=False)] = False
    """Share the KV cache between prompts with a common beginning."""
    enforce_eager: Annotated[bool, Flag("--disable-cuda-graph", when=True)] = False
    """Run without CUDA graphs."""
    overlap_schedule: Annotated[bool, Flag("--disable-overlap-schedule", when=False)] = True
    """Overlap the scheduler with the device."""
    max_num_seqs: Annotated[Concurrency | None, Flag("--max-running-requests")] = None
    """Sequences in one batch at most."""
    max_num_batched_tokens: Annotated[ContextLength | None, Flag("--chunked-prefill-size")] = None
    """Prompt tokens in one step at most."""
    load_format: Annotated[str | None, Flag()] = None
    """Source of the weights; ``dummy`` draws random ones."""
    attention_backend: Annotated[str | None, Flag()] = None
    """Kernels of attention."""
    sampling_backend: Annotated[str | None, Flag()] = None
    """Kernels of sampling."""
    step_log: bool = True
    """Record steps, by a plugin inside the server's scheduler."""


DISTRIBUTION: Final = "sglang"
_INSIDE: Final = Path(__file__).parent / "inside" / "sglang"
_SEED: Final = 0
_STATED: Final = (
    "version", "model_path", "device", "dtype", "kv_cache_dtype", "quantization", "load_format",
    "mem_fraction_static", "page_size", "schedule_policy", "stream_interval", "attention_backend",
    "sampling_backend", "speculative_algorithm", "enable_deterministic_inference",
)  # fmt: skip
"""The relevant ones of hundreds of settings that the server reports. The rest changes from start to start (ports,
free memory) or is secret (``api_key``)."""
_STATED_AS: Final = {name: name for name in _STATED} | {
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "tp_size": "tensor_parallel_size",
    "dp_size": "data_parallel_size",
}
"""Our names for them, and for those that have another name here."""
_STATED_INVERTED: Final = {
    "disable_radix_cache": "enable_prefix_caching",
    "disable_overlap_schedule": "overlap_schedule",
}
SIGNATURES: Final = (
    *signatures(
        "port-taken", "end the process that holds the port, or leave port out of the profile",
        "error while attempting to bind on address", is_final=True,
    ),
    *signatures("port-taken", "end the process that holds the port", "address already in use", is_final=True),
    *signatures(
        "out-of-memory", "weights leave no room for the KV cache: raise mem_fraction_static, or free memory",
        "Please try to increase --mem-fraction-static",
    ),
    *signatures(
        "out-of-memory", "lower mem_fraction_static or max_num_seqs, or free memory",
        "OutOfMemoryError", "CUDA out of memory",
    ),
    *profile_errors(
        "bad-model", "the model has no weights: get them, or load_format: dummy", "Cannot find any model weights"
    ),
    *profile_errors(
        "bad-flag", "lower max_model_len: the model was made for shorter texts",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    ),
    *profile_errors(
        "bad-flag", "correct extra_args: this version does not know the flag", "error: unrecognized arguments"
    ),
    *profile_errors("bad-flag", "correct the option that the log names", "sglang serve: error: ", ".py: error: "),
    *profile_errors("bad-model", "correct the path of the model", "Repo id must be"),
    *profile_errors(
        "bad-model", "correct the model's name", "is not a local folder and is not a valid model identifier"
    ),
    *signatures("no-device", "make a GPU visible, or set device", "No CUDA GPUs are available"),
    *signatures(
        "warm-up-failed", "the log says why its first request failed", "Initialization failed. warmup error"
    ),
    *signatures("engine-died", "the log says which exception ended the scheduler", "Scheduler hit an exception"),
)  # fmt: skip


class SglangEngine(PythonServer):
    """Servers of ``python -m sglang.launch_server``."""

    kind = environment = "sglang"
    distributions = (DISTRIBUTION,)
    essential_processes = ("sglang::scheduler", "sglang::detokenizer")
    signatures = SIGNATURES
    once_patterns = (re.compile(r"(Capture (?:piecewise )?cuda graph bs [^\n]+)"), *PythonServer.once_patterns)
    counter = PromptCounter

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        extra_args = own_options(settings, SglangOptions).extra_args
        return (str(self.interpreter(settings)), *self.launch_words(settings, site), *extra_args)

    def launch_words(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        """The command line after the interpreter, without ``extra_args``."""
        return (
            "-m", "sglang.launch_server",
            "--model-path", checkpoint_for(settings.model, self.kind), "--served-model-name", settings.model,
            "--host", LOOPBACK, "--port", str(site.port), "--random-seed", str(_SEED),
            "--enable-metrics", "--enable-cache-report",
            *own_options(settings, SglangOptions).flag_words(),
        )  # fmt: skip

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        """The path of our plugin, no telemetry, and the variables of the profile."""
        own = quiet_env(settings.model) | super().env(settings, site)
        if not own_options(settings, SglangOptions).step_log:
            return own
        own["BENCHCTL_STEP_LOG"] = str(site.step_log)
        return plugged_in(own, _INSIDE, "benchctl-steps", allowed_in="SGLANG_PLUGINS")

    def request_fields(self, request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
        return streamed(request, settings, request_body(request, settings), form=sglang_form(settings.request))

    async def effective_config(self, client: Client, settings: VariantSettings, site: LaunchSite) -> dict[str, Any]:
        """The settings that the server reports, and whether it honours the seeds of requests."""
        options = own_options(settings, SglangOptions)
        return {
            **stated_config(await server_info(client)),
            "enforce_eager": options.enforce_eager,
            "request_seed": "honoured" if is_deterministic(options) else "ignored",
            **({"extra_args": " ".join(options.extra_args)} if options.extra_args else {}),
        }

    async def attached_config(self, client: Client, headers: Mapping[str, str]) -> dict[str, Any]:
        info = await offered_json(client, "/server_info", headers)
        return stated_config(info or await offered_json(client, "/get_server_info", headers))

    def recipe(self, device: Device) -> Recipe | None:
        if device != "cuda":
            raise EngineUnavailableError(
                "sglang: needs an NVIDIA GPU, and 'nvidia-smi -L' shows none here; install vllm or transformers "
                "instead"
            )
        return Recipe(
            kind=self.kind,
            device=device,
            pins=("sglang==0.5.23",),
            cost="about five minutes and 10 GB",
            proof="import sglang, sglang.launch_server",
        )


def quiet_env(model: str) -> dict[str, str]:
    """No telemetry, and a health path that generates nothing."""
    return {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        **({"HF_HUB_OFFLINE": "1"} if is_local(model) else {}),
    }


def request_body(request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
    """The fields of a request except prompt and length.

    Token ids give the tokens of each event, also with several choices; SGLang has them since 0.5.20 and refuses
    them for streamed chats. A running usage replaces them if there is one choice.
    """
    body = plain_body(request, settings) | {"repetition_penalty": settings.sampling.repetition_penalty}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body | ({"return_token_ids": True} if request.messages is None else {})


def sglang_form(options: RequestOptions) -> dict[str, Any]:
    """The form of the answer in SGLang's fields ``response_format``, ``regex`` and ``ebnf``."""
    fields: dict[str, Any] = {}
    if options.response_format is not None:
        fields["response_format"] = options.response_format
    for name, value in (options.structured_outputs or {}).items():
        match name:
            case "json":
                schema = json.loads(value) if isinstance(value, str) else value
                fields["response_format"] = {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": schema},
                }
            case "choice":
                fields["regex"] = "(" + "|".join(re.escape(str(choice)) for choice in value) + ")"
            case _:
                fields["ebnf" if name == "grammar" else name] = value
    return fields


async def server_info(client: Client) -> dict[str, Any]:
    """The settings that the server reports, by their names there; some are secret."""
    return await offered_json(client, "/server_info", {}) or await get_json(client, "/get_server_info")


def is_deterministic(options: SglangOptions) -> bool:
    """True where the server honours the seeds of requests."""
    return "--enable-deterministic-inference" in options.extra_args


def stated_config(info: Mapping[str, Any]) -> dict[str, Any]:
    """The relevant settings of ``/server_info``, under the names of our options where they have one."""
    config = {ours: info[theirs] for theirs, ours in _STATED_AS.items() if info.get(theirs) is not None}
    config |= {ours: not info[theirs] for theirs, ours in _STATED_INVERTED.items() if theirs in info}
    return config
