"""Sections of a bench on planted experiments: each prints one table, whose rows may refute a demand."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from benchmarks.common.table import show
from benchmarks.verdict.shares import Row

Section: TypeAlias = tuple[Callable[[int], Iterable[Row]], str]
"""The rows of a number of experiments for each condition, and a title."""


def run_sections(description: str | None, sections: Mapping[str, Section], num_experiments: int) -> int:
    """Run the sections that the command line names, by default all; returns the exit code.

    ``num_experiments`` is the default for each condition.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=num_experiments, metavar="N", help="per condition")
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections), metavar="NAME")
    asked = parser.parse_args()
    print(f"{asked.experiments} experiments for each row; shares in % with their 95 % interval")
    failures = 0
    for name in asked.sections:
        section, title = sections[name]
        rows = list(section(asked.experiments))
        show([one.cells() for one in rows], f"{name}: {title}")
        sys.stdout.flush()
        failures += sum(len(one.failures) for one in rows)
    print(f"\n{failures} demands are refuted" if failures else "\nno demand is refuted")
    return 1 if failures else 0
