"""Answers: deterministic words and lengths in place of a language model.

Natural lengths follow a distribution that gives the published figures of GSM8K with Qwen2.5-7B for 50 questions
with 16 samples each: about 237,675 output tokens, and a longest answer that keeps the engine busy for 1,193 steps.
The published record has no single lengths, so the shape between these figures is an assumption. To keep totals and
makespan stable for any 50 questions, the samples of one request are stratified (each draws from its own n-quantile)
and the last percent of answers runs close to the bound.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from benchctl.guided.params import GuidanceParams
from benchctl.sim.requests import Request
from benchctl.workload.seeded import named_stream

_QUANTILES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 1.0)
_LENGTHS: Final = (80.0, 141.0, 188.0, 254.0, 345.0, 464.0, 690.0, 1165.0, 1195.0)
"""Length at each of the quantiles, linear between them: mean 297.3 tokens."""

_SCALES: Final = (-100.0, -10.0, -5.0, -2.0, 0.0)
_MEAN_LENGTHS: Final = (278.905, 343.32375, 351.300625, 351.300625, 353.2875)
"""Published mean lengths by scale of ``centered_exp``. The values at -5 (351.98) and -2 (350.62) are out of
order by less than their noise of 5.9 tokens; both are set to their mean, which makes the curve monotone."""
_WORDS: Final = """
the of and to a in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said what
its about than into them can only other time new some could these two may first then do any like my now over
such our man me even most made after also did many off before must well back through years much where your way
down should because long each just state those people too mr how little good world make very year still see
work life men day get here old between both under last never know same us house another while small great use
since part place again around however home found does away three every number went hand fact want right
against few less give costs total hours cents miles
""".split()  # noqa: SIM905 - readable as text
FIRST_TOKEN_ID: Final = 1000
CLOSING_TOKEN_ID: Final = 999
"""The one token that closes an answer with its result in a box."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole output of one sequence, planned at its start.

    Word i of the output is entry (``first`` + i ``stride``) mod W of the vocabulary; W is prime, so every stride
    goes through all words. ``box`` is the number that the last token states, or None.
    """

    num_tokens: int
    finish_reason: str
    first: int
    stride: int
    box: int | None = None

    def token_id(self, position: int) -> int:
        if self.box is not None and position == self.num_tokens - 1:
            return CLOSING_TOKEN_ID
        return FIRST_TOKEN_ID + (self.first + position * self.stride) % len(_WORDS)

    def token_text(self, position: int) -> str:
        """The text of one token."""
        if self.box is not None and position == self.num_tokens - 1:
            return f"\n\\boxed{{{self.box}}}"
        return " " + _WORDS[(self.first + position * self.stride) % len(_WORDS)]

    def text(self) -> str:
        return "".join(map(self.token_text, range(self.num_tokens)))


class PlannedAnswers:
    """The answers to one request: ``num_tokens`` of each choice now, the words when someone reads them."""

    __slots__ = ("_answer_length", "_answers", "_request", "num_tokens")

    def __init__(self, request: Request, answer_length: Callable[[int], int] | None = None) -> None:
        self._request = request
        self._answer_length = answer_length
        self._answers: list[Answer] | None = None
        limit = request.max_tokens
        self.num_tokens = [_cut_to(limit, natural) for natural in _natural_tokens(request, answer_length)]

    def answer(self, choice: int) -> Answer:
        if self._answers is None:
            self._answers = plan_answers(self._request, self._answer_length)
        return self._answers[choice]


def _cut_to(limit: int, natural: int | None) -> int:
    return limit if natural is None else min(natural, limit)


def plan_answers(request: Request, answer_length: Callable[[int], int] | None = None) -> list[Answer]:
    """Decide length, text and finish reason of each choice of a request.

    ``answer_length`` replaces the published distribution of lengths. The texts depend on seed, prompt, choice and,
    where guidance tilts the probabilities, on the guidance; greedy ones on prompt and choice alone. The greedy
    choices of one request have one text and different lengths: on a real engine they drift apart as batches round
    differently, and the published run with top_k 1 had as many steps as the sampled ones.
    """
    draw = _text_stream(request)
    answers: list[Answer] = []
    for natural in _natural_tokens(request, answer_length):
        ends_itself = natural is not None and natural <= request.max_tokens
        first, stride, box = draw.randrange(len(_WORDS)), draw.randrange(1, len(_WORDS)), draw.randrange(1000)
        if request.sampling.is_greedy and answers:
            first, stride = answers[0].first, answers[0].stride
        answers.append(
            Answer(
                num_tokens=_cut_to(request.max_tokens, natural),
                finish_reason="stop" if ends_itself else "length",
                first=first,
                stride=stride,
                box=box if ends_itself and request.prompt.asks_for_box else None,
            )
        )
    return answers


def _text_stream(request: Request) -> random.Random:
    if request.sampling.is_greedy:
        return named_stream(0, f"text:{request.prompt.digest}")
    guidance = request.guidance
    tilt = "" if guidance is None or guidance.is_neutral else f":{guidance.mode}={guidance.value_scale}"
    return named_stream(request.seed, f"text:{request.prompt.digest}{tilt}")


def _natural_tokens(request: Request, answer_length: Callable[[int], int] | None) -> list[int] | list[None]:
    """Length at which each choice ends by itself; None where it may not."""
    if request.ignore_eos:
        return [None] * request.n
    if answer_length is not None:
        return [answer_length(request.prompt.num_tokens)] * request.n
    is_greedy = request.sampling.is_greedy
    quantiles = natural_quantiles(
        seed=0 if is_greedy else request.seed, prompt_digest=request.prompt.digest, n=request.n
    )
    ratio = 1.0 if is_greedy else guided_length_ratio(request.guidance)
    return [max(1, round(natural_length(quantile) * ratio)) for quantile in quantiles]


def natural_quantiles(*, seed: int, prompt_digest: str, n: int) -> list[float]:
    """Quantiles of n choices in the distribution of lengths, each in [0, 1).

    Choice c is in stratum p(c) of n equal ones, p a permutation drawn for the prompt.
    """
    draw = named_stream(seed, f"length:{prompt_digest}")
    strata = list(range(n))
    draw.shuffle(strata)
    return [(stratum + draw.random()) / n for stratum in strata]


def natural_length(quantile: float) -> int:
    """Tokens of an answer at ``quantile``: the published-like table, linear between its points."""
    return round(_interpolated(quantile, _QUANTILES, _LENGTHS))


def guided_length_ratio(guidance: GuidanceParams | None) -> float:
    """Length under guidance over length without.

    Only ``centered_exp`` has published lengths: below 0 the ratio follows them, linear between the points and
    constant below -100; above 0 it is the inverse of the ratio at the mirrored scale, an assumption. All other
    modes and hard constraints leave the length as it is.
    """
    if guidance is None or guidance.has_target or guidance.mode != "centered_exp":
        return 1.0
    shorter = _interpolated(-abs(guidance.value_scale), _SCALES, _MEAN_LENGTHS) / _MEAN_LENGTHS[-1]
    return shorter if guidance.value_scale <= 0 else 1 / shorter


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The value at ``x`` of points that are joined by lines, to the last bit that of ``numpy.interp``."""
    if not xs[0] < x < xs[-1]:
        return ys[0] if x <= xs[0] else ys[-1]
    low = bisect_right(xs, x) - 1
    slope = (ys[low + 1] - ys[low]) / (xs[low + 1] - xs[low])
    return slope * (x - xs[low]) + ys[low]
