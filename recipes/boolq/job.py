"""The model and the data of a run: a pretrained model on BoolQ, or a small BERT on generated questions."""

import argparse
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from boolq.batches import Rows, encode
from boolq.data import read_questions
from boolq.model import check_max_length, check_model_name, load_model, load_tokenizer, new_small_bert
from boolq.questions import reading_questions
from boolq.small_bert import train_tokenizer

DEFAULT_MODEL, DEFAULT_DATA = "bert-base-uncased", "super_glue/boolq"
ROWS_A_STEP = 32  # of all processes together, so that the default does not depend on their number


@dataclass(frozen=True)
class Job:
    """The model and the data of a run.

    Attributes:
        model: the classifier, in float32 on the CPU, not yet sharded.
        tokenizer: the model's tokenizer.
        train_rows: the tokenized training rows.
        validation_rows: the tokenized validation rows.
        origin: where the rows come from, for messages.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train_rows: Rows
    validation_rows: Rows
    origin: str

    def describe(self) -> str:
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        return (
            f"{type(self.model).__name__} ({size:.1f} M parameters) on {self.origin} "
            f"({len(self.train_rows)} training and {len(self.validation_rows)} validation rows)"
        )

    def fingerprint(self) -> int:
        """Return a checksum of all token ids and labels, to compare between ranks."""
        return zlib.crc32(repr((self.train_rows.rows, self.validation_rows.rows)).encode())


def prepare(options: argparse.Namespace, world_size: int, *, embedded: bool) -> Job:
    """Load the questions and the model, and set the options that were not given (`epochs`, `lr`, `batch_size`).

    Raises ValueError or OSError for wrong input. Paths and names are checked before any download.

    Args:
        options: the options of the command line; changed in place.
        world_size: the number of ranks.
        embedded: train a small new BERT on generated questions, instead of a pretrained model on BoolQ.
    """
    check_output(options.output)
    if embedded:
        questions = reading_questions(options.seed)
        tokenizer = train_tokenizer(text for row in questions.train for text in (row.question, row.passage))
        model = new_small_bert(len(tokenizer), options.seed, options.dropout)
        fill_in(options, world_size, epochs=3, lr=1e-3)
    else:
        name = options.model or DEFAULT_MODEL
        check_model_name(name)
        questions = read_questions(options.data or DEFAULT_DATA)
        tokenizer = load_tokenizer(name)
        model = load_model(name, options.seed, options.dropout)
        fill_in(options, world_size, epochs=5, lr=2e-5)
    check_max_length(options.max_length, model, tokenizer)
    train_rows = encode(questions.train, tokenizer, options.max_length)
    validation_rows = encode(questions.validation, tokenizer, options.max_length)
    check_enough_rows(train_rows, world_size * options.batch_size)
    return Job(model, tokenizer, train_rows, validation_rows, questions.origin)


def fill_in(options: argparse.Namespace, world_size: int, *, epochs: int, lr: float) -> None:
    """Set `epochs`, `lr` and `batch_size` in `options` if they were not given on the command line.

    Args:
        options: the options of the command line; changed in place.
        world_size: the number of ranks. `batch_size` becomes such that they process `ROWS_A_STEP` rows per step.
        epochs: the number of epochs, if it was not given.
        lr: the learning rate, if it was not given.
    """
    options.epochs = options.epochs or epochs
    options.lr = options.lr or lr
    options.batch_size = options.batch_size or max(1, ROWS_A_STEP // world_size)


def check_output(folder: Path) -> None:
    """Create the output folder. Raise ValueError if it cannot be written to.

    Called before training, so that this error does not come when the results are saved.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--output {folder} cannot be written to ({error}): give another folder") from error


def check_enough_rows(rows: Rows, rows_a_step: int) -> None:
    if len(rows) < rows_a_step:
        raise ValueError(
            f"{len(rows)} training rows do not fill one step of {rows_a_step} over all processes: "
            "give a smaller --batch-size"
        )
