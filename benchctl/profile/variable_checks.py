"""Rules of ``env``: the variables by which benchctl tells a server what to do are spelled as options."""

from collections.abc import Iterator

from benchctl.profile.engine_table import OWN_PREFIX, options_class, own_variables
from benchctl.profile.sources.located import LocatedDict, LocatedError


def own_variable_errors(tree: LocatedDict, kind: str) -> Iterator[LocatedError]:
    """Variables of benchctl itself in the ``env`` of one run's server, which would be overwritten or do harm."""
    env = tree.mapping("server", "env")
    for name in env:
        if str(name).startswith(OWN_PREFIX):
            yield env.error(f"benchctl sets this variable itself{_instead(name, kind)}", name)


def _instead(name: str, kind: str) -> str:
    """The option of this kind of engine that a variable stands for, as a remedy."""
    options = [option for option in own_variables().get(name, ()) if option in options_class(kind).model_fields]
    if len(options) > 1 and options[0] in options_class(kind).VALUE_MODEL_OPTIONS:
        del options[0]  # it only says whether the variable is set at all
    if not options:
        return "; remove it"
    return f", from {', '.join(f'engine.options.{option}' for option in options)}; set that and remove the variable"
