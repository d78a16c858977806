"""use_checkpoint="auto": what the planner decides when, and that nothing it decides changes a number."""

import contextlib
import functools
import itertools
import logging
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import hf_bmtrain as bmt
from cases import by_default, full, pairwise
from hf_bmtrain.engine.blocks.recompute import ALWAYS, NEVER
from hf_bmtrain.features import activations as activations_feature
from hf_bmtrain.features import memory as memory_feature
from hf_bmtrain.features.memory import MemoryPlanner
from inner import device_memory, memory_planner, state_of
from log_lines import log_lines
from ranks import on_ranks
from recomputed_models import Cache, Created, Decoder, Ranged, Recomputing
from tiny_models import batch, build
from twins import WIDTH, Layer, Tower, check_gradients, check_twins, ids

ENOUGH = 1 << 40


class Given:
    """A memory of `room` bytes beside what is allocated, of which a step takes `step` in forward and backward."""

    def __init__(self, room):
        self.base, self.room, self.step, self.resets = 1000, room, 500, 0

    def allocated(self):
        return self.base

    def peak(self):
        return self.base + self.step

    def reset_peak(self):
        self.resets += 1

    def usable(self):
        return 1500 + self.room

    def passes(self, blocks=3):
        """How many have been measured: the peak is reset as one begins and ends, and twice for each block."""
        assert self.resets % (2 + 2 * blocks) == 0
        return self.resets // (2 + 2 * blocks)


@contextlib.contextmanager
def memory_of(room):
    """The planner of this world finds so much memory. Yields it."""
    memory, schedule = Given(room), bmt.current_world().schedule
    # After a model whose layers have collectives, which an earlier test may have wrapped, ranks make plans together.
    with device_memory(memory), mock.patch.object(schedule, "collective_layers", False):
        yield memory


class Noisy(Layer):
    """Draws a mask."""

    def forward(self, x, shift=None):
        return nn.functional.dropout(super().forward(x, shift), 0.3, self.training)


def tower_of(layer, count=4):
    def make():
        model = Tower(0)
        torch.manual_seed(1)
        model.layers = nn.ModuleList([layer() for _ in range(count)])
        return model.train()

    return make


def plain_loss(model, step, rank):
    torch.manual_seed(step)
    return model(ids(step, rank))


def policies(model):
    return [state_of(module).recompute for module in model.modules() if isinstance(module, bmt.CheckpointBlock)]


def kept(model):
    return "".join("01"[getattr(policy, "kept", False)] for policy in policies(model))


def layer_bytes(layer=Layer, **options):
    """What a layer of the tower is measured to keep."""
    with memory_of(0):
        model = check_twins(tower_of(layer), plain_loss, steps=1, use_checkpoint="auto", **options)
        return policies(model)[0].nbytes


# -- what is decided ----------------------------------------------------------------------------------------------


def measured_then_planned():
    size = layer_bytes()
    assert size == 4 * 3 * WIDTH * 4  # what tanh returns; the input is there anyway
    for room, expected in [(-1, "0000"), (3 * size - 1, "0011"), (ENOUGH, "1111")]:
        with memory_of(room) as memory:
            model = check_twins(tower_of(Layer), plain_loss, steps=1, use_checkpoint="auto")
            assert kept(model) == "0000", "planned before a step was made"
            model(ids(1, 0)).backward()
            assert kept(model) == expected
            model(ids(2, 0)).backward()
            assert memory.passes(4) == 1, "measured again"
            whole = room == ENOUGH and bmt.world_size() > 1
            assert [state_of(layer).zero_level for layer in model.layers] == [3 - whole] * 4


def offloaded_inputs_count():
    """A block that keeps its activations keeps its input on the device, too."""
    size = layer_bytes()
    with mock.patch.object(activations_feature, "has_own_memory", return_value=True):
        assert layer_bytes(offload_activations=True) == 2 * size  # as much as what tanh returns


