"""BMTrain's layers whose weights are split over a tensor-parallel group. With tp_size=1 they are not split."""

from __future__ import annotations

from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engine.base.arguments import expect_flag, expect_kind, expect_number
from ...engine.blocks.distributed_module import DistributedModule, ParameterInitializer
from ...engine.runtime.world import current_world
from ...engine.sharding.parameter import DistributedParameter
from .functions import add, add_rows, features_of_all_rows, gather_features, gather_rows, share


class ReduceType(Enum):
    """How `OpParallelLinear` sums the outputs of the ranks of a tensor-parallel group.

    ALL_REDUCE gives each rank all rows (dimension 0) of the sum. REDUCE_SCATTER gives each rank 1/tp_size of the rows,
    in rank order. The number of rows must then be a multiple of tp_size.
    """

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2


class OpParallelLinear:
    """The function behind ColumnParallelLinear and RowParallelLinear, with a weight that is split over ranks.

    Use these two layers instead: they create the weight and choose the arguments. This class exists for programs that
    call BMTrain's autograd function OpParallelLinear. Do not construct it. Call `apply`, with this rank's part of the
    weight::

        OpParallelLinear.apply(
            input, weight, bias=None, gather_input=False, gather_output=False, split_input=False,
            reduce_output_type=None, async_gather_chunks=2
        )
    """

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        gather_input: bool = False,
        gather_output: bool = False,
        split_input: bool = False,
        reduce_output_type: ReduceType | None = None,
        async_gather_chunks: int = 2,
    ) -> Tensor:
        """Compute input · weightᵀ + bias, where `weight` is this rank's part of a weight that is split over ranks.

        Collective: every rank must call it, and run its backward. "All ranks" below are the tp_size ranks of this
        rank's tensor-parallel group, which compute one loss together. Rows are dimension 0, and features are the last
        dimension. With tp_size 1, this is `F.linear(input, weight, bias)`.

        `reduce_output_type` tells on which dimension the weight is split:

        * None: on its output features, as in ColumnParallelLinear. Each rank computes some of the output features.
        * A ReduceType: on its input features, as in RowParallelLinear. Each rank uses some of the input features, and
          the outputs of all ranks are summed.

        If a tensor is equal on all ranks, backward computes the same gradient of it on every rank: the gradient of the
        loss that the ranks compute together. If each rank has a part of a tensor, backward computes the gradient of
        that part.

        Args:
            input: (rows, ..., features). With `gather_input`, the rows are those of this rank, and every rank passes
                the same number of rows. Otherwise, the rows are those of all ranks. The number of features is
                in_features / tp_size if `reduce_output_type` is given and `split_input` is False, otherwise
                in_features.
            weight: (out_features / tp_size, in_features) if `reduce_output_type` is None, otherwise (out_features,
                in_features / tp_size).
            bias: (out_features / tp_size,) if `reduce_output_type` is None, otherwise (out_features,). Or None, for no
                bias. If `reduce_output_type` is given, each rank adds its bias before the outputs are summed, so the
                result contains the sum of the biases of all ranks. To add a bias only once, pass None, and add the bias
                to the result.
            gather_input: whether to all-gather the rows of all ranks first.
            gather_output: whether to all-gather the output features of all ranks. Ignored if `reduce_output_type` is
                given.
            split_input: whether `input` has all features, so that this function must select those that this rank uses.
                True is useful only if `reduce_output_type` is given.
            reduce_output_type: how to sum the outputs of all ranks. None does not sum them.
            async_gather_chunks: for compatibility with BMTrain; ignored.

        Returns:
            (rows, ..., features). With ReduceType.REDUCE_SCATTER, the rows are those of this rank. Otherwise, they are
            those of all ranks. The number of features is out_features / tp_size if `reduce_output_type` is None and
            `gather_output` is False, otherwise out_features.

        Raises:
            ValueError: with ReduceType.REDUCE_SCATTER, the number of rows is not a multiple of tp_size.
        """
        grid = current_world().grid
        if grid is None:
            return F.linear(input, weight, bias)
        if split_input and gather_input:
            x = features_of_all_rows(grid, input)
        elif gather_input:
            x = gather_rows(grid, input)
        elif split_input:
            x = share(grid, input).chunk(grid.size, -1)[grid.place]
        else:
            x = share(grid, input) if reduce_output_type is None else input
        y = F.linear(x, weight, bias)
        if reduce_output_type is not None:
            return add(grid, y) if ReduceType(reduce_output_type) is ReduceType.ALL_REDUCE else add_rows(grid, y)
        return gather_features(grid, y) if gather_output else y


