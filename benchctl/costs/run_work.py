"""The work of a run as counts: tokens forwarded, positions attended to, heads evaluated; by model and phase."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from benchctl.errors import UsageError

RunWork: TypeAlias = Mapping[str, "TokenWork"]
"""Work of a run by phase, as ``FlopsAccount`` has them; that of an absent model is left out."""


class Lengths(NamedTuple):
    """One generated sequence: tokens of its prompt and tokens of its output."""

    prompt_tokens: int
    output_tokens: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """Tokens that one model forwards.

    ``positions`` is the sum over these tokens of the positions each attends to, itself included; ``heads`` the
    number of positions at which the head is evaluated.
    """

    tokens: int = 0
    positions: int = 0
    heads: int = 0

    @classmethod
    def after(cls, context: int, num_tokens: int) -> "TokenWork":
        """N tokens after a context of P: N tokens, N P + N (N + 1) / 2 positions, a head at each."""
        positions = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return cls(tokens=num_tokens, positions=positions, heads=num_tokens)

    def __add__(self, other: "TokenWork") -> "TokenWork":
        return TokenWork(
            tokens=self.tokens + other.tokens,
            positions=self.positions + other.positions,
            heads=self.heads + other.heads,
        )

    def __mul__(self, times: int) -> "TokenWork":
        return TokenWork(tokens=self.tokens * times, positions=self.positions * times, heads=self.heads * times)

    def resized(self, tokens: int, *, heads: int) -> "TokenWork":
        """Another number of tokens, which on average attend to as many positions as these."""
        positions = (2 * self.positions * tokens + self.tokens) // (2 * self.tokens) if self.tokens else 0
        return TokenWork(tokens=tokens, positions=positions, heads=heads)


def published_work(totals: RunTotals, top_k: int) -> RunWork:
    """Counts of the published rule; see ``flops.published_flops``."""
    prompt = round(totals.prompt_tokens / totals.num_questions)
    output = round(totals.output_tokens / totals.num_sequences)
    prefill = TokenWork.after(0, prompt) * totals.num_questions
    return guided_work(prefill, TokenWork.after(prompt, output) * totals.num_sequences, top_k)


def guided_work(prompts: TokenWork, outputs: TokenWork, top_k: int) -> dict[str, TokenWork]:
    """Work of both models on the same prompts and outputs; without a top_k the value model does nothing."""
    is_guided = int(top_k >= 1)
    return {
        "base_prefill": prompts,
        "base_decode": outputs,
        "value_prefill": prompts * is_guided,
        "value_extend": outputs * is_guided,
        "value_candidates": outputs * max(top_k, 0),
    }


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
    prompts, outputs = prompt_work(prompt for prompt, _ in sequences), output_work(sequences)
    num_first_tokens = sum(1 for _, output in sequences if output > 0)
    decoded, verified = output_work(sequences, num_skipped=1), counts.verification_tokens
    return {
        "base_prefill": prompts.resized(counts.base_prefill_tokens, heads=num_first_tokens),
        "base_decode": decoded if verified is None else decoded.resized(verified, heads=verified),
        "value_prefill": prompts.resized(counts.value_prefill_tokens, heads=0),
        "value_extend": outputs.resized(counts.value_extend_tokens, heads=0),
        "value_candidates": outputs.resized(counts.candidates, heads=counts.candidates),
        "draft_prefill": prompts.resized(counts.draft_prefill_tokens, heads=0),
        "draft_decode": decoded.resized(counts.draft_tokens + counts.backfill_tokens, heads=counts.draft_tokens),
    }


def prompt_work(prompts: Iterable[int]) -> TokenWork:
    """Each of these prompts prefilled from nothing; prompts of one length are counted together."""
    of_lengths = (TokenWork.after(0, prompt) * times for prompt, times in Counter(prompts).items())
    return sum(of_lengths, TokenWork())


def output_work(sequences: Sequence[Lengths], num_skipped: int = 0) -> TokenWork:
    """Each output token of each sequence forwarded once, but for the first ``num_skipped`` of each."""
    of_lengths = (
        TokenWork.after(prompt, max(output - num_skipped, 0)) * times
        for (prompt, output), times in Counter(sequences).items()
    )
    return sum(of_lengths, TokenWork())


def spread_evenly(total: int, parts: int) -> list[int]:
    """``total`` as ``parts`` whole numbers that differ by at most one, larger ones first."""
    each, rest = divmod(total, parts)
    return [each + 1] * rest + [each] * (parts - rest)
