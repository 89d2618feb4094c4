"""The verdicts at the end of ``benchctl run``, as lines and as JSON, and the commands that follow."""

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchctl.analysis.analyzed import AnalyzedExperiment
    from benchctl.measure.experiment import Outcome
    from benchctl.report.page.verdict import ComparisonVerdict, PageVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """The page to open and the commands to type next, with every path quoted for a shell."""

    page: str
    compare: str | None
    """None where there is nothing to compare."""
    more_blocks: str | None
    """None where nothing is inconclusive, or where more blocks do not help or cannot be added."""
    reason: str = ""
    """Sentence that comes before ``more_blocks``."""

    @classmethod
    def of(cls, analysis: "AnalyzedExperiment", verdict: "PageVerdict") -> Self:
        from benchctl.analysis.compare.more_blocks import blocks_to_settle
        from benchctl.analysis.statistics.screening import MIN_PAIRED_BLOCKS
        from benchctl.report.export import PAGE_NAME

        path, planned = analysis.results.path, analysis.results.manifest.blocks
        likely = blocks_to_settle(verdict.comparisons) if _can_grow(analysis) else None
        is_screening = all(comparison.is_screening for comparison in verdict.comparisons)
        num_blocks = MIN_PAIRED_BLOCKS if is_screening and likely is not None else likely
        more = ["benchctl", "run", "--resume", str(path), "--blocks", str(num_blocks)]
        return cls(
            page=shlex.quote(str(path / PAGE_NAME)),
            compare=shlex.join(["benchctl", "compare", str(path)]) if _has_verdicts(analysis, verdict) else None,
            more_blocks=shlex.join(more) if num_blocks is not None and num_blocks > planned else None,
            reason=_why_more(likely, is_screening=is_screening),
        )


def _why_more(likely: int | None, *, is_screening: bool) -> str:
    """The reason for more blocks; ``likely`` is the number that would settle every arm."""
    from benchctl.analysis.statistics.screening import MIN_PAIRED_BLOCKS

    if not is_screening:
        return f"inconclusive; about {likely} blocks would settle it if scatter and changes stay as they are"
    least = f"screening; a verdict takes at least {MIN_PAIRED_BLOCKS} blocks"
    if likely is None or likely <= MIN_PAIRED_BLOCKS:
        return least
    return f"{least}, and about {likely} if scatter and changes stay as they are"


def print_verdicts(analysis: "AnalyzedExperiment", verdict: "PageVerdict") -> None:
    """Print one line for each arm against the baseline, then the page and the commands to go on with."""
    from rich.text import Text

    from benchctl.analysis.compare.text import looks_lines
    from benchctl.cli.output.screen import verdict_text, wide_console
    from benchctl.untrusted.text import visible_line

    if _has_verdicts(analysis, verdict):
        console = wide_console()
        lines = [line for one in verdict.all for line in _verdict_lines(one)]
        width = max(len(visible_line(name)) for name, _ in lines)
        print(f"\nVerdicts against {analysis.results.manifest.baseline}")
        for name, sentence in lines:
            console.print(Text(f"{visible_line(name):<{width}}  ").append_text(verdict_text(sentence)))
        for line in dict.fromkeys(line for each in verdict.comparisons for line in looks_lines(each)):
            print(line)
    follow_up = FollowUp.of(analysis, verdict)
    print(f"page: {follow_up.page}")
    if follow_up.compare is not None:
        print(f"compare: {follow_up.compare}")
    if follow_up.more_blocks is not None:
        print(f"{follow_up.reason}: {follow_up.more_blocks}")


def outcome_document(
    analysis: "AnalyzedExperiment", outcome: "Outcome", verdict: "PageVerdict", exit_code: int
) -> dict[str, Any]:
    """The output of ``benchctl run --json``; ``verdict`` and the sentences are those of ``compare``."""
    import msgspec

    follow_up = FollowUp.of(analysis, verdict)
    warnings = [*analysis.warnings, *(warning for run in analysis.runs for warning in run.warnings)]
    return {
        "directory": str(analysis.results.path),
        "page": str(analysis.results.path / "report.html"),
        "exit_code": exit_code,
        "state": analysis.results.manifest.state,
        "runs": {
            "done": outcome.num_done,
            "suspect": outcome.num_suspect,
            "failed": outcome.num_failed,
            "done_before": outcome.num_skipped,
        },
        "baseline": analysis.results.manifest.baseline,
        "verdict": verdict.word,
        "verdict_exit_code": verdict.exit_code,
        "summary": verdict.sentence,
        "verdicts": [document for one in verdict.all for document in _verdict_documents(one)],
        "commands": {"compare": follow_up.compare, "more_blocks": follow_up.more_blocks},
        "warnings": msgspec.to_builtins(warnings),
        "damage": list(analysis.damage),
    }


def _has_verdicts(analysis: "AnalyzedExperiment", verdict: "PageVerdict") -> bool:
    """True where another arm than the baseline was planned and some run counts."""
    return bool(verdict.all) and any(run.is_usable for run in analysis.runs)


def _can_grow(analysis: "AnalyzedExperiment") -> bool:
    """True where blocks can be added; an A/A experiment measures noise and has nothing to settle."""
    from benchctl.analysis.planning.noise_floor import is_repeated_baseline
    from benchctl.measure.resume.extension import why_not_extended

    if analysis.profile is not None and is_repeated_baseline(analysis.profile):
        return False
    return why_not_extended(analysis.results.manifest) is None


def _verdict_lines(one: "ComparisonVerdict") -> "Iterator[tuple[str, str]]":
    from benchctl.analysis.compare.text import cell_sentence
    from benchctl.analysis.quality.text import accuracy_sentence

    control = " (control)" if one.is_control else ""
    if one.comparison is None:
        yield f"{one.b_name}{control}", f"{one.word}: {one.sentence}"
        return
    for cell in one.comparison.cells:
        yield f"{cell.b_label}{control}", cell_sentence(cell)
        if cell.quality is not None:
            yield "", accuracy_sentence(cell.quality)


def _verdict_documents(one: "ComparisonVerdict") -> "Iterator[dict[str, Any]]":
    from benchctl.analysis.compare.text import cell_sentence
    from benchctl.report.documents.comparison import quality_document

    if one.comparison is None:
        yield {"arm": one.b_name, "verdict": one.word, "is_control": one.is_control, "sentence": one.sentence}
        return
    for cell in one.comparison.cells:
        yield {
            "arm": cell.b_label,
            "verdict": cell.verdict,
            "is_control": one.is_control,
            "sentence": cell_sentence(cell),
            "changes": [
                {
                    "metric": metric.metric.name,
                    "verdict": metric.verdict,
                    "ratio": None if metric.estimate is None else metric.estimate.ratio,
                    "ci_low": None if metric.estimate is None else metric.estimate.ci_low,
                    "ci_high": None if metric.estimate is None else metric.estimate.ci_high,
                    "margin_frac": metric.margins.change_frac,
                    "reason": metric.reason,
                }
                for metric in cell.deciding
            ],
            "quality": quality_document(cell),
        }
