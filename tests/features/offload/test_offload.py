"""AdamOffloadOptimizer is AdamOptimizer: on CPU, and by the path of a GPU with streams that lag at random.

AdamOptimizer keeps float32 masters here, or both forms of them are compared.
"""

import copy
import gc
import itertools
import pickle
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full, in_full
from float_masters import FloatMasters
from hf_bmtrain.engine.base import pinned
from hf_bmtrain.engine.base.torch_internals import StorageWeakRef
from hf_bmtrain.engine.sharding.pending_update import PendingUpdate
from hf_bmtrain.features.offload import slabs
from inner import chunks_of, run_of
from offloaded import DTYPES, Trainee, as_on_a_gpu, assert_equal, the_same
from twenty_steps import OPTIONS, groups
from twins import Tower, ids

KINDS = (FloatMasters, bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer)


def assert_all_equal(trainees, label):
    for other in trainees[1:]:
        assert_equal(trainees[0], other, (label, type(other.optimizer).__name__))


def hand_written(seed):
    """Weights written in part or whole between steps, also while frozen: every master keeps rounding to its weight."""
    with as_on_a_gpu(seed):
        trainees = [Trainee(cls, torch.bfloat16) for cls in KINDS]
        for number in range(12):
            for trainee in trainees:
                trainee.model.layers[1].linear.requires_grad_(number not in (4, 5, 8))
                trainee.step(number)
                if number % 3 < 2:
                    write(trainee, number)
            assert_all_equal(trainees, number)
            for trainee in trainees:
                for p, values in zip(trainee.model.parameters(), states(trainee)):
                    assert torch.equal(values["master"].bfloat16(), p.part), number
        for trainee in trainees:  # the same values once more: no master moves
            before = [values["master"] for values in states(trainee)]
            with bmt.gathered(trainee.model, modify=True):
                pass
            trainee.optimizer.param_groups[0]["lr"] = trainee.optimizer.param_groups[1]["lr"] = 0.0
            trainee.step(20)
            assert all(torch.equal(a, values["master"]) for a, values in zip(before, states(trainee)))


def written_while_frozen(seed):
    """What is written to a weight that no step updates is there when one does again; nobody asks for the state."""
    with as_on_a_gpu(seed):
        trainees = [Trainee(cls, torch.bfloat16) for cls in KINDS]
        for number in range(6):
            for trainee in trainees:
                trainee.model.layers[1].linear.requires_grad_(number in (0, 1, 4, 5))
                trainee.step(number)
                if number in (1, 2, 3):
                    write(trainee, 2)
        assert_all_equal(trainees, "frozen")


def states(trainee):
    """The state of every parameter, in their order."""
    optimizer = trainee.optimizer
    held = optimizer.state_dict()
    pairs = zip(optimizer.param_groups, held["param_groups"])
    by_parameter = {id(p): held["state"][key] for own, saved in pairs for p, key in zip(own["params"], saved["params"])}
    return [by_parameter[id(p)] for p in trainee.model.parameters()]


