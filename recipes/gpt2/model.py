"""A sharded GPT: embeddings and a TransformerBlockList of blocks."""

import torch

import hf_bmtrain as bmt
from gpt2.layers import Embedding, LayerNorm, TransformerBlock


class GPT(bmt.DistributedModule):
    """GPT-2 (Radford et al. 2019); the output layer is tied to the embedding of tokens.

    num_layers, dim_model, dim_head, num_heads, dim_ff: sizes of the blocks. max_distance: number of positions.
    use_checkpoint: recompute each block in backward instead of keeping its activations.
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
        """Return the next token's scores (batch, length, vocab_size).

        inputs, positions: int64 (batch, length). mask: (batch, length), False for padding. Attention is causal.
        """
        length = inputs.shape[1]
        if length > self.max_distance:
            raise ValueError(f"{length} tokens, but the model has {self.max_distance} positions (max_distance)")
        before = torch.ones(length, length, dtype=torch.bool, device=inputs.device).tril()
        x = self.blocks(self.tokens(inputs) + self.positions(positions), before & mask[:, None, None, :])
        return self.tokens.project(self.norm(x))
