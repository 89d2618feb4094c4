"""vLLM as an engine: its OpenAI server, with a plugin of ours that records steps."""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from benchctl.engines.engine import (
    LOOPBACK,
    JsonGetter,
    LaunchSite,
    TokenizeCounter,
    own_options,
    plain_body,
    plugged_in,
    profile_errors,
    salted,
    signatures,
    streamed,
)
from benchctl.engines.environment import PythonServer, installed_versions
from benchctl.engines.hub import checkpoint_for, is_local, pair_remedy
from benchctl.engines.vllm_options import VllmOptions
from benchctl.engines.vllm_steps import effective, read_vllm_steps
from benchctl.errors import EngineUnavailableError
from benchctl.profile.model import VariantSettings
from benchctl.records.record import Call, PreparedRequest
from benchctl.records.schema import StepRecord
from benchctl.untrusted.http import fetch_json

SIGNATURES: Final = (
    *profile_errors(
        "bad-flag",
        "vLLM does not know an option as it is given: correct engine.options or extra_args; if it is "
        "--enable-logging-iteration-details, this vLLM is too old to record steps, so set engine.options.step_log "
        "to false",
        "error: unrecognized arguments", "error: argument ", "error: the following arguments",
    ),
    *signatures(
        "port-taken", "another process took the port: end it, or leave port out of the profile",
        "Address already in use", "address already in use",
    ),
    *profile_errors(
        "bad-model",
        "the model is neither a directory with a config.json nor a repository that can be fetched from here: "
        "correct model, fetch it beforehand, or set HF_TOKEN where access is restricted",
        "Repo id must be in the form", "Cannot find an appropriate cached snapshot folder",
        "is not a local folder and is not a valid model identifier", "Invalid repository ID or local directory",
        "RepositoryNotFoundError", "GatedRepoError",
    ),
    *profile_errors(
        "no-weights",
        "the directory of the model has no weights: put them there, or set engine.options.load_format to dummy for "
        "random ones",
        "Cannot find any model weights with",
    ),
    *profile_errors(
        "damaged-weights", "a file of weights is damaged or cut off: fetch or make the model again",
        "SafetensorError", "Error while deserializing header", "PytorchStreamReader failed",
    ),
    *profile_errors(
        "unsupported-model",
        "this version of vLLM cannot run models of this architecture: name another model, or install a newer vLLM",
        "Transformers does not recognize this architecture", "are not supported for now",
        "has no vLLM implementation",
    ),
    *profile_errors(
        "bad-draft",
        "the draft model has another vocabulary than the served one: name one with the same tokenizer in "
        "engine.options.draft_model",
        "Target and draft model should have the same vocabulary size",
    ),
    *profile_errors(
        "context-too-long",
        "engine.options.max_model_len is more than the model was made for: lower it, or leave it out",
        "is greater than the derived max_model_len",
    ),
    *profile_errors(
        "unsupported-quantization",
        "the model's weights are not quantised as engine.options.quantization says, or this device cannot compute "
        "with them: correct or drop it",
        "Unknown quantization method", "Cannot find the config file for", "does not match the quantization method",
        "quantization is currently not supported",
    ),
    *profile_errors(
        "bad-parallelism", "the model or the devices cannot be divided so: lower tensor_parallel_size",
        "divisible by tensor parallel size", "larger than the number of available",
    ),
    *signatures(
        "out-of-memory",
        "the KV cache is too small: raise kv_cache_memory_bytes or gpu_memory_utilization, or lower max_model_len",
        "larger than the available KV cache memory", "No available memory for the cache blocks",
    ),
    *signatures(
        "out-of-memory",
        "the first memory node of this machine has less free than the share that vLLM asks for: set "
        "kv_cache_memory_bytes, such as 256M (the preset vllm-cpu does)",
        "is less than desired CPU memory utilization",
    ),
    *signatures(
        "out-of-memory",
        "a memory node of this machine has less free than the KV cache is to have: lower kv_cache_memory_bytes, or "
        "end what else uses memory",
        "is less than requested memory for kv",
    ),
    *signatures(
        "out-of-memory",
        "the device has too little free memory: end what else uses it, or lower gpu_memory_utilization, "
        "max_num_seqs or max_model_len",
        "Free memory on device", "CUDA out of memory", "OutOfMemoryError", "CUDA error: out of memory",
        "DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory", "MemoryError",
    ),
    *signatures(
        "no-device",
        "vLLM finds no device that it can use: check nvidia-smi, CUDA_VISIBLE_DEVICES and that this build of vLLM "
        "fits the driver; without a GPU install vllm-cpu (benchctl engines install vllm)",
        "Found no NVIDIA driver", "CUDA driver version is insufficient", "no kernel image is available",
        "No CUDA GPUs are available", "Failed to infer device type", "CUDA driver initialization failed",
    ),
    *profile_errors(
        "seeded-parts",
        "on a CPU vLLM 0.32 dies when it computes the prompt of a seeded request in parts: set "
        "engine.options.enable_chunked_prefill to false, or sampling.temperature to 0",
        "CPU Generator does not use offset",
    ),
    *signatures(
        "device-failed",
        "the device failed in mid-work: its log says which operation; try again, and with enforce_eager: true if "
        "it comes back",
        "CUDA error:", "NCCL error", "CUBLAS_STATUS", "device-side assert",
    ),
    *profile_errors(
        "bad-plugin",
        "a logits processor that extra_args name cannot be imported or is none: correct its name, or put its "
        "module on PYTHONPATH in engine.options.env",
        "LogitsProcessor plugin", "LogitsProcessor subclass",
    ),
    *profile_errors(
        "missing-package",
        "a package is missing or does not fit: run 'benchctl engines install vllm --force', which makes the "
        "environment again",
        "ModuleNotFoundError: No module named", "PackageNotFoundError", "operator torchvision::nms does not exist",
    ),
    *signatures(
        "engine-failed",
        "a process of the engine failed at the start: the log has its traceback above the one of the front end",
        "Engine core initialization failed", "died unexpectedly",
    ),
    *signatures(
        "engine-died",
        "a process of the engine ended in mid-work: the log has its last words; if there are none, it was killed, "
        "often for want of memory",
        "EngineDeadError", "EngineCore encountered an issue",
    ),
)  # fmt: skip


