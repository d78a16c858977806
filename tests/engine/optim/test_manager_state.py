"""A run that is saved and goes on elsewhere makes the steps of one that was never interrupted."""

import io
import struct
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

import hf_bmtrain as bmt
from cases import in_full, pairwise
from hf_bmtrain.engine.base.torch_internals import unwrapped
from ranks import Ranks, on_ranks
from state_dicts import check_equal
from twins import Tower, ids

OPTIMIZERS = {
    "ours": lambda p: bmt.optim.AdamOptimizer(p, lr=0.05, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
}


def make(kind, dtype, loss_scale=8.0):
    model = bmt.auto_wrap(Tower().to(dtype))
    named = dict(model.named_parameters())
    groups = [{"params": [p for n, p in named.items() if ("bias" in n) == biases]} for biases in (False, True)]
    optimizer = OPTIMIZERS[kind](groups)
    manager = bmt.optim.OptimManager(loss_scale=loss_scale, loss_scale_steps=5)
    scheduler = bmt.lr_scheduler.Cosine(optimizer, start_lr=0.05, warmup_iter=2, end_iter=12)
    manager.add_optimizer(optimizer, scheduler)
    return model, manager


def run(model, manager, steps):
    """The batch is all ranks' together, so that the number of ranks does not matter."""
    for step in steps:
        manager.zero_grad()
        losses = [model(ids(step, row)) for row in range(2)]
        manager.backward(torch.stack(losses).mean())
        manager.clip_grad_norm(manager.optimizers[0].param_groups, 1.0)
        manager.step()


def first_half(kind, dtype, gather_opt, folder):
    """Four steps, saved, and four more: the weights there."""
    model, manager = make(kind, dtype)
    run(model, manager, range(4))
    weights, state = model.state_dict(), manager.state_dict(gather_opt=gather_opt)
    run(model, manager, range(4, 8))  # the saved state is a copy: this does not change it
    if gather_opt:
        assert bmt.rank() == 0 or not state["optimizers"][0]["state"]
    if bmt.rank() == 0 or not gather_opt:
        torch.save((weights, state), f"{folder}/{0 if gather_opt else bmt.rank()}.pt")
    bmt.synchronize()
    return {name: value.float().numpy() for name, value in model.state_dict().items()}, manager.loss_scale


def second_half(kind, dtype, gather_opt, folder):
    model, manager = make(kind, dtype)
    path = f"{folder}/{0 if gather_opt else bmt.rank()}.pt"
    weights, state = torch.load(path, weights_only=True)
    model.load_state_dict(weights)
    manager.load_state_dict(state, gather_opt=gather_opt)
    assert manager.schedulers[0].num_iter == 4
    run(model, manager, range(4, 8))
    return {name: value.float().numpy() for name, value in model.state_dict().items()}, manager.loss_scale


@pytest.mark.parametrize(
    ("worlds", "kind", "dtype"),
    pairwise(
        [
            ((2, 2, False), "ours", torch.bfloat16),
            ((2, 1, True), "adamw", torch.bfloat16),
            ((1, 2, True), "momentum", torch.float32),
        ],
        [(1, 1, False), (2, 2, False), (2, 1, True), (1, 2, True), (2, 2, True)],
        list(OPTIMIZERS),
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)
def test_goes_on(world, worlds, kind, dtype, tmp_path):
    before, after, gather_opt = worlds
    straight, scale = world(before)(first_half, kind, dtype, gather_opt, str(tmp_path))[0]
    resumed, resumed_scale = world(after)(second_half, kind, dtype, gather_opt, str(tmp_path))[0]
    assert scale == resumed_scale == 16.0  # doubled after the fifth step, the first of the second half
    for name, value in straight.items():
        exact = before == after
        expected, value = torch.from_numpy(value), torch.from_numpy(resumed[name])
        tolerance = 0 if exact else 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


class OddStates(torch.optim.SGD):
    """As StableAdamW and AdEMAMix of bitsandbytes: None, and two full tensors in one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if "pair" not in self.state[p]:
                    self.state[p].update(kahan=None, pair=torch.ones(2, *p.shape))
                pair = self.state[p]["pair"]
                pair[1] += 1
                p.sub_(group["lr"] * p.grad * pair.mean())


@on_ranks(2)
def test_states_that_are_no_tensor_of_a_parameter(folder):
    def steps(model, optimizer):
        for step in range(2):
            model(ids(step, bmt.rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model = bmt.auto_wrap(Tower())
    optimizer = OddStates(model.parameters(), lr=0.05)
    steps(model, optimizer)
    bmt.save_state(folder, model, optimizer, step=2)
    steps(model, optimizer)
    again = bmt.auto_wrap(Tower())
    resumed = OddStates(again.parameters(), lr=0.05)
    assert bmt.load_state(folder, again, resumed).step == 2
    steps(again, resumed)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize("kind", ["ours", *in_full("adamw")])
@pytest.mark.parametrize("gather_opt", [False, *in_full(True)])
@on_ranks(2, full=(1,))
def test_own_entries_of_an_optimizer(kind, gather_opt):
    """A subclass saves and loads them: each rank its own or, gathered, those of rank 0."""

    class Counting(bmt.optim.AdamOptimizer if kind == "ours" else torch.optim.AdamW):
        def state_dict(self, *gather):
            return {**super().state_dict(*gather), "own": self.own}

        def load_state_dict(self, state_dict):
            left = dict(state_dict)
            self.own = left.pop("own")
            super().load_state_dict(left)

    model, manager = bmt.auto_wrap(Tower()), bmt.optim.OptimManager()
    optimizer = Counting(model.parameters(), lr=0.01)
    manager.add_optimizer(optimizer)
    optimizer.own = torch.tensor([bmt.rank()])
    run(model, manager, range(1))
    state = manager.state_dict(gather_opt=gather_opt)
    weights, whole = model.state_dict(), optimizer.state_dict(True) if kind == "ours" else None
    optimizer.own.fill_(7)
    if gather_opt:
        state, whole = map(bmt.current_world().control.broadcast_object, (state, whole))
    run(model, manager, range(1, 3))
    expected = model.state_dict()
    manager.load_state_dict(state)
    assert optimizer.own.tolist() == [0 if gather_opt else bmt.rank()]
    if gather_opt and kind == "ours":
        optimizer.load_state_dict(whole)
    model.load_state_dict(weights)
    run(model, manager, range(1, 3))
    check_equal(model.state_dict(), expected)


@pytest.mark.parametrize("gather_opt", [False, True])
@on_ranks(2)
def test_own_entries_that_are_named_like_ours(gather_opt):
    """`save_state` has entries of the same names, and nested tensors are copies, too."""
    model, manager = bmt.auto_wrap(Tower()), bmt.optim.OptimManager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own = {"rank": 5, "world_size": 7, "shard": [torch.zeros(1)], "sliced": ["a"], "added_entries": 1}
    loaded = {}
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, **own})
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: loaded.update(state_dict))
    manager.add_optimizer(optimizer)
    run(model, manager, range(1))
    state = manager.state_dict(gather_opt=gather_opt)
    own["shard"][0].fill_(1)
    if gather_opt:
        state = bmt.current_world().control.broadcast_object(state)
    manager.load_state_dict(state)
    assert {name: loaded[name] for name in own} == {**own, "shard": [torch.zeros(1)]}


class Counting(torch.optim.SGD):
    """Its step counts are tensors of shape (1,), and the name of its moments has a dot."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update({"step": torch.zeros(1), "mean.slow": torch.zeros_like(p)})
            state["step"] += 1
            state["mean.slow"] += p.grad / state["step"].item()
            p.sub_(0.1 * state["mean.slow"])


def counting():
    """A model whose first parameter has one element, and its optimizer with a manager."""
    model = bmt.auto_wrap(torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 33, bias=False)))
    optimizer, manager = Counting(model.parameters(), lr=0.1), bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    return model, optimizer, manager


