"""Generated word problems in the manner of GSM8K, with gold answers that are right by construction.

They replace a missing GSM8K file, and are a workload of their own that needs no download. The questions are
about as long as those of GSM8K (a mean of 46 words there) and vary about as much, and none repeats.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Final

from benchctl.workload.datasets.base import MadeDataset, Prompt
from benchctl.workload.datasets.made.stories import STORIES, Cast
from benchctl.workload.datasets.published.gsm8k import question_prompt
from benchctl.workload.seeded import named_stream

_NAMES: Final = (
    *("Ada", "Amir", "Anna", "Bo", "Carla", "Chen", "Dana", "Dmitri", "Ed", "Elif", "Emma", "Farah", "Finn"),
    *("Grace", "Hana", "Hugo", "Ines", "Ivan", "Jonas", "Julia", "Kai", "Kofi", "Lena", "Liam", "Mara", "Mei"),
    *("Nadia", "Noah", "Olga", "Omar", "Paula", "Priya", "Quentin", "Rosa", "Sam", "Sofia", "Tariq", "Tess"),
    *("Uma", "Victor", "Wanda", "Yusuf", "Zoe"),
)
_ITEMS: Final = (
    *("apples", "balloons", "beads", "brushes", "candles", "coins", "cookies", "crayons", "cups", "erasers"),
    *("hats", "kites", "lemons", "magnets", "marbles", "mugs", "notebooks", "oranges", "pears", "pencils"),
    *("plants", "plates", "postcards", "puzzles", "ribbons", "rulers", "socks", "spoons", "stamps", "toy cars"),
)
_SCENES: Final = (
    "It is a sunny Saturday, and nobody has to be anywhere before the evening.",
    "{a} likes to plan everything in advance and writes each amount into a little blue notebook.",
    "{a} and {b} have been neighbors for many years and help each other out whenever they can.",
    "Last year it went wrong because nobody had done the sums, so this time {a} wants to be sure of all numbers.",
    "{b} offers to check the result.",
    "The whole family is curious how it will turn out.",
    "{a} has looked forward to this day since the beginning of the month and has told all friends about it.",
    "It has been raining all morning.",
    "{c} comes along to watch, but does not take part.",
    "{a} asks {c} for advice, and both of them agree that it is best to work it out with pencil and paper.",
    "The teacher told the class to look for problems in everyday life, and {a} found this one on the way home.",
    "Everyone is in a good mood.",
)
_NUM_SCENES: Final = (0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 3)
"""Numbers of scenes that open a problem: each entry is equally likely. Chosen for a spread of lengths like
GSM8K's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One word problem; ``story`` names its type."""

    story: str
    question: str
    answer: int


def problems(seed: int) -> Iterator[Problem]:
    """Distinct problems without end, from the stream ``generated``. More of them extend the same sequence."""
    draw = named_stream(seed, "generated")
    return without_repeats(_problem(draw) for _ in count())


def without_repeats(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The problems whose questions did not occur before."""
    questions: set[str] = set()
    for problem in problems:
        if problem.question not in questions:
            questions.add(problem.question)
            yield problem


def _problem(draw: random.Random) -> Problem:
    a, b, c = draw.sample(_NAMES, 3)
    item, other = draw.sample(_ITEMS, 2)
    cast = Cast(a=a, b=b, c=c, item=item, other=other)
    scenes = draw.sample(_SCENES, draw.choice(_NUM_SCENES))
    story = draw.choice(STORIES)
    text, answer = story(cast, draw)
    opening = "".join(f"{scene.format(a=a, b=b, c=c)} " for scene in scenes)
    return Problem(story=story.__name__, question=opening + text, answer=answer)


def generated_prompts(num_prompts: int, seed: int) -> tuple[Prompt, ...]:
    """The first ``num_prompts`` problems as chats like those of GSM8K."""
    return tuple(
        question_prompt(
            problem.question, prompt_id=f"generated-{i:05d}", source=f"generated:{i}", answer=str(problem.answer)
        )
        for i, problem in enumerate(islice(problems(seed), num_prompts))
    )


DATASET: Final = MadeDataset(make=lambda workload, seed: generated_prompts(workload.num_prompts, seed))
