"""What is counted as saved is what a forward that keeps its activations leaves behind, and which inputs are known."""

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cases import full, in_full, rows_in_full
from hf_bmtrain.engine.base.device_memory import DeviceMemory
from hf_bmtrain.engine.base.torch_internals import top_saved_tensors_hooks
from hf_bmtrain.features.memory.meter import MeasuredInputs, SavedBytes
from recomputed_models import Created
from tiny_models import batch, build


def inside_a_layer(family, check):
    """`check(layer, args, kwargs)` with a layer of the family in its model's forward."""
    model = build(family, dropout=0.1).train()
    layer = [module for module in model.modules() if isinstance(module, nn.ModuleList)][0][1]
    found = []
    own = layer.forward

    def forward(*args, **kwargs):
        layer.forward = own
        found.append(check(layer, args, kwargs))
        return own(*args, **kwargs)

    layer.forward = forward
    model(**batch(family, 0, rows=3, length=11), use_cache=False)
    return found[0]


def kept_and_counted(layer, args, kwargs):
    held = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    with Created() as created:
        output = layer(*args, **kwargs)
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    assert len(outputs) == 1
    alive = created.alive()
    for tensor in (*held, *layer.parameters(), *outputs):  # views of weights are made, too
        alive.pop(StorageWeakRef(tensor.untyped_storage()), None)
    counted = SavedBytes([*held, *layer.parameters()])
    with counted.counting():
        layer(*args, **kwargs)
    return sum(alive.values()), counted.nbytes


@pytest.mark.parametrize("family", ["llama", *in_full("gpt2", "bert")])
def test_counted_is_what_stays(family):
    kept, counted = inside_a_layer(family, kept_and_counted)
    assert counted > 10_000
    assert kept == counted


def test_counted_inside_a_checkpoint():
    """The checkpoint goes on as without counting: the same count, the same gradients, nothing kept."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(5, 8, requires_grad=True)
    plain, inside = SavedBytes([x, *layer.parameters()]), SavedBytes([x, *layer.parameters()])
    with plain.counting():
        layer(x).square().mean().backward()
    expected = x.grad

    def counted(x):
        with inside.counting():
            return layer(x)

    x.grad = None
    with Created() as created:
        output = checkpoint(counted, x, use_reentrant=False)
    alive = created.alive()
    for tensor in (x, *layer.parameters()):
        alive.pop(StorageWeakRef(tensor.untyped_storage()), None)
    # torch's checkpoint keeps tensors without elements before 2.12
    assert {each for each, size in alive.items() if size} == {StorageWeakRef(output.untyped_storage())}
    assert inside.nbytes == plain.nbytes == 2 * 5 * 8 * 4
    output.square().mean().backward()
    assert torch.equal(x.grad, expected)
    assert top_saved_tensors_hooks(True) is None


@full
def test_each_storage_once_and_nothing_kept_alive():
    x = torch.randn(4, 6, requires_grad=True)
    saved = SavedBytes([])
    with saved.counting():
        y = x * 2.0  # saves nothing that is a tensor of its own
        z = y * y + y[:2].sum() * y.t().sum()  # y whole, and views of it; two sums
        del y
        w = torch.exp(z) + z.to_sparse().to_dense()
    assert saved.nbytes == (24 + 2 + 24) * 4
    alive = weakref.ref(z)
    del z, w
    assert alive() is None


@full
@pytest.mark.parametrize(("fraction", "usable"), [(0.5, 36), *rows_in_full([(1.0, 72), (0.01, -3.2)])])
def test_usable_memory_is_what_the_process_may_take(fraction, usable):
    """Of 80 GB 70 are free and 6 are held by the allocator; a reserve of 4 is left."""
    device = SimpleNamespace(
        mem_get_info=lambda device: (70 * 10**9, 80 * 10**9),
        memory_stats_as_nested_dict=lambda device: {"reserved_bytes": {"all": {"current": 6 * 10**9}}},
        get_per_process_memory_fraction=lambda device: fraction,
    )  # fmt: skip
    with mock.patch.object(torch, "get_device_module", return_value=device):
        assert DeviceMemory(torch.device("cuda", 0)).usable() == pytest.approx(usable * 10**9)


def test_inputs_no_larger_than_measured_ones_are_covered():
    def shapes(*sizes):
        return tuple(map(torch.Size, sizes))

    inputs = MeasuredInputs()
    assert not inputs.cover(shapes((2, 3)))
    inputs.add(shapes((2, 3), (5,)), 1)
    inputs.add(shapes((4, 1), (5,)))
    for covered, number in [(((2, 3), (5,)), 1), (((1, 3), (4,)), 0), (((2, 1), (5,)), 1), (((4, 1), (5,)), 0)]:
        assert inputs.cover(shapes(*covered), number)
        assert inputs.cover(shapes(*covered), number), "the second time"
    for unknown, number in [(((2, 3), (6,)), 0), (((2, 3), (5,)), 2), (((4, 1), (5,)), 1), (((4, 3), (5,)), 0)]:
        assert not inputs.cover(shapes(*unknown), number)
    assert not inputs.cover(shapes((2, 3))), "another number of tensors"
    assert not inputs.cover(shapes((2, 3, 1), (5,))), "another number of dimensions"
    inputs.add(shapes((4, 3), (6,)), 2)
    assert inputs.cover(shapes((4, 1), (5,)), 1)
