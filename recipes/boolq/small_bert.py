"""A small new BERT for the generated questions, and its vocabulary."""

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

    The trainer numbers the letters inside of words in the order of a hash table and breaks ties between pieces by those
    numbers, so two runs would differ. Special tokens keep their place, therefore the letters are passed as such.
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
    """Return a configuration of two layers of width 128, without dropout.

    The standard deviation of new weights is large (BERT's is 0.02) and heads are many: attention then distinguishes
    words from the first step, and the plateau before the model relates question and passage is short.
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
