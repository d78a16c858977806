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

    With ALL_REDUCE each rank gets all rows (dimension 0) of the sum, with REDUCE_SCATTER only its own rows.
    """

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2


class OpParallelLinear:
    """The function that tensor-parallel linear layers call, under BMTrain's name. Use `OpParallelLinear.apply(...)`."""

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
        """Compute x weightᵀ + bias with this rank's part of the weight. Differentiable.

        Collective: every rank must call it. "All ranks" here are those of this rank's tensor-parallel group.

        Args:
            input: (rows, ..., features). The rows are this rank's if `gather_input` is True, otherwise those of all
                ranks. The features are this rank's if `reduce_output_type` is given and `split_input` is False,
                otherwise all.
            weight: this rank's part of the weight: with `reduce_output_type`, (out_features, in_features / tp_size),
                otherwise (out_features / tp_size, in_features).
            bias: the bias for this rank's outputs, or None. With `reduce_output_type`, the sum of the outputs contains
                the biases of all ranks. To add a bias only once, pass None, and add the bias to the result.
            gather_input: whether to concatenate the rows of all ranks first.
            gather_output: whether to return the features of all ranks instead of this rank's. Ignored with
                `reduce_output_type`.
            split_input: whether to use only this rank's features of `input`.
            reduce_output_type: how to sum the outputs of all ranks. With None they are not summed.
            async_gather_chunks: for compatibility with BMTrain; ignored.

        Returns:
            The output, (rows, ..., features). The rows are this rank's with ReduceType.REDUCE_SCATTER, otherwise those
            of all ranks. With `reduce_output_type` or `gather_output` it has all features, otherwise this rank's.
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
    """Return the number of ranks over which weights are split: `tp_size`, or 1 without tensor parallelism."""
    grid = current_world().grid
    return 1 if grid is None else grid.size


def _own_part(name: str, size: int) -> int:
    """Return the size of this rank's part of a dimension, or raise ValueError if `size` cannot be split evenly.

    name: the argument's name, for the error.
    """
    expect_number(name, size, "positive and below 2**48", lambda size: 1 <= size < 2**48, integer=True)
    if size % parts():
        raise ValueError(
            f"{name}={size} must be a multiple of tp_size={parts()}, the number of ranks over which the layer is split"
        )
    return size // parts()


def _weight(rows: int, columns: int, dtype: torch.dtype | None, init_method, dim: int) -> DistributedParameter:
    if dtype is not None:
        expect_kind("dtype", dtype, torch.dtype, "a floating torch.dtype or None")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating torch.dtype or None, got {dtype}")
    values = torch.zeros(rows, columns, dtype=dtype)
    return DistributedParameter(values, init_method=init_method, tp_mode=True, tp_split_dim=dim)


def _bias(size: int, dtype: torch.dtype | None, tp_mode: bool, dim: int) -> DistributedParameter:
    zeros = ParameterInitializer(torch.nn.init.zeros_)
    return DistributedParameter(
        torch.zeros(size, dtype=dtype), init_method=zeros, tp_mode=tp_mode, tp_split_dim=dim
    )  # fmt: skip


class ColumnParallelLinear(DistributedModule):
    """Linear layer y = x Aᵀ + b whose outputs are split over the ranks of a tensor-parallel group.

    Collective: every rank must call it. Each rank stores the elements of `weight` and `bias` for out_features / tp_size
    outputs; state dicts contain those for all outputs. Weight and bias are zero until they are loaded, or until
    `init_parameters` draws the weight from the Glorot normal distribution. "All ranks" here are those of this rank's
    tensor-parallel group, and "rows" are dimension 0 of inputs and outputs. The output has the rows of all ranks.

    Args:
        in_features: the size of the last dimension of the input.
        out_features: the total number of output features, a multiple of tp_size.
        bias: whether the layer has a bias.
        dtype: a floating dtype. None uses torch's default dtype.
        gather_output: whether the output has the features of all ranks, and is equal on all of them. Otherwise it has
            this rank's features.
        gather_input: whether the input has only this rank's rows (the same number on all ranks). Otherwise it has the
            rows of all ranks, and is equal on all of them.
        async_gather_chunks: for compatibility with BMTrain; ignored.

    Raises:
        ValueError: a size is not positive or cannot be split, or `dtype` is not a floating dtype.
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

    Collective: every rank must call it. Each rank has in_features / tp_size columns of `weight`; state dicts contain
    all columns. Weight and bias are zero until they are loaded, or until `init_parameters` draws the weight from the
    Glorot normal distribution. "All ranks" here are those of this rank's tensor-parallel group.

    Args:
        in_features: the total number of input features, a multiple of tp_size.
        out_features: the size of the last dimension of the output.
        bias: whether the layer has a bias.
        dtype: a floating dtype. None uses torch's default dtype.
        split_input: True: the input has all in_features of this rank's rows (dimension 0; equally many on all ranks).
            False: it has in_features / tp_size features of the rows of all ranks, as a ColumnParallelLinear returns.
        all_reduce_output: whether the output has the rows of all ranks, and is equal on all of them. Otherwise it has
            this rank's rows.
        async_chunks: for compatibility with BMTrain; ignored.

    Raises:
        ValueError: a size is not positive or cannot be split, or `dtype` is not a floating dtype.
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

    Collective: every rank must call it. Each rank has vocab_size / tp_size rows of `weight`; state dicts contain all
    rows. The weight is zero until it is loaded, or until `init_parameters` draws it from a normal distribution.

    Args:
        vocab_size: the total number of tokens in the vocabulary, a multiple of tp_size.
        embedding_size: the size of an embedding.
        dtype: a floating dtype. None uses torch's default dtype.
        init_mean: the mean of the normal distribution.
        init_std: the standard deviation of the normal distribution.
        same_rows: True: the inputs are equal on all ranks of this rank's tensor-parallel group. False: each rank has
            different rows (dimension 0; equally many on all ranks).

    Raises:
        ValueError: a size is not positive or cannot be split, or `dtype` is not a floating dtype.
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

        Args:
            x: tokens (...) or, with `projection`, hidden states (..., embedding_size).
            projection: whether `x` is hidden states to project, instead of tokens to look up.

        Returns:
            The embeddings of `x`, (..., embedding_size). With `projection`, the logits of this rank's part of the
            vocabulary for the rows of all ranks of the tensor-parallel group, (..., vocab_size / tp_size).
        """
        grid = current_world().grid
        if projection:
            return OpParallelLinear.apply(x, self.weight, None, not self.same_rows)
        if grid is None:
            return F.embedding(x, self.weight)
        tokens = x if self.same_rows else gather_rows(grid, x)
        others = (tokens < self.start_index) | (tokens >= self.end_index)
        own = F.embedding((tokens - self.start_index).masked_fill(others, 0), self.weight)
        own = own.masked_fill(others.unsqueeze(-1), 0)  # each token's embedding is on one rank; the others add zeros
        return add(grid, own) if self.same_rows else add_rows(grid, own)