def write(trainee, number):
    """A mask, a doubling, a value for all, and what has no master at the old distance: ±0 and inf."""
    if hasattr(trainee.optimizer, "wait"):
        trainee.optimizer.wait()
    for index, parameter in enumerate(trainee.model.parameters()):
        values = parameter.detach().as_subclass(torch.Tensor)
        kind = (index + number) % 5
        if kind == 0:
            values.mul_(torch.arange(values.numel()) % 3 > 0)
        elif kind == 1:
            values[: values.numel() // 2] *= 2
        elif kind == 2:
            values[1::2] = 0.0 if number % 2 else -0.0
        elif kind == 3:
            values.add_(1e-3)


def another_master_is_loaded(seed):
    """A loaded master wins over the weights, which were another's."""
    with as_on_a_gpu(seed):
        trainees = [Trainee(cls, torch.bfloat16) for cls in KINDS]
        for trainee in trainees:
            trainee.step(0)
            state = trainee.optimizer.state_dict()
            for values in state["state"].values():
                values["master"] = (values["master"] + 0.37).sin()
            trainee.optimizer.load_state_dict(state)
            trainee.step(1)
        assert_all_equal(trainees, "loaded")


def all_dtypes_at_once(seed):
    """Parameters of three dtypes in one optimizer; what travels of each is as many bytes as the docstring says."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for exp_avg_dtype, travel in ((torch.float32, (8, 12, 10)), (torch.bfloat16, (6, 10, 8))):
        with as_on_a_gpu(seed):
            pair = [
                [torch.nn.Parameter(torch.linspace(-1, 1, n).to(d).view(-1, 3)) for n in (300, 69) for d in dtypes]
                for _ in range(2)
            ]
            kinds = FloatMasters, bmt.optim.AdamOffloadOptimizer
            optimizers = [kind(ps, **OPTIONS, exp_avg_dtype=exp_avg_dtype) for kind, ps in zip(kinds, pair)]
            for step in range(4):
                for parameters, optimizer in zip(pair, optimizers):
                    for number, p in enumerate(parameters):
                        p.grad = (number + step + 1) * p.detach().sin()
                    optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(*pair))
            own, other = (optimizer.state_dict()["state"] for optimizer in optimizers)
            assert [[*state] for state in own.values()] == [[*state] for state in other.values()]
            assert all(torch.equal(own[k][name], other[k][name]) for k in own for name in own[k])
            for chunk in chunks_of(optimizers[1]):
                held = [t for t in chunk.slab.part(chunk.start, chunk.stop) if t is not None]
                kind = dtypes.index(run_of(optimizers[1], chunk.parts[0].run).weights.dtype)
                assert sum(t.element_size() for t in held) == travel[kind]


def saved_by_two_ranks(folder):
    """All kinds write the same file; each is saved under its name."""
    with as_on_a_gpu(3):
        for cls in KINDS:
            trainee = Trainee(cls, torch.bfloat16)
            for number in range(3):
                trainee.step(number)
            state = trainee.model.state_dict(), trainee.manager.state_dict(gather_opt=True)
            if bmt.rank() == 0:
                torch.save(state, f"{folder}/{cls.__name__}.pt")
    bmt.synchronize()


def loaded_by_others(folder):
    """By one rank: each kind goes on from another's file, and steps alike."""
    with as_on_a_gpu(4):
        files = [torch.load(f"{folder}/{cls.__name__}.pt", weights_only=True) for cls in KINDS]
        flat = [torch.utils._pytree.tree_leaves(file) for file in files]
        assert len(flat[0]) == len(flat[1]) == len(flat[2])
        assert all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for f in flat for a, b in zip(flat[0], f)
        )
        trainees = [Trainee(cls, torch.bfloat16) for cls in KINDS]
        for trainee, (weights, state) in zip(trainees, files[1:] + files[:1]):
            trainee.model.load_state_dict(weights)
            trainee.manager.load_state_dict(state, gather_opt=True)
            for number in range(3):
                trainee.step(number)
        assert_all_equal(trainees, "on another number of ranks")


def streamed(dtype, seed, exp_avg_dtype=torch.float32):
    with as_on_a_gpu(seed) as clock:
        the_same(dtype, exp_avg_dtype=exp_avg_dtype)
    assert clock.lag > 6, "the streams were never far behind"


def moved(dtype, seed):
    """A state dict goes from each kind of optimizer to the next, until all have been all."""
    with as_on_a_gpu(seed):
        kinds = [*KINDS]
        trainees = [Trainee(kind, dtype) for kind in kinds]
        for number in range(8):
            if number in (2, 4, 6):
                kinds = kinds[1:] + kinds[:1]
                saved = [trainee.optimizer.state_dict() for trainee in trainees]
                assert all(v.dtype == torch.float32 for s in saved for d in s["state"].values() for v in d.values())
                for trainee, kind, state in zip(trainees, kinds, saved):
                    trainee.optimizer = kind(groups(trainee.model.named_parameters()), **OPTIONS)
                    trainee.optimizer.load_state_dict(state)
                    trainee.manager.optimizers[0] = trainee.optimizer
            for trainee in trainees:
                trainee.step(number)
        assert_all_equal(trainees, "moved")


