"""Chunks hold every element of every run once, within slabs and in order."""

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_bmtrain.engine.optim.runs import Run
from hf_bmtrain.features.offload import slabs

MASTERS = [None, torch.float32, torch.int16]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 700), st.sampled_from(MASTERS)), min_size=1, max_size=9), st.randoms())
def test_chunks_tile_the_runs(sizes, chance):
    runs = [Run.over([torch.nn.Parameter(torch.empty(numel))]) for numel, _ in sizes]
    masters = [master for _, master in sizes]
    active = sorted(chance.sample(range(len(runs)), chance.randint(1, len(runs))))
    with mock.patch.multiple(slabs, CHUNK_ELEMENTS=128, SLAB_ELEMENTS=512):
        places = slabs.allocate_slabs(runs, masters, torch.bfloat16)
        chunks = slabs.cut([runs[i] for i in active], {runs[i]: places[runs[i]] for i in active}, range(len(active)))
    for run, master in zip(runs, masters):
        place, numel = places[run], run.weights.numel()
        assert place.start % slabs.ALIGNMENT == 0
        held = place.slab.part(place.start, place.start + numel)
        assert [t.shape for t in held if t is not None] == [(numel,)] * (2 if master is None else 3)
        assert [None if t is None else t.dtype for t in held] == [master, torch.bfloat16, torch.float32]
        held[1].add_(1)  # no two runs share an element
    assert all(bool((places[run].slab.exp_avg <= 1).all()) for run in runs)
    seen = dict.fromkeys(range(len(active)), 0)
    for chunk in chunks:
        assert 0 < chunk.stop - chunk.start <= 128
        assert chunk.start % slabs.ALIGNMENT == 0
        for part in chunk.parts:
            place = places[runs[active[part.run]]]
            assert place.slab is chunk.slab
            assert part.of_run.start == seen[part.run]
            assert place.start + part.of_run.start == chunk.start + part.of_chunk.start
            assert part.of_run.stop - part.of_run.start == part.of_chunk.stop - part.of_chunk.start
            assert chunk.start + part.of_chunk.stop <= chunk.stop
            seen[part.run] = part.of_run.stop
    assert seen == {number: runs[i].weights.numel() for number, i in enumerate(active)}


def test_a_chunk_stays_in_its_slab():
    """The second of the active runs begins where a chunk of the first slab would go on."""
    runs = [Run.over([torch.nn.Parameter(torch.empty(64))]) for _ in range(3)]
    places = slabs.allocate_slabs(runs, [torch.int16, None, None], torch.float32)
    chunks = slabs.cut([runs[0], runs[2]], places, [0, 1])
    assert [chunk.slab for chunk in chunks] == [places[runs[0]].slab, places[runs[2]].slab]
