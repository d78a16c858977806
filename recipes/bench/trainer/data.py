"""The rows of tokens that every cell trains on, and a tokenizer for SFTTrainer, which wants one."""

import torch
from torch.utils.data import Dataset

DISTINCT = 64
"""Different tokens in the rows: few, so that the loss falls within the first steps and tells what is trained alike."""


class Sequences(Dataset):
    """Rows of arithmetic sequences modulo DISTINCT, `length` tokens each.

    classes: whether a row has one label, whether its stride is odd, instead of its tokens.
    """

    def __init__(self, rows: int, length: int, classes: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(0, DISTINCT, (rows, 1), generator=generator)
        stride = torch.randint(1, 9, (rows, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(length)) % DISTINCT
        self.labels = stride[:, 0] % 2 if classes else self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def make_tokenizer():
    """Return a tokenizer that is never asked to read text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(DISTINCT)} | {"<pad>": DISTINCT, "</s>": DISTINCT + 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="</s>")
