"""A sharded GPT: embeddings and a TransformerBlockList of blocks."""

import torch

import hf_bmtrain as bmt
from gpt2.layers import Embedding, LayerNorm, TransformerBlock


class GPT(bmt.DistributedModule):
    """GPT-2 (Radford et al. 2019), whose output layer is tied to the embedding of tokens.

    Args:
        num_layers: the number of blocks (transformer layers).
        vocab_size: the number of different tokens.
        dim_model: the size of the hidden states.
        dim_head: the size of each attention head.
        num_heads: the number of attention heads.
        dim_ff: the inner size of the feed-forward layers.
        max_distance: the maximum number of tokens in a row, for each of which there is a position embedding.
        bias: whether linear layers and layer normalizations have a bias.
        dtype: the dtype of the parameters; None for torch's default dtype.
        use_checkpoint: whether to recompute each block in backward instead of keeping its activations.
    """

    def __init__(
        self,
        num_layers: int,
        vocab_size: int,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        dim_ff: int,
        max_distance: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        use_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.tokens = Embedding(vocab_size, dim_model, 0.02, dtype)
        self.positions = Embedding(max_distance, dim_model, 0.01, dtype)
        blocks = (
            TransformerBlock(num_layers, dim_model, dim_head, num_heads, dim_ff, bias, dtype) for _ in range(num_layers)
        )
        self.blocks = bmt.TransformerBlockList(
            bmt.CheckpointBlock(block, use_checkpoint=use_checkpoint) for block in blocks
        )
        self.norm = LayerNorm(dim_model, bias, dtype)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at every position, (batch, length, vocab_size). Attention is causal.

        Args:
            inputs: (batch, length), int64, the tokens.
            positions: (batch, length), int64, from 0 to max_distance - 1.
            mask: (batch, length), bool, False for padding.

        Raises:
            ValueError: `length` exceeds `max_distance`.
        """
        length = inputs.shape[1]
        if length > self.max_distance:
            raise ValueError(f"{length} tokens exceed the model's {self.max_distance} positions: increase max_distance")
        before = torch.ones(length, length, dtype=torch.bool, device=inputs.device).tril()
        x = self.blocks(self.tokens(inputs) + self.positions(positions), before & mask[:, None, None, :])
        return self.tokens.project(self.norm(x))
