"""AdamOptimizer on slices against torch.optim.AdamW on whole parameters."""

import collections
import copy
import io
import pickle
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full, in_full
from hf_bmtrain.engine.ops import adam_step
from hf_bmtrain.engine.runtime.world import current_world
from hf_bmtrain.engine.tensors.tensor import ShardTensor
from offloaded import as_on_a_gpu
from ranks import on_ranks
from twins import Tower, ids

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}


def compare(model, twin, rtol=1e-5, atol=1e-6):
    state = model.state_dict()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def steps(model, twin, optimizer, plain, numbers, accumulation=1):
    size = bmt.world_size()
    for step in numbers:
        for micro in range(accumulation):
            seed = 100 * step + micro
            (model(ids(seed, bmt.rank())) / accumulation).backward()
            torch.stack([twin(ids(seed, other)) / accumulation for other in range(size)]).mean().backward()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()


def against_torch(accumulation):
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    steps(model, twin, optimizer, torch.optim.AdamW(twin.parameters(), **SETTINGS), range(5), accumulation)
    compare(model, twin)


def groups(model):
    decayed = [p for name, p in model.named_parameters() if not name.endswith(("bias", "gain"))]
    rest = [p for name, p in model.named_parameters() if name.endswith(("bias", "gain"))]
    return [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 3e-2}]


def parameter_groups():
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer = bmt.optim.AdamOptimizer(groups(model), **SETTINGS)
    steps(model, twin, optimizer, torch.optim.AdamW(groups(twin), **SETTINGS), range(5))
    compare(model, twin)


def unfrozen_later():
    """Parameters that join later begin their own step count."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    plain = torch.optim.AdamW(twin.parameters(), **SETTINGS)
    for frozen, numbers in ((True, range(3)), (False, range(3, 6)), (True, range(6, 8)), (False, range(8, 10))):
        for either in (model, twin):
            either.layers[1].linear.requires_grad_(not frozen)
        steps(model, twin, optimizer, plain, numbers)
        compare(model, twin)


def half_precision(dtype):
    """The master copy moves in float32 and the weights are its rounding to nearest even."""
    model, twin = bmt.auto_wrap(Tower().to(dtype)), Tower().to(dtype)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    masters = {name: p.detach().float().clone() for name, p in twin.named_parameters()}
    plain = torch.optim.AdamW(masters.values(), **SETTINGS)
    for step in range(4):
        model(ids(step, 0)).backward()
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.gather_gradient().float()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        state = model.state_dict()
        for name, master in masters.items():
            assert torch.equal(state[name], master.to(dtype)), name


def accumulation_is_summed_in_float32():
    """256 + 1 does not exist in bfloat16: eight ones vanish unless the sum is kept wider."""
    linear = torch.nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    model = bmt.auto_wrap(torch.nn.Sequential(linear))
    for value in (256.0, *[1.0] * 8):
        model(torch.full((1, 2), value, dtype=torch.bfloat16)).sum().backward()
    gradient = model[0].weight.gather_gradient()
    assert gradient.tolist() == [[264.0, 264.0]]


def edited_gradients():
    """What a user does to `.grad` between backward and step counts, also in an accumulation."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    plain = torch.optim.AdamW(twin.parameters(), **SETTINGS)
    for step in range(3):
        for micro in range(2):
            model(ids(10 * step + micro, bmt.rank())).backward()
            torch.stack([twin(ids(10 * step + micro, r)) for r in range(bmt.world_size())]).mean().backward()
            for either in (model, twin):
                for index, parameter in enumerate(either.parameters()):
                    if index % 3 == 0:
                        parameter.grad.mul_(0.5)
                    elif index % 3 == 1:
                        parameter.grad = parameter.grad * 3
                    elif micro == 0:
                        parameter.grad = None
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
        compare(model, twin)


def resumed():
    """A state dict loaded into a new optimizer continues as if nothing happened, masters included."""
    torch.manual_seed(0)
    models = [bmt.auto_wrap(Tower().to(torch.bfloat16)) for _ in range(2)]
    optimizers = [bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS) for model in models]
    for step in range(6):
        if step == 3:
            optimizers[1] = bmt.optim.AdamOptimizer(models[1].parameters(), **SETTINGS)
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        for model, optimizer in zip(models, optimizers):
            model(ids(step, bmt.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*(model.state_dict().values() for model in models)))
    state = optimizers[1].state_dict()["state"][0]
    assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(state, torch.float32)


