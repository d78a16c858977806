"""Tokenized rows, their distribution over the ranks, and the original order of gathered results."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from boolq.data import Example


class Rows(Dataset):
    """Dataset of tokenized pairs: the tokenizer's columns and "labels", 0 or 1."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def labels(self) -> torch.Tensor:
        """Return all labels, int64 of shape (rows,)."""
        return torch.tensor([row["labels"] for row in self.rows])


def encode(examples: list[Example], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Rows:
    """Tokenize (question, passage) pairs to at most `max_length` tokens; only the passage is cut.

    Raises ValueError if a question leaves no room for one token of its passage.
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
    """Return shuffled batches of `batch_size` rows for one rank, and their sampler.

    Call the sampler's `set_epoch` before each epoch. In each step the ranks together see the rows that one process with
    batch size `world_size * batch_size` sees: the sampler distributes one permutation round robin. Rows that do not
    fill a step of all ranks are dropped.
    """
    sampler = DistributedSampler(rows, world_size, rank, shuffle=True, seed=seed, drop_last=True)
    return DataLoader(
        rows, batch_size, sampler=sampler, drop_last=True, collate_fn=DataCollatorWithPadding(tokenizer)
    ), sampler


def validation_batches(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, batch_size: int, *, rank: int, world_size: int
) -> DataLoader:
    """Return batches of every row in order. The sampler repeats rows so that all ranks have the same number."""
    sampler = DistributedSampler(rows, world_size, rank, shuffle=False)
    return DataLoader(rows, batch_size, sampler=sampler, collate_fn=DataCollatorWithPadding(tokenizer))


def in_order(gathered: torch.Tensor, world_size: int, rows: int) -> torch.Tensor:
    """Reorder gathered results, shape (world_size * n,), to the order of the rows, shape (rows,).

    Rank r holds rows r, r + world_size, ...; the sampler's repetitions are dropped.
    """
    return gathered.view(world_size, -1).t().reshape(-1)[:rows]
