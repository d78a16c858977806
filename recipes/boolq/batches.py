"""Tokenized rows, their distribution over the ranks, and the original order of gathered results."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from boolq.data import Example


class Rows(Dataset):
    """Dataset of tokenized (question, passage) pairs.

    Args:
        rows: a dict for each pair, with the tokenizer's outputs (such as "input_ids") and "labels", which is 0 or 1.
    """

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
    """Tokenize (question, passage) pairs. Pairs of more than `max_length` tokens are cut at the end of the passage.

    Raises ValueError if a question is so long that not even one token of its passage would remain.

    Args:
        examples: the questions, passages and answers.
        tokenizer: the model's tokenizer.
        max_length: the maximum number of tokens of a pair, including special tokens.
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
    """Return a loader of one rank's shuffled batches, and the loader's sampler.

    Call the sampler's `set_epoch` before each epoch. In each step, all ranks together get the rows that one process
    with batch size `world_size * batch_size` would get, because the sampler distributes one permutation of the rows
    round-robin. Rows at the end of an epoch that do not suffice for a step of all ranks are dropped.

    Args:
        rows: the training rows, the same on all ranks.
        tokenizer: pads the rows of a batch to the same length.
        batch_size: the number of rows per rank in each step.
        rank: the rank that gets the batches.
        world_size: the number of ranks.
        seed: the seed of the permutations, the same on all ranks.
    """
    sampler = DistributedSampler(rows, world_size, rank, shuffle=True, seed=seed, drop_last=True)
    return DataLoader(
        rows, batch_size, sampler=sampler, drop_last=True, collate_fn=DataCollatorWithPadding(tokenizer)
    ), sampler


def validation_batches(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, batch_size: int, *, rank: int, world_size: int
) -> DataLoader:
    """Return a loader of one rank's validation batches: rows rank, rank + world_size, rank + 2 * world_size, ...

    If the number of rows is not a multiple of the number of ranks, the sampler repeats some rows at the end, so that
    all ranks get equally many. `in_order` removes the results of repeated rows.

    Args:
        rows: the validation rows, the same on all ranks.
        tokenizer: pads the rows of a batch to the same length.
        batch_size: the number of rows per rank in a batch.
        rank: the rank that gets the batches.
        world_size: the number of ranks.
    """
    sampler = DistributedSampler(rows, world_size, rank, shuffle=False)
    return DataLoader(rows, batch_size, sampler=sampler, collate_fn=DataCollatorWithPadding(tokenizer))


def in_order(gathered: torch.Tensor, world_size: int, rows: int) -> torch.Tensor:
    """Bring results that were gathered from all ranks into the order of the rows of the data set.

    Rank r computed the results of the rows r, r + world_size, ... (see `validation_batches`).

    Args:
        gathered: (world_size * n,), the n results of each rank, in rank order.
        world_size: the number of ranks.
        rows: the number of rows of the data set.

    Returns:
        (rows,), without the results of the rows that the sampler repeated.
    """
    return gathered.view(world_size, -1).t().reshape(-1)[:rows]