@on_ranks(1)
def test_a_step_count_with_the_shape_of_a_full_parameter():
    """It is no moment of the parameter of one element, and the other parameter has one too."""
    model, optimizer, manager = counting()
    model(torch.ones(2, 1)).square().sum().backward()
    optimizer.step()
    manager.load_state_dict(manager.state_dict(gather_opt=True))
    assert [optimizer.state[p]["step"].tolist() for p in model.parameters()] == [[1.0], [1.0]]


@on_ranks(2)
def test_step_counts_of_one_element(folder):
    """One rank has a single element of the second parameter, whose step count then has the shape of a moment."""
    model, optimizer, manager = counting()
    assert [p.part.numel() for p in model.parameters()] == ([1, 32] if bmt.rank() == 0 else [0, 1])

    def steps():
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 1)).square().sum().backward()
            optimizer.step()
        return torch.cat([each.flatten() for each in model.state_dict().values()])

    steps()
    bmt.save_state(folder, model, optimizer, step=1)
    own, full = manager.state_dict(), bmt.current_world().control.broadcast_object(manager.state_dict(gather_opt=True))
    expected = steps()
    for state in own, full, None:
        assert bmt.load_state(folder, model, None if state else optimizer).step == 1
        if state:
            manager.load_state_dict(state)
        assert torch.equal(steps(), expected)


