"""The algorithm of use_checkpoint="auto": given the free memory, choose which blocks keep their activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """The input of `make_plan`: the sizes, in bytes, of the tensors that each block can keep in memory until backward.

    Each of the first three attributes has one size per block, in execution order.

    Attributes:
        activations: all activations of each block.
        attention: the outputs of attention, which are a part of the activations. 0 if the block cannot keep them
            without its other activations.
        parameters: the full parameters. 0 if the plan must not keep the block unsharded until backward.
        attention_first: whether keeping only the outputs of attention usually saves more time per byte than keeping all
            activations. If True, the plan first chooses the blocks that keep only these outputs, and afterwards those
            that keep all activations.
    """

    activations: Sequence[int]
    attention: Sequence[int]
    parameters: Sequence[int]
    attention_first: bool = False


@dataclass(frozen=True)
class Plan:
    """What each block, in execution order, keeps in memory until backward.

    Attributes:
        kept: for each block, whether it keeps its activations.
        attention: for each block, whether it is recomputed but keeps the outputs of attention.
        full: for each block, whether it stays unsharded from its forward to its backward.
        left: the bytes that the plan leaves free at the forward's peak or at the backward's peak, whichever is less.
            Negative if memory is insufficient even when every block is recomputed.
    """

    kept: tuple[bool, ...]
    attention: tuple[bool, ...]
    full: tuple[bool, ...]
    left: int = 0

    def table(self, sizes: Sizes, forward_room: int) -> str:
        """Return a table of this plan for the log.

        Each row shows a choice (such as keeping the activations), the number of blocks for which it was made, and a
        size in GiB. In the row of the blocks that are recomputed entirely, it is the size of the activations that they
        do not keep. In the other rows, it is the size of the tensors that the blocks keep.

        Args:
            sizes: the sizes for which `make_plan` has made this plan.
            forward_room: the free bytes at the peak in the forward, as passed to `make_plan`. The first line shows it.
        """
        rows = [
            ("keep their activations", self.kept, sizes.activations),
            ("recompute all but attention", self.attention, sizes.attention),
            ("recompute, saving", tuple(not any(each) for each in zip(self.kept, self.attention)), sizes.activations),
            ("stay unsharded until backward", self.full, sizes.parameters),
        ]
        lines = [f"of {len(self.kept)} blocks, with {forward_room / _GIB:.2f} GiB available for activations:"]
        for name, chosen, nbytes in rows:
            taken = sum(size for size, one in zip(nbytes, chosen) if one)
            lines.append(f"  {sum(chosen):4d} {name:30} {taken / _GIB:8.2f} GiB")
        return "\n".join(lines)


def make_plan(sizes: Sizes, forward_room: int, backward_room: int) -> Plan:
    """Choose which blocks keep activations instead of being recomputed, and which stay unsharded until backward.

    With use_checkpoint="auto", this is called after the first training steps, in which the sizes are measured, and
    again when inputs become larger or less memory is free.

    A block can keep all its activations, or only the outputs of attention, or nothing. The choice is made in three
    rounds. Each round goes through the blocks from the last to the first, and skips blocks whose tensors do not fit:

    1. If `sizes.attention_first` is False, choose blocks that keep all activations. If it is True, choose blocks that
       keep only the outputs of attention.
    2. Use the memory that remains. If `sizes.attention_first` is False, choose blocks that keep only the outputs of
       attention, among the blocks not chosen in round 1. If it is True, choose blocks that keep all activations, among
       all blocks.
    3. If every block keeps all its activations, choose blocks that stay unsharded until backward.

    Args:
        sizes: the bytes that each block can keep.
        forward_room: the free bytes at the peak in the forward and the loss, if every block is recomputed. May be
            negative.
        backward_room: the free bytes at the peak in backward, while the recomputed activations of a block are alive, if
            every block is recomputed. May be negative.

    Returns:
        The Plan.
    """
    count = len(sizes.activations)
    taken = [0] * count
    kept, attention = [False] * count, [False] * count

    def fits(index: int, size: int) -> bool:
        """Return whether block `index` can keep `size` bytes until backward. If so, set `taken[index]` to `size`."""
        before, taken[index] = taken[index], size
        # Keeping the last block's activations does not increase the backward's peak: backward starts with this block,
        # so its activations are in memory at that time in any case, either kept or recomputed.
        if sum(taken) <= forward_room and sum(taken[:-1]) <= backward_room:
            return True
        taken[index] = before
        return False

    for all_of_it in (False, True) if sizes.attention_first else (True, False):
        # Choose from the last block to the first. Backward frees the activations of the last blocks first, while those
        # that the first blocks keep take memory until its end.
        for index in reversed(range(count)):
            if all_of_it:
                kept[index] = fits(index, sizes.activations[index])
            elif not kept[index] and sizes.attention[index]:
                attention[index] = fits(index, sizes.attention[index])
    full = [False] * count
    left = min(forward_room - sum(taken), backward_room - sum(taken[:-1]))
    if all(kept):
        for index in reversed(range(count)):
            if 0 < sizes.parameters[index] <= left:
                full[index] = True
                left -= sizes.parameters[index]
    attention = [one and not all_of_it for one, all_of_it in zip(attention, kept)]
    return Plan(tuple(kept), tuple(attention), tuple(full), left)