def rank_dependent_room():
    """All follow the rank that has least."""
    size = layer_bytes()
    with memory_of(size * (1 + 2 * bmt.rank())):
        model = check_twins(tower_of(Layer), plain_loss, use_checkpoint="auto")
        assert kept(model) == "0001"


def waits_for_the_optimizer():
    """While gradients add up there is no plan: the optimizer's state is still to come."""
    with memory_of(ENOUGH):
        model = bmt.auto_wrap(Tower(), use_checkpoint="auto")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for micro in range(3):
            model(ids(micro, 0)).backward()
            assert kept(model) == "000"
        optimizer.step()
        model(ids(9, 0)).backward()
        assert kept(model) == "111"


def rows(count, length=3):
    return torch.randint(11, (count, length), generator=torch.Generator().manual_seed(count * length))


def larger_batches():
    """Inputs beyond the measured ones are recomputed and measured; smaller ones follow the plan."""
    with memory_of(ENOUGH) as memory:
        model, twin = bmt.auto_wrap(Tower(), use_checkpoint="auto"), Tower()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
        calls = recomputations(model)
        expected = [
            ((4, 3), 1, 1), ((4, 3), 0, 1), ((2, 3), 0, 1), ((4, 2), 0, 1), ((5, 3), 1, 2), ((5, 3), 0, 2),
            ((2, 6), 1, 3), ((5, 6), 1, 4), ((5, 5), 0, 4), ((4, 6), 0, 4),
        ]  # fmt: skip
        for shape, again, measured in expected:
            calls.clear()
            for either in (model, twin):
                either(rows(*shape)).backward()
            check_gradients(model, twin)
            assert len(calls) == (1 + again) * 3, shape
            assert memory.passes() == measured, shape
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert kept(model) == "111"
        assert policies(model)[0].nbytes == 5 * 6 * WIDTH * 4


def recomputations(model):
    """A list that gets an entry for every run of a layer's linear."""
    calls = []
    for layer in model.layers:
        layer.linear.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def more_is_allocated():
    """What a user allocates after the plan is taken from it, on the rank where it is."""
    size = layer_bytes()
    with memory_of(3 * size) as memory:
        model = check_twins(Tower, plain_loss, use_checkpoint="auto")
        assert kept(model) == "111"
        memory.base += size * (bmt.rank() + 1)
        model(ids(0, 0)).backward()
        assert kept(model) == ("011" if bmt.rank() == 0 else "001")
        memory.base -= size  # what is free in one step, between two micro-batches say, need not be in the next
        model(rows(1, 4)).backward()
        model(ids(0, 0)).backward()
        assert memory.passes() == 2, "not planned again"
        assert kept(model) == ("011" if bmt.rank() == 0 else "001")


def less_is_usable():
    """Memory that something other than torch takes after the plan is taken from it, on the rank where it is."""
    size = layer_bytes()
    with memory_of(3 * size) as memory:
        model = check_twins(Tower, plain_loss, use_checkpoint="auto")
        assert kept(model) == "111"
        memory.room -= size * (bmt.rank() + 1)
        model(ids(0, 0)).backward()
        assert kept(model) == ("011" if bmt.rank() == 0 else "001")
        memory.room = ENOUGH
        model(ids(0, 0)).backward()
        assert kept(model) == ("011" if bmt.rank() == 0 else "001"), "what was taken once may be taken again"


class Untouchable:
    """A memory that raises at any use."""

    def __getattribute__(self, name):
        raise AssertionError(f"memory.{name} is used")


def fixed():
    """With use_checkpoint=True or False, and nothing frozen, memory is not looked at."""
    with device_memory(Untouchable()):
        for use_checkpoint in (True, False):
            check_twins(tower_of(Noisy), plain_loss, use_checkpoint=use_checkpoint)


class Witness(Given):
    """Looks, each time it is read, whether gradients that nobody needs are still there."""

    def __init__(self):
        super().__init__(0)
        self.buffers, self.seen = [], []

    def allocated(self):
        self.seen.append(any(buffer.gradient.shard is not None for buffer in self.buffers))
        return super().allocated()


