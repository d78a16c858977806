"""The layers of a GPT, built from bmt.DistributedModule and bmt.DistributedParameter.

Every parameter is sharded when it is created. `bmt.init_parameters` gives the parameters their initial values.
"""

import math

import torch
import torch.nn.functional as F

import hf_bmtrain as bmt


def filled(function, *shape: int, dtype: torch.dtype | None, **arguments) -> bmt.DistributedParameter:
    """Return a sharded parameter, to which `bmt.init_parameters` applies an initialization function.

    Args:
        function: such as torch.nn.init.normal_; called as `function(tensor, **arguments)`.
        *shape: the full shape of the parameter.
        dtype: its dtype; None for torch's default dtype.
        **arguments: keyword arguments for `function`.
    """
    initializer = bmt.ParameterInitializer(function, **arguments)
    return bmt.DistributedParameter(torch.empty(shape, dtype=dtype), init_method=initializer)


class Linear(bmt.DistributedModule):
    """Linear layer from (..., dim_in) to (..., dim_out). Weights are drawn from N(0, std²), and the bias is zero."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool, std: float, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = filled(torch.nn.init.normal_, dim_out, dim_in, dtype=dtype, std=std)
        self.bias = filled(torch.nn.init.zeros_, dim_out, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(bmt.DistributedModule):
    """Embedding of indices (...), from 0 to size - 1, as vectors (..., dim). Weights are drawn from N(0, std²)."""

    def __init__(self, size: int, dim: int, std: float, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = filled(torch.nn.init.normal_, size, dim, dtype=dtype, std=std)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return F.embedding(indices, self.weight)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., size) of all indices: the products of `x` (..., dim) with all embedding vectors."""
        return F.linear(x, self.weight)


class LayerNorm(bmt.DistributedModule):
    """Layer normalization over the last dimension, of size `dim`, computed in float32."""

    def __init__(self, dim: int, bias: bool, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = filled(torch.nn.init.ones_, dim, dtype=dtype)
        self.bias = filled(torch.nn.init.zeros_, dim, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Attention(bmt.DistributedModule):
    """Multi-head self-attention.

    `forward` takes x (batch, length, dim_model) and mask (batch, 1, length, length), a bool tensor that is True where a
    query (dimension 2) attends to a key (dimension 3). It returns a tensor of the shape of x.
    """

    def __init__(
        self, dim_model: int, dim_head: int, num_heads: int, bias: bool, std: float, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.num_heads, self.dim_head = num_heads, dim_head
        self.queries_keys_values = Linear(dim_model, 3 * num_heads * dim_head, bias, 0.02, dtype)
        self.out = Linear(num_heads * dim_head, dim_model, bias, std, dtype)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        together = self.queries_keys_values(x).view(batch, length, 3, self.num_heads, self.dim_head)
        queries, keys, values = together.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(bmt.DistributedModule):
    """Two linear layers, dim_model to dim_ff and back, with GELU between them."""

    def __init__(self, dim_model: int, dim_ff: int, bias: bool, std: float, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.up = Linear(dim_model, dim_ff, bias, 0.02, dtype)
        self.down = Linear(dim_ff, dim_model, bias, std, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class TransformerBlock(bmt.DistributedModule):
    """Transformer layer: pre-norm attention and feed-forward with residual connections (Radford et al. 2019, 2.3).

    `forward` takes x and mask as `Attention` does. `num_layers` is the number of layers of the whole model.
    """

    def __init__(
        self,
        num_layers: int,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        dim_ff: int,
        bias: bool,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        # The std of the layers whose outputs are added to x. The sum of these 2 * num_layers outputs then has the same
        # scale for every depth.
        std = 0.02 / math.sqrt(2 * num_layers)
        self.attention_norm = LayerNorm(dim_model, bias, dtype)
        self.attention = Attention(dim_model, dim_head, num_heads, bias, std, dtype)
        self.feed_forward_norm = LayerNorm(dim_model, bias, dtype)
        self.feed_forward = FeedForward(dim_model, dim_ff, bias, std, dtype)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.feed_forward(self.feed_forward_norm(x))
