"""Text from files or generated, cut into rows of tokens, distributed over the ranks."""

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer

IGNORED = -100  # the loss ignores targets with this value
HELD_OUT_SHARE = 0.1

ANIMALS = ("hare", "owl", "fox", "crow", "toad", "wren", "mole", "stag")
PLACES = ("hill", "pond", "barn", "wood", "field", "bridge", "mill", "cave")
THINGS = ("berry", "feather", "stone", "acorn", "ribbon", "shell", "candle", "bell")


def generate_text(seed: int, stories: int = 3000) -> str:
    """Return generated short stories, one per line. The last sentence of each follows from the sentences before it.

    No two stories are equal, so those that are held out are not among the others.

    Args:
        seed: the seed of the random choices.
        stories: the number of stories, at most the 3,584 that there are.
    """
    random_ = random.Random(seed)
    chosen: dict[str, None] = {}
    while len(chosen) < stories:
        chosen[_story(random_)] = None
    return "\n".join(chosen)


def _story(random_: random.Random) -> str:
    giver, taker = random_.sample(ANIMALS, 2)
    place, thing = random_.choice(PLACES), random_.choice(THINGS)
    return (
        f"The {giver} found a {thing} near the {place}. The {taker} came to the {place} and saw the {thing}. "
        f"So the {giver} gave the {taker} the {thing}, and now the {taker} has the {thing}."
    )


def read_text(files: Sequence[Path]) -> str:
    """Return the concatenated contents of the files. Raises ValueError or OSError with the name of an unusable file."""
    texts = []
    for file in files:
        try:
            texts.append(file.read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): convert it to UTF-8"
            ) from error
    return "\n".join(texts)


def train_tokenizer(text: str, vocab_size: int) -> ByteLevelBPETokenizer:
    """Train a tokenizer on `text`: a byte-pair encoding of at most `vocab_size` tokens, which can encode any text."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.splitlines(), vocab_size=vocab_size, min_frequency=2, show_progress=False)
    return tokenizer


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, with the next tokens as targets.

    Attributes:
        tokens: (rows, length + 1), int64. The first `length` tokens of a row are inputs, the last `length` are targets.
        lengths: (rows,), int64, the number of targets of each row that are not padding.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def fingerprint(self) -> int:
        return zlib.crc32(self.tokens.numpy().tobytes())

    def batch(self, chosen: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs (batch, length), lengths (batch,) and targets (batch, length) of some rows, on `device`.

        The lengths are the numbers of targets that are not padding. Targets that are padding are `IGNORED`.

        Args:
            chosen: (batch,), int64, the indices of the rows.
            device: where the results are stored.
        """
        tokens, lengths = self.tokens[chosen].to(device), self.lengths[chosen].to(device)
        beyond = torch.arange(tokens.shape[1] - 1, device=device) >= lengths[:, None]
        return tokens[:, :-1].contiguous(), lengths, tokens[:, 1:].masked_fill(beyond, IGNORED)


def cut(text: str, tokenizer: ByteLevelBPETokenizer, length: int) -> tuple[Rows, Rows]:
    """Cut a text into rows. Return the training rows, and the held-out rows, which are the last tenth of the text.

    Args:
        text: the text.
        tokenizer: encodes the text.
        length: the number of tokens of a row.

    Raises:
        ValueError: the text is too short for one training row and one held-out row.
    """
    numbers = torch.tensor(tokenizer.encode(text).ids)
    tokens, lengths = _rows(numbers, length)
    held_out = max(1, round(HELD_OUT_SHARE * len(tokens)))
    if len(tokens) <= held_out:
        raise ValueError(
            f"{len(numbers)} tokens make {len(tokens)} row(s) of {length}: give --data more text or a smaller --length"
        )
    return Rows(tokens[:-held_out], lengths[:-held_out]), Rows(tokens[-held_out:], lengths[-held_out:])


def _rows(numbers: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the tokens `numbers` (n,) into rows. Return the tokens and lengths of the rows, as in `Rows`.

    A row begins with the last token of the row before it, because that token is a target there and an input here. The
    last row may be padded.
    """
    count = max(1, -(-(len(numbers) - 1) // length))
    padded = torch.zeros(count * length + 1, dtype=torch.int64)
    padded[: len(numbers)] = numbers
    lengths = torch.full((count,), length)
    lengths[-1] = len(numbers) - 1 - (count - 1) * length
    return padded.unfold(0, length + 1, length), lengths


def endless_batches(rows: Rows, batch_size: int, rank: int, world_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield the indices of this rank's rows of every step, int64 (batch_size,), forever, in random order.

    In each step, N ranks with b rows each get together the rows that one rank with N·b rows would get.

    Args:
        rows: the training rows, the same on all ranks.
        batch_size: the number of rows per rank in each step.
        rank: this rank.
        world_size: the number of ranks.
        seed: the seed of the order, the same on all ranks.

    Raises:
        ValueError: there are fewer than `batch_size * world_size` rows.
    """
    generator = torch.Generator().manual_seed(seed)
    at_once = batch_size * world_size
    if at_once > len(rows):
        raise ValueError(
            f"{len(rows)} training rows do not fill one step of {at_once} over all processes: give --data more text, "
            "or a smaller --batch-size or --length"
        )
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for start in range(0, len(rows) - at_once + 1, at_once):
            yield order[start + rank : start + at_once : world_size]