def gradients_of_the_last_step():
    """They are freed before the memory is read, unless they are added to."""
    memory = Witness()
    with device_memory(memory):
        model = bmt.auto_wrap(Tower(), use_checkpoint="auto")
        memory.buffers = [buffer for policy in policies(model) for buffer in policy.block.buffers]
        for step in range(4):
            model(ids(step, 0)).backward()
            if step % 2 == 0:
                model.zero_grad()
    assert memory.seen == [False, False, True, False]


def forwards_ahead_of_backward():
    """Two forwards before a backward count twice; more than were measured are recomputed."""
    with memory_of(ENOUGH):
        model = check_twins(
            Tower, lambda m, step, rank: m(ids(step, rank)) + 2 * m(ids(7 + step, rank)), use_checkpoint="auto"
        )
        assert policies(model)[0].calls == 2
        assert policies(model)[0].nbytes == 2 * 4 * 3 * WIDTH * 4
        calls = recomputations(model)
        (model(ids(0, 0)) + model(ids(1, 0)) + model(ids(2, 0))).backward()
        assert len(calls) == 3 * 3 + 3


def dropped_forward():
    """What only a forward without backward has shown is not known."""
    with memory_of(ENOUGH) as memory:
        model = check_twins(Tower, plain_loss, use_checkpoint="auto")
        activations = memory_planner().activations
        model(rows(7))
        activations.measuring = False
        assert memory.resets == 8 + 1
        model(rows(7))
        assert activations.measuring, "the dropped forward counts as measured"
        assert memory.resets == 8 + 2


def inside_a_reentrant_checkpoint():
    """Its forwards are without gradients or inside a backward: there is nothing to plan."""
    with memory_of(ENOUGH) as memory:
        model = check_twins(foreign("everything", True), plain_loss, steps=1, use_checkpoint="auto")
        for step in range(2):
            model(ids(step, 0)).backward()
        assert kept(model) == "0000"
        assert memory.resets == 0


