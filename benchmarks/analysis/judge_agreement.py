"""Do the judges of `benchctl compare` agree with published judgements of GSM8K answers?

Reads the 1,319 questions x 4 judged answers that come with GSM8K (example_model_solutions.jsonl of
openai/grade-school-math) and judges each answer as published (`A: 18`) and in the other forms in which models state
an answer. Every disagreement is listed.

    python -m benchmarks.analysis.judge_agreement [--data FILE] [--judges numeric math-verify]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchctl.analysis.compare.judge import JUDGES, judge_named

DATA = Path(__file__).resolve().parents[3] / "shared/data/gsm8k/example_model_solutions.jsonl"
FORMS = {
    "as published, A: 18": "A: {}",
    "#### 18": "#### {}",
    r"\boxed{18}": "So the result is $\\boxed{{{}}}$.",
    "a sentence": "The answer is {}.",
    "a bare number": "{}",
}
HARD = (
    (r"\boxed{70{,}000}", "70000", True),
    (r"\boxed{\$18.00}", "18", True),
    (r"\boxed{18 \text{ dollars}}", "18", True),
    (r"\boxed{1\frac{1}{2}}", "1.5", True),
    ("The answer is 1 1/2.", "1.5", True),
    (r"\boxed{-\dfrac12}", "-0.5", True),
    (r"\boxed{20\%}", "20", True),
    ("The answer is 5 million.", "5000000", True),
    (r"\boxed{3 \times 10^{4}}", "30000", True),
    ("#### \u22123", "-3", True),
    ("Rs.500", "500", True),
    ("so 10-5=5", "5", True),
    ("First 18, but the answer is 3.\n#### 18", "18", True),
    (r"\boxed{\sqrt{4}}", "2", True),
    (r"\boxed{6 \times 3}", "18", True),
    (r"\boxed{18 \text{ or } 3}", "18", False),
    (r"\boxed{33.33}", "100/3", False),
    ("2^5", "5", False),
    ("18 eggs on 3 days", "18", True),
)
"""Text, gold answer, and what a person says."""


@dataclass(frozen=True)
class Judged:
    row: int
    model: str
    told: str
    """The solution before its answer."""
    answer: str | None
    gold: str
    is_correct: bool

    def text(self, form: str) -> str:
        """The solution with its answer in that form; a solution that was cut off before it has none."""
        return self.told if self.answer is None else f"{self.told}\n{form.format(self.answer)}"


def judged_answers(path: Path) -> Iterator[Judged]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        gold = row["ground_truth"].rpartition("\nA: ")[2]
        for model, said in row.items():
            if isinstance(said, dict):
                told, mark, answer = said["solution"].rpartition("\nA: ")
                told = told if mark else said["solution"]
                yield Judged(number, model, told, answer if mark else None, gold, said["is_correct"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--judges", nargs="+", choices=JUDGES, default=list(JUDGES))
    options = parser.parse_args()
    if not options.data.is_file():
        sys.exit(f"{options.data} is not there; --data names example_model_solutions.jsonl of GSM8K")
    answers = list(judged_answers(options.data))
    num_correct = sum(answer.is_correct for answer in answers)
    cut = sum(answer.answer is None for answer in answers)
    print(f"{len(answers):,} answers, {num_correct:,} of them correct, {cut} without an end; ", end="")
    print(f"Python {sys.version.split()[0]}, math-verify {version('math-verify')}\n")
    print(f"{'judge':<18}{'form of the answer':<22}{'agree':>7}{'disagree':>10}{'agreement':>11}{'us/answer':>11}")
    listed = []
    for name in options.judges:
        judge = judge_named(name)
        for title, form in FORMS.items():
            began = time.perf_counter()
            verdicts = [judge.is_correct(answer.text(form), answer.gold) for answer in answers]
            us = (time.perf_counter() - began) * 1e6 / len(answers)
            apart = [a for a, verdict in zip(answers, verdicts, strict=True) if verdict != a.is_correct]
            listed += [(judge, title, answer) for answer in apart]
            agree = len(answers) - len(apart)
            share = agree / len(answers)
            print(f"{judge!s:<18}{title:<22}{agree:>7,}{len(apart):>10}{share:>11.2%}{us:>11.0f}")
    print(f"\ndisagreements: {len(listed)}")
    for judge, title, answer in listed:
        published = "correct" if answer.is_correct else "wrong"
        end = answer.text(FORMS[title])[-70:]
        print(f"  {judge}, {title}, question {answer.row}, {answer.model}: published {published}, ", end="")
        print(f"gold {answer.gold}, text ends {end!r}")
    print_hard_cases(options.judges)


def print_hard_cases(names: list[str]) -> None:
    print(f"\n{'hard cases':<46}{'gold':<10}{'person':<9}{'  '.join(names)}")
    for text, gold, truth in HARD:
        verdicts = [judge_named(name).is_correct(text, gold) for name in names]
        told = "  ".join(
            f"{'correct' if verdict else 'wrong':<{len(name)}}"
            for name, verdict in zip(names, verdicts, strict=True)
        )
        print(f"{text!r:<46}{gold:<10}{'correct' if truth else 'wrong':<9}{told}")


if __name__ == "__main__":
    main()
