"""Chat templates of models, rendered as ``transformers`` renders them, in Jinja's sandbox.

The rules are those of ``render_jinja_template`` in transformers 5: a line that holds only a block leaves no blank
line, loops may be left early, ``tojson`` escapes nothing, and marks around what an assistant wrote are left out.
"""

import json
import resource
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import psutil
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from benchctl.errors import UsageError
from benchctl.records.record import Message
from benchctl.untrusted import LINE_BYTES, PROFILE_BYTES, TEMPLATE_BYTES, TEMPLATE_S
from benchctl.untrusted.files import UnreadableError, decoding_problem, read_json, read_text
from benchctl.workload.tokenizers import TEMPLATE_FILES, TOKEN_FILES

_TEMPLATE_ERRORS: Final[tuple[type[Exception], ...]] = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""Raised by Jinja about a template, and by what a template does with a chat."""
_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Template of one model, with its special tokens and the variables that every chat is given."""

    def __init__(self, directory: Path, variables: Mapping[str, Any] | None = None) -> None:
        """Reads the files of ``directory``; ``variables`` are those of the template's author, and count over ours.

        Raises UsageError where no file has a template, or none that Jinja understands.
        """
        source, self._path = _template_in(directory)
        self._variables = {**_special_tokens(directory), **(variables or {})}
        try:
            self._template = _environment().from_string(source)
        except _TEMPLATE_ERRORS as error:
            raise UsageError(
                f"{self._path}: the chat template is damaged: {decoding_problem(error)}; get the file again"
            ) from error

    def render(self, chat: Sequence[Message]) -> str:
        """The text that a server encodes for ``chat``, up to where the answer begins.

        Raises UsageError where the template refuses the chat.
        """
        messages = [{"role": message.role, "content": message.content} for message in chat]
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(variables | self._variables)
        except _TEMPLATE_ERRORS as error:
            roles = ", ".join(message.role for message in chat)
            raise UsageError(
                f"{self._path}: the chat template refuses a chat of {roles}: {decoding_problem(error)}; its "
                "servers refuse it too, so ask in a form that the model knows, or correct "
                "request.chat_template_kwargs"
            ) from error


def render_within_bounds(
    directory: Path, variables: Mapping[str, Any] | None, chats: Sequence[Sequence[Message]]
) -> list[str]:
    """The texts of some hundred chats by the template in ``directory``, which may be that of a stranger.

    A process of its own renders them: nothing else ends a loop, or a text that fills the memory. Raises UsageError
    as ``ChatTemplate`` does, and where the template takes more time or memory than any honest one.
    """
    with ProcessPoolExecutor(1, get_context("fork"), initializer=_bound) as child:
        try:
            return child.submit(_rendered, directory, variables, chats).result()
        except (BrokenProcessPool, MemoryError) as error:
            raise UsageError(
                f"{directory}: its chat template takes more than {TEMPLATE_S} s of processor time, "
                f"{TEMPLATE_BYTES >> 20:,} MiB of memory or {LINE_BYTES >> 20} MiB for one chat, as no honest one "
                "does; get the file again, or name another tokenizer in workload.tokenizer"
            ) from error


def _bound() -> None:
    """Bound this process for good; a limit that is narrower already stays."""
    memory_bytes = psutil.Process().memory_info().vms + TEMPLATE_BYTES
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CPU, TEMPLATE_S)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (min(limit, limit if hard == resource.RLIM_INFINITY else hard),) * 2)


def _rendered(
    directory: Path, variables: Mapping[str, Any] | None, chats: Sequence[Sequence[Message]]
) -> list[str]:
    texts = list(map(ChatTemplate(directory, variables).render, chats))
    if max(map(len, texts)) > LINE_BYTES:
        raise MemoryError
    return texts


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model; empty without the file. Raises UsageError for a damaged one."""
    if not path.exists():
        return {}
    try:
        document = read_json(path)
    except UnreadableError as error:
        raise UsageError(f"{error}; get the file again") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds no JSON object; get the file again")
    return document


def _template_in(directory: Path) -> tuple[str, Path]:
    template: object
    for name in TEMPLATE_FILES:
        path = directory / name
        if path.suffix == ".jinja":
            template = _text_of(path) if path.is_file() else None
        else:
            template = _default_of(read_object(path).get("chat_template"))
        if isinstance(template, str):
            return template, path
    raise UsageError(
        f"the tokenizer in {directory} has no chat template (none of {', '.join(TEMPLATE_FILES)} holds one), and "
        "the workload asks in chats; name the directory or repository of an instruct model in workload.tokenizer, "
        "or choose a dataset of plain prompts"
    )


def _text_of(path: Path) -> str:
    try:
        return read_text(path, PROFILE_BYTES)
    except UnreadableError as error:
        raise UsageError(f"{error}; get the file again") from error


def _default_of(template: object) -> object:
    """The template for chats without tools: of several, the one named ``default``."""
    if isinstance(template, list):
        named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
        return named[-1].get("template") if named else None
    return template


def _special_tokens(directory: Path) -> dict[str, str]:
    """Texts of the special tokens that a template may write, by name."""
    stated: dict[str, Any] = {}
    for file in TOKEN_FILES:
        document = read_object(directory / file)
        stated |= {name: document[name] for name in _TOKEN_NAMES if document.get(name) is not None}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in stated.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


class _Generation(Extension):
    """The block ``{% generation %}``, which marks what an assistant wrote: its content as it is."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),  # noqa: DTZ005 - servers write the date of their own clock
    }
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