def ordinary(seed):
    """Nobody waits for parameters outside buffers: they are there after the step."""
    with as_on_a_gpu(seed):
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 200)), torch.nn.Parameter(torch.ones(2, 3))]
        twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        optimizer = bmt.optim.AdamOffloadOptimizer(parameters, **OPTIONS)
        plain = torch.optim.AdamW(twins, **OPTIONS)
        for _ in range(3):
            for p in (*parameters, *twins):
                p.grad = p.detach().sin()
            optimizer.step()
            plain.step()
            for parameter, twin in zip(parameters, twins):
                torch.testing.assert_close(parameter, twin)


def without_a_gradient(seed):
    """A step that finds no gradient at all does nothing, and the state is there for the next one."""
    with as_on_a_gpu(seed):
        parameter, twin = (torch.nn.Parameter(torch.linspace(-1, 1, 200)) for _ in range(2))
        optimizers = bmt.optim.AdamOffloadOptimizer([parameter], **OPTIONS), bmt.optim.AdamOptimizer([twin], **OPTIONS)
        for factor in (1.0, None, 2.0):
            for p, optimizer in zip((parameter, twin), optimizers):
                p.grad = None if factor is None else factor * torch.ones_like(p)
                optimizer.step()
            assert torch.equal(parameter, twin)
        assert float(optimizers[0].state[parameter]["step"]) == 2


def the_first_buffers_come_first(seed):
    """Decayed and other parameters are in different groups, yet a buffer is done before the next one begins."""
    with as_on_a_gpu(seed):
        trainee = Trainee(bmt.optim.AdamOffloadOptimizer, torch.bfloat16)
        trainee.step(0)
        chunks = chunks_of(trainee.optimizer)
        order = [run_of(trainee.optimizer, p.run).buffer for chunk in chunks for p in chunk.parts]
    changes = sum(a is not b for a, b in zip(order, order[1:]))
    assert len({*order}) > 2
    assert changes == len({*order}) - 1
    along = [chunk.slab for chunk in chunks]
    assert sum(a is not b for a, b in zip(along, along[1:])) == len({*along}) - 1 > 0
    assert order[0] is trainee.model.embedding._parameters["weight"].buffer


def written_gradients_wait(seed):
    """zero_grad(set_to_none=False) writes what an update may still read."""
    with as_on_a_gpu(seed):
        trainees = [Trainee(cls, torch.bfloat16) for cls in (FloatMasters, bmt.optim.AdamOffloadOptimizer)]
        for number in range(3):
            for trainee in trainees:
                trainee.step(number)
                trainee.optimizer.zero_grad(set_to_none=False)
        assert_equal(*trainees, "zeroed")


def steps_in_a_row(seed):
    """Each with another lr, and no forward between them."""
    with as_on_a_gpu(seed):
        trainees = [Trainee(cls, torch.bfloat16) for cls in (FloatMasters, bmt.optim.AdamOffloadOptimizer)]
        for trainee in trainees:
            trainee.step(0)
            trainee.model(ids(1, bmt.rank())).backward()
            for number in range(5):
                trainee.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
                trainee.optimizer.step()
        assert_equal(*trainees, "in a row")


def direct_reads(seed):
    """`wait`, `.data`, `gather` and both state dicts show the step's weights and state at once."""
    with as_on_a_gpu(seed):
        trainees = [Trainee(cls, torch.bfloat16) for cls in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer)]
        for number in range(10):
            for trainee in trainees:
                trainee.step(number)
            if number % 5 == 0:
                trainees[1].optimizer.wait()
            if number % 5 == 4:
                a, b = (trainee.manager.state_dict()["optimizers"][0]["state"] for trainee in trainees)
                assert all(torch.equal(a[key][name], b[key][name]) for key in a for name in a[key])
            if number % 5 == 3:
                assert_equal(*trainees, number)
            for a, b in zip(*(trainee.model.parameters() for trainee in trainees)):
                if number % 5 == 0:
                    assert torch.equal(a, b)
                elif number % 5 == 1:
                    assert torch.equal(a.data, b.data)
                elif number % 5 == 2:
                    assert torch.equal(a.gather(), b.gather())