def ordinary_parameters():
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 5)), torch.nn.Parameter(torch.ones(2, 3))]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer, plain = bmt.optim.AdamOptimizer(parameters, **SETTINGS), torch.optim.AdamW(twins, **SETTINGS)
    for _ in range(3):
        for either in (parameters, twins):
            for parameter in either:
                parameter.grad = parameter.detach().sin()
        optimizer.step()
        plain.step()
    for parameter, twin in zip(parameters, twins):
        torch.testing.assert_close(parameter, twin)


def train_ordinary(net, optimizer, change, steps=6):
    """Steps with an unsharded layer, which `change` changes after three of them."""
    for step in range(steps):
        if step == 3:
            change(net)
        optimizer.zero_grad()
        weight = next(net.parameters())
        net(torch.linspace(-1, 1, 8, dtype=weight.dtype).view(2, 4)).float().square().mean().backward()
        optimizer.step()


def replaced(net):
    for parameter in net.parameters():
        parameter.data = torch.full_like(parameter, 0.25)


def filled(net):
    torch.nn.utils.vector_to_parameters(torch.full((20,), 0.25), net.parameters())


MOVES = [filled, replaced, torch.nn.Module.half, torch.nn.Module.bfloat16]


@pytest.mark.parametrize("cls", [bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer])
@pytest.mark.parametrize("move", by_default(MOVES, filled, torch.nn.Module.half), ids=lambda move: move.__name__)
def test_new_memory_of_an_ordinary_parameter_is_trained(cls, move):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    twin = copy.deepcopy(net)
    optimizer = cls(net.parameters(), **SETTINGS)
    train_ordinary(net, optimizer, move)
    train_ordinary(twin, torch.optim.AdamW(twin.parameters(), **SETTINGS), move if move in (filled, replaced) else id)
    close = {} if net.weight.dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-3}
    torch.testing.assert_close(net.weight.float(), twin.weight, **close)
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}
    if close:  # the masters that a checkpoint gets are those of the new weights
        replaced(net)
        held = optimizer.stored_state()[net.weight]["master"]
        assert torch.equal(held.to(net.weight.dtype).view_as(net.weight), net.weight)


def written_by_data(net):
    for parameter in net.parameters():
        parameter.data.fill_(0.5)


def write(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)


