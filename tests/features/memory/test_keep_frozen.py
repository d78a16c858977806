"""keep_frozen: frozen parameters stay whole, nothing is gathered for them, and no number changes."""

import contextlib
import logging
import tempfile
import weakref

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import full, in_full, pairwise, rows_in_full
from hf_bmtrain.engine.base.torch_internals import top_saved_tensors_hooks
from hf_bmtrain.engine.comm.collective_log import code
from hf_bmtrain.features.prediction.prediction import predict
from hf_bmtrain.features.prediction.simulation import on_meta
from inner import device_memory, memory_planner, state_of
from log_lines import log_lines
from ranks import on_ranks
from tiny_models import batch, build
from twins import WIDTH, Layer, Tower, check_gradients, check_twins, compare_backward, ids

counts_saved = pytest.mark.skipif(top_saved_tensors_hooks is None, reason="use_checkpoint='auto' needs torch 2.7")


class Adapted(Layer):
    """A frozen layer with a trainable product beside it, as LoRA's, and a frozen buffer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64), requires_grad=False)

    def forward(self, x, shift=None):
        return super().forward(x, shift) + self.up(self.down(x)) * self.scale.to(x.dtype)


def adapted(layers=3):
    model = Tower(0)
    torch.manual_seed(1)
    model.layers = nn.ModuleList([Adapted() for _ in range(layers)])
    model.embedding.requires_grad_(False)
    model.head.requires_grad_(False)
    return model.train()


def loss(model, step, rank):
    return model(ids(step, rank))


def buffers_in(model):
    return list(dict.fromkeys(p.buffer for p in model.parameters()))


def frozen_in(model):
    return [buffer for buffer in buffers_in(model) if not buffer.gradient.trainable]


@contextlib.contextmanager
def gathers():
    """Yields a list that has, afterwards, the numbers of the buffers that were gathered by collectives."""
    collective_log = bmt.current_world().gather.collective_log
    before, gathered = collective_log.count, []
    yield gathered
    kinds = ("gather of", "gather without gradients of")
    known = {code(kind, number): number for kind in kinds for number in range(1, 100_000)}
    entries = [collective_log.entry(number) for number in range(before + 1, collective_log.count + 1)]
    gathered += [known[entry] for entry in entries if entry in known]


def gathered_in_steps(model, count=2, first=1):
    """How often each frozen buffer was gathered in so many steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with gathers() as numbers:
        for step in range(first, first + count):
            loss(model, step, bmt.rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [numbers.count(buffer.number) for buffer in frozen_in(model)]


# -- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero_level", "use_checkpoint"),
    pairwise([(3, True), (2, "auto")], [2, 3], [True, False, "auto"]),
)
@on_ranks(2)
def test_kept_and_equal(zero_level, use_checkpoint):
    options = {"zero_level": zero_level, "use_checkpoint": use_checkpoint}
    several = bmt.world_size() > 1
    for keep_frozen in (True, False):
        model = check_twins(adapted, loss, keep_frozen=keep_frozen, **options)
        assert len(frozen_in(model)) == 7  # outside, and of each block by dtype
        assert [b.is_unsharded for b in frozen_in(model)] == [keep_frozen or not several] * 7
        times = gathered_in_steps(model)
        assert any(times) == (several and not keep_frozen), times
        with torch.no_grad(), gathers() as numbers:
            loss(model, 5, bmt.rank())
        trained = {b.number for b in buffers_in(model) if b.gradient.trainable}
        assert set(numbers) == (
            set() if not several else trained if keep_frozen else {b.number for b in buffers_in(model)}
        )


