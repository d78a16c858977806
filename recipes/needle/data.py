"""Rows with a few needles in much hay: of random tokens for the small new model, or of text for other models."""

import random
from collections.abc import Iterator
from typing import Any

import torch

KEYS, VALUES, HAY = 4, 16, 16
VOCABULARY = HAY + KEYS * VALUES + KEYS + VALUES
SHORTEST = 32  # tokens of the shortest row
IGNORED = -100  # targets that the loss ignores
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gwen", "Hal")
SENTENCES = ("The rain fell on the hills.", "A cart went by on the road.", "Nobody spoke for a while.", "It was late.")


def rows(count: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a batch of random rows, in which a model must find the values of keys: `input_ids` and `labels`, int64.

    Both have the shape (count, length). The first half of a row is hay (random tokens), with one needle for each key at
    a random position: a token that represents the key and its value. Every token of the second half is a key, and the
    model must predict the key's value as the next token. Attention must therefore reach back into the first half.

    Args:
        count: the number of rows.
        length: the number of tokens of a row.
        generator: the random generator, on the CPU.
    """
    half = length // 2
    ids = torch.randint(HAY, (count, length), generator=generator)
    labels = torch.full((count, length), IGNORED)
    values = torch.randint(VALUES, (count, KEYS), generator=generator)
    places = torch.rand(count, half, generator=generator).argsort(1)[:, :KEYS]
    ids.scatter_(1, places, HAY + torch.arange(KEYS) * VALUES + values)
    asked = torch.randint(KEYS, (count, length - half), generator=generator)
    ids[:, half:] = HAY + KEYS * VALUES + asked
    labels[:, half + 1 :] = HAY + KEYS * VALUES + KEYS + values.gather(1, asked[:, :-1])
    return {"input_ids": ids, "labels": labels}


def lengths(longest: int, steps: int) -> Iterator[tuple[int, int]]:
    """Yield (number of rows, tokens of a row) of the batch of each of `steps` steps.

    In the first two thirds of the steps the rows are short, so that the model learns the task quickly. Afterwards their
    length is doubled several times, up to `longest` tokens.

    Args:
        longest: the number of tokens of the rows in the last steps.
        steps: the number of steps.
    """
    doublings = max(0, (longest - 1).bit_length() - SHORTEST.bit_length() + 1)
    for step in range(steps):
        late = max(0.0, 3 * step / steps - 2)
        length = min(longest, SHORTEST << min(doublings, int(late * (doublings + 1))))
        yield max(1, min(32, 1024 // length)), length


def text_row(tokenizer: Any, length: int, draw: random.Random) -> dict[str, torch.Tensor]:
    """Return a batch of one row of text, in which a model must find a code: `input_ids` and `labels`, (1, length).

    The row consists of unrelated sentences (the hay) with one sentence that contains the code (the needle) in their
    first half, and of a question and its answer. All labels except those of the answer are -100, which the loss
    ignores. Raises ValueError if `length` is too short for needle and question.

    Args:
        tokenizer: the model's tokenizer.
        length: the number of tokens of the row.
        draw: the random generator.
    """

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    name, code = draw.choice(NAMES), str(draw.randrange(10000, 100000))
    asked, answer = tokens(f" What is the code of {name}? The code of {name} is"), tokens(f" {code}.")
    needle = tokens(f" The code of {name} is {code}.")
    room = length - len(asked) - len(answer) - len(needle)
    if room < 0:
        raise ValueError(f"--length {length} is too short for a question: give at least {length - room}")
    hay = tokens(" ".join(draw.choice(SENTENCES) for _ in range(room // 4 + 1)))
    while len(hay) < room:
        hay += hay
    at = draw.randrange(room // 2 + 1)
    ids = hay[:at] + needle + hay[at:room] + asked + answer
    labels = [IGNORED] * (length - len(answer)) + answer
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
