"""What to tell of suspect runs when an experiment has ended: why they are, what of them counts, how to go on."""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.analysis.analyzed import AnalyzedExperiment
    from benchctl.analysis.summary.runs import RunSummary


def suspects_lines(analysis: "AnalyzedExperiment") -> list[str]:
    """A sentence for the suspect runs of which the client's times do not count, and one for those that do not."""
    suspect = [run for run in analysis.runs if run.record.state == "suspect"]
    in_part = [run for run in suspect if run.usability.client_excluded is not None]
    others = [run for run in suspect if run.usability.client_excluded is None]
    lines = []
    if in_part:
        lines.append(
            f"{_runs(in_part)}: what the client timed of them does not count, what the server measured does "
            "(step_ms); see Notes. --allow-suspect of compare, report and show counts all of it"
        )
    if others:
        lines.append(f"{_runs(others)}: what they measured is not to be relied on; see Notes")
    return lines


def _runs(suspect: "Sequence[RunSummary]") -> str:
    from benchctl.analysis.validity.usability import decisive_warnings

    codes = Counter(code for run in suspect for code in {w.code for w in decisive_warnings(run.record)})
    why = ", ".join(f"{code} in {count}" for code, count in codes.most_common()) or "no reason recorded"
    number = "1 run is" if len(suspect) == 1 else f"{len(suspect)} runs are"
    return f"{number} suspect ({why})"
