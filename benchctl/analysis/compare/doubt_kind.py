"""When two doubts are one: the same thing said of several runs, whatever number each of them measured."""

import re
from typing import Final, TypeAlias

from benchctl.records.run import ResultWarning

DoubtKind: TypeAlias = tuple[str, str]
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")


def doubt_kind(warning: ResultWarning) -> DoubtKind:
    """Code, and message without numbers where it is about one run or file."""
    if warning.where is None:
        return warning.code, warning.message
    return warning.code, _NUMBER.sub("#", warning.message)
