"""The pieces of all ranks tile every tensor exactly."""

from hypothesis import given
from hypothesis import strategies as st

from cases import full
from hf_bmtrain.engine.comm.layout import Layout

SPREADS = st.tuples(st.integers(0, 4), st.sampled_from([1, 2, 4]))


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 9), st.integers(1, 70), SPREADS)
def test_pieces_tile_every_tensor(numels, world_size, grain, spread):
    layout = Layout.build(numels, world_size, grain, spread)
    assert layout.shard_numel % grain == 0
    covered = set()
    for index, numel in enumerate(numels):
        assert layout.offsets[index] % grain == 0
        position = 0
        for rank in range(world_size):
            piece = layout.range_of(index, rank)
            assert 0 <= piece.shard_start <= piece.shard_stop <= layout.shard_numel
            if piece.length:
                assert piece.tensor_start == position
                whole_start = rank * layout.shard_numel + piece.shard_start
                assert whole_start == layout.offsets[index] + piece.tensor_start
                covered.update(range(whole_start, whole_start + piece.length))
                position = piece.tensor_stop
        assert position == numel
    sizes = layout.sizes
    padding, position = set(), 0
    for number, size in enumerate(sizes):
        assert size == numels[number // 2] if number % 2 else size >= 0
        padding |= set(range(position, position + size)) if number % 2 == 0 else set()
        position += size
    everyone = [[layout.range_of(index, rank) for rank in range(world_size)] for index in range(len(numels))]
    cut = [pieces for pieces in everyone if sum(piece.length > 0 for piece in pieces) > 1]
    for rank in range(world_size):
        held = [pieces[rank] for pieces in cut if pieces[rank].length]
        assert layout.cut_ranges(rank) == [(piece.shard_start, piece.shard_stop) for piece in held]
    assert not covered & padding
    assert len(covered) == sum(numels)
    assert max(covered, default=-1) < layout.extent == Layout.build(numels, 1, grain, spread).extent <= layout.numel
    assert covered | padding == set(range(layout.numel))
    first, times = spread
    if first < len(numels):
        ends = [offset + numel for offset, numel in zip(layout.offsets[:first], numels)]
        assert all(times * end <= layout.offsets[first] for end in ends)
        assert layout.offsets[first] <= layout.shard_numel or not first


@full
@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 9), st.integers(1, 70))
def test_sizes_of_a_shard_are_those_of_its_pieces(numels, world_size, grain):
    layout = Layout.build(numels, world_size, grain)
    for rank in range(world_size):
        sizes = layout.shard_sizes(rank)
        assert sum(sizes) == layout.shard_numel and min(sizes) >= 0
        for index in range(len(numels)):
            piece = layout.range_of(index, rank)
            assert sizes[2 * index + 1] == piece.length
            assert sum(sizes[: 2 * index + 1]) == piece.shard_start


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 9), st.sampled_from([1, 64, 128, 300]))
def test_a_grain_is_never_divided(numels, world_size, grain):
    """Neither is a tensor where the grain is as large. Padding stays within the bounds that `Layout` names."""
    layout = Layout.build(numels, world_size, grain)
    for index, numel in enumerate(numels):
        for rank in range(world_size):
            piece = layout.range_of(index, rank)
            assert piece.tensor_start % grain == 0 or piece.length == 0
            assert piece.tensor_stop % grain == 0 or piece.tensor_stop == numel
            assert piece.shard_start % grain == 0 or piece.length == 0
    gaps = layout.sizes[::2]
    assert gaps[0] == 0 and max(gaps[:-1], default=0) < grain
    assert gaps[-1] < (world_size + 1) * grain