def looked_at_and_pickled(seed):
    """`inspect_model` and a pickle of a parameter show the step's weights at once."""
    with as_on_a_gpu(seed):
        trainees = [Trainee(cls, torch.float32) for cls in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer)]
        for number in range(4):
            for trainee in trainees:
                trainee.step(number)
            if number % 2:
                a, b = (bmt.inspect.inspect_model(trainee.model, "*") for trainee in trainees)
                assert a == b
            else:
                a, b = (pickle.dumps([p.part for p in trainee.model.parameters()]) for trainee in trainees)
                assert all(torch.equal(x, y) for x, y in zip(pickle.loads(a), pickle.loads(b)))


class Grouped:
    """A tower in three groups, of which the last two are its first two layers, updated in backward or not."""

    def __init__(self, early):
        self.model, self.early = bmt.auto_wrap(Tower()), early
        split = {"layers.0.": (1e-2, []), "layers.1.": (1e-4, []), "": (1e-3, [])}
        for name, p in self.model.named_parameters():
            next(members for prefix, (_, members) in split.items() if name.startswith(prefix)).append(p)
        first, second, rest = ({"params": members, "lr": lr} for lr, members in split.values())
        self.optimizer = bmt.optim.AdamOffloadOptimizer([rest, first, second])

    def backward(self, number, change=lambda groups: None):
        with self.optimizer.update_in_backward() if self.early else nullcontext():
            loss = self.model(ids(number, bmt.rank()))
            change(self.optimizer.param_groups)
            loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def merged(groups):
    groups[1]["params"] += groups[2]["params"]
    groups[2]["params"] = []


def regrouped(seed):
    """Groups that are changed between steps, or before the backward, are used at once; the next backward updates."""
    changes = merged, lambda groups: groups.reverse(), lambda groups: groups.pop(0)
    paths = (False, nullcontext), (True, lambda: as_on_a_gpu(seed))
    for change, (inside, path) in itertools.product(changes, paths):
        results, updated = [], []
        for early in (False, True):
            with path():
                grouped = Grouped(early)
                for number in range(5):
                    if number == 2 and not inside:
                        change(grouped.optimizer.param_groups)
                    grouped.backward(number, *[change] * (number == 2 and inside))
                    updated.append(grouped.optimizer.updated_in_backward)
                    grouped.step()
                results.append(grouped.model.state_dict())
        for name, value in results[0].items():
            assert torch.equal(value, results[1][name]), (name, (value - results[1][name]).abs().max())
        assert updated == [False] * 5 + [False, True, False, True, True]


def regrouped_too_late(seed):
    """After the backward, a parameter that it has updated may change its group only for one with the same settings."""
    grouped = Grouped(True)
    for number in range(4):
        grouped.backward(number)
        if number == 1:
            groups = grouped.optimizer.param_groups
            groups[1]["params"].reverse()
            groups[1]["lr"] = groups[2]["lr"]
            with pytest.raises(RuntimeError, match="another setting of a parameter group was changed before step"):
                grouped.optimizer.step()
            groups[1]["lr"] = 1e-2
        grouped.step()
    moved, kept = (copy.copy(group["params"]) for group in groups[1:])
    for members in ([], moved + kept):
        grouped.backward(4)
        assert grouped.optimizer.updated_in_backward
        groups[1]["params"], groups[2]["params"] = [], members
        with pytest.raises(RuntimeError, match="parameters were moved out of their parameter group"):
            grouped.optimizer.step()
        groups[1]["params"], groups[2]["params"] = moved, kept
        grouped.step()
        grouped.backward(5)
        grouped.step()
    groups[1]["lr"] = groups[2]["lr"]
    grouped.backward(6)
    assert grouped.optimizer.updated_in_backward
    groups[1]["params"], groups[2]["params"] = [], moved + kept
    grouped.step()


