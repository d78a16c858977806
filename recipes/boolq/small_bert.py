"""A small BERT for the generated questions: its vocabulary trained on the spot, its weights new."""

import string
from collections.abc import Iterator

from tokenizers import AddedToken
from tokenizers.implementations import BertWordPieceTokenizer
from transformers import BertConfig, BertTokenizer

VOCABULARY_SIZE = 400
MAX_TOKENS = 512
HIDDEN_SIZE = 128


def train_tokenizer(texts: Iterator[str]) -> BertTokenizer:
    """Train a lower-casing WordPiece vocabulary on `texts`; equal texts give equal vocabularies.

    The trainer numbers the letters inside of words in the order of a hash table, and settles ties between
    pieces by those numbers: two runs would differ. Tokens named beforehand keep their place, so the letters are.
    """
    first: list[str | AddedToken] = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"##{letter}" for letter in string.ascii_lowercase),
    ]
    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(
        texts, vocab_size=VOCABULARY_SIZE, min_frequency=1, special_tokens=first, show_progress=False
    )
    return BertTokenizer(vocab=trained.get_vocab(), do_lower_case=True, model_max_length=MAX_TOKENS)


def small_bert_config(vocabulary_size: int) -> BertConfig:
    """Two layers of width 128, without dropout.

    New weights are wide (BERT draws them with 0.02) and heads are many: attention then tells words apart from
    the first step, and the plateau before the model relates question and passage stays short.
    """
    return BertConfig(
        vocab_size=vocabulary_size,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=8,
        intermediate_size=2 * HIDDEN_SIZE,
        max_position_embeddings=MAX_TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.15,
    )