def changes(model, twin):
    """Ways to change frozen weights, on both."""
    state = {name: value * 1.25 for name, value in twin.state_dict().items()}
    for each in (model, twin):
        each.load_state_dict(state)
    yield "load_state_dict"
    for each in (model, twin):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(0.75)
    yield "in place"
    for each in (model, twin):
        with torch.no_grad():
            each.layers[1].linear.weight.copy_(torch.arange(36.0).view(6, 6) / 100)
            each.head.bias.data = torch.ones(2)
    yield "copy_"
    with bmt.gathered(model, modify=True):
        model.layers[2].linear.weight.data += 0.125
        model.embedding.weight.data[3] = 0.5
    twin.layers[2].linear.weight.data += 0.125
    twin.embedding.weight.data[3] = 0.5
    yield "gathered"
    folders = [tempfile.mkdtemp() if bmt.rank() == 0 else None]
    torch.distributed.broadcast_object_list(folders, 0) if bmt.world_size() > 1 else None
    bmt.save(model, f"{folders[0]}/model.pt")
    bmt.save_state(f"{folders[0]}/run", model, step=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    bmt.load(model, f"{folders[0]}/model.pt")
    yield "load"
    with torch.no_grad():
        model.layers[0].linear.weight.zero_()
        model.embedding.weight.zero_()
    bmt.load_state(f"{folders[0]}/run", model)
    yield "load_state"
    bmt.init_parameters(model)
    yield "init_parameters"


def follows_writes():
    """What stays whole follows every write to frozen weights, and is gathered once for each."""
    model, twin = bmt.auto_wrap(adapted(), keep_frozen=True), adapted()
    step = 0
    for change in changes(model, twin):
        for _ in range(2):
            step += 1
            mine = loss(model, step, bmt.rank())
            expected = [loss(twin, step, rank) for rank in range(bmt.world_size())]
            torch.testing.assert_close(mine, expected[bmt.rank()], rtol=1e-6, atol=0, msg=change)
            mine.backward()
            torch.stack(expected).mean().backward()
            check_gradients(model, twin)
            for each in (model, twin):
                each.zero_grad()
        assert not any(gathered_in_steps_without_update(model)), change
        full_params = model.state_dict()
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(full_params[name], value, msg=f"{change}: {name}")


def gathered_in_steps_without_update(model):
    with gathers() as numbers:
        loss(model, 0, bmt.rank()).backward()
    model.zero_grad()
    return [numbers.count(buffer.number) for buffer in frozen_in(model)]


@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_follows_writes(world, size):
    world(size)(follows_writes)


@full
def test_follows_writes_where_shards_are_copied(peers):
    peers(2)(follows_writes)


def thaw_and_freeze(model, step):
    for name, parameter in model.named_parameters():
        if "layers.1.linear" in name or "embedding" in name:
            parameter.requires_grad_(step in (1, 2, 4))
        if "up" in name:
            parameter.requires_grad_(step not in (3, 5))


@pytest.mark.parametrize("use_checkpoint", [True, *in_full(False)])
@on_ranks(2, full=(1,))
def test_follows_requires_grad(use_checkpoint):
    model = check_twins(adapted, loss, 6, thaw_and_freeze, keep_frozen=True, use_checkpoint=use_checkpoint)
    if bmt.world_size() == 1:
        return
    linear, up = model.layers[1].linear.weight.buffer, model.layers[0].up.weight.buffer
    assert linear.is_unsharded, "frozen again"
    assert not up.is_unsharded, "down is trained"
    model.layers[1].requires_grad_(True)
    loss(model, 0, bmt.rank()).backward()
    assert not linear.is_unsharded
    model.zero_grad()


@full
@on_ranks(2)
def test_thawed_between():
    """Thawed between a forward and its backward, frozen between another: as plain torch where it defines a result."""
    model = bmt.auto_wrap(adapted(), keep_frozen=True)
    value = loss(model, 0, bmt.rank())
    model.layers[1].requires_grad_(True)
    value.backward()
    assert model.layers[1].linear.weight.grad is None
    model.zero_grad()
    model.layers[1].linear.requires_grad_(False)
    check = loss(model, 1, bmt.rank())
    model.layers[1].requires_grad_(False)
    check.backward()
    assert model.layers[1].up.weight.grad is None
    assert all(buffer.is_unsharded for buffer in frozen_in(model)[:2])


@on_ranks(2, full=(1,))
def test_added_later():
    """Adapters in a wrapped model whose base is frozen then: the second auto_wrap keeps the base whole."""

    def make():
        return Tower(2)

    model, twin = bmt.auto_wrap(make(), keep_frozen=True), make()
    for each in (model, twin):
        each.requires_grad_(False)
        torch.manual_seed(3)
        for layer in each.layers:
            layer.extra = nn.Parameter(torch.randn(WIDTH))
            layer.register_forward_hook(lambda module, args, output: output * module.extra)
    bmt.auto_wrap(model)
    assert all(buffer.is_unsharded for buffer in frozen_in(model))
    for step in range(2):
        compare_backward(model, twin, loss, step)
    assert not any(gathered_in_steps(model))


@on_ranks(2, full=(1,))
def test_refused():
    for value in ("some", 1, None):
        with pytest.raises(ValueError, match="keep_frozen must be True, False or 'auto'"):
            bmt.auto_wrap(adapted(), keep_frozen=value)
    if bmt.world_size() > 1:
        with pytest.raises(RuntimeError, match="keep_frozen"):
            bmt.auto_wrap(adapted(), keep_frozen=bmt.rank() == 0)


# -- as many as memory allows ----------------------------------------------------------------------------------------


class Given:
    """A memory of which a step takes `step` bytes and leaves `room`, without what stays whole of `buffers`."""

    def __init__(self, room, step=500):
        self.base, self.step, self.room, self.buffers = 1000, step, room, weakref.WeakSet()

    def kept(self):
        return sum(b.full_nbytes for b in self.buffers if b.is_resident and b.is_unsharded)

    def allocated(self):
        return self.base + self.kept()

    def peak(self):
        return self.base + self.step + self.kept()

    def reset_peak(self):
        pass

    def usable(self):
        return 1000 + self.step + self.room


@contextlib.contextmanager
def memory_of(room):
    """Memory is known, as on a GPU. Yields it."""
    memory = Given(room)
    with device_memory(memory):
        yield memory


def wrapped(memory, make=adapted, **options):
    model = bmt.auto_wrap(make(), **options)
    memory.buffers |= set(buffers_in(model))
    return model


def kept(model):
    """Whether each unit is kept: what is outside blocks, then the blocks."""
    units = [[model.head.weight.buffer], *(state_of(layer).buffers for layer in model.layers)]
    frozen = [[buffer for buffer in unit if not buffer.gradient.trainable] for unit in units]
    marks = ["".join("01"[buffer.is_resident and buffer.is_unsharded] for buffer in unit) for unit in frozen]
    assert all(len(set(mark)) <= 1 for mark in marks), "a block is kept in part"
    return "".join(mark[0] for mark in marks)


def sizes():
    model = bmt.auto_wrap(adapted(), keep_frozen=True)
    outside = model.head.weight.buffer.full_nbytes
    return outside, sum(b.full_nbytes for b in state_of(model.layers[0]).buffers if not b.gradient.trainable)


def train(model, steps, rows=4):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        model(ids(step, bmt.rank())[:rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("use_checkpoint", [True, *in_full(False)])
@on_ranks(2)
def test_as_many_as_fit(use_checkpoint):
    outside, block = sizes()
    for room, expected in [(-1, "0000"), (outside - 1, "0000"), (outside + 2 * block, "1110"), (1 << 40, "1111")]:
        with memory_of(room) as memory, log_lines(logging.INFO) as lines:
            model = wrapped(memory, use_checkpoint=use_checkpoint)
            train(model, 1)
            assert kept(model) == "0000", "before it was measured"
            train(model, 1)
            assert kept(model) == expected
            train(model, 2)
            assert kept(model) == expected
            if use_checkpoint is not None and "0" not in expected:
                assert not any(gathered_in_steps(model))
        told = [line for line in lines if "keep_frozen='auto'" in line]
        assert len(told) == (bmt.rank() == 0), "told more than once"
        if told:
            assert "of 4 blocks and parameter groups outside them" in told[0]
            assert f"{expected.count('1')} stay unsharded between steps" in told[0]


def auto_twins(wrap):
    for room in (300, 1 << 40):
        for options in wrap:
            with memory_of(room):
                check_twins(adapted, loss, 5, thaw_and_freeze, **options)


def test_auto_trains_as_plain_torch(world):
    world(2)(auto_twins, [{"zero_level": 2}, {"zero_level": 3}])


@full
@counts_saved
def test_auto_beside_recomputation(world):
    world(2)(auto_twins, [{"use_checkpoint": "auto"}])


def least_memory():
    """All follow the rank that has least."""
    outside, block = sizes()
    with memory_of(outside + block * (1 + bmt.rank())) as memory:
        model = wrapped(memory)
        train(model, 3)
        assert kept(model) == "1100"


def larger_inputs():
    """One rank's larger batch: all give back before it runs, measure, and keep again after its step."""
    with memory_of(1 << 40) as memory:
        model = wrapped(memory)
        train(model, 2, rows=2)
        assert kept(model) == "1111"
        train(model, 1, rows=1)
        assert kept(model) == "1111"
        seen, planner = [], memory_planner()
        handle = model.layers[0].register_forward_pre_hook(lambda *_: seen.append(planner.resident_bytes))
        train(model, 1, rows=3 if bmt.rank() == 1 else 2)
        assert seen[0] == 0, "the larger batch had not all memory"
        handle.remove()
        train(model, 1, rows=3)
        train(model, 1, rows=3)
        assert kept(model) == "1111"


def check_all_memory_for_a_larger_batch(model):
    """A batch of three rows counts as not measured, so nothing is kept beside it."""
    seen, planner = [], memory_planner()
    model.layers[0].register_forward_pre_hook(lambda *_: seen.append(planner.resident_bytes))
    train(model, 1, rows=3)
    assert seen[0] == 0, "the larger batch had not all memory"


def failed_backward():
    """A pass whose backward fails is not measured, and its peak does not count."""

    def fail(gradient):
        raise OSError("as asked")

    with memory_of(1 << 40) as memory:
        model = wrapped(memory)
        handle = model.layers[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        value = model(ids(0, bmt.rank())[:3])
        handle.remove()
        usable = memory.usable()
        memory.usable, memory.step = lambda: usable, usable  # at its peak, it takes all memory
        memory.reset_peak = lambda: setattr(memory, "step", 500)
        with pytest.raises(OSError, match="as asked"):
            value.backward()
        train(model, 3, rows=2)
        assert kept(model) == "1111"
        check_all_memory_for_a_larger_batch(model)


def failed_forward():
    """A forward that fails is not measured, even if another one follows before the next backward."""

    def fail(module, args):
        raise OSError("no forward")

    with memory_of(1 << 40) as memory:
        model = wrapped(memory)
        handle = model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(OSError, match="no forward"):
            model(ids(0, bmt.rank())[:3])
        handle.remove()
        train(model, 4, rows=2)
        assert kept(model) == "1111"
        check_all_memory_for_a_larger_batch(model)


def less_memory():
    """Memory that something else takes, on one rank, is given back by all."""
    outside, block = sizes()
    with memory_of(outside + 2 * block + 20) as memory:
        model = wrapped(memory)
        train(model, 3)
        assert kept(model) == "1110"
        memory.base += 10
        train(model, 2)
        assert kept(model) == "1110", "within the tolerance"
        memory.base += block * bmt.rank()
        train(model, 1)
        assert kept(model) == "0000"
        train(model, 1)
        assert kept(model) == "1100"


def waits_for_the_optimizer():
    with memory_of(1 << 40) as memory:
        model = wrapped(memory)
        for step in range(3):
            loss(model, step, bmt.rank()).backward()
            assert kept(model) == "0000"
        train(model, 2)
        assert kept(model) == "1111"


def evaluation():
    """Evaluation has the memory to itself; the next training forward keeps as before."""
    with memory_of(1 << 40) as memory:
        model = wrapped(memory)
        train(model, 2)
        value = loss(model, 0, bmt.rank())
        with torch.no_grad():
            expected = loss(model, 0, bmt.rank())
        assert kept(model) == "0000"
        value.backward()  # what was given back is gathered for it
        torch.testing.assert_close(value.detach(), expected)
        model.zero_grad()
        train(model, 1)
        assert kept(model) == "1111"


def recomputation_first():
    """use_checkpoint="auto" takes the memory first; and its plan does not count what frozen parameters take."""
    outside, block = sizes()
    with memory_of(0) as memory:
        model = wrapped(memory, use_checkpoint="auto")
        train(model, 1)
        activations = [state_of(layer).recompute.nbytes for layer in model.layers]
    cases = [
        (min(activations) - 1, "000", "0000"),
        (sum(activations), "111", "0000"),
        (sum(activations) + outside + block, "111", "1100"),
        (1 << 40, "111", "1111"),
    ]
    for room, recomputing, expected in cases:
        with memory_of(room) as memory, log_lines(logging.INFO) as lines:
            model = wrapped(memory, use_checkpoint="auto")
            train(model, 5)
            policies = [state_of(layer).recompute for layer in model.layers]
            assert "".join("01"[policy.kept] for policy in policies) == recomputing
            assert kept(model) == expected
            assert [state_of(layer).zero_level for layer in model.layers] == [3] * 3
            assert not any("again" in line for line in lines)


def fully_trained():
    """Where little is frozen nothing is kept, nor said between the ranks."""
    with memory_of(1 << 40) as memory:

        def make():
            model = Tower()
            model.head.requires_grad_(False)
            return model

        model = wrapped(memory, make)
        optimizer, control = torch.optim.SGD(model.parameters(), lr=0.1), bmt.current_world().control.collective_log
        counts = []
        for step in range(4):
            loss(model, step, bmt.rank()).backward()
            optimizer.step()
            counts.append(control.count)
        assert counts[1] == counts[3]
        assert not any(buffer.resident for buffer in buffers_in(model))


def two_models():
    """Two models of a world share its memory, and one that was dropped leaves its share."""
    outside, block = sizes()
    whole = outside + 3 * block
    with memory_of(whole + outside + block) as memory:
        one, two = wrapped(memory), wrapped(memory)
        for _ in range(4):
            train(one, 1)
            train(two, 1)
        assert (kept(one), kept(two)) == ("1111", "1100")
        assert memory_planner().resident_bytes == whole + outside + block
        del one
        assert memory_planner().resident_bytes == outside + block


def told_on_the_cpu():
    with log_lines(logging.INFO) as lines:
        model = check_twins(adapted, loss)
    assert not any(buffer.resident for buffer in buffers_in(model))
    assert sum("keeps no frozen parameters unsharded on the CPU" in line for line in lines) <= 1


DECISIONS = [
    least_memory, larger_inputs, failed_backward, failed_forward, waits_for_the_optimizer, evaluation,
    *in_full(less_memory, fully_trained, two_models, told_on_the_cpu),
    pytest.param(recomputation_first, marks=[counts_saved, full], id="recomputation_first"),
]  # fmt: skip


@pytest.mark.parametrize("case", DECISIONS, ids=lambda case: case.__name__)
def test_decisions(world, case):
    world(2)(case)


# -- through PEFT, and predicted -------------------------------------------------------------------------------------


def lora():
    import peft

    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(build("llama"), config).train()


def through_peft(choice):
    """LoRA trains, generates, merges and is saved as PEFT's on the plain model."""

    def rows_loss(model, step, rank):
        return model(**batch("llama", 10 * step + rank)).loss

    with contextlib.nullcontext() if choice is True else memory_of(1 << 40):
        model = check_twins(lora, rows_loss, keep_frozen=choice)
        assert all(buffer.is_unsharded for buffer in frozen_in(model))
        with gathers() as numbers:
            rows_loss(model, 1, bmt.rank()).backward()
        model.zero_grad()
        assert not {buffer.number for buffer in frozen_in(model)} & set(numbers)
        twin = lora()
        twin.load_state_dict(model.state_dict())
        prompt = batch("llama", 0)["input_ids"][:, :4]
        options = {"input_ids": prompt, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.eval().generate(**options), twin.eval().generate(**options))
        with bmt.gathered(model, modify=True):
            model.merge_adapter()
        twin.merge_adapter()
        torch.testing.assert_close(rows_loss(model, 0, 0), rows_loss(twin, 0, 0))


@pytest.mark.parametrize(("size", "choice"), rows_in_full([(2, "auto"), (1, True), (2, True)]))
def test_through_peft(world, size, choice):
    pytest.importorskip("peft")
    world(size)(through_peft, choice)


def frozen_llama():
    model = build("llama").requires_grad_(False)
    for layer in model.model.layers:
        layer.input_layernorm.requires_grad_(True)
    return on_meta(model).train()


@full
@pytest.mark.parametrize("use_checkpoint", [*in_full(True), pytest.param("auto", marks=counts_saved)])
def test_predictions_follow(use_checkpoint):
    """What is kept is whole at the peak, and no more is than fits."""

    def predicted(keep_frozen, total=1 << 40):
        inputs = batch("llama", 0, 64, 32)
        options = {"use_checkpoint": use_checkpoint, "keep_frozen": keep_frozen}
        return predict(frozen_llama(), inputs, bmt.optim.AdamOptimizer, ranks=4, total=total, **options)

    every, none, auto = (predicted(choice).table.get("whole", 0) for choice in (True, False, "auto"))
    weights = sum(p.numel() * 4 for p in frozen_llama().parameters() if not p.requires_grad)
    assert every >= auto >= weights
    assert weights > none or use_checkpoint == "auto"  # which leaves blocks whole until their backward
    assert predicted("auto", 1 << 31).table == predicted(False, 1 << 31).table, "less than the reserve"
