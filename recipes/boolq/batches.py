"""From questions to batches: encoded as pairs, dealt to the ranks, and put back in order afterwards."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from boolq.data import Example


class Rows(Dataset):
    """Encoded pairs: of each what the tokenizer has made of it, and "labels", 0 or 1."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def labels(self) -> torch.Tensor:
        """All labels, int64 of shape (rows,)."""
        return torch.tensor([row["labels"] for row in self.rows])


def encode(examples: list[Example], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Rows:
    """Encode (question, passage) pairs of at most `max_length` tokens; only the passage is cut.

    Raises ValueError when a
    question leaves no room for one token of its passage.
    """
    questions = [example.question for example in examples]
    check_question_lengths(questions, tokenizer, max_length)
    columns = tokenizer(
        questions, [example.passage for example in examples], truncation="only_second", max_length=max_length
    )
    return Rows(
        [
            {name: columns[name][row] for name in columns} | {"labels": int(example.label)}
            for row, example in enumerate(examples)
        ]
    )


def check_question_lengths(questions: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    lengths = [len(ids) for ids in tokenizer(questions, add_special_tokens=False)["input_ids"]]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    needed = lengths[longest] + tokenizer.num_special_tokens_to_add(pair=True) + 1
    if needed > max_length:
        raise ValueError(
            f"the question {questions[longest]!r} has {lengths[longest]} tokens and leaves no room for its "
            f"passage in --max-length {max_length}: give at least {needed}"
        )


def training_batches(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, batch_size: int, *, rank: int, world_size: int, seed: int
) -> tuple[DataLoader, DistributedSampler]:
    """Shuffled batches of `batch_size` rows for one rank; the sampler is told each epoch's number.

    Together the ranks see, step by step, the very rows that one process with batch size
    `world_size * batch_size` sees: the sampler deals one common permutation like a deck of cards.
    Rows that do not fill a step of all ranks are left out.
    """
    sampler = DistributedSampler(rows, world_size, rank, shuffle=True, seed=seed, drop_last=True)
    return DataLoader(
        rows, batch_size, sampler=sampler, drop_last=True, collate_fn=DataCollatorWithPadding(tokenizer)
    ), sampler


def validation_batches(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, batch_size: int, *, rank: int, world_size: int
) -> DataLoader:
    """Every row at least once, in order; the sampler repeats some so that all ranks have as many."""
    sampler = DistributedSampler(rows, world_size, rank, shuffle=False)
    return DataLoader(rows, batch_size, sampler=sampler, collate_fn=DataCollatorWithPadding(tokenizer))


def in_order(gathered: torch.Tensor, world_size: int, rows: int) -> torch.Tensor:
    """Undo the dealing: ranks' results one after the other, shape (world_size * n,), to shape (rows,).

    Rank r holds rows r, r + world_size, ...; what lies beyond `rows` are the sampler's repetitions.
    """
    return gathered.view(world_size, -1).t().reshape(-1)[:rows]
