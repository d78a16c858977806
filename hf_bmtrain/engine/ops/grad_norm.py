"""Squared norms of flat gradients, computed deterministically in one pass. Results are on the device, in float64.

A squared norm is inf or NaN if and only if an element of the gradient is, because float64 can represent the square of
any float32. The kernels first add the squares of up to 32 elements in float32, where a square below 1e-38 loses
precision or becomes zero. If this sum is not finite, they compute it again in float64.
"""

import itertools
from collections.abc import Sequence
from functools import cache, cached_property

import torch

from ..base.arguments import expect
from ..base.launch import C_NAMES, Variant, kernel

THREADS = 256
# The maximum number of thread blocks among which `accumulate_squared_norm` divides a tensor on a GPU. It is the same
# for every GPU, so that all GPUs add in the same order.
BLOCKS = 528
TILE_BYTES = THREADS * 64
# On a GPU, `segmented_squared_norm` divides segments into pieces of at most this many elements. It launches one thread
# block for each piece, however many pieces there are.
PIECE = 1 << 16
CHUNK = 1 << 18  # number of elements that the CPU converts to float64 at a time


@cache
def variant(dtype: torch.dtype) -> Variant:
    """Return the Variant of this module's kernels for gradients of one dtype, to pass to `kernel`, which compiles it.

    A Variant is a CUDA source file and the macros with which it is compiled. The macro ELEMENT is the type of the
    gradients' elements.

    dtype: float32, float16 or bfloat16.
    """
    return Variant("grad_norm", (("ELEMENT", C_NAMES[dtype]),))


