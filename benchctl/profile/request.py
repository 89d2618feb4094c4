"""The fields of a request beyond prompt, length and sampling. See ``Profile.request``."""

from typing import Any

from pydantic import Field

from benchctl.profile.section import Section


class RequestOptions(Section):
    """Fields of every request of a variant beside its prompt, its length and ``sampling``."""

    model: str | None = Field(default=None, min_length=1)
    """Name of the model in requests, such as that of a LoRA adapter; null: the served model."""
    extra_body: dict[str, Any] = {}
    """Fields added to the JSON body as they are, in place of benchctl's own where the names are equal."""
    headers: dict[str, str] = {}
    """HTTP headers. ``${NAME}`` stands for a variable of the environment; a value with one is never recorded."""
    response_format: dict[str, Any] | None = None
    """Form of the answer, as in OpenAI's API: ``{type: json_schema, json_schema: {...}}``."""
    structured_outputs: dict[str, Any] | None = None
    """Constraint on the answer in vLLM's own field: ``json``, ``regex``, ``choice`` or ``grammar``."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as ``enable_thinking``."""
