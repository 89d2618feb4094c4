"""A profile's settings and requests in the words of the core, as the server would understand them over HTTP."""

import msgspec

from benchctl.engines.openai_server import own_options
from benchctl.engines.sim.engine import SimEngine
from benchctl.engines.sim.options import SimOptions
from benchctl.errors import UsageError
from benchctl.profile.choices import COST_MODELS
from benchctl.profile.model import VariantSettings
from benchctl.records.record import PreparedRequest
from benchctl.sim.config import SimConfig
from benchctl.sim.http.openai_api import ChatBody, CompletionBody, request_from
from benchctl.sim.requests.request import Request


def config_of(settings: VariantSettings, *, noise_seed: int = 0) -> SimConfig:
    """The configuration of the server that these settings start."""
    options = own_options(settings, SimOptions).model_dump(exclude={"port"})
    return SimConfig(model=settings.model, noise_seed=noise_seed, **options)


def core_request(request: PreparedRequest, settings: VariantSettings, config: SimConfig) -> Request:
    """The request as the server reads it. Raises UsageError where the server refuses it."""
    kind: type[ChatBody | CompletionBody] = ChatBody if request.messages is not None else CompletionBody
    fields = settings.request.model_copy(update={"headers": {}})  # nothing is sent
    call = SimEngine().request_call(request, settings.model_copy(update={"request": fields}))
    body: ChatBody | CompletionBody = msgspec.json.decode(call.body, type=kind)
    if body.model not in {None, config.model}:
        raise UsageError(f"the model {body.model!r} does not exist; this server has {config.model!r}")
    return request_from(body, request.request_id, config)


def costs_in_words(settings: VariantSettings) -> str:
    """The source of the step times: ``cost model roofline (llama-3.1-8b on h100-sxm)``."""
    options = own_options(settings, SimOptions)
    if not COST_MODELS[options.cost_model].uses_shapes:
        return f"cost model {options.cost_model}"
    return f"cost model {options.cost_model} ({settings.model} on {options.hardware})"
