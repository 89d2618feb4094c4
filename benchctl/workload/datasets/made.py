"""Prompts made from the seed of the profile: of planned lengths, or word problems with gold answers.

A story of a word problem draws its numbers so that the answer is a whole positive number, and computes the answer
from the numbers that it wrote. Every number of a problem stands in digits, in the order in which the story names
it; words such as "half" or "twice" stand for themselves.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Final, NamedTuple

from benchctl.errors import ProfileError
from benchctl.profile.choices import NO_REQUESTS
from benchctl.profile.model import Workload
from benchctl.profile.sections import SharedPrefix
from benchctl.workload.datasets.base import MadeDataset, Prompt
from benchctl.workload.datasets.published import question_prompt
from benchctl.workload.seeded import draw_lengths, named_stream, numbers_of_prompt, prefix_numbers


@dataclass(frozen=True, slots=True)
class SyntheticPrompts(Sequence[Prompt]):
    """Prompts of these lengths. Each is made when it is taken: its numbers take much more memory than its text."""

    lengths: tuple[int, ...]
    seed: int
    turns: tuple[tuple[int, int], ...] = ()
    """Of each prompt the number of its conversation, and its position there; empty for single prompts."""
    prefix: SharedPrefix | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: Any) -> Any:
        number, turn = self.turns[i] if self.turns else (i, 0)
        length, prefix = self.lengths[i], self.prefix
        shared = () if prefix is None else prefix_numbers(i % prefix.groups, prefix.tokens_of(length), self.seed)
        return Prompt(
            prompt_id=f"synthetic-{number:05d}",
            source=f"synthetic:{i}",
            token_numbers=(*shared, *numbers_of_prompt(length - len(shared), i, self.seed)),
            shared=len(shared),
            turn=turn,
        )


def _synthetic(workload: Workload, seed: int) -> SyntheticPrompts:
    """Prompts whose lengths are ``input_len``, in turn from a list, or drawn from the stream ``input-len``.

    Of conversations they are the user's words of each turn; numbers of turns come from the stream ``turns``.
    """
    if workload.input_len is None:
        raise ProfileError("workload.input_len is null with dataset synthetic, which needs it; set a length")
    lengths = draw_lengths(workload.input_len, named_stream(seed, "input-len"))
    numbers = () if workload.turns is None else draw_lengths(workload.turns.number, named_stream(seed, "turns"))
    turns = tuple(
        (i, turn) for i, number in enumerate(islice(numbers, workload.num_prompts)) for turn in range(number)
    )
    num_prompts = len(turns) or workload.num_prompts
    return SyntheticPrompts(tuple(islice(lengths, num_prompts)), seed, turns, workload.prefix)


class Cast(NamedTuple):
    """The people and things of a problem."""

    a: str
    b: str
    c: str
    item: str
    other: str


Draft = tuple[int, str]
"""Answer and text."""


def change_at_the_shop(cast: Cast, draw: random.Random) -> Draft:
    num, price = draw.randint(2, 12), draw.randint(2, 15)
    more, cheap = draw.randint(2, 9), draw.randint(1, 9)
    cost = num * price + more * cheap
    paid = (cost // 50 + 1) * 50
    return paid - cost, (
        f"{cast.a} buys {num} {cast.item} for ${price} each and {more} {cast.other} for ${cheap} each. "
        f"{cast.a} hands the cashier ${paid}. How many dollars of change does {cast.a} get back?"
    )


def weekly_savings(cast: Cast, draw: random.Random) -> Draft:
    earned, weeks = draw.randint(40, 160), draw.randint(3, 16)
    spent = draw.randint(5, earned - 15)
    saved = (earned - spent) * weeks
    cost = draw.randint(10, saved - 5)
    return saved - cost, (
        f"{cast.a} earns ${earned} every week by walking dogs and spends ${spent} of it on lunch and bus tickets. "
        f"The rest goes into a jar. After {weeks} weeks, {cast.a} takes ${cost} out of the jar to buy a winter "
        "jacket. How many dollars are left in the jar?"
    )


def bake_sale(cast: Cast, draw: random.Random) -> Draft:
    trays, per_tray, per_box = draw.randint(4, 12), draw.randint(10, 24), draw.randint(3, 8)
    boxes = trays * per_tray // per_box - draw.randint(1, 3)
    burnt = trays * per_tray - boxes * per_box
    price = draw.randint(2, 12)
    return boxes * price, (
        f"For a bake sale, {cast.a} bakes {trays} trays of muffins with {per_tray} muffins on each tray. "
        f"{burnt} muffins are burnt and get thrown away. {cast.b} helps to pack the good muffins into boxes of "
        f"{per_box}, and every box is sold for ${price}. If all boxes are sold, how many dollars do they take in?"
    )


def road_trip(cast: Cast, draw: random.Random) -> Draft:
    hours, speed = draw.randint(2, 6), draw.randint(40, 70)
    later, slower = draw.randint(2, 5), draw.randint(25, 55)
    driven = hours * speed + later * slower
    total = driven + draw.randint(10, 240)
    return total - driven, (
        f"{cast.a} drives {hours} hours at {speed} miles per hour. After a break for coffee, the road gets worse, "
        f"and {cast.a} drives {later} more hours at {slower} miles per hour. The whole trip is {total} miles long. "
        "How many miles remain?"
    )


def pooled_collection(cast: Cast, draw: random.Random) -> Draft:
    children, times = draw.randint(3, 9), draw.randint(3, 6)
    owned = children * draw.randint(2, 20)
    return owned * (1 + times) // children, (
        f"{cast.a} has {owned} {cast.item}, and {cast.b} has {times} times as many. They put all of them together "
        f"and share them equally among {children} children. How many {cast.item} does each child get?"
    )


def coat_on_sale(cast: Cast, draw: random.Random) -> Draft:
    price, percent = 20 * draw.randint(3, 20), 5 * draw.randint(1, 10)
    reduced = price - price * percent // 100
    coupon = draw.randint(2, reduced - 5)
    return reduced - coupon, (
        f"A coat costs ${price}. This week the shop takes {percent}% off the price, and {cast.a} also has a coupon "
        f"worth ${coupon} that is used after the discount. How much does {cast.a} pay?"
    )


def ages(cast: Cast, draw: random.Random) -> Draft:
    times, years, now = draw.randint(2, 6), draw.randint(2, 15), draw.randint(3, 14)
    return times * now, (
        f"{cast.a} is {times} times as old as {cast.b}. In {years} years, {cast.b} will be {now + years} years "
        f"old. How old is {cast.a} now?"
    )


def flower_beds(cast: Cast, draw: random.Random) -> Draft:
    rows, per_row = draw.randint(3, 12), draw.randint(6, 20)
    more, fewer = draw.randint(2, 10), draw.randint(4, 15)
    lost, price = draw.randint(2, 25), draw.randint(2, 6)
    return (rows * per_row + more * fewer - lost) * price, (
        f"In spring, {cast.a} plants {rows} rows of tulips with {per_row} tulips in each row, and {more} rows of "
        f"daisies with {fewer} daisies in each row. A hailstorm ruins {lost} of the flowers. All the others are "
        f"cut and sold at the market, where each flower brings ${price}. How many dollars does {cast.a} earn?"
    )


def overtime(cast: Cast, draw: random.Random) -> Draft:
    wage, hours = draw.randint(11, 30), draw.randint(42, 60)
    higher = wage + draw.randint(3, 15)
    return 40 * wage + (hours - 40) * higher, (
        f"{cast.a} works in a warehouse and is paid ${wage} an hour. For every hour beyond 40 in a week the pay is "
        f"${higher} an hour. Last week {cast.a} covered some shifts for {cast.b} and worked {hours} hours in "
        f"total. How much did {cast.a} earn last week?"
    )


def reading_plan(cast: Cast, draw: random.Random) -> Draft:
    per_day, days = draw.randint(8, 40), draw.randint(3, 9)
    left, pace = draw.randint(2, 8), draw.randint(6, 45)
    pages = per_day * days + left * pace
    return pace, (
        f"A novel from the library has {pages} pages. {cast.a} reads {per_day} pages a day for {days} days. The "
        f"book is due in {left} days. How many pages a day must {cast.a} read from now on to finish it on time?"
    )


def leaking_tank(cast: Cast, draw: random.Random) -> Draft:
    leak, minutes = draw.randint(1, 9), draw.randint(5, 60)
    inflow = leak + draw.randint(2, 18)
    held = draw.randint(10, 300)
    full = held + minutes * (inflow - leak)
    return minutes, (
        f"A tank on {cast.a}'s farm holds {full} liters and has {held} liters of water in it. A pump brings "
        f"{inflow} liters every minute, but {leak} liters leak out of a crack every minute. How many minutes "
        "does it take until the tank is full?"
    )


def pizza_party(cast: Cast, draw: random.Random) -> Draft:
    slices, guests, eaten = draw.choice((6, 8, 10, 12)), draw.randint(5, 20), draw.randint(2, 4)
    pizzas = guests * eaten // slices + draw.randint(2, 4)
    return pizzas * slices - guests * eaten, (
        f"{cast.a} orders {pizzas} pizzas for a party. Each is cut into {slices} slices. If each of {guests} "
        f"guests eats {eaten} slices, how many slices are left?"
    )


def sticker_album(cast: Cast, draw: random.Random) -> Draft:
    owned, packs, per_pack = 2 * draw.randint(10, 150), draw.randint(2, 15), draw.randint(3, 12)
    return owned // 2 + packs * per_pack, (
        f"{cast.a} has {owned} stickers and gives half of them to {cast.b}. Then {cast.a} buys {packs} packs of "
        f"{per_pack} stickers. How many stickers does {cast.a} have now?"
    )


def two_machines(cast: Cast, draw: random.Random) -> Draft:
    first, minutes, percent = draw.randint(6, 40), 10 * draw.randint(2, 18), draw.randint(2, 20)
    second = 10 * draw.randint(1, 5) + -first % 10
    return (first + second) * minutes * (100 - percent) // 100, (
        f"In a toy factory, one machine makes {first} parts a minute and a newer one makes {second} parts a "
        f"minute. Both run for {minutes} minutes without a stop. {cast.a}, who checks the quality, has to throw "
        f"out {percent}% of all the parts made in that time. How many good parts are there?"
    )


def lending_library(cast: Cast, draw: random.Random) -> Draft:
    shelves, per_shelf = draw.randint(5, 30), draw.randint(12, 45)
    lent = draw.randint(20, shelves * per_shelf // 2)
    returned = draw.randint(5, lent - 5)
    return shelves * per_shelf - lent + returned, (
        f"A small library has {shelves} shelves with {per_shelf} books on each. On Monday {cast.a} lends out "
        f"{lent} books to a school. By Friday, {returned} of them have come back. How many books are in the "
        "library now?"
    )


def club_budget(cast: Cast, draw: random.Random) -> Draft:
    members, fee, balls, price = (draw.randint(*r) for r in ((15, 40), (10, 35), (3, 9), (4, 9)))
    rent = draw.randint(10, members * fee - balls * price - 2)
    return members * fee - rent - balls * price, (
        f"Each of the {members} members of a sports club pays a fee of ${fee}. {cast.a}, who keeps the accounts, "
        f"pays ${rent} for the rent of the hall and buys {balls} new balls at ${price} each. {cast.b} wants to "
        "know what is left for the summer party. How many dollars does the club still have?"
    )


def shell_hunt(cast: Cast, draw: random.Random) -> Draft:
    shells, more, times = draw.randint(4, 40), draw.randint(3, 25), draw.randint(2, 5)
    return shells + (shells + more) * (1 + times), (
        f"On the beach {cast.a} found {shells} shells. {cast.b} found {more} more than {cast.a}, and {cast.c} "
        f"found {times} times as many as {cast.b}. How many shells did they find in total?"
    )


def gift_ribbon(cast: Cast, draw: random.Random) -> Draft:
    gifts, each, piece, pieces = (draw.randint(*r) for r in ((3, 12), (25, 80), (4, 15), (3, 30)))
    return pieces, (
        f"{cast.a} has a roll with {gifts * each + piece * pieces} centimeters of ribbon and wraps {gifts} gifts, "
        f"using {each} centimeters for each of them. What remains on the roll is cut into bookmarks that are "
        f"{piece} centimeters long, one for every child at {cast.b}'s party. How many bookmarks are there?"
    )


STORIES: Final[tuple[Callable[[Cast, random.Random], Draft], ...]] = (
    change_at_the_shop,
    weekly_savings,
    bake_sale,
    road_trip,
    pooled_collection,
    coat_on_sale,
    ages,
    flower_beds,
    overtime,
    reading_plan,
    leaking_tank,
    pizza_party,
    sticker_album,
    two_machines,
    lending_library,
    club_budget,
    shell_hunt,
    gift_ribbon,
)


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
    cast = Cast(*draw.sample(_NAMES, 3), *draw.sample(_ITEMS, 2))
    scenes = draw.sample(_SCENES, draw.choice(_NUM_SCENES))
    story = draw.choice(STORIES)
    answer, text = story(cast, draw)
    opening = "".join(f"{scene.format_map(cast._asdict())} " for scene in scenes)
    return Problem(story=story.__name__, question=opening + text, answer=answer)


def generated_prompts(num_prompts: int, seed: int) -> tuple[Prompt, ...]:
    """The first ``num_prompts`` problems as chats like those of GSM8K."""
    return tuple(
        question_prompt(
            problem.question, prompt_id=f"generated-{i:05d}", source=f"generated:{i}", answer=str(problem.answer)
        )
        for i, problem in enumerate(islice(problems(seed), num_prompts))
    )


DATASETS: Final = {
    "synthetic": MadeDataset(
        meaning="Synthetic prompts of planned lengths, written for the tokenizer of the server.",
        make=_synthetic,
        needs_input_len=True,
    ),
    "generated": MadeDataset(
        meaning="Generated word problems in the manner of GSM8K, with gold answers that are right by construction.",
        make=lambda workload, seed: generated_prompts(workload.num_prompts, seed),
    ),
    NO_REQUESTS: MadeDataset(
        meaning="No prompts, for engines that compute without requests.", make=lambda _workload, _seed: ()
    ),
}
