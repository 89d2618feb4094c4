"""Small tokenizers of every kind that models have, with a chat template."""

from collections.abc import Sequence
from functools import cache
from itertools import islice

from tokenizers import BertWordPieceTokenizer, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from benchctl.engines.tiny_models.files import train_tokenizer
from benchctl.records.record import Message
from benchctl.workload.datasets.made import problems
from benchctl.workload.written_texts import WORDS


class TrainedTokenizer:
    """Counts by a tokenizer of the package ``tokenizers``; a chat is its texts between marks."""

    source = "tokenizer small"

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.calls: list[int] = []

    def count_texts(self, texts: Sequence[str]) -> tuple[int, ...]:
        self.calls.append(len(texts))
        return tuple(len(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts)))

    def count_chats(self, chats: Sequence[Sequence[Message]]) -> tuple[int, ...]:
        return self.count_texts([self._chat(messages) for messages in chats])

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def _chat(self, messages: Sequence[Message]) -> str:
        turns = "".join(f"<|im_start|>{turn.role}\n{turn.content.strip()}<|im_end|>\n" for turn in messages)
        return f"{turns}<|im_start|>assistant\n"


def byte_level(vocab: int, *, adds_bos: bool = False) -> TrainedTokenizer:
    """Byte-level BPE, as of Llama 3 and Qwen: with 259 tokens hardly more than bytes."""
    tokenizer = train_tokenizer(vocab)
    if adds_bos:
        special = [("<|im_start|>", 1)]
        tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $0", special_tokens=special)
    return TrainedTokenizer(tokenizer)


def _metaspace(model, trainer) -> TrainedTokenizer:
    """Trained over text with a visible character in place of blanks and at its beginning."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(_english(), trainer)
    return TrainedTokenizer(tokenizer)


def sentence_piece(vocab: int) -> TrainedTokenizer:
    """BPE, as of Llama 2."""
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<unk>"], show_progress=False)
    return _metaspace(models.BPE(unk_token="<unk>"), trainer)


def word_piece(vocab: int) -> TrainedTokenizer:
    """WordPiece between [CLS] and [SEP], as of BERT."""
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(_english(), vocab_size=vocab, show_progress=False)
    return TrainedTokenizer(tokenizer._tokenizer)


def unigram(vocab: int) -> TrainedTokenizer:
    """Unigram, as of T5."""
    unknown = {"special_tokens": ["<unk>"], "unk_token": "<unk>"}
    return _metaspace(models.Unigram(), trainers.UnigramTrainer(vocab_size=vocab, show_progress=False, **unknown))


@cache
def _english() -> tuple[str, ...]:
    questions = (problem.question for problem in islice(problems(0), 200))
    return (*questions, " ".join(WORDS), "0123456789 éZ.,;:!?-x1a")
