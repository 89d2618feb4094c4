"""The tokenizer that counts the prompts of an experiment as its servers will.

The first of these that is to be had: the one that ``workload.tokenizer`` names, that of the model on this machine,
a server's, an estimate. A server that someone else started is asked before files are looked for: it alone knows
which model it has. The simulator counts by a rule of its own, which is that of the estimate.

Arms may have different models; the request set is one for all of them, and the baseline's model counts it.
"""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchctl.engines.engine import engine_for
from benchctl.engines.hub import repository_of
from benchctl.measure.tokenizing.server_tokenizer import ServerTokenizer, question_headers
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.record import ESTIMATE
from benchctl.records.schema import ResultWarning
from benchctl.workload.prepare import PreparedSet, prepare_requests
from benchctl.workload.tokenizers.files import KEY, directory_named, directory_on_disk
from benchctl.workload.tokenizers.local import LocalTokenizer
from benchctl.workload.tokenizers.tokenizer import Estimate, Tokenizer

_OWN_RULE: Final = frozenset({"sim", "micro"})
"""Engines whose prompts need no tokenizer: for the simulator the estimate is exact, and passes have no prompts."""


def tokenizer_for(
    profile: Profile, on_start: Callable[[str], None] = lambda _text: None
) -> AbstractContextManager[Tokenizer]:
    """The tokenizer of the baseline's model. Inside the context it may hold a server; it can be entered again.

    ``on_start`` is told in words before a server is started, which happens when a prompt has to be counted. Raises
    UsageError for a ``workload.tokenizer`` that cannot be had.
    """
    settings, engine = _baseline(profile), engine_for(profile.engine.kind)
    counter, without_server = engine.prompt_counter(settings), planning_tokenizer(profile)
    if counter is None or profile.engine.kind in _OWN_RULE or profile.workload.tokenizer is not None:
        return nullcontext(without_server)
    if engine.is_launched and _directory(settings.model) is not None:
        return nullcontext(without_server)

    def open_server() -> AbstractContextManager[str]:
        if engine.is_launched:
            from benchctl.measure.tokenizing.launched import launched_server  # noqa: PLC0415 - few need it

            return launched_server(engine, settings, profile.timeouts, on_start)
        return nullcontext(engine.base_url(settings, 0))

    return ServerTokenizer(
        counter, open_server, question_headers(engine, settings), profile.timeouts, without_server
    )


def planning_tokenizer(profile: Profile) -> Tokenizer:
    """The same without any server: from files, else the estimate. Raises UsageError as ``tokenizer_for`` does."""
    if profile.engine.kind in _OWN_RULE:
        return Estimate()
    settings = _baseline(profile)
    if (named := profile.workload.tokenizer) is not None:
        return LocalTokenizer(directory_named(named), settings.request.chat_template_kwargs)
    directory = _directory(settings.model)
    if directory is None or importlib.util.find_spec("tokenizers") is None:
        return Estimate()
    return LocalTokenizer(directory, settings.request.chat_template_kwargs)


def prepare_counted(profile: Profile, tokenizer: Tokenizer, lengths_from: Path | None = None) -> PreparedSet:
    """The request set of a profile, counted by ``tokenizer``; with a warning where none is to be had.

    Raises as ``prepare_requests`` and the tokenizer do.
    """
    prepared = prepare_requests(profile, lengths_from=lengths_from, tokenizer=tokenizer)
    is_estimated = any(request.prompt_tokens_from == ESTIMATE for request in prepared.requests)
    if not is_estimated or profile.engine.kind in _OWN_RULE:
        return prepared
    message = f"lengths of prompts are estimated, and may be far off: {_why_estimated(profile, tokenizer)}"
    warning = ResultWarning(code="prompt-lengths-estimated", message=message, where=KEY)
    return replace(prepared, warnings=(*prepared.warnings, warning))


def _why_estimated(profile: Profile, tokenizer: Tokenizer) -> str:
    """The reason in words, with the remedy."""
    settings, engine = _baseline(profile), engine_for(profile.engine.kind)
    directory = _directory(settings.model)
    if directory is not None:
        return f"to read the tokenizer in {directory}, run: python -m pip install tokenizers"
    missing = f"no tokenizer of {settings.model} is on this machine"
    if isinstance(tokenizer, ServerTokenizer):
        return f"the server does not count them, and {missing}; name one in {KEY} (load: --tokenizer)"
    if engine.prompt_counter(settings) is not None:
        return f"{missing}, and a plan asks no server; the run will, or name one in {KEY}"
    return f"{missing}; name one in {KEY}"


def _baseline(profile: Profile) -> VariantSettings:
    """The settings of the first arm of the baseline."""
    variant, cell = next(arm for arm in arms(profile) if arm[0] == profile.baseline)
    return variant_settings(profile, variant, cell)


def _directory(model: str) -> Path | None:
    return directory_on_disk(model, repository_of(model))
