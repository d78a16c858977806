"""A small BERT for the generated questions: its vocabulary trained on the spot, its weights new."""

from collections.abc import Iterable

from tokenizers.implementations import BertWordPieceTokenizer
from transformers import BertConfig, BertTokenizer

VOCABULARY_SIZE = 400
MAX_TOKENS = 512
HIDDEN_SIZE = 128


def train_tokenizer(texts: Iterable[str]) -> BertTokenizer:
    """Train a lower-casing WordPiece vocabulary on `texts`; equal texts give equal vocabularies."""
    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=VOCABULARY_SIZE, min_frequency=1, show_progress=False)
    return BertTokenizer(vocab=trained.get_vocab(), do_lower_case=True, model_max_length=MAX_TOKENS)


def small_bert_config(vocabulary_size: int) -> BertConfig:
    """Two layers of width 128, without dropout.

    New weights are wide (BERT draws them with 0.02): attention then tells words apart from the first
    step, and the long plateau before the model relates question and passage becomes short.
    """
    return BertConfig(
        vocab_size=vocabulary_size,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN_SIZE,
        max_position_embeddings=MAX_TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.15,
    )