@pytest.mark.parametrize("dtype", [torch.float16, *in_full(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("on_a_gpu", [True, *in_full(False)])
@pytest.mark.parametrize("cls", [bmt.optim.AdamOffloadOptimizer, *in_full(bmt.optim.AdamOptimizer)])
def test_writes_by_data_to_ordinary_parameters_stay(cls, on_a_gpu, dtype):
    """torch does not count them; with an optimizer in host memory, no step makes the host wait because of that."""
    results = []
    for change in (write, written_by_data):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4).to(dtype)
        with as_on_a_gpu(0) if on_a_gpu else nullcontext():
            optimizer = cls(net.parameters(), **SETTINGS)
            train_ordinary(net, optimizer, change)
            with mock.patch.object(optimizer, "_finish") as waited:
                train_ordinary(net, optimizer, id, 2)
            assert not (waited.called and cls is bmt.optim.AdamOffloadOptimizer and on_a_gpu)
            written_by_data(net)
            master = optimizer.stored_state()[net.weight].get("master")
            assert master is None or (master.to(dtype) == 0.5).all()  # masters round to the weights
        results.append([net.weight, net.bias])
    assert all(map(torch.equal, *results))


@full
def test_an_unsupported_new_dtype_is_refused():
    net = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="supports float32, float16 and bfloat16 parameters, got torch.float64"):
        train_ordinary(net, bmt.optim.AdamOptimizer(net.parameters()), torch.nn.Module.double)


def gradients_are_only_read():
    model = bmt.auto_wrap(Tower())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    model(ids(0, bmt.rank())).backward()
    before = [p.grad.as_subclass(torch.Tensor).clone() for p in model.parameters()]
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    assert all(torch.equal(p.grad.as_subclass(torch.Tensor), b) for p, b in zip(model.parameters(), before))


def scaled_by_torch(unscale):
    """torch.amp.GradScaler hands over its scale and everyone's overflow; one rank overflows in step 2."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    plain = torch.optim.AdamW(twin.parameters(), **SETTINGS)
    scaler = torch.amp.GradScaler(bmt.current_world().device.type, init_scale=64.0, growth_interval=2)
    for step in range(6):
        factor = float("inf") if step == 2 and bmt.rank() == 0 else 1.0
        scaler.scale(model(ids(step, bmt.rank())) * factor).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 2:
            torch.stack([twin(ids(step, other)) for other in range(bmt.world_size())]).mean().backward()
            plain.step()
            plain.zero_grad()
        compare(model, twin)
    assert scaler.get_scale() == 64.0 * 2 / 2 * 2


def writes_are_counted(dtype):
    """Whoever keeps copies of the weights sees by the buffers' versions that a step has changed them."""
    model = bmt.auto_wrap(Tower().to(dtype))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    model(ids(0, bmt.rank())).backward()
    before = {p.buffer: p.buffer.version for p in model.parameters() if p.buffer.shard.any()}
    assert before
    optimizer.step()
    assert all(buffer.version > version for buffer, version in before.items())


def settings_change():
    """lr as a tensor that is written in place, betas and a group added on the way."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    rate = torch.tensor(1e-2)
    optimizers = [
        bmt.optim.AdamOptimizer(model.layers.parameters(), lr=rate, weight_decay=0.1),
        torch.optim.AdamW(twin.layers.parameters(), lr=1e-2, weight_decay=0.1),
    ]
    for step in range(6):
        if step == 2:
            rate.fill_(3e-2)
            optimizers[1].param_groups[0]["lr"] = 3e-2
        if step == 3:
            for either, optimizer in zip((model, twin), optimizers):
                optimizer.add_param_group({"params": list(either.head.parameters()), "lr": 5e-3})
        if step == 4:
            for optimizer in optimizers:
                optimizer.param_groups[1]["betas"] = (0.5, 0.9)
        steps(model, twin, *optimizers, [step])
        model.zero_grad()
        twin.zero_grad()
    compare(model, twin)


def stochastic_state(dtype):
    """Six steps on gradients that do not depend on the ranks: (weights, exp_avg), whole."""
    model = bmt.auto_wrap(Tower().to(dtype))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS, exp_avg_dtype=torch.bfloat16)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = p.take(torch.randn(p.full_shape, generator=generator).to(dtype)).clone()
        optimizer.step()
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    assert all(m.dtype == torch.bfloat16 for m in moments)
    whole = [p.placement.gather(m) for p, m in zip(model.parameters(), moments)]
    return [t.float().numpy() for t in [*model.state_dict().values(), *whole]]


CASES = [
    (against_torch, 1), (against_torch, 3), (parameter_groups,), (unfrozen_later,), (half_precision, torch.bfloat16),
    (half_precision, torch.float16), (accumulation_is_summed_in_float32,), (edited_gradients,), (resumed,),
    (ordinary_parameters,), (gradients_are_only_read,), (settings_change,), (writes_are_counted, torch.float32),
    (writes_are_counted, torch.bfloat16), (scaled_by_torch, False), (scaled_by_torch, True),
]  # fmt: skip


def by_kernels(case, *arguments):
    """`case` with the kernels' path, which on CPU ends in their references."""
    with mock.patch.object(adam_step, "kernels_serve", return_value=True) as asked:
        result = case(*arguments)
    assert asked.called
    return result


def name(case):
    return "-".join(str(getattr(c, "__name__", c)) for c in case)


@pytest.mark.parametrize(
    "case",
    by_default(
        CASES,
        (against_torch, 3),
        (unfrozen_later,),
        (half_precision, torch.float16),
        (scaled_by_torch, True),
    ),
    ids=name,
)
@pytest.mark.parametrize("size", [2, *in_full(3)])
def test_adam(world, size, case):
    world(size)(*case)


@pytest.mark.parametrize(
    "case",
    by_default(
        [case for case in CASES if case[0] is not accumulation_is_summed_in_float32],
        (half_precision, torch.bfloat16),
        (edited_gradients,),
        (writes_are_counted, torch.bfloat16),
    ),
    ids=name,
)
def test_adam_by_kernels(world, case):
    world(2)(by_kernels, *case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)], ids=str)
def test_stochastic_rounding_is_the_same_on_any_number_of_ranks(world, dtype):
    alone = world(1)(stochastic_state, dtype)[0]
    for size in (2, 3):
        for state in world(size)(stochastic_state, dtype):
            assert len(state) == len(alone)
            assert all((a == b).all() for a, b in zip(state, alone))


