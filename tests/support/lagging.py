"""Offloaded updates on a GPU in many small chunks, by streams that lag."""

import random
from unittest import mock

import torch

from hf_bmtrain.engine.comm import streams
from hf_bmtrain.features.offload import slabs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def small_chunks():
    return mock.patch.multiple(slabs, CHUNK_ELEMENTS=1 << 16, SLAB_ELEMENTS=1 << 19)


def lagging(seed):
    """Every piece of work on the optimizer's streams begins some random time late, and so does the current stream."""
    chance, original = random.Random(seed), streams.WorkStream.run

    def run(self, function):
        def late():
            torch.cuda._sleep(chance.choice((0, 0, 100_000, 1_000_000)))
            function()

        original(self, late)

    return mock.patch.object(streams.WorkStream, "run", run)