def each_buffer_waits_for_its_own(seed):
    """A gather is behind the update of its buffer and not behind the last one; updates come in the buffers' order."""
    with as_on_a_gpu(seed) as clock:
        trainee = Trainee(bmt.optim.AdamOffloadOptimizer, torch.bfloat16)
        trainee.step(0)
        trainee.model(ids(1, bmt.rank())).backward()
        clock.pass_some_time = lambda: None  # from here nothing is done before somebody waits
        trainee.optimizer.step()
        first = trainee.model.embedding._parameters["weight"].buffer
        last = trainee.model.layers[2].linear._parameters["weight"].buffer
        tickets = first.update.ticket, last.update.ticket
        assert not any(ticket.reached for ticket in tickets)
        first.gather()
        assert tickets[0].reached
        assert not tickets[1].reached
        last.gather()
        assert tickets[1].reached


def a_resident_update_leaves_nothing_pending(seed):
    with as_on_a_gpu(seed):
        trainee = Trainee(bmt.optim.AdamOptimizer, torch.bfloat16)
        trainee.step(0)
        assert all(p.buffer.update.ticket is None for p in trainee.model.parameters())


@pytest.mark.parametrize("dtype", by_default(DTYPES, torch.bfloat16), ids=str)
def test_the_same_on_cpu(world, dtype):
    world(2)(the_same, dtype)


@pytest.mark.parametrize("seed", [0, *in_full(1)])
@pytest.mark.parametrize("dtype", by_default(DTYPES, torch.bfloat16), ids=str)
def test_streamed_is_the_same(world, dtype, seed):
    world(2)(streamed, dtype, seed)


@full
def test_streamed_with_a_short_exp_avg_is_the_same(world):
    world(2)(streamed, torch.bfloat16, 5, torch.bfloat16)


CASES = [
    *((moved, dtype) for dtype in DTYPES),
    (steps_in_a_row,), (ordinary,), (without_a_gradient,), (the_first_buffers_come_first,),
    (written_gradients_wait,), (direct_reads,), (looked_at_and_pickled,), (each_buffer_waits_for_its_own,),
    (a_resident_update_leaves_nothing_pending,), (hand_written,), (written_while_frozen,),
    (another_master_is_loaded,), (all_dtypes_at_once,), (regrouped,), (regrouped_too_late,),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_default(
        CASES,
        (moved, torch.bfloat16),
        (steps_in_a_row,),
        (without_a_gradient,),
        (each_buffer_waits_for_its_own,),
        (written_while_frozen,),
        (regrouped,),
        (regrouped_too_late,),
    ),
    ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case),
)
def test_offload(world, case):
    world(2)(*case, 7)


def test_a_file_fits_all_kinds_and_any_number_of_ranks(world, tmp_path):
    world(2)(saved_by_two_ranks, str(tmp_path))
    world(1)(loaded_by_others, str(tmp_path))


@full
def test_gradients_are_kept_until_the_current_stream_has_waited():
    class Late:
        waited = False

        def wait(self):
            self.waited = True

    update, ticket, gradient = PendingUpdate(None), Late(), torch.zeros(3)
    alive = weakref.ref(gradient)
    update.begin(ticket, [gradient])
    del gradient
    gc.collect()
    assert alive() is not None
    update.wait()
    assert ticket.waited
    gc.collect()
    assert alive() is None


def test_a_load_frees_the_old_state_before_the_next_one_is_allocated():
    parameter = torch.nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones_like(parameter)
    found, storages, allocate = [], [], slabs.pinned_bytes

    def noting(*arguments):
        gc.collect()
        found.append([not storage.expired() for storage in storages])
        memory = allocate(*arguments)
        storages.append(StorageWeakRef(memory.untyped_storage()))
        return memory

    with as_on_a_gpu(0), mock.patch.object(slabs, "pinned_bytes", noting):
        optimizer = bmt.optim.AdamOffloadOptimizer([parameter])
        for _ in range(2):
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert found == [[], [False]]


def test_too_little_memory_is_said_with_the_numbers():
    parameter = torch.nn.Parameter(torch.ones(1 << 20, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    with as_on_a_gpu(0), mock.patch.object(pinned, "available_bytes", return_value=3 << 20):
        with pytest.raises(
            RuntimeError,
            match="10.0 MiB .* state of 1,048,576 elements in 1 parameters .* 0.0 GiB .* train on more ranks",
        ):
            bmt.optim.AdamOffloadOptimizer([parameter]).step()