def two_models():
    """Two models of a world share its memory."""
    size = layer_bytes()
    with memory_of(4 * size):
        one, two = (bmt.auto_wrap(Tower(), use_checkpoint="auto") for _ in range(2))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
        for step in range(3):
            for model, optimizer in zip((one, two), optimizers):
                model(ids(step, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert (kept(one), kept(two)) == ("001", "111")
        del two, model, optimizers, optimizer
        one(rows(5)).backward()
        one(rows(5)).backward()
        assert kept(one) == "111"
        plan = memory_planner().activations
        three = bmt.auto_wrap(Tower(), use_checkpoint="auto")
        assert policies(three)[2].activations is plan
        del one, three
        four = bmt.auto_wrap(Tower(), use_checkpoint="auto")
        shared = {policy.activations for policy in policies(four)}
        assert len(shared) == 1 and plan not in shared, "the last models' maxima hold"


def trained(model, steps, optimizer_steps=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(ids(step, bmt.rank())).backward()
        if optimizer_steps:
            optimizer.step()
        optimizer.zero_grad()
    return model


def kept_on_one_rank():
    """Rank 0 holds the best model so far, which the others have deleted: all start a new plan."""
    with memory_of(ENOUGH):
        best = trained(bmt.auto_wrap(Tower(), use_checkpoint="auto"), 2)
        assert kept(best) == "111"
        if bmt.rank():
            del best
        model = trained(bmt.auto_wrap(Tower(2), use_checkpoint="auto"), 3)
        assert kept(model) == "11"


def deleted_on_one_rank():
    """Of two models that were measured together, the one that every rank still has is planned for."""
    for later in (False, True):  # whether the other one is measured only then
        with memory_of(ENOUGH):
            old, model = (bmt.auto_wrap(Tower(count), use_checkpoint="auto") for count in (3, 2))
            trained(old, 2, optimizer_steps=False)
            if not later:
                trained(model, 2, optimizer_steps=False)
            if bmt.rank():
                del old
            trained(model, 4)
            assert kept(model) == "11"


def a_torch_whose_hooks_cannot_be_read():
    """As 2.6: refused with the way out."""
    with memory_of(ENOUGH), mock.patch.object(memory_feature, "top_saved_tensors_hooks", None):
        model = Tower()
        with pytest.raises(RuntimeError, match="Pass use_checkpoint=True or False, or install a newer torch"):
            bmt.auto_wrap(model, use_checkpoint="auto")
        check_twins(Tower, plain_loss, use_checkpoint=True)


def asked_for_later():
    """gradient_checkpointing_enable and _disable mean all and none."""
    with memory_of(ENOUGH):
        model, twin = bmt.auto_wrap(build("llama"), use_checkpoint="auto").train(), build("llama").train()
        assert not hasattr(model, "layers")
        blocks = model.model.layers
        for switch, expected in [("enable", True), ("disable", False)]:
            getattr(model, f"gradient_checkpointing_{switch}")()
            assert [state_of(block).recompute for block in blocks] == [ALWAYS if expected else NEVER] * len(blocks)
        model(**batch("llama", bmt.rank())).loss.backward()
        torch.stack([twin(**batch("llama", r)).loss for r in range(bmt.world_size())]).mean().backward()
        check_gradients(model, twin)


def on_the_cpu():
    assert bmt.current_world().schedule.observer(MemoryPlanner) is None
    model = check_twins(Tower, plain_loss, use_checkpoint="auto")
    assert [state_of(layer).recompute for layer in model.layers] == [NEVER] * 3
    with pytest.raises(ValueError, match="must be True, False, 'attention' or 'auto', not 'some'"):
        bmt.auto_wrap(Tower(), use_checkpoint="some")


def told_once():
    with log_lines(logging.INFO) as lines, memory_of(ENOUGH):
        check_twins(Tower, plain_loss, steps=5, use_checkpoint="auto")
    told = [line for line in lines if "use_checkpoint='auto'" in line]
    assert len(told) == (bmt.rank() == 0), told
    assert all("of 3 blocks" in line and "3 keep their activations" in line for line in told)


class Allocator(Created):
    """The memory of a device whose allocator is this process's: bytes of the storages that operations have made."""

    def __init__(self):
        super().__init__()
        self.limit, self.most = ENOUGH, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.allocated())
        return result

    def allocated(self):
        self.storages = self.alive()
        return sum(self.storages.values())

    def peak(self):
        return self.most

    def reset_peak(self):
        self.most = self.allocated()

    def usable(self):
        return self.limit


class Wide(Layer):
    """Keeps several times its input, and computes beside."""

    def forward(self, x, shift=None):
        wide = torch.tanh(torch.cat([x, x, x], -1).exp() * 0.1)
        return super().forward(x + nn.functional.dropout(wide * wide.sin(), 0.1)[..., :WIDTH], shift)


class Spread(torch.autograd.Function):
    """The identity, whose backward takes much memory for a moment."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.repeat(90, 1, 1).view(90, *gradient.shape)[3].clone()


class Early(Wide):
    """Its backward begins with that: its activations are not needed yet."""

    def forward(self, x, shift=None):
        return Spread.apply(super().forward(x, shift))


class Late(Wide):
    """Its backward ends with that: of its activations, what its first operations keep is still there."""

    def forward(self, x, shift=None):
        return super().forward(Spread.apply(x), shift)


def with_vocabulary():
    model = tower_of(Wide, 8)()
    model.head = nn.Linear(WIDTH, 500)
    return model


PEAKS = {
    "of blocks": tower_of(Wide, 8),
    "early in backward": tower_of(Early, 8),
    "late in backward": tower_of(Late, 8),
    "of the loss": with_vocabulary,
}


def peaks_under(limit, use_checkpoint, make, micro_batches):
    """The memory that each step's forwards and backwards have taken at most, and how many blocks keep."""
    allocator, peaks, batch = Allocator(), [], torch.randint(11, (64, 16))
    allocator.limit = limit
    with device_memory(allocator):
        model = bmt.auto_wrap(make(), use_checkpoint=use_checkpoint)
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
        with allocator:
            for _ in range(4):
                allocator.reset_peak()
                for _ in range(micro_batches):
                    model(batch).backward()
                peaks.append(allocator.most)
                optimizer.step()
                optimizer.zero_grad()
    return peaks, kept(model).count("1")


# -- that it changes nothing --------------------------------------------------------------------------------------


def train(make, loss, use_checkpoint, zero_level, schedule=None, steps=6):
    """Losses, gradients and weights of some steps, and what the last plan keeps.

    schedule: the blocks that keep, by step, after the first plan.
    """
    torch.manual_seed(0)
    model = bmt.auto_wrap(make(), use_checkpoint=use_checkpoint, zero_level=zero_level)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    seen = []
    for step in range(steps):
        if schedule is not None and step >= 2:
            for policy, keeps in zip(policies(model), itertools.cycle(schedule[step % len(schedule)])):
                policy.kept = keeps == "1"
        value = loss(model, step, bmt.rank())
        seen += [value.detach(), torch.rand(())]  # random numbers go on as without recomputation
        value.backward()
        for parameter in model.parameters():
            gradient = parameter.gather_gradient()
            seen += [] if gradient is None else [gradient]
        optimizer.step()
        optimizer.zero_grad()
    seen += [parameter.gather() for parameter in model.parameters()]
    return seen + [buffer.clone() for buffer in model.buffers()], kept(model)


def frozen_blocks():
    model = tower_of(Noisy)()
    model.layers[0].requires_grad_(False)
    model.layers[2].requires_grad_(False)
    model.embedding.requires_grad_(False)
    return model


def twice_loss(model, step, rank):
    torch.manual_seed(step)
    return model(ids(step, rank), plan=[0, 1, 1, 0, 2, 3])


def evaluating_loss(model, step, rank):
    torch.manual_seed(step)
    value = model(ids(step, rank))
    with torch.no_grad():
        model(ids(60, rank))
    model(ids(50, rank))  # a graph that is dropped
    return value


def adding_loss(model, step, rank):
    torch.manual_seed(step)
    (model(ids(step, rank)) / 2).backward()
    return model(ids(step + 9, rank)) / 2


def growing_loss(model, step, rank):
    torch.manual_seed(step)
    return model(rows(2 + (step * 5 + rank) % 7, 3 - step % 2))


def cached_loss(model, step, rank):
    return model(ids(step, rank), Cache())


def family_loss(family):
    def loss(model, step, rank):
        torch.manual_seed(step)
        return model(**batch(family, 10 * step + rank, rows=2 + step % 2)).loss

    return loss


def foreign(plan, reentrant):
    def make():
        model = Recomputing(plan, reentrant, True).train()
        model.layers = nn.ModuleList([Noisy() for _ in range(4)])
        return model

    return make


CASES = {
    "plain": (tower_of(Layer), plain_loss),
    "dropout": (tower_of(Noisy), plain_loss),
    "buffers": (tower_of(Ranged), plain_loss),
    "cache": (Decoder, cached_loss),
    "a block twice": (tower_of(Noisy), twice_loss),
    "frozen": (frozen_blocks, plain_loss),
    "evaluation": (tower_of(Noisy), evaluating_loss),
    "accumulation": (tower_of(Noisy), adding_loss),
    "batches grow": (tower_of(Noisy), growing_loss),
    **{family: (functools.partial(build, family, dropout=0.2), family_loss(family)) for family in ("t5", "mixtral")},
    **{f"{plan}, {reentrant}": (foreign(plan, reentrant), plain_loss)
       for plan in ("each layer", "all layers", "everything") for reentrant in (False, True)},
}  # fmt: skip
SCHEDULE = ["0000", "0011", "1111", "1010"]


# -- compiled -----------------------------------------------------------------------------------------------------


def compiled(family):
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    with memory_of(ENOUGH):
        model = bmt.auto_wrap(build(family).train(), use_checkpoint="auto", compile="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        blocks = policies(model)
        for step in range(8):
            if step > 3:
                for index, policy in enumerate(blocks):
                    policy.kept = (index + step) % 2 == 0
            model(**batch(family, 10 * step + bmt.rank())).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            graphs.append(counters["stats"]["unique_graphs"])
            if step == 2:
                assert all(policy.kept for policy in blocks)
    return graphs


# -----------------------------------------------------------------------------------------------------------------

DECISIONS = [
    measured_then_planned, offloaded_inputs_count, rank_dependent_room, waits_for_the_optimizer,
    larger_batches, more_is_allocated,
    less_is_usable, fixed, gradients_of_the_last_step, forwards_ahead_of_backward, dropped_forward,
    inside_a_reentrant_checkpoint, two_models, kept_on_one_rank, deleted_on_one_rank, asked_for_later,
    a_torch_whose_hooks_cannot_be_read, on_the_cpu, told_once,
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_default(
        DECISIONS,
        measured_then_planned,
        rank_dependent_room,
        larger_batches,
        gradients_of_the_last_step,
        dropped_forward,
        kept_on_one_rank,
        deleted_on_one_rank,
    ),
    ids=lambda case: case.__name__,
)
def test_decisions(world, case):
    world(2)(case)


@full
@pytest.mark.parametrize(("which", "micro_batches"), [*zip(PEAKS, [2, 1, 1, 2])])
@on_ranks(1)
def test_the_peak_is_kept(which, micro_batches):
    """Real peaks: as few blocks recompute as the limit asks for, and no step goes over it."""
    make = PEAKS[which]
    low = peaks_under(ENOUGH, True, make, micro_batches)[0][-1]
    high = peaks_under(ENOUGH, False, make, micro_batches)[0][-1]
    one = (high - low) / 7
    counts = []
    for share in (-0.1, 0.05, 0.3, 0.6, 0.9, 1.3):
        limit = int(low + share * (high - low))
        peaks, count = peaks_under(limit, "auto", make, micro_batches)
        counts.append(count)
        assert count == 0 or max(peaks) <= limit, (share, count, peaks, limit)
        assert count == 8 or max(peaks) > limit - 2.5 * one, ("blocks recompute that need not", share, count, peaks)
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 8 and len(set(counts)) > 4, counts


@pytest.mark.parametrize(
    ("name", "zero_level", "schedule"),
    pairwise(
        [
            ("dropout", 3, SCHEDULE),
            ("a block twice", 3, SCHEDULE),
            ("batches grow", 3, None),
            ("each layer, True", 3, SCHEDULE),
        ],
        list(CASES),
        [2, 3],
        [None, SCHEDULE],
    ),
    ids=lambda value: "planned" if value is None else "scheduled" if value is SCHEDULE else str(value),
)
@on_ranks(2)
def test_equal_to_the_last_bit(name, zero_level, schedule):
    make, loss = CASES[name]
    always, never = (train(make, loss, use_checkpoint, zero_level)[0] for use_checkpoint in (True, False))
    with memory_of(ENOUGH if schedule is None else 0):
        planned, plan = train(make, loss, "auto", zero_level, schedule)
    assert "1" in plan or "True" in name or schedule, "nothing was kept"
    assert all(value.isfinite().all() for value in planned)
    for others in (always, never):
        assert len(planned) == len(others)
        assert all(torch.equal(one, other) for one, other in zip(planned, others))


@full
@pytest.mark.parametrize(("size", "family"), [(2, "llama"), (1, "gpt2")])
def test_compiled(world, size, family):
    graphs = world(size)(compiled, family)[0]
    assert graphs[0] >= 1, "nothing was compiled"
    assert graphs[4] <= graphs[2] + 1, "blocks that are recomputed do not share a graph"
    assert graphs[-1] == graphs[4], "the plan's changes compile again"
    assert graphs[-1] <= 3, "the layers do not share a graph"