class Averaging(torch.optim.Optimizer):
    """A wrapper with the state of the optimizer inside, and an average of its own."""

    def __init__(self, optimizer):
        self.optimizer, self.average = optimizer, 0.0

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        self.optimizer.step()
        self.average += 1.0

    def state_dict(self):
        return {**self.optimizer.state_dict(), "average": self.average}

    def load_state_dict(self, state_dict):
        self.average = state_dict["average"]
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != "average"})


@on_ranks(2, full=(1,))
def test_what_a_wrapper_adds():
    model, inner, _ = counting()
    optimizer, manager = Averaging(inner), bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    model(torch.ones(2, 1)).square().sum().backward()
    optimizer.step()
    own, full = manager.state_dict(), bmt.current_world().control.broadcast_object(manager.state_dict(gather_opt=True))
    for state in own, full:
        optimizer.average = 0.0
        manager.load_state_dict(state)
        assert optimizer.average == 1.0


class Registered(torch.optim.Optimizer):
    """A wrapper like `Averaging` that calls `Optimizer.__init__`."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, self.average = optimizer, 0.0
        self.state, self.param_groups = optimizer.state, optimizer.param_groups

    step, state_dict = Averaging.step, Averaging.state_dict

    def load_state_dict(self, state_dict):
        Averaging.load_state_dict(self, state_dict)
        self.state, self.param_groups = self.optimizer.state, self.optimizer.param_groups


class Plain:
    """A wrapper like `Averaging` that is no torch optimizer, and has no `state`."""

    __init__, param_groups, step = Averaging.__init__, Averaging.param_groups, Averaging.step
    state_dict, load_state_dict = Averaging.state_dict, Averaging.load_state_dict


class OtherName(Averaging):
    """A wrapper like `Averaging` that keeps the optimizer in an attribute of another name."""

    def __init__(self, optimizer):
        self.base, self.average = optimizer, 0.0

    optimizer = property(lambda self: self.base)


class EmptyState(Registered):
    """A wrapper like timm's Lookahead, whose own `state` is empty."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.state = {}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.state = {}


class Nested(Averaging):
    """A wrapper with the other optimizer's state dict in an entry."""

    def state_dict(self):
        return {"inside": self.optimizer.state_dict(), "average": self.average}

    def load_state_dict(self, state_dict):
        self.average = state_dict["average"]
        self.optimizer.load_state_dict(state_dict["inside"])


WRAPPERS = {kind.__name__: kind for kind in (Averaging, Registered, Plain, OtherName, EmptyState)}


@pytest.mark.parametrize("kind", ["ours", "adamw"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2, full=(1,))
def test_a_checkpoint_of_a_wrapper(folder, wrapper, kind):
    """The wrapper's entries, and the state of the optimizer inside. Its steps depend on both."""

    def steps(model, optimizer):
        for step in range(2):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 + optimizer.average)
            model(ids(step, 0)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
        return model.state_dict()

    def made():
        model = bmt.auto_wrap(Tower())
        return model, WRAPPERS[wrapper](OPTIMIZERS[kind](model.parameters()))

    model, optimizer = made()
    steps(model, optimizer)
    manager, same = bmt.optim.OptimManager(), bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    bmt.save_state(folder, model, optimizer, step=2)
    weights, state = model.state_dict(), manager.state_dict()
    expected = steps(model, optimizer)
    model, optimizer = made()
    assert bmt.load_state(folder, model, optimizer).step == 2
    check_equal(steps(model, optimizer), expected)
    model, optimizer = made()
    same.add_optimizer(optimizer)
    model.load_state_dict(weights)
    same.load_state_dict(state)
    check_equal(steps(model, optimizer), expected)


@on_ranks(2, full=(1,))
def test_a_wrapper_without_the_entries_of_an_optimizer(folder):
    """Its entries are kept, unless they have sharded tensors, or the manager's state needs the others."""
    model, inner, manager = counting()
    optimizer = Nested(inner)
    manager.optimizers[:] = [optimizer]
    model(torch.ones(2, 1)).square().sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"Nested\.state_dict\(\) must be .* has no state and no param_groups"):
        manager.state_dict()
    if bmt.world_size() > 1:
        with pytest.raises(RuntimeError, match="Nested has sharded tensors in the entry 'inside'"):
            bmt.save_state(folder, model, optimizer, step=1)
        return
    bmt.save_state(folder, model, optimizer, step=1)
    optimizer.average = 0.0
    bmt.load_state(folder, model, optimizer)
    assert optimizer.average == 1.0


