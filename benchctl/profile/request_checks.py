"""Rules of ``request`` and of penalties beyond their types: what is inherited, and what an engine understands."""

from collections.abc import Iterator
from typing import Any, Final

from benchctl.profile.engine_options import request_fields
from benchctl.profile.model import VariantSettings
from benchctl.profile.request import variable_problem, variables_in
from benchctl.profile.yaml import LocatedDict, LocatedError

FREE_SECTIONS: Final = (
    "extra_body",
    "headers",
    "response_format",
    "structured_outputs",
    "chat_template_kwargs",
)
"""Sections of ``request`` whose keys the writer chooses."""
_PLAIN_HEADERS: Final = frozenset(
    {
        "accept", "accept-charset", "accept-encoding", "accept-language", "anthropic-version", "cache-control",
        "content-language", "content-type", "http-referer", "openai-beta", "priority", "referer", "user-agent",
        "x-title",
    }
)  # fmt: skip
"""Headers whose values are no secrets; those of any other may be, whatever its name."""
_GUIDANCE_FIELDS: Final = ("custom_params", "vllm_xargs")


def merge_fields(below: Any, above: Any) -> Any:
    """``merge`` for sections of ``request``: null removes what is below it, and is a value where nothing is."""
    if not isinstance(below, LocatedDict) or not isinstance(above, LocatedDict):
        return above
    removed = [key for key, value in above.items() if value is None and below.get(key) is not None]
    below, above = below.without(*removed), above.without(*removed)
    values = {key: merge_fields(below.get(key), value) for key, value in above.items()}
    return LocatedDict({**below, **values}, above.location, below.locations | above.locations)


def request_errors(tree: LocatedDict, kind: str, settings: VariantSettings) -> Iterator[LocatedError]:
    """Fields of the requests of one run that servers of this kind do not have."""
    kind = getattr(settings.server, "dialect", kind)
    understood, options = request_fields(kind), settings.request
    section, where = tree.mapping("request"), f"servers of {kind!r}"

    def refusal(key: str, problem: str) -> LocatedError:
        return section.error(f"{problem}; leave it out, or choose another engine", key)

    if options.response_format and not understood.response_format:
        yield refusal("response_format", f"{where} have no response_format")
    if options.chat_template_kwargs and not understood.chat_template_kwargs:
        yield refusal("chat_template_kwargs", f"{where} pass nothing on to the chat template")
    if options.structured_outputs and understood.constraints is not None:
        unknown = [name for name in options.structured_outputs if name not in understood.constraints]
        if unknown:
            has = ", ".join(sorted(understood.constraints)) or "none"
            problem = f"{where} have {has} of these constraints, not {', '.join(unknown)}"
            yield refusal("structured_outputs", problem)
    for name in settings.sampling.penalties:
        if name not in understood.penalties:
            sampling = tree.mapping("sampling")
            yield sampling.error(f"{where} have no {name}; leave it out, or choose another engine", name)
    for name in _GUIDANCE_FIELDS:
        if settings.guidance is not None and name in options.extra_body:
            yield section.mapping("extra_body").error(
                f"{name} carries the guidance of this variant; remove it", name
            )


def header_errors(tree: LocatedDict, *, is_to_send: bool, is_stored: bool) -> Iterator[LocatedError]:
    """Headers of one run that may be secrets in plain text, and variables that the environment lacks.

    Results of older versions, which ``is_stored`` says, hold what they hold.
    """
    headers = tree.mapping("request", "headers")
    for header, value in headers.items():
        variables = variables_in(value) if isinstance(value, str) else ()
        if not (variables or is_stored or header.lower() in _PLAIN_HEADERS):
            yield headers.error(
                f"{header} may be a secret, which profiles and results must not hold; put its value into a "
                "variable of the environment, and write ${NAME} here",
                header,
            )
        for variable in variables if is_to_send else ():
            if problem := variable_problem(variable):
                yield headers.error(problem, header)
