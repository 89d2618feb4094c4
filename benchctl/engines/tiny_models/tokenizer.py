"""A byte-level BPE tokenizer of any size, trained on text that benchctl generates.

It does not depend on the seed of the weights: models of one vocabulary size share their tokens, as a draft model
or a value model must with its base.
"""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from benchctl.errors import UsageError
from benchctl.workload.datasets.made.generated import problems

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (PAD, START, END)
"""In the order of their ids, from 0."""
PAD_ID: Final = SPECIAL_TOKENS.index(PAD)
END_ID: Final = SPECIAL_TOKENS.index(END)

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

MIN_VOCAB: Final = 256 + len(SPECIAL_TOKENS)
"""Every byte has a token of its own, so that any text can be written."""
MAX_VOCAB: Final = 1_000_000
_PROBLEMS: Final = 500
_SPLIT_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Words, single digits, punctuation and space: how Qwen2 cuts text before merging. Loaders that know a model by its
family put this in place of what the file says, so anything else would be cut differently by different engines."""
_CONSONANTS: Final = "bdfghjklmnprstvwxyz"
_VOWELS: Final = "aeiou"


def train_tokenizer(vocab: int) -> "Tokenizer":
    """A tokenizer of exactly ``vocab`` tokens, the same for the same number; UsageError for one out of range."""
    if not MIN_VOCAB <= vocab <= MAX_VOCAB:
        raise UsageError(
            f"vocab is {vocab}; it must be from {MIN_VOCAB} (256 bytes and {len(SPECIAL_TOKENS)} special tokens) "
            f"to {MAX_VOCAB}"
        )
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(vocab), trainer)
    return tokenizer


def _training_text(vocab: int) -> Iterator[str]:
    """English of word problems, then one invented word for each token.

    Training merges until each word is one token, so as many distinct words as tokens always fill the vocabulary.
    """
    for problem in islice(problems(0), _PROBLEMS):
        yield problem.question
    for number in range(vocab):
        yield f" {_invented_word(number)}"


def _invented_word(number: int) -> str:
    """A word that can be spoken, another one for each number: its digits in syllables."""
    syllables = ""
    rest = number + len(_CONSONANTS) * len(_VOWELS)  # two syllables or more
    while rest:
        rest, digit = divmod(rest, len(_CONSONANTS) * len(_VOWELS))
        syllables += _CONSONANTS[digit // len(_VOWELS)] + _VOWELS[digit % len(_VOWELS)]
    return syllables