def unsealed(state):
    """A state that may be changed before it is loaded."""
    return {name: value for name, value in state.items() if name != "checksums"}


@on_ranks(2, full=(1,))
def test_refused():
    model, manager = make("adamw", torch.float32)
    run(model, manager, range(1))
    state = manager.state_dict()
    whole = bmt.current_world().gather_objects(manager.state_dict(gather_opt=True))[0]  # only rank 0 has it
    with pytest.raises(ValueError, match=r"gather_opt=True\) can be loaded"):
        manager.load_state_dict({**unsealed(state), "optimizers": [{**state["optimizers"][0], "world_size": 7}]})
    # With two ranks rank 1 alone stores another shard, as if the order of the shards had changed.
    moved = {**state["optimizers"][0], "shard": (0, 2, 1)}
    with pytest.raises(ValueError, match=r"was saved for shard 0 of 2 with tp_size=1, but the rank now has shard"):
        manager.load_state_dict({**unsealed(state), "optimizers": [moved]})
    with pytest.raises(ValueError, match="saved with gather_opt=True"):
        manager.load_state_dict(whole, gather_opt=False)
    with pytest.raises(ValueError, match="loss_scale None"):
        manager.load_state_dict({**unsealed(state), "loss_scale": None})
    other = bmt.optim.OptimManager(loss_scale=8.0)
    with pytest.raises(ValueError, match="call add_optimizer for the same optimizers and schedulers"):
        other.load_state_dict(state)
    other.add_optimizer(torch.optim.AdamW(model.parameters()), manager.schedulers[0])
    with pytest.raises(ValueError, match="same groups"):
        other.load_state_dict(whole)


@pytest.mark.parametrize("gather_opt", [False, *in_full(True)])
@on_ranks(2)
def test_damage_is_found(folder, gather_opt):
    """Bits that flip in the file on one rank: in moments, in settings, in the scheduler. Nothing is loaded."""
    model, manager = make("adamw", torch.float32)
    run(model, manager, range(3))
    torch.save(manager.state_dict(gather_opt=gather_opt), path := Path(folder) / f"{bmt.rank()}.pt")
    bmt.synchronize()
    path = Path(folder) / f"{0 if gather_opt else bmt.rank()}.pt"
    state = torch.load(path, weights_only=True)
    moments = [values["exp_avg"] for values in state["optimizers"][0]["state"].values()]
    moment = max(moments, key=len).numpy().tobytes()
    number = struct.pack(">d", state["optimizers"][0]["param_groups"][0]["lr"])
    for what in (moment, number, b"num_iter"):
        data = bytearray(path.read_bytes())
        data[data.index(what) + 1] ^= 1
        damaged = torch.load(io.BytesIO(data), weights_only=True) if bmt.rank() == 1 else state
        run(model, manager, range(1))
        before = manager.state_dict()
        with pytest.raises(RuntimeError, match=r"damaged.* rank 1: .*(optimizer 0|lr_schedulers)"):
            manager.load_state_dict(damaged)
        assert manager.state_dict()["checksums"] == before["checksums"]
    manager.load_state_dict(unsealed(state))


def beside_an_accelerator(folder):
    """While one lives, an optimizer's own state_dict is whole; the manager's parts stay parts."""
    Accelerator(cpu=True)
    first_half("ours", torch.bfloat16, True, folder)
    first_half("ours", torch.bfloat16, False, folder)


def test_beside_an_accelerator(tmp_path):
    ranks = Ranks(2)
    ranks(beside_an_accelerator, str(tmp_path))
    ranks.stop()


def test_an_optimizer_that_refers_to_its_wrapper_is_found_inside_it():
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)

    class Wrapper(torch.optim.Optimizer):
        def __init__(self):
            self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups

    wrapper = Wrapper()
    inner.wrapper = wrapper
    assert unwrapped(wrapper) is inner
    inner.param_groups = [*inner.param_groups]  # from here on, only the state is the same
    assert unwrapped(wrapper) is inner
    inner.state = {**inner.state}
    assert unwrapped(wrapper) is wrapper
