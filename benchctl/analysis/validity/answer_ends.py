"""Ends of answers: those for an unknown reason, and those that came early where the length was forced.

A server that ends an answer at its end of sequence although ``ignore_eos`` was sent does less work than was asked
for, and usage may say otherwise. Three observations show it, whatever the dialect:

* The finish reason says that the model ended the answer, and fewer chunks came than usage counts tokens.
* A chunk counts many more tokens than its text can hold, and came too soon after the one before for them to have
  been generated. Tokens without text (a repeated end of sequence) take their time, and so are no sign.
* Chunks are not counted, some answers have a chunk for each token, and others have too few chunks with too little
  text. Where one chunk carries several tokens (speculation, coalescing), its text is longer in proportion.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import sqrt
from operator import itemgetter
from statistics import fmean, median, pstdev
from typing import Final

from benchctl.analysis.metrics.request_timing import is_completed
from benchctl.analysis.validity.token_checks import abbreviate_names
from benchctl.records.finish_reasons import finish_of, unknown_reasons
from benchctl.records.record import ResultWarning
from benchctl.records.request import ChoiceRecord, RequestRecord
from benchctl.untrusted.text import visible_line

_SLACK_FRAC: Final = 0.2
_SLACK_TOKENS: Final = 8
"""Tokens that may lack a chunk or text of their own: parts of characters, text that a detokenizer holds back."""
_BYTES_PER_CHAR: Final = 3
"""A character takes at most as many tokens as bytes; those with four are rare."""
_LEAST_TIME_FRAC: Final = 0.25
"""Share of the time of that many tokens below which they were not generated in it."""
_LONG_GAP: Final = 3.0
"""Gaps above so many median gaps hold tokens that sent nothing."""
_LEAST_ANSWERS: Final = 3
_STANDARD_ERRORS: Final = 4.0
_LEAST_SPREAD: Final = 0.05
"""Relative standard deviation of bytes per token that is assumed at least."""


@dataclass(frozen=True, slots=True)
class _Uncounted:
    """An answer whose chunks are not counted."""

    bytes_per_token: float
    chunks_per_token: float


class AnswerEnds:
    """Collects the ends of answers, record by record.

    ``is_forced``: every answer was to have a certain length. ``may_stop``: the requests had stop strings or a form
    whose end ends the answer.
    """

    def __init__(self, *, is_forced: bool, may_stop: bool = False) -> None:
        self._is_forced, self._may_stop = is_forced, may_stop
        self._unknown: Counter[str] = Counter()
        self._num_forced = 0
        self._ended: list[str] = []
        self._lumped: list[str] = []
        self._whole: list[_Uncounted] = []
        self._short: list[_Uncounted] = []

    def add(self, record: RequestRecord) -> None:
        """Take a record; those of the warm-up and of failed requests say nothing."""
        if record.is_warmup or not is_completed(record):
            return
        self._unknown.update(unknown_reasons(record))
        num_chunks = sum(len(choice.chunk_ns) for choice in record.choices)
        if self._is_forced and record.completion_tokens and num_chunks and record.stamps != "whole":
            self._num_forced += 1
            self._add_forced(record, record.completion_tokens, num_chunks)

    def _add_forced(self, record: RequestRecord, num_tokens: int, num_chunks: int) -> None:
        finishes = {finish.ending for choice in record.choices if (finish := finish_of(choice.finish_reason))}
        if "natural" in finishes and num_chunks < num_tokens and not self._may_stop:
            self._ended.append(f"{record.request_id} ({num_chunks} chunks, {num_tokens} tokens)")
        elif all(choice.chunk_tokens is not None for choice in record.choices):
            if any(_has_lump(choice) for choice in record.choices):
                self._lumped.append(record.request_id)
        elif "tool-call" not in finishes and all(_is_text(choice) for choice in record.choices):
            self._add_uncounted(record, num_tokens, num_chunks)

    def _add_uncounted(self, record: RequestRecord, num_tokens: int, num_chunks: int) -> None:
        num_bytes = sum(len(choice.text.encode("utf-8", "surrogatepass")) for choice in record.choices)
        answer = _Uncounted(num_bytes / num_tokens, num_chunks / num_tokens)
        if num_tokens - num_chunks <= _slack(num_tokens):
            self._whole.append(answer)
        elif not _waited_for(record, num_tokens - num_chunks, num_tokens):
            self._short.append(answer)

    def warnings(self) -> tuple[ResultWarning, ...]:
        """Warnings that all answers together justify."""
        warnings = [ResultWarning(code="finish-reason-unknown", message=text) for text in self._unknown_texts()]
        if early := self._early_texts():
            message = f"ignore_eos was sent, and answers ended early all the same: {'; '.join(early)}"
            warnings.append(ResultWarning(code="output-ended-early", message=message))
        elif len(self._short) >= _LEAST_ANSWERS and len(self._whole) < _LEAST_ANSWERS:
            message = (
                f"{len(self._short)} of {self._num_forced} have {self._mean_share():.0%} as many chunks as usage "
                "counts tokens; nothing shows whether a chunk carries several"
            )
            warnings.append(ResultWarning(code="output-tokens-unseen", message=message))
        return tuple(warnings)

    def _unknown_texts(self) -> list[str]:
        if not self._unknown:
            return []
        words = [f"'{visible_line(word)}' ({count} answers)" for word, count in self._unknown.most_common()]
        return [f"answers ended with a finish_reason that is not known: {abbreviate_names(words)}"]

    def _early_texts(self) -> list[str]:
        texts, num_all = [], self._num_forced
        if self._ended:
            listed = abbreviate_names(self._ended)
            texts.append(
                f"{len(self._ended)} of {num_all} by their finish_reason, in fewer chunks than tokens: {listed}"
            )
        if self._lumped:
            listed = abbreviate_names(self._lumped)
            texts.append(
                f"{len(self._lumped)} of {num_all} count many tokens in a chunk without text or time: {listed}"
            )
        if self._lacks_text():
            whole, short = (fmean(each.bytes_per_token for each in of) for of in (self._whole, self._short))
            texts.append(
                f"{len(self._short)} of {num_all} have {self._mean_share():.0%} as many chunks as tokens in usage, "
                f"and {short:.1f} bytes of text per token where the others have {whole:.1f}"
            )
        return texts

    def _mean_share(self) -> float:
        return fmean(each.chunks_per_token for each in self._short)

    def _lacks_text(self) -> bool:
        """True when answers with few chunks have the text of their chunks alone.

        With the text of all their tokens they would have as many bytes per token as answers with a chunk for each,
        within four standard errors; the decision lies halfway.
        """
        if len(self._short) < _LEAST_ANSWERS or len(self._whole) < _LEAST_ANSWERS:
            return False
        per_token = [each.bytes_per_token for each in self._whole]
        expected, received = fmean(per_token), fmean(each.bytes_per_token for each in self._short)
        spread = max(pstdev(per_token), _LEAST_SPREAD * expected)
        is_far = expected - received > _STANDARD_ERRORS * spread / sqrt(len(self._short))
        return is_far and received < expected * (1 + self._mean_share()) / 2


def _slack(num_tokens: int) -> float:
    return max(_SLACK_TOKENS, _SLACK_FRAC * num_tokens)


def _is_text(choice: ChoiceRecord) -> bool:
    """True when every chunk has text: parts of tool calls have none that is recorded."""
    return choice.chunk_tokens is None and bool(choice.chunk_chars) and min(choice.chunk_chars or (0,)) > 0


def _has_lump(choice: ChoiceRecord) -> bool:
    """True when a write counts tokens that neither its text can hold nor its time could make."""
    counts, chars = choice.chunk_tokens or (), choice.chunk_chars or ()
    slack = _slack(sum(counts))
    if len(counts) != len(chars) or max(counts, default=0) <= slack:
        return False
    num_after_first = sum(counts) - counts[0]
    pace_ns = (choice.chunk_ns[-1] - choice.chunk_ns[0]) / num_after_first if num_after_first else 0.0
    chunks = zip(choice.chunk_ns, counts, chars, strict=True)
    writes = [(t_ns, list(of_write)) for t_ns, of_write in groupby(chunks, key=itemgetter(0))]
    for (before_ns, _), (t_ns, of_write) in pairwise(writes):
        num_hidden = sum(count - 1 - _BYTES_PER_CHAR * num_chars for _, count, num_chars in of_write)
        if num_hidden > slack and t_ns - before_ns < _LEAST_TIME_FRAC * num_hidden * pace_ns:
            return True
    return False


def _waited_for(record: RequestRecord, num_missing: int, num_tokens: int) -> bool:
    """True when pauses between chunks and after the last are long enough for tokens that sent nothing."""
    times_ns = sorted(t_ns for choice in record.choices for t_ns in choice.chunk_ns)
    end_ns = max(record.done_ns or 0, times_ns[-1])
    gaps_ns = [after - before for before, after in pairwise((*times_ns, end_ns))]
    typical_ns = median(gaps_ns)
    waited_ns = sum(gap_ns - typical_ns for gap_ns in gaps_ns if gap_ns > _LONG_GAP * typical_ns)
    total_ns = end_ns - times_ns[0]
    return waited_ns >= 2 * _LEAST_TIME_FRAC * total_ns * num_missing / num_tokens
