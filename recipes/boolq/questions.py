"""Generated yes/no questions about passages: the data set of a run without a data folder and without the Hub.

A passage contains two facts about two people: each person still has a thing, or no longer has it. The question asks
about one of the two things. To answer, a model must find the sentence about this person and thing, and know the meaning
of its verb. Nothing simpler suffices:

- The question alone does not determine the answer, because every question occurs twice: with two facts, and with the
  opposites of both.
- The passage alone hardly helps. In three of four passages, the person of one fact still has the thing, and the other
  person does not. Which of them the question asks about is random. Guessing from passages scores 0.625 at best.
- People of the validation split do not occur in the training split, but their first and family names do.
"""

import random
from dataclasses import dataclass, replace

from boolq.data import Example, Questions

FIRST_NAMES = "Anna Clara Elsa Felix Hugo Ida Jonas Lena Mira Nora Oskar Peter Ruben Simon Tom Vera".split()
FAMILY_NAMES = "Berg Cole Dale Finch Frost Hart Holt Lane Marsh Moss North Page Reed Stone Wells".split()
THINGS = "bell boat clock drum flute kite lamp rope".split()
COLOURS = "black blue brown green grey pink purple red white yellow".split()
PLACES = "attic barn cellar forest garden harbour kitchen mill school tower".split()
VERBS = {True: ("has", "keeps", "owns"), False: ("lost", "sold", "broke")}
HELD_OUT_PEOPLE = 40  # of 240; they occur in the validation split only
TRAIN_QUESTIONS, VALIDATION_QUESTIONS = 4000, 400  # each question gives two rows

Person = tuple[str, str]


@dataclass(frozen=True)
class Fact:
    """The statement that a person still has a thing (`true` is True), or no longer has it (False)."""

    person: Person
    thing: str
    colour: str
    place: str
    true: bool

    def sentence(self, rng: random.Random) -> str:
        verb = rng.choice(VERBS[self.true])
        return f"{' '.join(self.person)} {verb} the {self.colour} {self.thing} in the {self.place}."

    def question(self) -> str:
        return f"does {' '.join(self.person)} still have the {self.thing}".lower()


def reading_questions(seed: int) -> Questions:
    """Generate both splits; equal seeds give equal splits, on every machine and rank."""
    rng = random.Random(seed)
    people = [(first, family) for first in FIRST_NAMES for family in FAMILY_NAMES]
    rng.shuffle(people)
    held_out, known = people[:HELD_OUT_PEOPLE], people[HELD_OUT_PEOPLE:]
    return Questions(
        train=generate(known, TRAIN_QUESTIONS, rng),
        validation=generate(held_out, VALIDATION_QUESTIONS, rng),
        origin="generated reading questions",
    )


def generate(people: list[Person], questions: int, rng: random.Random) -> list[Example]:
    """Return two examples for each generated question: one with the answer yes, and one with the answer no.

    Args:
        people: the people that may occur.
        questions: the number of questions.
        rng: the random generator.
    """
    examples = []
    for _ in range(questions):
        facts = two_facts(people, rng)
        asked = rng.randrange(2)
        for told in (facts, [replace(fact, true=not fact.true) for fact in facts]):
            passage = " ".join(fact.sentence(rng) for fact in told)
            examples.append(Example(told[asked].question(), passage, told[asked].true))
    return examples


def two_facts(people: list[Person], rng: random.Random) -> list[Fact]:
    """Return facts about two people. The two names, things, colours and places have nothing in common.

    With probability 3/4, exactly one of the two people still has the thing; otherwise both or neither.

    Args:
        people: the people to choose from.
        rng: the random generator.
    """
    first = rng.choice(people)
    second = rng.choice([person for person in people if not set(person) & set(first)])
    true = rng.random() < 0.5
    answers = (true, not true if rng.random() < 0.75 else true)
    things, colours, places = (rng.sample(words, 2) for words in (THINGS, COLOURS, PLACES))
    return [Fact(*fact) for fact in zip((first, second), things, colours, places, answers, strict=True)]
