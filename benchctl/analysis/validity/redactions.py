"""A remark on the secrets that were replaced in what servers wrote."""

from collections import Counter

from benchctl.records.loaded import LoadedResults
from benchctl.records.record import ResultWarning


def redaction_warnings(results: LoadedResults) -> tuple[ResultWarning, ...]:
    """One note on all runs together; none where nothing was replaced."""
    counts = sum((Counter(run.record.redactions) for run in results.runs), Counter[str]())
    if not counts:
        return ()
    kinds = ", ".join(
        f"{label} {count} times" if count > 1 else f"{label} once" for label, count in counts.most_common()
    )
    message = f"{counts.total()} secrets were replaced in what the servers wrote: {kinds}"
    if counts.total() == 1:
        message = f"a secret was replaced in what the servers wrote: {kinds}"
    return (ResultWarning(code="secrets-redacted", message=message),)
