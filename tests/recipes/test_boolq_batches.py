"""Only passages are cut; the ranks together see the rows of one process; gathered results are reordered."""

import pytest
import torch

from boolq.batches import Rows, encode, in_order, training_batches, validation_batches
from boolq.data import Example
from boolq.small_bert import train_tokenizer
from cases import full, in_full, rows_in_full

QUESTION, PASSAGE = (
    "is the red kite in the barn",
    "the red kite is in the barn and the blue drum is in the mill",
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([QUESTION, PASSAGE] * 3)


def numbered(count: int) -> Rows:
    """Rows of two lengths, identified by their first token."""
    lengths = [1 + row % 2 for row in range(count)]
    return Rows([{"input_ids": [row] * n, "attention_mask": [1] * n, "labels": n - 1} for row, n in enumerate(lengths)])


def firsts(batch) -> list[int]:
    return batch["input_ids"][:, 0].tolist()


def test_a_pair_keeps_its_question_and_loses_the_end_of_its_passage(tokenizer):
    whole, cut = (encode([Example(QUESTION, PASSAGE, True)], tokenizer, length)[0] for length in (64, 14))
    question = tokenizer(QUESTION)["input_ids"]  # [CLS] question [SEP]
    separator = tokenizer.sep_token_id
    assert len(cut["input_ids"]) == 14 < len(whole["input_ids"])
    assert cut["input_ids"][: len(question)] == question
    assert cut["input_ids"][:-1] == whole["input_ids"][:13]
    assert cut["input_ids"][-1] == separator
    assert cut["token_type_ids"] == [0] * len(question) + [1] * (14 - len(question))
    assert cut["labels"] == 1


@full
def test_a_question_that_leaves_no_room_is_named_with_the_length_it_needs(tokenizer):
    rows = [Example("is it", PASSAGE, True), Example(QUESTION, PASSAGE, True)]
    needed = len(tokenizer(QUESTION)["input_ids"]) + 2  # one token of the passage and [SEP]
    assert len(encode(rows, tokenizer, needed)[1]["input_ids"]) == needed
    with pytest.raises(ValueError, match=rf"'{QUESTION}' has \d+ tokens .* give at least {needed}$"):
        encode(rows, tokenizer, needed - 1)


@pytest.mark.parametrize(("world_size", "batch_size"), [(3, 2), *rows_in_full([(2, 4), (4, 1)])])
@pytest.mark.parametrize("rows", [25, *in_full(23)])
def test_ranks_see_together_the_steps_of_one_process(tokenizer, world_size, batch_size, rows):
    def steps(world: int, size: int, epoch: int) -> list[set[int]]:
        ranks = [
            training_batches(numbered(rows), tokenizer, size, rank=rank, world_size=world, seed=5)
            for rank in range(world)
        ]
        for _, sampler in ranks:
            sampler.set_epoch(epoch)
        loaders = (loader for loader, _ in ranks)
        return [{n for part in parts for n in firsts(part)} for parts in zip(*loaders, strict=True)]

    for epoch in (1, 2):
        alone = steps(1, world_size * batch_size, epoch)
        assert steps(world_size, batch_size, epoch) == alone
        assert len(alone) == rows // (world_size * batch_size)
        assert all(len(step) == world_size * batch_size for step in alone)
    assert steps(1, world_size * batch_size, 1) != steps(1, world_size * batch_size, 2)


@pytest.mark.parametrize("world_size", [3, *in_full(1, 4)])
@pytest.mark.parametrize("rows", [10, *in_full(8, 11)])
def test_every_validation_row_counts_once_and_in_order(tokenizer, world_size, rows):
    ranks = []
    for rank in range(world_size):
        loader = validation_batches(numbered(rows), tokenizer, 2, rank=rank, world_size=world_size)
        ranks.append(torch.tensor([n for batch in loader for n in firsts(batch)]))
    assert len({len(rank) for rank in ranks}) == 1  # or gathering would not work
    gathered = torch.cat(ranks)
    assert len(gathered) == -(-rows // world_size) * world_size
    assert in_order(gathered, world_size, rows).tolist() == list(range(rows))


@full
def test_a_batch_is_padded_to_its_longest_row(tokenizer):
    batch = next(iter(validation_batches(numbered(2), tokenizer, 2, rank=0, world_size=1)))
    assert batch["input_ids"].tolist() == [[0, tokenizer.pad_token_id], [1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["labels"].tolist() == [0, 1]