def parts() -> int:
    """Return the number of ranks over which the layers of this file split their weights.

    This is the `tp_size` that was given to `init_distributed`, or 1 without tensor parallelism.
    """
    grid = current_world().grid
    return 1 if grid is None else grid.size


def _own_part(name: str, size: int) -> int:
    """Return the size of this rank's part of a dimension, or raise ValueError if `size` cannot be split evenly.

    name: the argument's name, for the error message.
    """
    expect_number(name, size, "positive and below 2**48", lambda size: 1 <= size < 2**48, integer=True)
    if size % parts():
        raise ValueError(
            f"{name}={size} must be a multiple of tp_size={parts()}, the number of ranks over which the layer is split"
        )
    return size // parts()


def _weight(rows: int, columns: int, dtype: torch.dtype | None, init_method, dim: int) -> DistributedParameter:
    if dtype is not None:
        expect_kind("dtype", dtype, torch.dtype, "a floating-point torch.dtype or None")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {dtype}")
    values = torch.zeros(rows, columns, dtype=dtype)
    return DistributedParameter(values, init_method=init_method, tp_mode=True, tp_split_dim=dim)


def _bias(size: int, dtype: torch.dtype | None, tp_mode: bool, dim: int) -> DistributedParameter:
    zeros = ParameterInitializer(torch.nn.init.zeros_)
    return DistributedParameter(
        torch.zeros(size, dtype=dtype), init_method=zeros, tp_mode=tp_mode, tp_split_dim=dim
    )  # fmt: skip