def accumulate_squared_norm(flat: torch.Tensor, out: torch.Tensor) -> None:
    """Add the squared norm of a flat tensor to a running sum. The host does not wait for the device.

    To compute the norm of all gradients, for clipping, call this function for one flat gradient after another. The same
    tensors in the same order give bit-identical results.

    Args:
        flat: (n,) float32, float16 or bfloat16, contiguous, of any alignment. Padding must be zero, because the
            squares of all elements are added.
        out: (2,) float64 on the same device, updated. Element 0 is the running sum. Element 1 becomes 1.0 if an element
            of `flat` is inf or NaN. The caller must set both to zero before the first tensor.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device described above, or is not contiguous.
    """
    expect("flat", flat, C_NAMES, (flat.numel(),), flat.device)
    expect("out", out, (torch.float64,), (2,), flat.device)
    if flat.numel() == 0 or flat.is_meta:
        return
    if not flat.is_cuda:
        total = _sum_of_squares(flat)
        out[0] += total
        out[1].masked_fill_(~torch.isfinite(total), 1.0)
        return
    blocks = min(BLOCKS, -(-flat.numel() * flat.element_size() // TILE_BYTES))
    partials = torch.empty(blocks, dtype=torch.float64, device=flat.device)
    chosen = variant(flat.dtype)
    kernel(chosen, "squared_norm_partials", flat.device)(blocks, THREADS, flat, flat.numel(), partials)
    kernel(chosen, "add_squared_norm", flat.device)(1, THREADS, partials, blocks, out)


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """Return a view of a gradient as real numbers, because the functions that sum squares take only real tensors.

    A real gradient is returned unchanged. For a complex gradient, the result is (2n,) and contains its real and
    imaginary parts in turn. The sum of their squares is the squared norm of the gradient.

    flat: (n,), the gradient.
    """
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class Segments:
    """The boundaries of the segments of a flat tensor, for `segmented_squared_norm`.

    A segment is a range of adjacent elements, of which `segmented_squared_norm` computes the squared norm. If several
    flat tensors have the same segments, reuse the object, because its first use copies tables to the device.

    Args:
        offsets: k + 1 non-decreasing integers. Segment s is flat[offsets[s]:offsets[s + 1]], and may be empty.
        device: the device of the flat tensors.

    Raises:
        ValueError: `offsets` is empty, decreases somewhere, or begins below 0.
    """

    def __init__(self, offsets: Sequence[int], device: torch.device | str):
        if len(offsets) == 0 or offsets[0] < 0 or any(a > b for a, b in itertools.pairwise(offsets)):
            raise ValueError(f"offsets must be one or more ascending integers >= 0, but begin with {list(offsets)[:8]}")
        self.offsets, self.device = tuple(offsets), torch.device(device)
        self.lengths = [stop - start for start, stop in itertools.pairwise(offsets)]

    @cached_property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Three tensors for the CUDA kernels: the division of the segments into pieces of at most PIECE elements.

        The first has the index of each piece's first element (int64), and the second has each piece's length (int32).
        The third has the index of each segment's first piece, followed by the total number of pieces (int64).
        """
        begins, lengths, firsts = [], [], [0]
        for start, end in itertools.pairwise(self.offsets):
            begins += range(start, end, PIECE)
            lengths += [min(PIECE, end - begin) for begin in range(start, end, PIECE)]
            firsts.append(len(begins))
        wide = {"dtype": torch.int64, "device": self.device}
        return (
            torch.tensor(begins, **wide),
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            torch.tensor(firsts, **wide),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1


def segmented_squared_norm(flat: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return the squared norm of each of the k segments of a flat tensor. The host does not wait for the device.

    Args:
        flat: (n,) float32, float16 or bfloat16, contiguous. Elements outside all segments are not read.
        segments: the segments' boundaries. They must have been created with the device of `flat`.

    Returns:
        (k,) float64 on the device of `flat`. An entry is inf or NaN if an element of its segment is.

    Raises:
        ValueError: `flat` is not contiguous, does not have one of these dtypes, has fewer elements than the last offset
            of `segments`, or is on a GPU that is not the device of `segments`.
    """
    expect("flat", flat, C_NAMES, (flat.numel(),), flat.device)
    if segments.offsets[-1] > flat.numel():
        raise ValueError(
            f"segments end at {segments.offsets[-1]}, but the tensor has {flat.numel()} elements. The last offset of "
            "Segments must not exceed the number of elements."
        )
    if flat.is_meta:
        return torch.zeros(len(segments), dtype=torch.float64, device=flat.device)
    if not flat.is_cuda:
        return _segmented_on_cpu(flat.detach(), segments)
    begins, lengths, firsts = segments.tables
    if begins.device != flat.device:
        raise ValueError(
            f"segments are on {begins.device}, but the tensor is on {flat.device}. Create the Segments with the device "
            "of the tensor."
        )
    pieces = begins.numel()
    if pieces == 0:
        return torch.zeros(len(segments), dtype=torch.float64, device=flat.device)
    out = torch.empty(len(segments), dtype=torch.float64, device=flat.device)  # not zeros: `_add_up` overwrites it
    partials = torch.empty(pieces, dtype=torch.float64, device=flat.device)
    kernel(variant(flat.dtype), "piece_squares", flat.device)(pieces, THREADS, flat, begins, lengths, partials)
    _add_up(partials, firsts, out)
    return out


def add_squares(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add up partial sums of squares: write the sum of all elements of parts[i] to out[i], for each i.

    `peer_mean`, which averages a gradient over the ranks, also returns partial sums of its squares. This function adds
    them up to one sum per gradient, which gradient clipping uses later. The host does not wait for the device. The same
    parts give bit-identical results.

    Args:
        parts: for each gradient, its partial sums, a float64 tensor of any length (k_i,). It may be empty: the sum is
            then 0.
        out: (len(parts),) float64, overwritten with one sum for each gradient.
    """
    flat = torch.cat(list(parts))
    if flat.is_cuda and flat.numel():
        return _add_up(flat, _firsts(tuple(part.numel() for part in parts), flat.device), out)
    out.copy_(torch.stack([part.sum() for part in parts]))


@cache
def _firsts(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int64, device=device)


def _add_up(partials: torch.Tensor, firsts: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of partials[firsts[s] : firsts[s + 1]] to out[s], for each s, with a CUDA kernel.

    partials: (n,) float64.
    firsts: (k + 1,) int64, non-decreasing, from 0 to n.
    out: (k,) float64.
    """
    kernel(variant(torch.float32), "segment_squares", out.device)(out.numel(), THREADS, partials, firsts, out)


def _segmented_on_cpu(flat: torch.Tensor, segments: Segments) -> torch.Tensor:
    if len(segments) == 0:
        return flat.new_zeros(0, dtype=torch.float64)
    flat = flat[segments.offsets[0] : segments.offsets[-1]]
    if flat.numel() > CHUNK:
        return torch.stack([*map(_sum_of_squares, flat.split_with_sizes(segments.lengths))])
    return torch.stack([torch.dot(wide, wide) for wide in flat.double().split_with_sizes(segments.lengths)])


def _sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of `flat` in float64. To save memory, convert CHUNK elements at a time."""
    if flat.numel() <= CHUNK:
        wide = flat.detach().double()
        return torch.dot(wide, wide)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for chunk in flat.split(CHUNK):
        total += _sum_of_squares(chunk)
    return total