@pytest.mark.parametrize("bad", [{"betas": (1.0, 0.9)}, *in_full({"lr": -1}, {"eps": -1}, {"weight_decay": -0.1})])
def test_settings_are_checked(bad):
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        bmt.optim.AdamOptimizer([torch.nn.Parameter(torch.ones(1))], **bad)


@full
def test_dtypes_are_checked():
    with pytest.raises(ValueError, match=r"float16 and bfloat16 parameters, got torch.float64 of shape \(3,\)"):
        bmt.optim.AdamOptimizer([torch.nn.Parameter(torch.ones(3).double())])
    with pytest.raises(ValueError, match="exp_avg_dtype must be"):
        bmt.optim.AdamOptimizer([torch.nn.Parameter(torch.ones(3))], exp_avg_dtype=torch.float16)


@pytest.mark.parametrize("setting", ["maximize", *in_full("amsgrad")])
def test_settings_that_only_torch_has_are_refused(setting):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    parameters[0].grad = torch.ones(2)
    plain = torch.optim.AdamW(parameters, **{setting: True})
    plain.step()
    optimizer, state = bmt.optim.AdamOptimizer(parameters, lr=0.5), plain.state_dict()
    message = f"{setting}=True, which AdamOptimizer does not support"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], setting: True})
    assert optimizer.param_groups[0]["lr"] == 0.5 and len(optimizer.param_groups) == 1 and not optimizer.state
    state["param_groups"][0][setting] = False
    optimizer.load_state_dict(state)


def scaled_with_an_empty_group():
    model = bmt.auto_wrap(Tower())
    optimizer = bmt.optim.AdamOptimizer([{"params": []}, {"params": list(model.parameters())}], lr=0.1)
    other = bmt.auto_wrap(Tower())
    expected = bmt.optim.AdamOptimizer(other.parameters(), lr=0.1)
    (2 * model(ids(0, bmt.rank()))).backward()
    other(ids(0, bmt.rank())).backward()
    optimizer.step(scale=2.0)
    expected.step()
    compare(model, other)


def integer_step():
    """As older versions of torch and other libraries save it."""
    model = bmt.auto_wrap(Tower())
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    model(ids(0, bmt.rank())).backward()
    optimizer.step()
    state = optimizer.state_dict()
    for values in state["state"].values():
        values["step"] = int(values["step"])
    optimizer.load_state_dict(state)
    optimizer.step()
    assert {int(held["step"]) for held in optimizer.state.values()} == {2}


@pytest.mark.parametrize("case", [integer_step, *in_full(scaled_with_an_empty_group)], ids=lambda case: case.__name__)
def test_unusual_forms(world, case):
    world(2)(case)


OPTIMIZERS = [bmt.optim.AdamOptimizer, *in_full(bmt.optim.AdamOffloadOptimizer)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2, full=(1,))
def test_a_deep_copy(kind):
    """It holds copies of the parameters, full as they are in a copy of the model, and their full state."""
    model = bmt.auto_wrap(Tower())
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1, betas=(0.8, 0.9))

    def step(model, optimizer, number):
        optimizer.zero_grad()
        torch.stack([model(ids(number, row)) for row in range(2)]).square().mean().backward()
        optimizer.step()

    step(model, optimizer, 0)
    twin, other = copy.deepcopy((model, optimizer))
    assert other.param_groups[0]["params"][0] is next(iter(twin.parameters()))
    for number in (1, 2):
        step(model, optimizer, number)
        step(twin, other, number)
    for (name, mine), theirs in zip(model.state_dict().items(), twin.state_dict().values()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("weight_decay", [0.0, *in_full(0.1)])
@on_ranks(1)
def test_bits_of_torch(weight_decay):
    """On the CPU a float32 weight has the bits that torch.optim.AdamW gives it, which rounds in the same places."""
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 1237)) for _ in range(2)]
    ours = bmt.optim.AdamOptimizer(weights[:1], lr=0.3, weight_decay=weight_decay)
    truth = torch.optim.AdamW(weights[1:], lr=0.3, weight_decay=weight_decay, foreach=False)
    for _ in range(50):
        for weight in weights:
            weight.grad = torch.sin(weights[1].detach() * 37 + len(truth.state))
        ours.step()
        truth.step()
    assert torch.equal(*weights)


