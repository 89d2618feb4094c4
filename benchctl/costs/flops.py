"""FLOPs of a run under named conventions, and the differences between them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from benchctl.costs.hardware import Hardware
from benchctl.costs.shapes import ModelShape
from benchctl.errors import UsageError
from benchctl.units import GIGA


class Lengths(NamedTuple):
    """One generated sequence: tokens of its prompt and tokens of its output."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """Tokens that one model forwards.

    ``positions`` is the sum over these tokens of the positions each attends to, itself included; ``heads`` the
    number of positions at which the head is evaluated.
    """

    tokens: int = 0
    positions: int = 0
    heads: int = 0

    def __mul__(self, times: int) -> "TokenWork":
        return TokenWork(tokens=self.tokens * times, positions=self.positions * times, heads=self.heads * times)

    def resized(self, tokens: int, *, heads: int) -> "TokenWork":
        """Another number of tokens, which on average attend to as many positions as these."""
        positions = (2 * self.positions * tokens + self.tokens) // (2 * self.tokens) if self.tokens else 0
        return TokenWork(tokens=tokens, positions=positions, heads=heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWork:
    """Work of the base model, the value model and the draft model in one run; that of an absent model is empty."""

    base_prefill: TokenWork
    base_decode: TokenWork
    value_prefill: TokenWork = TokenWork()
    value_extend: TokenWork = TokenWork()
    value_candidates: TokenWork = TokenWork()
    draft_prefill: TokenWork = TokenWork()
    draft_decode: TokenWork = TokenWork()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """Totals of a run whose sequences are unknown; each is at least 1.

    ``prompt_tokens`` counts each question once; ``num_sequences`` is questions times samples.
    """

    num_questions: int
    num_sequences: int
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (value := getattr(self, name)) < 1:
                raise UsageError(f"{name} is {value}; FLOPs need at least 1")

    def evenly(self) -> "RunLengths":
        """Lengths of these totals that are as equal as whole tokens allow."""
        prompts = spread_evenly(self.prompt_tokens, self.num_questions)
        samples = spread_evenly(self.num_sequences, self.num_questions)
        prompt_of = [prompt for prompt, num in zip(prompts, samples, strict=True) for _ in range(num)]
        outputs = spread_evenly(self.output_tokens, self.num_sequences)
        return RunLengths(
            question_prompts=tuple(prompts),
            sequences=tuple(Lengths(*pair) for pair in zip(prompt_of, outputs, strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLengths:
    """Lengths of a run whose sequences are known.

    ``question_prompts`` holds the prompt of each question once, ``sequences`` every generated sequence: a
    question sampled n times is one of the former and n of the latter.
    """

    question_prompts: tuple[int, ...]
    sequences: tuple[Lengths, ...]

    def totals(self) -> RunTotals:
        return RunTotals(
            num_questions=len(self.question_prompts),
            num_sequences=len(self.sequences),
            prompt_tokens=sum(self.question_prompts),
            output_tokens=sum(output for _, output in self.sequences),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogCounts:
    """Tokens forwarded by a step log: sums of the fields of ``StepRecord``."""

    base_prefill_tokens: int
    value_prefill_tokens: int = 0
    value_extend_tokens: int = 0
    candidates: int = 0
    verification_tokens: int | None = None
    """Tokens that the base model forwarded for decoding sequences, with all drafts that it verified; None for a
    server that did not speculate."""
    draft_prefill_tokens: int = 0
    """Prompt tokens that the draft model prefilled."""
    draft_tokens: int = 0
    """Tokens that the draft model proposed."""
    backfill_tokens: int = 0
    """Tokens that it forwarded besides, because a bonus token came after them and its cache lacked them."""


def prefill_work(prompt_tokens: int) -> TokenWork:
    """A prompt of P tokens from nothing: P tokens, P (P + 1) / 2 positions, a head at every token."""
    return TokenWork(tokens=prompt_tokens, positions=prompt_tokens * (prompt_tokens + 1) // 2, heads=prompt_tokens)


def decode_work(prompt_tokens: int, num_tokens: int) -> TokenWork:
    """N tokens one by one after a prompt of P: N tokens, N P + N (N + 1) / 2 positions, a head at each."""
    positions = num_tokens * prompt_tokens + num_tokens * (num_tokens + 1) // 2
    return TokenWork(tokens=num_tokens, positions=positions, heads=num_tokens)


def prompt_work(prompts: Iterable[int]) -> TokenWork:
    """Each of these prompts prefilled from nothing; prompts of one length are counted together."""
    return total_work(prefill_work(prompt) * times for prompt, times in Counter(prompts).items())


def total_work(parts: Iterable[TokenWork]) -> TokenWork:
    tokens = positions = heads = 0
    for part in parts:
        tokens, positions, heads = tokens + part.tokens, positions + part.positions, heads + part.heads
    return TokenWork(tokens=tokens, positions=positions, heads=heads)


def output_work(sequences: Sequence[Lengths], *, without_first: bool = False) -> TokenWork:
    """Each output token of each sequence forwarded once; without the first of each, which prefill yields."""
    return total_work(
        decode_work(prompt, max(output - without_first, 0)) * times
        for (prompt, output), times in Counter(sequences).items()
    )


def observed_work(sequences: Sequence[Lengths], counts: StepLogCounts) -> RunWork:
    """Work of a serving engine, from each sequence's own lengths and the counts of its step log.

    The conventions, each with the one that is rejected:

    * lengths of each sequence, not rounded means: attention is convex in length;
    * logits where a token is sampled (once for each output token), not for every prompt token;
    * the first output token comes from prefill, so a sequence decodes O - 1 tokens, not O;
    * base prefill as logged: prompts shared by prefix caching are not forwarded again, recomputed ones are;
    * value-model prefill as logged: it shares no prefixes among samples, so one for each prompt is too little;
    * value-model extends and candidates as logged, not one and k for each output token: filters leave fewer than
      k, a row with one candidate is not scored, a greedy step scores nothing;
    * the value head at each candidate only: the values of prompt and prefix are not used;
    * of a server that speculates, the tokens that the base model verified, with logits at each, not one for each
      output token: a rejected draft is computed like an accepted one;
    * one token of the draft model for each token that it proposes, with logits (of K passes the first takes the
      newest token, the others the draft before), and those of its backfill, without.

    Logged tokens are assumed to attend to as many positions on average as all prompt (output) tokens; a log has no
    finer count, and attention is about one percent of the whole.
    """
    prompts = prompt_work(prompt for prompt, _ in sequences)
    outputs = output_work(sequences)
    num_first_tokens = sum(1 for _, output in sequences if output > 0)
    decoded, verified = output_work(sequences, without_first=True), counts.verification_tokens
    return RunWork(
        base_prefill=prompts.resized(counts.base_prefill_tokens, heads=num_first_tokens),
        base_decode=decoded if verified is None else decoded.resized(verified, heads=verified),
        value_prefill=prompts.resized(counts.value_prefill_tokens, heads=0),
        value_extend=outputs.resized(counts.value_extend_tokens, heads=0),
        value_candidates=outputs.resized(counts.candidates, heads=counts.candidates),
        draft_prefill=prompts.resized(counts.draft_prefill_tokens, heads=0),
        draft_decode=decoded.resized(counts.draft_tokens + counts.backfill_tokens, heads=counts.draft_tokens),
    )


def spread_evenly(total: int, parts: int) -> list[int]:
    """``total`` as ``parts`` whole numbers that differ by at most one, larger ones first."""
    each, rest = divmod(total, parts)
    return [each + 1] * rest + [each] * (parts - rest)


Convention: TypeAlias = Literal["published", "two-n", "lm-head-value-model"]

_NOMINAL_PARAMS: Final = {
    "qwen2.5-0.5b": 490_000_000,
    "qwen2.5-1.5b": 1_540_000_000,
    "qwen2.5-3b": 3_090_000_000,
    "qwen2.5-7b": 7_610_000_000,
    "qwen2.5-14b": 14_800_000_000,
    "qwen2.5-32b": 32_500_000_000,
    "qwen2.5-72b": 72_700_000_000,
}
"""Parameters as model cards round them, the basis of the ``two-n`` figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFlops:
    """FLOPs by operator: projections, attention over positions, head."""

    linear: int = 0
    attention: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return self.linear + self.attention + self.head

    def __add__(self, other: "OperatorFlops") -> "OperatorFlops":
        return OperatorFlops(
            linear=self.linear + other.linear,
            attention=self.attention + other.attention,
            head=self.head + other.head,
        )

    def scaled(self, factor: float) -> "OperatorFlops":
        """Each operator times ``factor``, cut to a whole number as the published analysis does."""
        return OperatorFlops(
            linear=int(self.linear * factor), attention=int(self.attention * factor), head=int(self.head * factor)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsAccount:
    """FLOPs of one run by model and phase; each phase by operator.

    Invariants: ``base.total`` is prefill plus decode, ``value.total`` is prefill plus extend plus candidates,
    ``draft.total`` is prefill plus decode, ``total`` is base plus value plus draft. ``base_decode`` has the
    verification of drafts. ``value_extend`` keeps the value model's prefix up to date with the output,
    ``value_candidates`` scores the candidates.
    """

    base_prefill: OperatorFlops
    base_decode: OperatorFlops
    value_prefill: OperatorFlops
    value_extend: OperatorFlops
    value_candidates: OperatorFlops
    output_tokens: int
    draft_prefill: OperatorFlops = OperatorFlops()
    draft_decode: OperatorFlops = OperatorFlops()

    @property
    def base(self) -> OperatorFlops:
        return self.base_prefill + self.base_decode

    @property
    def value(self) -> OperatorFlops:
        return self.value_prefill + self.value_extend + self.value_candidates

    @property
    def draft(self) -> OperatorFlops:
        return self.draft_prefill + self.draft_decode

    @property
    def total(self) -> int:
        return self.base.total + self.value.total + self.draft.total

    @property
    def ratio(self) -> float | None:
        """Total over base: the factor by which the models beside the base multiply the computation, at these
        lengths.
        """
        return self.total / self.base.total if self.base.total else None

    @property
    def flops_per_output_token(self) -> float | None:
        """Decode, extend, candidates and drafts over output tokens; prefill is left out, tokens are not rounded."""
        if not self.output_tokens:
            return None
        per_token_work = self.base_decode + self.value_extend + self.value_candidates + self.draft_decode
        return per_token_work.total / self.output_tokens

    @property
    def gflops_per_output_token(self) -> float | None:
        flops = self.flops_per_output_token
        return None if flops is None else flops / GIGA


def price_work(
    work: RunWork,
    base: ModelShape,
    value_model: ModelShape | None,
    output_tokens: int,
    *,
    draft_model: ModelShape | None = None,
) -> FlopsAccount:
    """FLOPs of counted work: linear · tokens + attention · positions + head · heads, for each phase."""
    return FlopsAccount(
        base_prefill=_price(work.base_prefill, base),
        base_decode=_price(work.base_decode, base, is_decode=True),
        value_prefill=_price(work.value_prefill, value_model),
        value_extend=_price(work.value_extend, value_model, is_decode=True),
        value_candidates=_price(work.value_candidates, value_model, is_decode=True),
        output_tokens=output_tokens,
        draft_prefill=_price(work.draft_prefill, draft_model),
        draft_decode=_price(work.draft_decode, draft_model, is_decode=True),
    )


def _price(work: TokenWork, shape: ModelShape | None, *, is_decode: bool = False) -> OperatorFlops:
    """A latent attention computes a position of a decoding token in another way than one of a prompt."""
    if shape is None:
        return OperatorFlops()
    per_position = (
        shape.decode_attention_flops_per_position() if is_decode else shape.attention_flops_per_position()
    )
    return OperatorFlops(
        linear=shape.linear_flops_per_token() * work.tokens,
        attention=per_position * work.positions,
        head=shape.head_flops() * work.heads,
    )


def published_flops(
    totals: RunTotals,
    *,
    base: ModelShape,
    value_model: ModelShape | None = None,
    top_k: int = 0,
    candidate_cost: float = 1.0,
    convention: Convention = "published",
) -> FlopsAccount:
    """FLOPs by a published rule.

    With Q questions, N sequences, P = round(prompt tokens / Q) and O = round(output tokens / N), ties to even:

        base       = Q prefill(P) + N decode(P, O)
        extra      = Q prefill_v(P) + N decode_v(P, O) + int(N k m decode_v(P, O)) for each operator
        prefill(P) = linear P + attention P (P + 1) / 2 + head P
        decode     = linear O + attention (O P + O (O + 1) / 2) + head O

    m is ``candidate_cost``. The extra is charged whenever k >= 1, also at k = 1, where decoding is greedy and no
    value model runs; ``observed_flops`` charges what ran.

    Source: LenVM, pull request 2, as of commit b1b4ba0; earlier forms are dc93a52 (``two-n``) and 497f75b
    (``lm-head-value-model``). Raises UsageError for a ``candidate_cost`` that is negative or not finite.
    """
    if not (math.isfinite(candidate_cost) and candidate_cost >= 0):
        raise UsageError(f"candidate_cost is {candidate_cost}; it must be a finite number from 0")
    if top_k < 1:
        value_model = None
    if convention == "two-n":
        return _two_n_flops(totals, base, value_model, top_k * candidate_cost)
    if value_model is not None:
        head: Literal["lm_head", "value_head"] = "value_head" if convention == "published" else "lm_head"
        value_model = replace(value_model, head=head)
    account = price_work(published_work(totals, top_k), base, value_model, totals.output_tokens)
    return replace(account, value_candidates=account.value_candidates.scaled(candidate_cost))


def published_work(totals: RunTotals, top_k: int) -> RunWork:
    """Counts of the published rule; see ``published_flops``. Without a top_k the value model does nothing."""
    prompt = round(totals.prompt_tokens / totals.num_questions)
    output = round(totals.output_tokens / totals.num_sequences)
    prefill = prefill_work(prompt) * totals.num_questions
    decode = decode_work(prompt, output) * totals.num_sequences
    return RunWork(
        base_prefill=prefill,
        base_decode=decode,
        value_prefill=prefill if top_k >= 1 else TokenWork(),
        value_extend=decode if top_k >= 1 else TokenWork(),
        value_candidates=decode * max(top_k, 0),
    )


def _two_n_flops(
    totals: RunTotals, base: ModelShape, value_model: ModelShape | None, candidates_per_token: float
) -> FlopsAccount:
    """2 N (prompt + output) for the base, 2 N_v (1 + k) output for the value model; no rounding of lengths.

    The published 15.22 GFLOP per output token leave prompts out, and the published ratio of 2.17 has them in; it is
    2.188 at equal lengths, so that the guided run had 0.9 % fewer output tokens.
    """
    base_flops = 2 * _nominal_params(base)
    value_flops = 2 * _nominal_params(value_model) if value_model is not None else 0
    extend = OperatorFlops(linear=value_flops * totals.output_tokens)
    return FlopsAccount(
        base_prefill=OperatorFlops(linear=base_flops * totals.prompt_tokens),
        base_decode=OperatorFlops(linear=base_flops * totals.output_tokens),
        value_prefill=OperatorFlops(),
        value_extend=extend,
        value_candidates=extend.scaled(candidates_per_token),
        output_tokens=totals.output_tokens,
    )


def _nominal_params(shape: ModelShape) -> int:
    return _NOMINAL_PARAMS.get(shape.name, shape.num_params())


def observed_flops(
    sequences: Sequence[Lengths],
    counts: StepLogCounts,
    *,
    base: ModelShape,
    value_model: ModelShape | None = None,
    draft_model: ModelShape | None = None,
) -> FlopsAccount:
    """FLOPs of the forwarded tokens; ``observed_work`` states the conventions and those that it rejects.

    The value model is charged its value head whatever its shape says, because scoring uses no other. Drafts without
    a ``draft_model`` cost what their verification does.
    """
    return price_work(
        observed_work(sequences, counts),
        base,
        value_model.as_value_model() if value_model is not None else None,
        sum(output for _, output in sequences),
        draft_model=draft_model,
    )


def achieved_flops_per_s(flops: int, wall_s: float | None) -> float | None:
    """FLOPs over the time they took; None without a positive time."""
    return flops / wall_s if wall_s is not None and wall_s > 0 else None


def utilization_frac(flops: int, wall_s: float | None, hardware: Hardware | None) -> float | None:
    """Achieved FLOP/s over the device's peak of dense bfloat16; None when time or device are unknown.

    The peak is that of bfloat16 for quantised weights too, so that utilisations of one device compare.
    """
    achieved = achieved_flops_per_s(flops, wall_s)
    return achieved / hardware.peak_flops_per_s if achieved is not None and hardware is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One step from published to observed FLOPs; ``flops`` is negative if less was computed."""

    code: str
    meaning: str
    flops: int


class _Stage(NamedTuple):
    code: str
    meaning: str
    work: RunWork


def explain_difference(
    published: FlopsAccount,
    *,
    lengths: RunLengths,
    counts: StepLogCounts,
    base: ModelShape,
    value_model: ModelShape | None,
    top_k: int,
    draft_model: ModelShape | None = None,
) -> tuple[Correction, ...]:
    """Corrections that lead from ``published`` to ``observed_flops`` of the same run.

    Invariant: ``published.total`` plus all ``flops`` is the observed total. Corrections of a model are left out
    without that model, ``verification`` without speculation, and ``convention`` if ``published`` follows the
    published rule.
    """
    value = value_model.as_value_model() if value_model is not None else None
    output_tokens = lengths.totals().output_tokens
    corrections: list[Correction] = []
    reached = published.total
    for stage in _stages(lengths, counts, top_k):
        total = price_work(stage.work, base, value, output_tokens, draft_model=draft_model).total
        corrections.append(Correction(code=stage.code, meaning=stage.meaning, flops=total - reached))
        reached = total
    # A correction of 0 FLOPs is information, unless it could never apply.
    inapplicable = {"value-prefill", "value-extend", "candidates"} if value is None else set()
    inapplicable |= {"verification"} if counts.verification_tokens is None else set()
    inapplicable |= {"drafts"} if draft_model is None else set()
    inapplicable |= {"convention"} if corrections[0].flops == 0 else set()
    return tuple(correction for correction in corrections if correction.code not in inapplicable)


def _stages(lengths: RunLengths, counts: StepLogCounts, top_k: int) -> Iterator[_Stage]:
    observed = observed_work(lengths.sequences, counts)
    yield _Stage(
        "convention",
        "the published rule with a value head and candidates at full cost",
        published_work(lengths.totals(), top_k),
    )

    prompts = prompt_work(lengths.question_prompts)
    outputs = output_work(lengths.sequences)
    nothing = TokenWork()
    work = RunWork(
        base_prefill=prompts,
        base_decode=outputs,
        value_prefill=prompts if top_k >= 1 else nothing,
        value_extend=outputs if top_k >= 1 else nothing,
        value_candidates=outputs * max(top_k, 0),
    )
    yield _Stage("lengths", "each sequence's own length instead of rounded means", work)

    work = replace(
        work,
        base_prefill=replace(work.base_prefill, heads=observed.base_prefill.heads),
        value_prefill=replace(work.value_prefill, heads=0),
        value_extend=replace(work.value_extend, heads=0),
    )
    yield _Stage("head", "heads only where a token is sampled or a candidate scored", work)

    work = replace(work, base_decode=output_work(lengths.sequences, without_first=True))
    yield _Stage("first-token", "the first output token comes from prefill", work)

    work = replace(work, base_decode=observed.base_decode)
    yield _Stage("verification", "every draft token that the base model verified, also the rejected ones", work)

    work = replace(work, base_prefill=observed.base_prefill)
    yield _Stage("base-prefill", "prompt tokens that the base model prefilled, not one prompt per question", work)

    work = replace(work, value_prefill=observed.value_prefill)
    yield _Stage("value-prefill", "prompt tokens that the value model prefilled, sample by sample", work)

    work = replace(work, value_extend=observed.value_extend)
    yield _Stage("value-extend", "tokens by which the value model extended its prefixes, not every one", work)

    work = replace(work, value_candidates=observed.value_candidates)
    yield _Stage("candidates", "candidates scored, not top_k for each output token", work)

    meaning = "the draft model's passes: prompts, proposed tokens, and the backfill of bonus tokens"
    yield _Stage("drafts", meaning, observed)
