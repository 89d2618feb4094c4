"""The fields of a request beyond prompt, length and sampling. See ``Profile.request``."""

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field, field_validator

from benchctl.errors import EngineUnavailableError
from benchctl.profile.choices import Section, check_rules
from benchctl.untrusted.secrets import holds_key, is_secret_name

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OWN_HEADERS: Final = frozenset(
    {
        "connection", "content-encoding", "content-length", "content-type", "host", "transfer-encoding",
        "x-request-id",
    }
)  # fmt: skip
"""Headers without which a request is no longer the one that is measured."""
_OWN_FIELDS: Final[Mapping[str, str]] = {
    "model": "request.model",
    "prompt": "workload",
    "messages": "workload",
    "max_tokens": "workload.output_len",
    "max_completion_tokens": "workload.output_len",
    "min_tokens": "stop",
    "ignore_eos": "stop",
    "stop": "stop",
    "stop_token_ids": "stop",
    "n": "workload.samples_per_prompt",
    "best_of": "workload.samples_per_prompt",
    "seed": "seed",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "response_format": "request.response_format",
    "structured_outputs": "request.structured_outputs",
    "chat_template_kwargs": "request.chat_template_kwargs",
}
"""Fields on which the measurement rests, or that have a key of their own, and the key that sets each."""
_ALWAYS_SENT: Final = frozenset({"stream", "stream_options"})
"""Fields without which no token has a time and no answer a count."""


class RequestOptions(Section):
    """Fields of every request of a variant beside its prompt, its length and ``sampling``."""

    model: str | None = Field(default=None, min_length=1)
    """Name of the model in requests, such as that of a LoRA adapter; null: the served model."""
    extra_body: dict[str, Any] = {}
    """Fields added to the JSON body as they are, in place of benchctl's own where the names are equal; not those on
    which the measurement rests, nor those that have a key."""
    headers: dict[str, str] = {}
    """HTTP headers. ``${NAME}`` stands for a variable of the environment; a value with one is never recorded.
    Without one only headers such as ``User-Agent`` are taken, whose values are no secrets."""
    response_format: dict[str, Any] | None = None
    """Form of the answer, as in OpenAI's API: ``{type: json_schema, json_schema: {...}}``."""
    structured_outputs: dict[str, Any] | None = None
    """Constraint on the answer as vLLM names it, ``json``, ``regex``, ``choice`` or ``grammar``; sent to SGLang and
    llama.cpp in their own fields."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as ``enable_thinking``; for data sets of chats."""

    @field_validator("extra_body")
    @classmethod
    def _leaves_the_measurement_alone(cls, fields: dict[str, Any]) -> dict[str, Any]:
        for name in fields:
            check_rules(
                (name in _ALWAYS_SENT, f"sets {name}, by which answers are timed and counted; remove it"),
                (
                    name in _OWN_FIELDS,
                    f"sets {name}, which has a key of its own; set {_OWN_FIELDS.get(name)} instead",
                ),
                (
                    is_secret_name(name),
                    (
                        f"sets {name}, which looks like a secret, and bodies are recorded; send it as a header "
                        "with ${NAME} in request.headers"
                    ),
                ),
            )
        return fields

    @field_validator("headers")
    @classmethod
    def _headers_can_be_sent_and_recorded(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            plain = _VARIABLE.sub("", value)
            check_rules(
                (
                    not _HEADER_NAME.fullmatch(name),
                    f"{name!r} is not the name of a header; write letters, digits and '-'",
                ),
                (
                    name.lower() in _OWN_HEADERS,
                    f"{name} is benchctl's own: requests could not be sent or told apart with another; remove it",
                ),
                ("${" in plain, f"{name} has a '${{' that names no variable; write ${{NAME}}"),
                (
                    not (plain.isascii() and plain.isprintable()),
                    f"{name} holds line breaks or other characters that no header carries; correct its value",
                ),
                (
                    holds_key(plain),
                    (
                        f"{name} looks like a secret, which profiles and results must not hold; put its value into "
                        "a variable of the environment, and write ${NAME} here"
                    ),
                ),
            )
        return headers

    @property
    def asks_for_json(self) -> bool:
        """True where the form of the answer is a JSON document."""
        is_form = (self.response_format or {}).get("type") in {"json_object", "json_schema"}
        return is_form or bool({"json", "json_object"} & (self.structured_outputs or {}).keys())

    def stated(self) -> dict[str, Any]:
        """The fields that are set, by dotted path: those of free sections one by one, a form of the answer whole.

        Headers are as written, with ``${NAME}`` for what is never recorded.
        """
        flat: dict[str, Any] = {} if self.model is None else {"model": self.model}
        for name in ("extra_body", "headers", "chat_template_kwargs"):
            flat |= _leaves(getattr(self, name) or {}, name)
        for name in ("response_format", "structured_outputs"):
            flat |= {f"{name}.{key}": value for key, value in (getattr(self, name) or {}).items()}
        return flat

    @property
    def variables(self) -> frozenset[str]:
        """The variables of the environment that its headers name."""
        return frozenset(name for value in self.headers.values() for name in variables_in(value))

    def sent_headers(self) -> tuple[dict[str, str], dict[str, str]]:
        """The headers as they are sent now, and the values in them that must never be recorded, by variable.

        Raises EngineUnavailableError for a variable that is not set or that no header can carry.
        """
        values = dict[str, str]()
        for header, value in self.headers.items():
            for variable in variables_in(value):
                if problem := variable_problem(variable):
                    raise EngineUnavailableError(f"request.headers.{header}: {problem}")
                values[variable] = os.environ[variable]
        headers = {
            name: _VARIABLE.sub(lambda match: values[match[1]], value) for name, value in self.headers.items()
        }
        return headers, values


def variables_in(value: str) -> tuple[str, ...]:
    """The variables of the environment that the value of a header names."""
    return tuple(_VARIABLE.findall(value))


def variable_problem(variable: str) -> str | None:
    """The problem of a variable that a header needs; None where the environment has it."""
    value = os.environ.get(variable)
    if not value:
        return f"{variable} is not set in the environment; export {variable}, or leave the header out"
    if not (value.isascii() and value.isprintable()):
        return (
            f"the value of {variable} holds line breaks or other characters that no header carries; export it "
            "without them"
        )
    return None


def _leaves(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Values of nested mappings by dotted path; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}.{key}"
        flat |= _leaves(value, path) if isinstance(value, dict) and value else {path: value}
    return flat