class ColumnParallelLinear(DistributedModule):
    """Linear layer y = x Aᵀ + b whose outputs are split over the ranks of a tensor-parallel group.

    Collective: every rank must create it and call its forward. With tp_size 1 nothing is split.

    `weight` (out_features / tp_size, in_features) and `bias` (out_features / tp_size,) are this rank's parts. They are
    sharded over the ranks that have the same parts. State dicts contain the whole tensors. Weight and bias are zero
    until they are loaded, or until `init_parameters` draws the weight from the Glorot normal distribution.

    Rows are dimension 0. In the shapes below, n is the number of rows that belong to one rank, the same on all ranks of
    the tensor-parallel group. N = tp_size · n is the number of rows of all ranks of the group, in rank order.

    Args:
        in_features: the size of the last dimension of the input.
        out_features: the total number of output features, a multiple of tp_size.
        bias: whether the layer has a bias.
        dtype: a floating-point dtype. None uses torch's default dtype.
        gather_output: True: the output is (N, ..., out_features), equal on all ranks of the group. False: it is
            (N, ..., out_features / tp_size), the features that this rank computes.
        gather_input: True: the input is (n, ..., in_features), this rank's rows, and is all-gathered. False: it is
            (N, ..., in_features), equal on all ranks of the group.
        async_gather_chunks: for compatibility with BMTrain; ignored.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a size is not positive, or `out_features` is not a multiple of tp_size.
        ValueError: `dtype` is not a floating-point dtype.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        gather_input: bool = True,
        async_gather_chunks: int = 2,
    ) -> None:
        super().__init__()
        for name, flag in (("bias", bias), ("gather_output", gather_output), ("gather_input", gather_input)):
            expect_flag(name, flag)
        expect_number("in_features", in_features, "positive", lambda size: size >= 1, integer=True)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.gather_input = gather_output, gather_input
        self.out_features_per_partition = _own_part("out_features", out_features)
        glorot = ParameterInitializer(torch.nn.init.xavier_normal_)
        self.weight = _weight(self.out_features_per_partition, in_features, dtype, glorot, 0)
        self.bias = _bias(self.out_features_per_partition, dtype, True, 0) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return OpParallelLinear.apply(input, self.weight, self.bias, self.gather_input, self.gather_output)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class RowParallelLinear(DistributedModule):
    """Linear layer y = x Aᵀ + b whose inputs are split over the ranks of a tensor-parallel group.

    Collective: every rank must create it and call its forward. With tp_size 1 nothing is split.

    `weight` is this rank's part (out_features, in_features / tp_size), which is sharded over the ranks that have the
    same part. `bias` (out_features,) is not split. State dicts contain the whole tensors. Weight and bias are zero
    until they are loaded, or until `init_parameters` draws the weight from the Glorot normal distribution.

    Rows are dimension 0. In the shapes below, n is the number of rows that belong to one rank, the same on all ranks of
    the tensor-parallel group. N = tp_size · n is the number of rows of all ranks of the group, in rank order.

    Args:
        in_features: the total number of input features, a multiple of tp_size.
        out_features: the size of the last dimension of the output.
        bias: whether the layer has a bias.
        dtype: a floating-point dtype. None uses torch's default dtype.
        split_input: whether the layer itself splits the features of the input. True: each rank passes
            (n, ..., in_features), its own rows with all features. False: each rank passes
            (N, ..., in_features / tp_size), all rows with its own features, as ColumnParallelLinear returns them by
            default.
        all_reduce_output: whether every rank gets the output for all rows. True: the output is (N, ..., out_features),
            equal on all ranks of the group. False: it is (n, ..., out_features), for this rank's own rows.
        async_chunks: for compatibility with BMTrain; ignored.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a size is not positive, or `in_features` is not a multiple of tp_size.
        ValueError: `dtype` is not a floating-point dtype.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        split_input: bool = False,
        all_reduce_output: bool = False,
        async_chunks: int = 2,
    ) -> None:
        super().__init__()
        for name, flag in (("bias", bias), ("split_input", split_input), ("all_reduce_output", all_reduce_output)):
            expect_flag(name, flag)
        expect_number("out_features", out_features, "positive", lambda size: size >= 1, integer=True)
        self.in_features, self.out_features = in_features, out_features
        self.split_input, self.all_reduce_output = split_input, all_reduce_output
        self.in_features_per_partition = _own_part("in_features", in_features)
        glorot = ParameterInitializer(torch.nn.init.xavier_normal_)
        self.weight = _weight(out_features, self.in_features_per_partition, dtype, glorot, 1)
        # The third argument is `tp_mode`, which decides how the bias's gradient is reduced. With all_reduce_output, all
        # ranks of a group add the bias to the same rows. Otherwise each rank adds it to its own rows.
        self.bias = _bias(out_features, dtype, all_reduce_output, -1) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        kind = ReduceType.ALL_REDUCE if self.all_reduce_output else ReduceType.REDUCE_SCATTER
        split = self.split_input
        out = OpParallelLinear.apply(input, self.weight, None, split, False, split, kind)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class VPEmbedding(DistributedModule):
    """Embedding whose vocabulary is split over a tensor-parallel group. It also projects hidden states to logits.

    Collective: every rank must create it and call its forward. With tp_size 1 nothing is split.

    `weight` is this rank's part (vocab_size / tp_size, embedding_size), which is sharded over the ranks that have the
    same part. State dicts contain the whole weight. The weight is zero until it is loaded, or until `init_parameters`
    draws it from a normal distribution.

    Args:
        vocab_size: the total number of tokens in the vocabulary, a multiple of tp_size.
        embedding_size: the size of an embedding.
        dtype: a floating-point dtype. None uses torch's default dtype.
        init_mean: the mean of the normal distribution.
        init_std: the standard deviation of the normal distribution.
        same_rows: True: the inputs of forward are equal on all ranks of the group. False: each rank passes different
            rows (dimension 0), the same number on every rank.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a size is not positive, or `vocab_size` is not a multiple of tp_size.
        ValueError: `dtype` is not a floating-point dtype.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        dtype: torch.dtype | None = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1,
        same_rows: bool = False,
    ) -> None:
        super().__init__()
        expect_flag("same_rows", same_rows)
        expect_number("embedding_size", embedding_size, "positive", lambda size: size >= 1, integer=True)
        self.dim_model, self.same_rows = embedding_size, same_rows
        self.vocab_size_per_partition = _own_part("vocab_size", vocab_size)
        grid = current_world().grid
        self.start_index = 0 if grid is None else grid.place * self.vocab_size_per_partition
        self.end_index = self.start_index + self.vocab_size_per_partition
        normal = ParameterInitializer(torch.nn.init.normal_, mean=init_mean, std=init_std)
        self.weight = _weight(self.vocab_size_per_partition, embedding_size, dtype, normal, 0)

    def forward(self, x: Tensor, projection: bool = False) -> Tensor:
        """Look up tokens, or project hidden states to logits.

        Collective: every rank must call it.

        Args:
            x: tokens (n, ...) or, with `projection`, hidden states (n, ..., embedding_size).
            projection: whether `x` is hidden states to project, instead of tokens to look up.

        Returns:
            Without `projection`, the embeddings of `x`, (n, ..., embedding_size).
            With `projection`, logits for this rank's part of the vocabulary, vocab_size / tp_size consecutive tokens.
            If the layer was created with same_rows=True, they are (n, ..., vocab_size / tp_size), for the rows of `x`.
            Otherwise they are (tp_size · n, ..., vocab_size / tp_size), for the rows of all ranks of the
            tensor-parallel group, in rank order.
            On CUDA, where a check would make the host wait, the embedding of a token that is not in the vocabulary is
            NaN, and contributes nothing to the gradient of the weight. With tp_size 1, CUDA raises an error instead.

        Raises:
            IndexError: on the CPU, a token is not in the vocabulary.
        """
        grid = current_world().grid
        if projection:
            return OpParallelLinear.apply(x, self.weight, None, not self.same_rows)
        if grid is None:
            return F.embedding(x, self.weight)
        tokens = x if self.same_rows else gather_rows(grid, x)
        outside = (tokens < 0) | (tokens >= grid.size * self.vocab_size_per_partition)
        if tokens.device.type == "cpu" and outside.any():  # on a GPU, `any` would make the host wait
            where = tuple(outside.nonzero()[0].tolist())
            raise IndexError(
                f"VPEmbedding: token {tokens[where].item()} at {list(where)} is not in "
                f"[0, {grid.size * self.vocab_size_per_partition}), the range of the vocabulary. In total, "
                f"{int(outside.sum())} of {outside.numel()} tokens{'' if self.same_rows else ' of all ranks'} are "
                "outside it. Correct the tokens, or create the layer with a larger vocab_size."
            )
        others = (tokens < self.start_index) | (tokens >= self.end_index)
        own = F.embedding((tokens - self.start_index).masked_fill(others, 0), self.weight)
        # The ranks' results are added below. For each token, one rank has the embedding, and the others add zeros. For
        # a token outside the vocabulary, all ranks add NaN.
        rest = torch.zeros_like(tokens, dtype=own.dtype).masked_fill(outside, torch.nan)
        own = torch.where(others.unsqueeze(-1), rest.unsqueeze(-1), own)
        return add(grid, own) if self.same_rows else add_rows(grid, own)
