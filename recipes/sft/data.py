"""Prompts with completions, from a file of JSON lines or generated from stories, and their rows of tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from boolq.data import numbered_lines, parse_line, shortened

IGNORED = -100  # the loss ignores targets with this value
HELD_OUT = 32  # the number of held-out rows, but at most a tenth of all rows


@dataclass(frozen=True)
class Example:
    prompt: str
    completion: str


def ask(stories: Iterable[str]) -> list[Example]:
    """Return an example for each story: its first two sentences and a question as prompt, the answer as completion.

    The question is who has the thing at the end of the story. The last sentence, which contains the answer, is left
    out.

    stories: the lines of the text that `gpt2.data.generate_text` returns.
    """
    examples = []
    for story in stories:
        found, came, _, end = story.replace(", and now ", ". ").split(". ")
        taker, thing = end.removesuffix(".").removeprefix("the ").split(" has the ")
        examples.append(Example(f"{found}. {came}. Who has the {thing} now?", f" The {taker}."))
    return examples


def read(file: Path) -> list[Example]:
    """Read examples from a file of JSON lines, each with texts under the keys "prompt" and "completion".

    Raises FileNotFoundError if there is no such file, and ValueError, which names the line, if a line is invalid.
    """
    if not file.exists() or file.is_dir():
        raise FileNotFoundError(f"--data {file}: no such file; give a file of JSON lines")
    examples = []
    for place, line in numbered_lines(file):
        row = parse_line(line, place)
        for key in ("prompt", "completion"):
            if key not in row:
                raise ValueError(f"{place}: no key {key!r} (found {', '.join(map(repr, row))}); repair the line")
            if not isinstance(row[key], str) or (key == "completion" and not row[key]):
                raise ValueError(f"{place}: {key!r} must be a text, found {shortened(row[key])}; repair the line")
        examples.append(Example(row["prompt"], row["completion"]))
    return examples


def cut(examples: Sequence[Example]) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return the examples to train on, and the held-out examples: the last tenth, at most `HELD_OUT`.

    Raises ValueError if there are fewer than 10 examples.
    """
    count = min(HELD_OUT, len(examples) // 10)
    if count == 0:
        raise ValueError(f"{len(examples)} rows are too few: give --data at least 10")
    return examples[:-count], examples[-count:]


class Rows(Dataset):
    """Dataset of tokenized examples. A row is a dict of two lists, "input_ids" and "labels".

    The labels of the prompt are `IGNORED`, so only the completion is learned. If a row is too long, the beginning of
    the prompt is cut, and if necessary also the end of the completion.

    Args:
        examples: the examples.
        tokenizer: encodes prompts and completions, and has an `eos_token_id`, which is appended.
        max_length: the maximum number of tokens of a row.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: Any, max_length: int) -> None:
        self._rows = []
        for example in examples:
            prompt = tokenizer(example.prompt)["input_ids"]
            answer = tokenizer(example.completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            answer = answer[: max_length - 1]
            prompt = prompt[-(max_length - len(answer)) :]
            self._rows.append({"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return self._rows[number]