_INSIDE: Final = Path(__file__).parent / "inside" / "vllm"
_STATED_CACHE: Final = re.compile(r'vllm:cache_config_info\{.*\benable_prefix_caching="(True|False)"')
_WHOLE_PROMPTS: Final = "--no-enable-chunked-prefill"
_ABOUT_PARTS: Final = re.compile("--((no-)?enable-chunked-prefill|max-num-batched-tokens)(=|$)")
_CPU_BUDGET: Final = 2048
_CPU_SEQS: Final = 128
"""vLLM's own limits of a step on a CPU: tokens, and sequences."""
_PLUGINS: Final = "benchctl-steps,benchctl-cpu"


class VllmEngine(PythonServer):
    """Servers of vLLM, on GPUs or, with the package ``vllm-cpu``, without."""

    kind = environment = "vllm"
    distributions = ("vllm", "vllm-cpu")
    essential_processes = ("VLLM::EngineCore", "VLLM::Worker")
    signatures = SIGNATURES

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when no such server can be started here, or its draft model is missing."""
        super().check_available(settings)
        options = own_options(settings, VllmOptions)
        for name, path in options.lora_modules.items():
            if _is_path(path) and not is_local(path):
                raise EngineUnavailableError(
                    f"engine {self.kind!r}: the adapter {name!r} is {path!r}, which is not a directory; correct "
                    "engine.options.lora_modules, or make a small pair to try it with: "
                    f"{pair_remedy(path, 'adapter', 'engine.options.lora_modules')}"
                )
        draft = options.draft_model
        if draft is not None and _is_path(draft) and not is_local(draft):
            raise EngineUnavailableError(
                f"engine {self.kind!r}: the draft model {draft!r} is not a directory; name one with the tokenizer "
                "of the served model in engine.options.draft_model, or make a small pair to try it with: "
                f"{pair_remedy(draft, 'draft', 'engine.options.draft_model')}"
            )

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for guidance, and for lengths beyond the server's context."""
        super().check_requests(requests, settings)
        self.require_context(requests, settings)
        if isinstance(settings.server, VllmOptions) and self._is_on_cpu(settings):
            self._require_whole_prompts(requests, settings)

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        options = own_options(settings, VllmOptions)
        argv = [str(self.interpreter(settings)), "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", checkpoint_for(settings.model, self.kind), "--served-model-name", settings.model]
        argv += ["--host", LOOPBACK, "--port", str(site.port), "--generation-config", "vllm"]
        argv += options.flag_words()
        if _leaves_parts_open(options) and self._is_on_cpu(settings):
            argv.append(_WHOLE_PROMPTS)
        if options.lora_modules:
            adapters = [f"{name}={_adapter(path)}" for name, path in options.lora_modules.items()]
            argv += ["--lora-modules", *adapters]
        draft = options.draft_model
        argv += options.speculative_words(None if draft is None else checkpoint_for(draft, self.kind))
        if options.step_log:
            argv.append("--enable-logging-iteration-details")
        return (*argv, *options.extra_args)

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        """The path of our plugin, no telemetry, and the variables of the profile."""
        own = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        own["VLLM_HOST_IP"] = LOOPBACK  # its processes would meet at the address by which the host is known outside
        options = own_options(settings, VllmOptions)
        models = (settings.model, options.draft_model, *options.lora_modules.values())
        if all(is_local(model) for model in models if model is not None):
            own["HF_HUB_OFFLINE"] = "1"
        own |= super().env(settings, site)
        own["BENCHCTL_SERVER_DESCRIPTION"] = str(site.description)
        if options.step_log:
            own["BENCHCTL_STEP_LOG"] = str(site.step_log)
        if options.speculates and options.correct_cpu_sampling:
            own["BENCHCTL_CORRECTS_CPU_SAMPLING"] = "1"
        return plugged_in(own, _INSIDE, _PLUGINS, allowed_in="VLLM_PLUGINS")

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> Call:
        return streamed(request, settings, plain_body(request, settings) | {"return_token_ids": True})

    def prompt_counter(self, settings: VariantSettings) -> TokenizeCounter:
        return TokenizeCounter(chat_template_kwargs=settings.request.chat_template_kwargs)

    async def effective_config(
        self, client: httpx.AsyncClient, settings: VariantSettings, site: LaunchSite
    ) -> dict[str, Any]:
        """The configuration that the plugin wrote, and the version that the server reports."""
        version = (await fetch_json(client, "/version")).get("version")
        return {**effective(site.description), "version": version}

    def has_steps(self, settings: VariantSettings) -> bool:
        """Steps of one replica are one series; those of several overlap and have no common time per step."""
        options = settings.server
        return isinstance(options, VllmOptions) and options.step_log and options.data_parallel_size == 1

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        return read_vllm_steps(directory)

    async def attached_config(self, get_json: JsonGetter) -> dict[str, Any]:
        version = (await get_json("/version")).get("version")
        return {**await super().attached_config(get_json), "version": version}

    def _is_on_cpu(self, settings: VariantSettings) -> bool:
        """True for a build of vLLM that computes on the CPU; False where none is installed."""
        try:
            python = self.interpreter(settings)
        except EngineUnavailableError:
            return False
        versions = installed_versions(python, self.distributions)
        return "vllm-cpu" in versions or versions.get("vllm", "").endswith("+cpu")

    def _require_whole_prompts(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for seeded requests of which a server on a CPU may compute a prompt in parts.

        That happens to a prompt that does not fit into what the other sequences leave of a step.
        """
        options = own_options(settings, VllmOptions)
        is_whole = options.enable_chunked_prefill is False or _leaves_parts_open(options)
        if is_whole or settings.sampling.temperature == 0:
            return
        num_seqs, budget = options.max_num_seqs or _CPU_SEQS, options.max_num_batched_tokens or _CPU_BUDGET
        prompts = sorted((request.prompt_tokens for request in requests for _ in range(request.n)), reverse=True)
        needed = sum(prompts[:num_seqs])
        if needed > budget:
            what = (
                "on a CPU dies when it computes the prompt of a seeded request in parts (vLLM 0.32), and up to "
                f"{needed} prompt tokens may wait for a step of {budget}"
            )
            remedy = (
                "set engine.options.enable_chunked_prefill to false and leave max_num_batched_tokens out, or set "
                "sampling.temperature to 0"
            )
            raise self.refusal(settings, what, remedy)

    def config_of_metrics(self, series: Collection[str]) -> dict[str, Any]:
        """The prefix cache, on or off, from the labels of ``vllm:cache_config_info``."""
        stated = (_STATED_CACHE.match(name) for name in series)
        values = {match[1] for match in stated if match is not None}
        return {"enable_prefix_caching": values == {"True"}} if values else {}

    def uncached_fields(self) -> dict[str, Any]:
        """A salt of its own, with which vLLM marks the blocks of a request; servers before 0.9 ignore it."""
        return salted()


def _leaves_parts_open(options: VllmOptions) -> bool:
    """True where nothing says whether prompts are computed in parts, nor how many tokens a step may have."""
    is_open = options.enable_chunked_prefill is None and options.max_num_batched_tokens is None
    return is_open and not any(_ABOUT_PARTS.match(word) for word in options.extra_args)


def _is_path(model: str) -> bool:
    """True for what is meant as a directory rather than as a repository."""
    return model.startswith(("models/", "/", "~", "."))


def _adapter(path: str) -> str:
    """The directory of an adapter, absolute, or its repository."""
    return str(Path(path).expanduser().resolve()) if is_local(path) else path
