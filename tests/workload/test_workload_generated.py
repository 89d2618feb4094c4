"""Generated word problems: answers recomputed from the text, lengths like GSM8K's, no repeats."""

import json
import re
import statistics
from fractions import Fraction
from itertools import islice

import pytest
from support.datasets import GSM8K

from benchctl.workload.datasets.made import STORIES, generated_prompts, problems, without_repeats

GSM8K_SIZE = 1319

# Each rule reads the numbers of a problem in the order in which its text names them.
RULES = {
    "change_at_the_shop": lambda num, price, more, cheap, paid: paid - (num * price + more * cheap),
    "weekly_savings": lambda earned, spent, weeks, cost: weeks * earned - weeks * spent - cost,
    "bake_sale": lambda trays, each, burnt, box, price: Fraction(trays * each - burnt, box) * price,
    "road_trip": lambda hours, speed, later, slower, total: total - hours * speed - later * slower,
    "pooled_collection": lambda owned, times, children: Fraction(owned + times * owned, children),
    "coat_on_sale": lambda price, percent, coupon: price - Fraction(price * percent, 100) - coupon,
    "ages": lambda times, years, then: (then - years) * times,
    "flower_beds": lambda rows, each, more, fewer, lost, price: (rows * each + more * fewer - lost) * price,
    "overtime": lambda wage, limit, higher, hours: limit * wage + (hours - limit) * higher,
    "reading_plan": lambda pages, per_day, days, left: Fraction(pages - per_day * days, left),
    "leaking_tank": lambda full, held, inflow, leak: Fraction(full - held, inflow - leak),
    "pizza_party": lambda pizzas, slices, guests, eaten: pizzas * slices - guests * eaten,
    "sticker_album": lambda owned, packs, each: Fraction(owned, 2) + packs * each,
    "two_machines": lambda first, second, minutes, bad: Fraction((first + second) * minutes * (100 - bad), 100),
    "lending_library": lambda shelves, each, lent, returned: shelves * each - lent + returned,
    "club_budget": lambda members, fee, rent, balls, price: members * fee - rent - balls * price,
    "shell_hunt": lambda shells, more, times: shells + shells + more + times * (shells + more),
    "gift_ribbon": lambda total, gifts, each, piece: Fraction(total - gifts * each, piece),
}


def test_every_answer_follows_from_the_numbers_of_its_sentence():
    stories = set()
    for problem in islice(problems(seed=11), 2000):
        numbers = [int(digits) for digits in re.findall(r"\d+", problem.question)]
        assert RULES[problem.story](*numbers) == problem.answer, problem.question
        assert min(*numbers, problem.answer) > 0
        assert problem.question.endswith("?")
        assert not re.search(r"  |{", problem.question)
        stories.add(problem.story)
    assert stories == {story.__name__ for story in STORIES}
    assert len(stories) >= 12


def test_no_question_repeats_within_a_set_as_large_as_gsm8k():
    questions = [problem.question for problem in islice(problems(1), GSM8K_SIZE)]
    assert len(set(questions)) == GSM8K_SIZE
    first, second = islice(problems(0), 2)
    assert list(without_repeats([first, first, second])) == [first, second]


def test_more_problems_extend_the_same_sequence_and_seeds_differ():
    assert generated_prompts(30, 4)[:10] == generated_prompts(10, 4)
    assert generated_prompts(10, 4) != generated_prompts(10, 5)


def test_lengths_are_distributed_like_those_of_gsm8k():
    words = word_counts(problem.question for problem in islice(problems(0), GSM8K_SIZE))
    assert statistics.fmean(words) == pytest.approx(46.25, rel=0.1)
    assert statistics.stdev(words) == pytest.approx(18.07, rel=0.2)
    if GSM8K.is_file():
        real = word_counts(json.loads(line)["question"] for line in GSM8K.read_text().splitlines())
        assert statistics.quantiles(words, n=10) == pytest.approx(statistics.quantiles(real, n=10), rel=0.2)


def word_counts(questions):
    return [len(question.split()) for question in questions]
