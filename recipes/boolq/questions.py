"""Generated yes/no reading questions: the data set of a run without a folder and without the Hub.

A passage states two facts about two people: that each has a thing, or no longer has it. The question asks about one of
them. To answer it a reader must find the fact of that person and thing, and know the meaning of its verb:

- The question alone does not determine the answer: every question occurs twice, with a passage that makes it true and
  with the same facts inverted.
- The passage alone hardly helps: in three of four passages one fact is true and one is not, and the fact that is asked
  about is random. Guessing from passages scores 0.625 at best.
- People of the validation split do not occur in the training split; their first and family names do.
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
HELD_OUT_PEOPLE = 40  # of 240
TRAIN_QUESTIONS, VALIDATION_QUESTIONS = 4000, 400  # two rows each

Person = tuple[str, str]


@dataclass(frozen=True)
class Fact:
    """A statement that `person` still has `thing` (true) or no longer has it."""

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
    """Return two examples per question, one true and one false."""
    examples = []
    for _ in range(questions):
        facts = two_facts(people, rng)
        asked = rng.randrange(2)
        for told in (facts, [replace(fact, true=not fact.true) for fact in facts]):
            passage = " ".join(fact.sentence(rng) for fact in told)
            examples.append(Example(told[asked].question(), passage, told[asked].true))
    return examples


def two_facts(people: list[Person], rng: random.Random) -> list[Fact]:
    """Return facts about two people with nothing in common; in three of four cases exactly one is true."""
    first = rng.choice(people)
    second = rng.choice([person for person in people if not set(person) & set(first)])
    true = rng.random() < 0.5
    answers = (true, not true if rng.random() < 0.75 else true)
    things, colours, places = (rng.sample(words, 2) for words in (THINGS, COLOURS, PLACES))
    return [Fact(*fact) for fact in zip((first, second), things, colours, places, answers, strict=True)]
