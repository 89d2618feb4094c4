"""The answers of a side, judged: how often was each question answered correctly?

A question is one prompt of a dataset (``source`` of the prepared request). It is asked in every block, and there
once per sample: ``n`` choices of a request, or several requests of the same source. An answer that is missing,
because its request failed or was never recorded, is wrong, and counted as failed.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from benchctl.analysis.metrics.request_timing import is_completed, measured
from benchctl.analysis.quality.judge import Judge
from benchctl.analysis.statistics.paired_shares import pass_at
from benchctl.records.loaded import LoadedRun
from benchctl.records.request import PreparedRequest, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """One side. ``correct[q]`` counts correct answers to question q in each run, of ``samples[q]`` in each.

    ``num_truncated`` counts answers that were cut off at their token limit; they are judged by what they say.
    """

    correct: dict[str, tuple[int, ...]]
    samples: dict[str, int]
    num_answers: int
    num_failed: int
    num_truncated: int

    @property
    def num_samples(self) -> int:
        """Answers to each question within one run, by the question with the fewest."""
        return min(self.samples.values())

    def share(self, question: str) -> Fraction:
        """Of the answers to a question over all runs, those that are correct."""
        found = self.correct[question]
        return Fraction(sum(found), len(found) * self.samples[question])

    def pass_at(self, k: int) -> float:
        """pass@k: the mean over questions and runs.

        Within a run only: a later block repeats the seeds of the first one, so its answers are no new samples.
        """
        chances = [
            pass_at(k, num_correct, self.samples[question])
            for question, found in self.correct.items()
            for num_correct in found
        ]
        return sum(chances) / len(chances)


def grade(prepared: Iterable[PreparedRequest], runs: Sequence[LoadedRun], judge: Judge) -> Grades | None:
    """Judge all answers of ``runs`` to requests that have a gold answer; None without such, or without runs."""
    asked = [request for request in prepared if request.answer is not None]
    if not asked or not runs:
        return None
    samples: dict[str, int] = defaultdict(int)
    for request in asked:
        samples[request.source] += request.n
    correct = {question: [0] * len(runs) for question in samples}
    num_failed = num_truncated = 0
    for i, run in enumerate(runs):
        records = {record.request_id: record for record in measured(run.requests)}
        for request in asked:
            right, answered, truncated = _judged(request, records.get(request.request_id), judge)
            correct[request.source][i] += right
            num_failed += request.n - answered
            num_truncated += truncated
    return Grades(
        correct={question: tuple(found) for question, found in correct.items()},
        samples=dict(samples),
        num_answers=sum(samples.values()) * len(runs),
        num_failed=num_failed,
        num_truncated=num_truncated,
    )


def _judged(request: PreparedRequest, record: RequestRecord | None, judge: Judge) -> tuple[int, int, int]:
    """Of the answers to one request: how many are correct, are there at all, were cut off."""
    if record is None or not is_completed(record):
        return 0, 0, 0
    choices = record.choices[: request.n]
    right = sum(judge.is_correct(choice.text, request.answer or "") for choice in choices)
    return right, len(choices), sum(choice.finish_reason == "length" for choice in choices)
