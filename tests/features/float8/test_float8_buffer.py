"""Float8Storage: what is gathered has the bits of the rounded whole, and the wholes are those of the shards or NaN."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, in_full, pairwise, rows_in_full
from hf_bmtrain.engine.comm.communicator import CollectiveGather
from hf_bmtrain.engine.comm.streams import DONE
from hf_bmtrain.engine.sharding.buffer import ShardedBuffer
from hf_bmtrain.engine.sharding.parameter import DistributedParameter
from hf_bmtrain.features.float8.arithmetic import quantize_full, quantize_transposed
from hf_bmtrain.features.float8.storage import Float8Kind, Float8Requantizer, Float8Storage
from kernel_checks import same_factors
from ranks import on_ranks

SHAPES = [(48, 16), (3, 5), (1, 1), (16, 176), (7, 33), (2, 2), (4, 300)]


def rounding():
    return Float8Requantizer(bmt.current_world().shards.communicator)


class Owner:
    """Stands for the state of a layer."""


OWNER = Owner()


def make(dtype=torch.float32, requires_grad=True, companions=()):
    """Return parameters, a buffer of them, and its slices. companions: the shapes of those, which come first."""
    generator = torch.Generator().manual_seed(0)
    beside = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype), requires_grad) for shape in companions
    ]
    full_params = [torch.randn(shape, generator=generator) * 10.0 ** (3 - i) for i, shape in enumerate(SHAPES)]
    full_params[0][0, 0] = full_params[0][-1, -1] = 6e4  # the largest, on the first and on the last rank
    full_params[4][0, 1], full_params[4][6, 32], full_params[6][3, 299] = torch.nan, torch.inf, -torch.inf
    full_params[5].zero_()
    parameters = [torch.nn.Parameter(whole.to(dtype), requires_grad) for whole in (*beside, *full_params)]
    world = bmt.current_world()
    buffer = ShardedBuffer(world, parameters, world.schedule.blocks, Float8Storage(len(companions)))
    return parameters, buffer, buffer.make_local(DistributedParameter, parameters)


COMPANIONS = [(5,), (), (2, 3), (0,), (7,)]


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8)


def check_factors(buffer, parameters):
    buffer.gather()
    buffer.wait()
    for gathered, parameter, whole in zip(buffer.storage.factors, parameters, buffer.full_params, strict=True):
        if gathered is None:
            assert torch.equal(bits(whole), bits(parameter))
            continue
        for turned, quantize in ((False, quantize_full), (True, quantize_transposed)):
            found = gathered.factor(turned)
            assert same_factors([found], [quantize(parameter.detach())])
            assert found.values.is_contiguous() and found.scales.is_contiguous()
    if not isinstance(bmt.current_world().shards, CollectiveGather):
        return
    storages = [each.values.untyped_storage() for each in buffer.storage.factors if each is not None]
    padding = torch.empty(0, dtype=torch.uint8).set_(max(storages, key=len)).clone()  # the others are shards
    assert len(padding) == buffer.layout.numel
    for gathered, offset, numel in zip(buffer.storage.factors, buffer.layout.offsets, buffer.layout.numels):
        itemsize = 1 if gathered is not None else parameters[0].itemsize
        padding[offset * itemsize : (offset + numel) * itemsize] = 0
    assert not padding.any()


def check_masters(buffer, parameters):
    whole = buffer.is_unsharded
    with buffer.unsharded(), buffer.unsharded():
        assert all(
            torch.equal(bits(mine), bits(other)) for mine, other in zip(buffer.full_params, parameters, strict=True)
        )
    assert buffer.is_unsharded == whole
    for found, mine, other in zip(buffer.storage.factors, buffer.full_params, parameters, strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        assert found is None or mine.isnan().all()


def rounds_and_gathers(dtype, companions=()):
    parameters, buffer, slices = make(dtype, companions=companions)
    buffer.gather()
    buffer.wait()
    assert not buffer.storage.in_float8 and buffer.full_nbytes == buffer.layout.numel * dtype.itemsize
    assert all(torch.equal(bits(mine), bits(other)) for mine, other in zip(buffer.full_params, parameters))
    buffer.storage.switch(rounding(), [OWNER])
    assert buffer.storage.in_float8 and not buffer.is_unsharded and buffer.full_nbytes == buffer.layout.numel
    check_factors(buffer, parameters)
    check_masters(buffer, parameters)  # beside the float8 copy, which stays
    check_factors(buffer, parameters)
    buffer.reshard()
    assert not buffer.is_unsharded
    check_masters(buffer, parameters)
    bmt.synchronize()
    with torch.no_grad():
        for parameter, local in zip(parameters, slices):
            parameter.mul_(-0.3)
            local.mul_(-0.3)
    check_factors(buffer, parameters)
    check_masters(buffer, parameters)
    assert all(torch.equal(bits(local.gather()), bits(other)) for local, other in zip(slices, parameters))
    weights = [gathered for gathered in buffer.storage.factors if gathered is not None]
    before = [bits(gathered.values).clone() for gathered in weights]
    buffer.reshard()
    buffer.gather()
    buffer.wait()
    assert all(torch.equal(bits(gathered.values), one) for gathered, one in zip(weights, before))


@pytest.mark.parametrize(
    ("size", "dtype", "companions"),
    pairwise(
        [(3, torch.bfloat16, COMPANIONS)], [2, 3], [torch.float32, torch.bfloat16, torch.float16], [(), COMPANIONS]
    ),
    ids=lambda value: ("companions" if value else "alone") if isinstance(value, list | tuple) else str(value),
)
def test_what_is_gathered_is_the_rounded_whole(world, size, dtype, companions):
    world(size)(rounds_and_gathers, dtype, companions)


@pytest.mark.parametrize("companions", [COMPANIONS, *in_full(())], ids=["companions", "alone"])
def test_it_is_pulled(peers, companions):
    peers(2)(rounds_and_gathers, torch.float32, companions)


@full
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 128), *rows_in_full([(torch.float32, 64)])], ids=str)
def test_only_few_are_companions(dtype, most):
    def takes(numel):
        beside, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((numel,), (64, 128)))
        return Float8Kind().takes([torch.nn.Parameter(beside)], [torch.nn.Parameter(weight)])

    assert takes(most) and not takes(most + 1)  # bytes, of which there may be one for 32 weights


@on_ranks(2)
def test_frozen_weights_stay_whole():
    parameters, buffer, slices = make(requires_grad=False, companions=COMPANIONS)
    buffer.resident = True
    buffer.gather()
    buffer.storage.switch(rounding(), [OWNER])
    assert buffer.is_unsharded, "what was kept whole is gathered at the switch"
    buffer.reshard()
    assert buffer.is_unsharded
    check_factors(buffer, parameters)
    check_masters(buffer, parameters)
    bmt.synchronize()
    with torch.no_grad():
        for parameter, local in zip(parameters, slices):
            parameter.add_(1)
            local.add_(1)
    check_factors(buffer, parameters)
    slices[0].requires_grad_(True)
    buffer.reshard()
    assert not buffer.is_unsharded


def rounds_together():
    """Two buffers are updated during the step, two alongside the computation."""
    common = rounding()
    made = [make(companions=COMPANIONS) for _ in range(4)]
    buffers = [buffer for _, buffer, _ in made]
    for buffer in buffers:
        buffer.storage.switch(common, [OWNER])
    for buffer in buffers[2:]:
        buffer.update.begin(DONE, ())
    assert not any(buffer.storage.is_stale for buffer in buffers)
    with torch.no_grad():
        for parameters, _, slices in made:
            for tensor in (*parameters, *slices):
                tensor.mul_(2)
    stale = []
    for parameters, buffer, _ in made[::-1]:
        check_factors(buffer, parameters)
        stale.append([each.storage.is_stale for each in buffers])
    return stale


@pytest.mark.parametrize("size", [2, *in_full(3)])
def test_what_is_updated_alongside_is_rounded_by_itself(world, size):
    for stale in world(size)(rounds_together):
        assert stale == [[False, False, True, False], *[[False] * 4] * 3]


def without_owner():
    """A layer that is cut off is not rounded any more, though this rank alone still has its slices."""
    common, owner = rounding(), Owner()
    (_, first, mine), (_, second, others) = made = [make(), make()]
    first.storage.switch(common, [owner, OWNER])
    second.storage.switch(common, [owner])
    del owner, made
    with torch.no_grad():
        for local in (*mine, *others):
            local.mul_(2)
    if bmt.rank() == 0:
        del second, others
    first.gather()
    first.wait()
    assert not first.storage.is_stale
    return bmt.rank() == 0 or second.storage.is_stale


@full
@pytest.mark.parametrize("size", [2, *in_full(3)])
def test_what_no_layer_has_is_not_rounded(world, size):
    assert all(world(size)(without_owner))


def unread(companions):
    """A gather that is refused leaves nothing that counts as gathered."""
    parameters, buffer, slices = make(companions=companions)
    buffer.storage.switch(rounding(), [OWNER])
    buffer.gather()
    buffer.wait()
    buffer.reshard()
    with torch.no_grad():
        for tensor in (*parameters, *slices):
            tensor.mul_(2)
    with pytest.raises(RuntimeError, match=r"Call hf_bmtrain\.synchronize\(\)"):
        buffer.gather()
    assert not buffer.is_unsharded
    bmt.synchronize()
    check_factors(buffer, parameters)


@full
def test_a_gather_that_is_refused(peers):
    peers(2)(unread, COMPANIONS)