@on_ranks(1)
def test_a_rate_on_the_device_is_replaced_by_zero():
    """Both are 0 in the row of numbers that is compared with the last one, so the old rate remained."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = bmt.optim.AdamOptimizer([weight], lr=torch.tensor(0.1), exp_avg_dtype=torch.bfloat16)
    for lr, moves in ((torch.tensor(0.1), True), (0.0, False), (0.0, False), (torch.tensor(0.1), True)):
        optimizer.param_groups[0]["lr"] = lr
        before = weight.detach().clone()
        weight.grad = torch.ones(4)
        optimizer.step()
        assert torch.equal(weight, before) != moves


@on_ranks(1)
def test_a_state_of_other_shapes_changes_nothing():
    """The settings and the first tensors were loaded before the error."""
    model = bmt.auto_wrap(Tower())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
    model(ids(0, 0)).backward()
    optimizer.step()
    before, other = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    other["param_groups"][0]["lr"] = 0.5
    other["state"][0]["exp_avg"].fill_(7)
    other["state"][1]["exp_avg"] = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"exp_avg.*\(2, 5\)"):
        optimizer.load_state_dict(other)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


@on_ranks(1, full=(2,))
def test_steps_of_torch_after_a_state_dict():
    """The parameters of a run had one step count together, and torch's AdamW added 1 for each of them."""
    model = bmt.auto_wrap(Tower())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    model(ids(0, bmt.rank())).backward()
    optimizer.step()
    state, file = optimizer.state_dict(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for given in (copy.deepcopy(state), torch.load(file, weights_only=False), state):
        plain = torch.optim.AdamW(model.parameters(), **SETTINGS)
        plain.load_state_dict(given)
        plain.step()
        assert {float(held["step"]) for held in plain.state.values()} == {2.0}
    assert {float(held["step"]) for held in optimizer.state.values()} == {1.0}


RESETS = {
    "clear": lambda optimizer, parameters: optimizer.state.clear(),
    "assign": lambda optimizer, parameters: setattr(optimizer, "state", collections.defaultdict(dict)),
    "moments": lambda optimizer, parameters: [
        optimizer.state[p].update(
            {name: torch.zeros_like(optimizer.state[p][name]) for name in ("exp_avg", "exp_avg_sq")}
        )
        for p in parameters
    ],
    "one parameter": lambda optimizer, parameters: optimizer.state.pop(parameters[2]),
}


@on_ranks(2, full=(1,))
@pytest.mark.parametrize("how", ["clear", "moments", *in_full("assign", "one parameter")])
def test_state_that_the_caller_resets(how):
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    plain = torch.optim.AdamW(twin.parameters(), **SETTINGS)
    steps(model, twin, optimizer, plain, range(3))
    for each, parameters in ((optimizer, model.parameters()), (plain, twin.parameters())):
        RESETS[how](each, [*parameters])
    steps(model, twin, optimizer, plain, range(3, 6))
    compare(model, twin)
    expected = plain.state_dict()["state"]
    stored = optimizer.stored_state()
    states = optimizer.state_dict()["state"], dict(enumerate(stored[p] for p in model.parameters()))
    for state in states:
        assert {key: float(values["step"]) for key, values in state.items()} == {
            key: float(values["step"]) for key, values in expected.items()
        }
        assert all({"exp_avg", "exp_avg_sq"} <= {*values} for values in state.values())


@on_ranks(2, full=(1,))
def test_entries_that_other_code_adds_to_the_state():
    """They stay, as those of a Lookahead around the optimizer, and do not restart anything; a step count may be set."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    plain = torch.optim.AdamW(twin.parameters(), **SETTINGS)
    steps(model, twin, optimizer, plain, range(2))
    for parameter in model.parameters():
        optimizer.state[parameter].update(slow=parameter.detach().clone(), count=3)
    before = {p: dict(held) for p, held in optimizer.state.items()}
    steps(model, twin, optimizer, plain, range(2, 4))
    assert all(optimizer.state[p][name] is value for p, held in before.items() for name, value in held.items())
    for each in (optimizer, plain):
        next(iter(each.state.values()))["step"] = torch.tensor(0.0) if each is plain else 0
    steps(model, twin, optimizer, plain, range(4, 6))
    assert all(optimizer.state[p][name] is held[name] for p, held in before.items() for name in ("slow", "count"))
    compare(model, twin)


NEW_STATES = {
    "bfloat16": lambda model: bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS),
    "8 bits": lambda model: bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS, state_bits=8),
    "muon": lambda model: bmt.optim.MuonOptimizer(model, lr=1e-2),
    "in backward": lambda model: bmt.optim.AdamOffloadOptimizer(model.parameters(), **SETTINGS),
}


OF_OTHER_CODE = {"number": 5, "nothing": None, "text": "x", "list": [1, 2], "scalar": torch.tensor(7)}


def assert_others_are_kept(optimizer, slow):
    """slow: for each parameter, this rank's elements of the tensor that other code keeps beside its state."""
    for parameter, values in zip(optimizer.param_groups[0]["params"], slow, strict=True):
        held = optimizer.state[parameter]
        assert {name: held[name] for name in OF_OTHER_CODE} == OF_OTHER_CODE
        assert type(held["number"]) is int and held["scalar"].dtype == torch.int64
        assert isinstance(held["slow"], ShardTensor) and torch.equal(held["slow"].part, values)


@on_ranks(2, full=(1,))
@pytest.mark.parametrize("kind", ["adam", *in_full("bfloat16", "8 bits", "muon", "in backward")])
@pytest.mark.parametrize("how", ["own", *in_full("copied", "gathered", "full")])
def test_entries_of_other_code_are_loaded(kind, how):
    """They were converted to float32, or refused, and the next step deleted them."""
    model = bmt.auto_wrap(Tower().bfloat16() if kind == "bfloat16" else Tower())
    make = NEW_STATES.get(kind, NEW_STATES["bfloat16"])
    optimizer = make(model)

    def step(number):
        model(ids(number, bmt.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        optimizer.state[parameter].update(slow=parameter.detach().double(), **OF_OTHER_CODE)
    slow = [optimizer.state[p]["slow"].part.clone() for p in optimizer.param_groups[0]["params"]]
    state = optimizer.state_dict(gather=how in ("gathered", "full"))
    if how == "copied":
        state = copy.deepcopy(state)
    if how in ("gathered", "full"):
        state = current_world().control.broadcast_object(state)
    if how == "full":  # as torch's AdamW has it, for the whole parameters
        del state["sliced"]
    for _ in range(2):
        optimizer.load_state_dict(state)
        assert_others_are_kept(optimizer, slow)
    for number in (1, 2):
        step(number)
        assert_others_are_kept(optimizer, slow)
    if how == "own":
        optimizer.load_state_dict(optimizer.state_dict())
        model(ids(3, bmt.rank())).backward()
        optimizer.step()
        assert_others_are_kept(optimizer, slow)


@on_ranks(2, full=(1,))
@pytest.mark.parametrize("how", ["own", *in_full("gathered", "checkpoint")])
def test_hooks_get_the_complete_state(folder, how):
    """As those of torch: before, they may change what is loaded; after, the state is there. They run once."""
    model = bmt.auto_wrap(Tower())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **SETTINGS)
    model(ids(0, bmt.rank())).backward()
    optimizer.step()
    parameters, seen = optimizer.param_groups[0]["params"], []

    def before(optimizer, state_dict):
        seen.append([sorted(values) for values in state_dict["state"].values()])
        state = {key: {**values, "step": torch.tensor(5.0)} for key, values in state_dict["state"].items()}
        return {**state_dict, "state": state}

    def after(optimizer):
        seen.append([sorted(optimizer.state[p]) for p in parameters])

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    if how == "checkpoint":
        bmt.save_state(folder, model, optimizer, step=1)
        bmt.load_state(folder, model, optimizer)
    else:
        state = optimizer.state_dict(gather=how == "gathered")
        optimizer.load_state_dict(current_world().control.broadcast_object(state) if how == "gathered" else state)
    assert seen == [[["exp_avg", "exp_avg_sq", "step"]] * len(parameters)] * 2
    model(ids(1, bmt.rank())).backward()
    optimizer.step()
    assert {float(optimizer.state[p]["step"]) for p in parameters} == {6.0}


@on_ranks(1)
def test_a_state_of_another_class_changes_nothing():
    """Entries that AdamOptimizer does not know come from other code only beside its own."""
    model = bmt.auto_wrap(Tower())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.5)
    others = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.optim.Adagrad(model.parameters())]
    model(ids(0, 0)).backward()
    for each in (*others, optimizer):
        each.step()
    before = copy.deepcopy(optimizer.state_dict())
    for each in others:
        with pytest.raises(ValueError, match="another class of optimizer"):
            optimizer.load_state_dict(each.state_dict())
        state = {**each.state_dict(), "param_groups": before["param_groups"]}
        with pytest.raises(ValueError, match="lacks exp_avg and exp_avg_sq, and has only (momentum_buffer|sum)"):
            optimizer.load_state_dict(state)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["in backward", *in_full("bfloat16", "8 bits", "muon")])
