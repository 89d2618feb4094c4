"""Grades of a side: the number of correct answers to each question.

A question is one prompt of a dataset (``source`` of the prepared request). It is asked in every block, and there
once per sample: ``n`` choices of a request, or several requests of the same source. A missing answer, because its
request failed or was never recorded, is wrong and counted as failed.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from benchctl.analysis.metrics.request_timing import is_completed, measured
from benchctl.analysis.quality.judge import Judge
from benchctl.analysis.statistics.paired_shares import pass_at
from benchctl.records.finish_reasons import is_cut, may_be_whole
from benchctl.records.loaded import LoadedRun
from benchctl.records.request import PreparedRequest, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """The graded answers of one side."""

    correct: dict[str, tuple[int, ...]]
    """Correct answers to each question, run by run."""
    samples: dict[str, int]
    """Answers to each question within one run."""
    num_answers: int
    num_failed: int
    num_truncated: int
    """Answers cut off at their token limit; they are judged by their text."""

    @property
    def num_samples(self) -> int:
        """Answers to each question within one run, by the question with the fewest."""
        return min(self.samples.values())

    def share(self, question: str) -> Fraction:
        """The share of correct answers to a question over all runs."""
        counts = self.correct[question]
        return Fraction(sum(counts), len(counts) * self.samples[question])

    def pass_at(self, k: int) -> float:
        """pass@k within a run, over questions and runs; a later block repeats seeds, so it has no new samples."""
        chances = [
            pass_at(k, num_correct, self.samples[question])
            for question, counts in self.correct.items()
            for num_correct in counts
        ]
        return sum(chances) / len(chances)


def grade(prepared: Iterable[PreparedRequest], runs: Sequence[LoadedRun], judge: Judge) -> Grades | None:
    """Judge all answers of ``runs``, those to requests with a gold answer where the judge needs one.

    None without such, or without runs.
    """
    questions = [request for request in prepared if request.answer is not None or not judge.needs_gold]
    if not questions or not runs:
        return None
    samples: dict[str, int] = defaultdict(int)
    for request in questions:
        samples[request.source] += request.n
    correct = {question: [0] * len(runs) for question in samples}
    num_failed = num_truncated = 0
    for i, run in enumerate(runs):
        records = {record.request_id: record for record in measured(run.requests)}
        for request in questions:
            num_correct, num_answered, num_cut = _grade_request(request, records.get(request.request_id), judge)
            correct[request.source][i] += num_correct
            num_failed += request.n - num_answered
            num_truncated += num_cut
    return Grades(
        correct={question: tuple(counts) for question, counts in correct.items()},
        samples=dict(samples),
        num_answers=sum(samples.values()) * len(runs),
        num_failed=num_failed,
        num_truncated=num_truncated,
    )


def _grade_request(request: PreparedRequest, record: RequestRecord | None, judge: Judge) -> tuple[int, int, int]:
    """Numbers of answers to one request that are correct, that arrived, and that were cut off."""
    if record is None or not is_completed(record):
        return 0, 0, 0
    choices = [choice for choice in record.choices[: request.n] if may_be_whole(choice.finish_reason)]
    num_correct = sum(judge.is_correct(choice.text, request.answer or "") for choice in choices)
    return num_correct, len(choices), sum(is_cut(choice.finish_reason) for choice in choices)
