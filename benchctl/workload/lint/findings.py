"""A finding of the lint: location, value, remedy and severity."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from benchctl.interop.readers.inference_perf import ConfigFile, KeyPath

Severity: TypeAlias = Literal["error", "warning"]
"""``error``: the load does not measure what the file says. ``warning``: it does, with a restriction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """One finding; ``problem`` states the value and its effect."""

    code: str
    severity: Severity
    path: str
    line: int
    key: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        location = f"{self.path}:{self.line}: {self.key}: " if self.key else f"{self.path}:{self.line}: "
        return f"{location}{self.severity}: {self.problem}; {self.remedy} [{self.code}]"


LintFindings: TypeAlias = Iterator[LintFinding]


def finding(
    file: ConfigFile, key: KeyPath, code: str, severity: Severity, *, problem: str, remedy: str
) -> LintFinding:
    """A finding at a key of ``file``."""
    dotted = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in key).removeprefix(".")
    return LintFinding(
        code=code,
        severity=severity,
        path=file.path,
        line=file.line(key),
        key=dotted,
        problem=problem,
        remedy=remedy,
    )
