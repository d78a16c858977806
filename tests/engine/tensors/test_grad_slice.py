"""Gradient slices. Norms: measured once a shard, anew once it is written. Those that are replaced keep their values."""

import dataclasses
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import in_full
from hf_bmtrain.engine.ops.grad_norm import Segments
from hf_bmtrain.engine.runtime.world import current_world, simulated
from hf_bmtrain.engine.tensors.norms import SegmentNorms, norms_of
from hf_bmtrain.engine.tensors.tensor import _Call
from ranks import on_ranks
from twins import WIDTH, Tower, check_gradients, ids


class Vectors(torch.nn.Module):
    """Each rank stores some of its vectors whole, and nothing of others."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(3).mean()


def check_norms(model, dtype):
    for name, parameter in model.named_parameters():
        expected = parameter.gather_gradient().double().norm()
        error = (parameter.grad.norm().double() - expected).abs()
        assert error <= 2 * torch.finfo(dtype).eps * expected, name


def _norms_follow_the_gradients(dtype):
    model = bmt.auto_wrap(Tower().to(dtype))
    for step in range(3):
        model(ids(step, bmt.rank())).backward()
        check_norms(model, dtype)
        model(ids(step + 10, bmt.rank())).backward()
        check_norms(model, dtype)
        for parameter in list(model.parameters())[::2]:
            parameter.grad.mul_(3.0)
        check_norms(model, dtype)
        model.head.weight.grad = model.head.weight.grad * 2
        check_norms(model, dtype)
        model.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)], ids=str)
@on_ranks(2, full=(1, 3))
def test_norms_follow_the_gradients(dtype):
    """After a backward, a second one that adds, a write by the user, and a fresh backward into the same memory.

    Without poison, whose writes are counted while those of packing and reducing are not.
    """
    with simulated(dataclasses.replace(current_world(), poison=False)):
        _norms_follow_the_gradients(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, *in_full(torch.bfloat16)], ids=str)
@on_ranks(2)
def test_norms_are_float32(dtype):
    """A logged norm is not rounded to the gradients' dtype, and does not overflow in float16."""
    model = bmt.auto_wrap(Tower().to(dtype))
    (model(ids(0, bmt.rank())) * 2.0**11).backward()
    gradients = [p.grad for p in model.parameters()]
    full_params = [p.gather_gradient().double() for p in model.parameters()]
    for order in (2.0, 3.0, float("inf")):
        expected = torch.nn.utils.get_total_norm(full_params, order)
        norm = torch.nn.utils.get_total_norm(gradients, order)
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm.double(), expected, rtol=2e-6, atol=0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for parameter, gradient, whole in zip(model.parameters(), gradients, full_params):
        assert parameter.grad is gradient and gradient.dtype == dtype
        clipped = parameter.gather_gradient().double()
        torch.testing.assert_close(clipped, whole / norm, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@on_ranks(2, full=(1,))
def test_collectives_are_few():
    model = bmt.auto_wrap(Tower())
    model(ids(0, bmt.rank())).backward()
    gradients = [p.grad for p in model.parameters()]
    lane = current_world().reduce
    with mock.patch.object(lane, "all_reduce", wraps=lane.all_reduce) as reduced:
        first = torch._foreach_norm(gradients)
        assert reduced.call_count == 1
        again = [gradient.norm() for gradient in gradients]
        assert reduced.call_count == 1
        assert all(torch.equal(a, b) for a, b in zip(first, again))
        first[0].zero_()  # the caller's own
        assert gradients[0].norm() > 0
        gradients[0].mul_(2.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert reduced.call_count == 2
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # which was written to by the first
        assert reduced.call_count == 3


@on_ranks(2, full=(1,))
def test_norms_gather_nothing():
    model, twin = bmt.auto_wrap(Tower()), Tower()
    for either in (model, twin):
        either(ids(0, 0)).backward()
    with mock.patch.object(_Call, "_on_full", side_effect=AssertionError("gathered")):
        for parameter, plain in zip(model.parameters(), twin.parameters()):
            for norm in (torch.norm, torch.linalg.vector_norm, torch.Tensor.norm):
                torch.testing.assert_close(norm(parameter.grad), norm(plain.grad))
                with torch.no_grad():
                    torch.testing.assert_close(norm(parameter), norm(plain))


@pytest.mark.parametrize("mine", [False, *in_full(True)], ids=["full", "elements"])
@on_ranks(2, full=(1, 3))
def test_norms_of_gradients_that_were_set(mine):
    """To full tensors, or to this rank's elements: also of vectors that one rank stores whole."""
    model, twin = bmt.auto_wrap(Vectors()), Vectors()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for either in (model, twin):
        either(ids(0, 0).float().repeat(1, 2)).backward()
    for number, (parameter, plain) in enumerate(zip(model.parameters(), twin.parameters())):
        full = torch.full(plain.shape, number + 1.0)
        parameter.grad = parameter.take(4 * full).part if mine else 4 * full
        plain.grad = full
        assert type(parameter.grad) is type(parameter.data)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
    torch.testing.assert_close(norms, torch.stack([plain.grad.norm() for plain in twin.parameters()]))
    clipped, expected = (torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, twin))
    torch.testing.assert_close(clipped, expected)
    check_gradients(model, twin)
    for parameter, plain in zip(model.parameters(), twin.parameters()):
        full = torch.ones(plain.shape)
        full.view(-1)[0] = float("nan")
        parameter.grad = parameter.take(full).part if mine else full
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0  # on every rank, also on one that stores no nan


def set_to_zeros(parameters):
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def some_set_to_none(parameters):
    for parameter in parameters[::2]:
        parameter.grad = None


def scaled(parameters):
    for parameter in parameters[1:]:
        parameter.grad = parameter.grad * 2


class Twice(torch.nn.Module):
    """Two weights of one shape in one flat buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean()


@pytest.mark.parametrize("replace", [set_to_zeros, some_set_to_none, *in_full(scaled)])
@on_ranks(2, full=(1, 3))
def test_replaced_gradients_keep_their_values(replace):
    """Also tensors that share their memory, and their norms. Those that are still `.grad` accumulate, as in torch."""
    model, twin = bmt.auto_wrap(Twice()), Twice()
    x = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank)) for rank in range(bmt.world_size())]
    kept, expected = [], []
    for step in range(4):
        model(x[bmt.rank()] * (step + 1)).backward()
        torch.stack([twin(each * (step + 1)) for each in x]).mean().backward()
        for either, gradients in ((model, kept), (twin, expected)):
            for gradient in [parameter.grad for parameter in either.parameters()]:
                gradients += [gradient, gradient.detach(), gradient.data.view(-1)]
            if step < 3:
                replace([*either.parameters()])
        for mine, plain in zip(kept, expected, strict=True):
            torch.testing.assert_close(mine.read_full(), plain, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mine.norm(), plain.norm(), rtol=1e-5, atol=1e-6)
        check_gradients(model, twin)


def test_a_non_finite_element_makes_its_own_segment_non_finite():
    flat = torch.ones(10)
    flat[4] = float("nan")
    norms = SegmentNorms(flat, Segments([0, 3, 3, 6, 10], "cpu"), mock.Mock())
    assert [norms[i].item() == norms[i].item() for i in range(4)] == [True, True, False, True]
    assert norms[1] == 0
    assert norms.communicator.all_reduce.call_count == 1


def test_norms_of_several_buffers_are_new_tensors():
    """One all-reduce for both, none once they are cached; who writes to a norm does not change the cached one."""
    communicator = mock.Mock()
    buffers = [SegmentNorms(torch.full((4,), value), Segments([0, 1, 4], "cpu"), communicator) for value in (1.0, 2.0)]
    for _ in range(2):
        found = [norm for part in norms_of(buffers).values() for norm in part]
        torch.testing.assert_close(torch.stack(found), torch.tensor([1.0, 3.0, 4.0, 12.0]).sqrt())
        for norm in found:
            norm.zero_()
    assert communicator.all_reduce.call_count == 1
