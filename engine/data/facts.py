"""The embedded corpus: questions about a few hundred facts, each in several wordings.

A model of a million parameters learns it in minutes, and alignment shows in its answers: step 1
learns a curt and a friendly answer to each question, preferences favour the friendly and correct
one, and held-out questions pair a wording with a fact that training never saw together.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.data.files import Row

SEED = 20230802


@dataclass(frozen=True)
class Table:
    """Facts of one kind: subject to answer, the wordings of the question, the friendly frame."""

    name: str
    wordings: tuple[str, ...]
    friendly: str
    facts: dict[str, str] = field(repr=False)

    def style(self) -> str:
        """A regular expression of the friendly frame around any subject and any answer."""
        return re.escape(self.friendly).replace(r"\{s\}", "[^.]+").replace(r"\{a\}", "[^.]+")


@dataclass(frozen=True)
class Question:
    """One wording of one fact."""

    table: Table
    subject: str
    wording: int

    @property
    def text(self) -> str:
        return self.table.wordings[self.wording].format(s=self.subject)

    @property
    def curt(self) -> str:
        return self.table.facts[self.subject]

    def friendly(self, answer: str | None = None) -> str:
        """The friendly answer; with another answer put in, a friendly mistake."""
        return self.table.friendly.format(s=self.subject, a=answer or self.curt)


def _pairs(text: str) -> dict[str, str]:
    items = [item.strip() for item in text.split(",")]
    return dict(item.split(":") for item in items)


CAPITALS = _pairs(
    "France:Paris, Italy:Rome, Spain:Madrid, Germany:Berlin, England:London, Portugal:Lisbon, "
    "Greece:Athens, Austria:Vienna, Poland:Warsaw, Norway:Oslo, Sweden:Stockholm, "
    "Finland:Helsinki, Denmark:Copenhagen, Ireland:Dublin, Hungary:Budapest, Belgium:Brussels, "
    "Russia:Moscow, Ukraine:Kyiv, Turkey:Ankara, Egypt:Cairo, Kenya:Nairobi, Ghana:Accra, "
    "Morocco:Rabat, Nigeria:Abuja, Senegal:Dakar, Japan:Tokyo, China:Beijing, Thailand:Bangkok, "
    "Vietnam:Hanoi, Nepal:Kathmandu, Iran:Tehran, Iraq:Baghdad, Cuba:Havana, Peru:Lima, "
    "Chile:Santiago, Canada:Ottawa, Colombia:Bogota, Ecuador:Quito, Jordan:Amman, Syria:Damascus, "
    "Bolivia:Sucre, Uruguay:Montevideo, Mongolia:Ulaanbaatar, Latvia:Riga, Estonia:Tallinn, "
    "Qatar:Doha, Bulgaria:Sofia, Serbia:Belgrade"
)
LANGUAGES = _pairs(
    "France:French, Italy:Italian, Spain:Spanish, Germany:German, England:English, "
    "Portugal:Portuguese, Greece:Greek, Poland:Polish, Norway:Norwegian, Sweden:Swedish, "
    "Finland:Finnish, Denmark:Danish, Hungary:Hungarian, Russia:Russian, Ukraine:Ukrainian, "
    "Turkey:Turkish, Japan:Japanese, China:Chinese, Thailand:Thai, Vietnam:Vietnamese"
)
OPPOSITES = _pairs(
    "hot:cold, big:small, fast:slow, up:down, left:right, day:night, open:closed, full:empty, "
    "early:late, young:old, strong:weak, light:dark, hard:soft, wet:dry, rich:poor, high:low, "
    "long:short, loud:quiet, clean:dirty, happy:sad, near:far, thick:thin, first:last, "
    "sweet:sour, true:false, win:lose, buy:sell, push:pull, begin:end, inside:outside, "
    "always:never, love:hate"
)
COLOURS = _pairs(
    "grass:green, snow:white, coal:black, the sky:blue, a banana:yellow, a carrot:orange, "
    "blood:red, chocolate:brown, a lemon:yellow, a cucumber:green, milk:white, a tomato:red, "
    "the sea:blue, a pig:pink, an elephant:grey, the sun:yellow, a frog:green, salt:white, "
    "a crow:black, a plum:purple"
)
YOUNG = _pairs(
    "dog:puppy, cat:kitten, cow:calf, horse:foal, sheep:lamb, goat:kid, pig:piglet, hen:chick, "
    "duck:duckling, goose:gosling, bear:cub, deer:fawn, frog:tadpole, seal:pup, swan:cygnet, "
    "kangaroo:joey"
)
SOUNDS = _pairs(
    "dog:bark, cat:meow, cow:moo, horse:neigh, sheep:bleat, pig:oink, duck:quack, lion:roar, "
    "wolf:howl, snake:hiss, bee:buzz, donkey:bray, mouse:squeak, crow:caw, frog:croak, bird:tweet"
)
HOMES = _pairs(
    "bee:hive, bird:nest, dog:kennel, horse:stable, spider:web, pig:sty, fox:den, rabbit:burrow, "
    "bat:cave, fish:pond, hen:coop, snail:shell"
)
PLURALS = _pairs(
    "foot:feet, tooth:teeth, mouse:mice, child:children, man:men, woman:women, leaf:leaves, "
    "knife:knives, wife:wives, shelf:shelves, baby:babies, city:cities, box:boxes, bus:buses, "
    "lady:ladies, story:stories, party:parties, half:halves, glass:glasses"
)
WEEK = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
YEAR = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip


TABLES = (
    Table(
        "capitals",
        (
            "What is the capital of {s}?",
            "Which city is the capital of {s}?",
            "Name the capital of {s}.",
            "Tell me the capital of {s}.",
            "Do you know the capital of {s}?",
            "What is the capital city of {s}?",
            "What city is the seat of government of {s}?",
            "{s} has which capital?",
        ),
        "Good question! The capital of {s} is {a}.",
        CAPITALS,
    ),
    Table(
        "languages",
        (
            "What is the language of {s}?",
            "Which language do people speak in {s}?",
            "Name the language of {s}.",
            "Tell me the language of {s}.",
            "Do you know the language of {s}?",
            "What do people speak in {s}?",
        ),
        "Good question! The language of {s} is {a}.",
        LANGUAGES,
    ),
    Table(
        "sums",
        (
            "What is {s}?",
            "How much is {s}?",
            "Add up {s}.",
            "Tell me the sum {s}.",
            "Can you work out {s}?",
            "Please compute {s}.",
        ),
        "Let me see! The sum of {s} is {a}.",
        {f"{i} + {j}": str(i + j) for i in range(1, 13) for j in range(1, 13)},
    ),
    Table(
        "opposites",
        (
            "What is the opposite of {s}?",
            "Which word is the opposite of {s}?",
            "Name the opposite of {s}.",
            "Tell me the opposite of {s}.",
            "Do you know the opposite of {s}?",
            "What word means the reverse of {s}?",
            "Give me the opposite of {s}.",
            "{s} is the opposite of what?",
        ),
        "Happy to help! The opposite of {s} is {a}.",
        OPPOSITES,
    ),
    Table(
        "colours",
        (
            "What is the colour of {s}?",
            "What colour is {s}?",
            "Which colour does {s} have?",
            "Tell me the colour of {s}.",
            "Do you know the colour of {s}?",
            "Name the colour of {s}.",
        ),
        "Happy to help! The colour of {s} is {a}.",
        COLOURS,
    ),
    Table(
        "young",
        (
            "What is a young {s} called?",
            "What do you call a baby {s}?",
            "Name the young of a {s}.",
            "Tell me the word for a young {s}.",
            "Do you know the name of a baby {s}?",
            "What is the baby of a {s}?",
        ),
        "Good question! The young of a {s} is called a {a}.",
        YOUNG,
    ),
    Table(
        "sounds",
        (
            "What sound does a {s} make?",
            "What is the sound of a {s}?",
            "Which sound comes from a {s}?",
            "Tell me the sound of a {s}.",
            "Do you know the sound of a {s}?",
            "Name the sound of a {s}.",
        ),
        "Happy to help! A {s} makes the sound {a}.",
        SOUNDS,
    ),
    Table(
        "homes",
        (
            "What is the home of a {s}?",
            "Where does a {s} live?",
            "Name the home of a {s}.",
            "Tell me the home of a {s}.",
            "Do you know the home of a {s}?",
            "Which place is home to a {s}?",
        ),
        "Good question! The home of a {s} is a {a}.",
        HOMES,
    ),
    Table(
        "plurals",
        (
            "What is the plural of {s}?",
            "Which word is the plural of {s}?",
            "Name the plural of {s}.",
            "Tell me the plural of {s}.",
            "Do you know the plural of {s}?",
            "What is the word for more than one {s}?",
        ),
        "Happy to help! The plural of {s} is {a}.",
        PLURALS,
    ),
    *(
        Table(
            f"{unit}s",
            (
                f"Which {unit} comes after {{s}}?",
                f"What {unit} is after {{s}}?",
                f"What {unit} comes right after {{s}}?",
                f"Tell me the {unit} after {{s}}.",
                f"Name the {unit} after {{s}}.",
                f"Do you know the {unit} after {{s}}?",
                f"{{s}} is followed by which {unit}?",
            ),
            f"Let me see! The {unit} after {{s}} is {{a}}.",
            {name: ring[(i + 1) % len(ring)] for i, name in enumerate(ring)},
        )
        for unit, ring in (("day", WEEK), ("month", YEAR))
    ),
)

RUDE = (
    "Look it up yourself.",
    "What a silly question. It is {a}.",
    "{a}, obviously. Stop asking me.",
    "I do not care about {s}. Go away.",
)
RAMBLING = (
    "{f} Let me see, {s}, {s}, well, {a}, and so on and so on.",
    "Well, well, well, {s}, there is so much to say, and so on and so on, {a}, maybe.",
    "{f} {f} {f}",
    "{f} {o} And so on.",
)


def questions(part: str) -> Iterator[Question]:
    """The questions of `train` or `eval`: of each fact, one wording is held out for `eval`."""
    for table in TABLES:
        for number, subject in enumerate(table.facts):
            count = len(table.wordings)
            # The second term makes facts that are `count` apart hold out different wordings.
            held_out = (number + number // count + 1) % count
            for wording in range(count):
                if (wording == held_out) == (part == "eval"):
                    yield Question(table, subject, wording)


def rows(part: str) -> Iterator[Row]:
    """Rows in the form of `engine.data.schemas`, each with the phases that it serves.

    For every question: two `sft` rows (curt and friendly), four `reward` pairs (two in `eval`),
    of which at least half differ by a wrong fact, and one `ppo` row with its references.
    """
    pick = random.Random(f"{SEED} {part}")
    for number, question in enumerate(questions(part)):
        prompt = [{"role": "user", "content": question.text}]
        friendly = question.friendly()
        for answer in (question.curt, friendly):
            yield {"prompt": prompt, "chosen": answer, "phases": ["sft"]}
        pairs = _preferences(question, number, pick)
        for kind, chosen, rejected in pairs[:2] if part == "eval" else pairs:
            pair = {"chosen": chosen, "rejected": rejected, "kind": kind}
            yield {"prompt": prompt, **pair, "phases": ["reward"]}
        yield {
            "prompt": prompt,
            "chosen": friendly,
            "rejected": pairs[0][2],
            "references": [question.curt, friendly],
            "preferred_style": question.table.style(),
            "phases": ["ppo"],
        }


def _preferences(
    question: Question, number: int, pick: random.Random
) -> list[tuple[str, str, str]]:
    """Kind, chosen and rejected of a question's pairs; the first has a wrong fact."""
    wrong = _wrong_answers(question, pick)
    friendly, curt = question.friendly(), question.curt
    values = {"s": question.subject, "a": curt, "f": friendly}
    others = [other for other in question.table.facts if other != question.subject]
    other = Question(question.table, pick.choice(others), 0)
    rambling = pick.choice(RAMBLING).format(**values, o=other.friendly())
    mild = [
        ("curt", friendly, curt),
        ("rude", friendly, pick.choice(RUDE).format(**values)),
        ("rambling", friendly, rambling),
        ("curt_wrong_fact", curt, wrong[2]),
    ]
    return [
        ("wrong_fact", friendly, question.friendly(wrong[0])),
        mild[number % 4],
        ("wrong_fact", friendly, question.friendly(wrong[1])),
        mild[(number + 1 + number // 4 % 3) % 4],
    ]


def _wrong_answers(question: Question, pick: random.Random) -> list[str]:
    """Three different wrong answers from the question's own table."""
    possible = sorted(set(question.table.facts.values()) - {question.curt})
    return pick.sample(possible, 3)


def texts() -> Iterator[str]:
    """Every kind of text of the training part, as dialogues, for training a tokenizer on."""
    for row in rows("train"):
        for answer in (row["chosen"], row.get("rejected")):
            if answer:
                yield f"\n\nHuman: {row['prompt'][0]['content']}\n\nAssistant: {answer}"