def test_a_cleared_state_is_that_of_a_new_optimizer(kind):
    results = []
    for clear in (True, False):
        model = bmt.auto_wrap(Tower().bfloat16() if kind == "bfloat16" else Tower())
        optimizer = NEW_STATES[kind](model)
        for step in range(4):
            if step == 2 and clear:
                optimizer.state.clear()
            elif step == 2:
                optimizer = NEW_STATES[kind](model)
            with optimizer.update_in_backward() if kind == "in backward" else nullcontext():
                model(ids(step, bmt.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict())
    torch.testing.assert_close(*results, rtol=0, atol=0)


BY_DTYPE = {
    "adam": lambda p: bmt.optim.AdamOptimizer([p], **SETTINGS),
    "8 bits": lambda p: bmt.optim.AdamOptimizer([p], **SETTINGS, state_bits=8),
    "bfloat16": lambda p: bmt.optim.AdamOptimizer([p], **SETTINGS, exp_avg_dtype=torch.bfloat16),
    "muon": lambda p: bmt.optim.MuonOptimizer([{"params": [p], "muon": True}], lr=1e-3, weight_decay=0.1),
}


@on_ranks(1)
@pytest.mark.parametrize("kind", BY_DTYPE)
def test_the_default_dtype_has_no_effect(kind):
    """Step counts stopped at 256, Muon's weight decay was rounded to none, and kernels were refused."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            parameter = torch.nn.Parameter(torch.eye(4, dtype=torch.float32) * 2)
            optimizer, manager = BY_DTYPE[kind](parameter), bmt.optim.OptimManager()
            manager.add_optimizer(optimizer)
            for step in range(300):
                parameter.grad = torch.arange(16, dtype=torch.float32).add(step).sin().view(4, 4)
                manager.step()
            parameter.grad = torch.ones_like(parameter)
            optimizer.step(scale=3.0)
        finally:
            torch.set_default_dtype(torch.float32)
        results.append((parameter.detach(), optimizer.state_dict()["state"]))
    assert float(results[1][1][0]["step"]) == 301
    torch.testing.assert_close(*results, rtol=0, atol=0)


@on_ranks(1)
@pytest.mark.parametrize("kind", ["adam", *in_full("muon")])
def test_a_copy_keeps_the_defaults_of_later_groups(kind):
    settings = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.5, 0.6)}
    parameter, more = torch.nn.Parameter(torch.ones(2, 2)), {"params": [torch.nn.Parameter(torch.ones(2, 2))]}
    if kind == "muon":
        settings |= {"momentum": 0.5, "ns_steps": 3}
        optimizer = bmt.optim.MuonOptimizer([{"params": [parameter], "muon": True}], **settings)
        groups = [{**more, "muon": True}, {"params": [torch.nn.Parameter(torch.ones(2, 2))], "muon": False}]
    else:
        optimizer, groups = bmt.optim.AdamOptimizer([parameter], **settings), [more]
    twin = copy.deepcopy(optimizer)
    for each in (optimizer, twin):
        for group in groups:
            each.add_param_group({**group})
    for group, other in zip(optimizer.param_groups[1:], twin.param_groups[1:]):
        assert all(other[name] == value for name, value in group.items() if name != "params")
        assert all(other[name] == value for name, value in settings.items() if name in other)


@on_ranks(1)
def test_pickling_is_refused():
    """What was unpickled lacked attributes, and raised an AttributeError in its first step."""
    optimizer = bmt.optim.AdamOptimizer([torch.nn.Parameter(torch.ones(2))])
    for copied in (pickle.dumps, copy.copy, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(TypeError, match="state_dict"):
            copied(optimizer)
    assert pickle.loads(pickle.dumps(optimizer.state_dict()))["param_groups"][0]["lr"] == 1e-3
