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
    """Train a lower-case WordPiece vocabulary on `texts`. Equal texts give equal vocabularies in every run.

    The trainer numbers the letters inside words (such as "##a") in the order of a hash table, which differs between
    runs, and uses these numbers to choose between equally frequent pieces. The numbers of special tokens are fixed.
    Therefore the letters are passed as special tokens.
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
    """Return the configuration of a BERT with two layers of width 128, without dropout.

    New weights have a large standard deviation (0.15, while BERT's is 0.02), and the layers have many heads. Attention
    then distinguishes words from the first step, so that the model learns earlier to relate question and passage.
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
