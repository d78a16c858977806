"""The guard of compiled float8 blocks: a measurement ahead of the first training forward, which leaves no trace."""

import contextlib
import logging
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import hf_bmtrain as bmt
from cases import full, in_full, in_slow, rows_in_slow
from float8_models import build, rows
from hf_bmtrain.engine.sharding.slots import buffers_of
from hf_bmtrain.features.float8.calibrate import Calibration
from hf_bmtrain.features.float8.gather import gather_float8
from hf_bmtrain.features.float8.linear import Float8Linear
from hf_bmtrain.features.float8.storage import Float8Storage
from log_lines import log_lines
from ranks import on_ranks

WIDTH = 32


class Layer(nn.Module):
    """Two layers, of which a cancellation may leave of the second's output what rounding adds to it."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)
        if noisy:
            self.two.weight.data.fill_(1)

    def forward(self, x):
        y = self.drop(self.norm(self.one(x)))
        return x + self.two(y - y.mean(-1, keepdim=True))


class Stateful(nn.Module):
    """Counts its forwards, draws random numbers, writes its input, and has running means in and outside blocks."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(noisy and number == 1) for number in range(3)])
        self.norm, self.drop, self.head = nn.BatchNorm1d(WIDTH), nn.Dropout(0.25), nn.Linear(WIDTH, 1)
        self.forwards, self.fails, self.seen = 0, False, []

    def forward(self, x, seen=None):
        self.forwards += 1
        x += self.forwards
        if seen is not None:
            seen.append(len(seen))
        y = self.drop(self.norm(self.embed(x)))
        for layer in self.layers:
            y = layer(y)
            if self.fails:
                raise ArithmeticError("as asked")
        return self.head(y).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WIDTH // 2, (64,), generator=torch.Generator().manual_seed(10 * step + bmt.rank()))


def guards(model: nn.Module) -> int:
    present = [each for each in bmt.current_world().schedule.observers if isinstance(each, Calibration)]
    return sum(each._model() is model for each in present)


def states(model: nn.Module) -> list:
    return [module.float8_state for module in model.modules() if isinstance(module, Float8Linear)]


def bits(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone().contiguous().view(-1).view(torch.uint8)


def without_guard(model, layers, blocks, world) -> None:
    """Gather in float8 at once, and measure nothing."""
    gather_float8(world, {path: layer.float8_state for path, layer in layers.items()})


def guarded(on: bool):
    if on:
        return contextlib.nullcontext()
    return mock.patch("hf_bmtrain.features.float8.install_signal_guard", without_guard)


def train(model, inputs, steps: int = 3, accumulate: int = 1) -> list:
    """Return all that some steps show: losses, gradients, weights, buffers and random states."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, shown = torch.optim.SGD(trained, lr=0.1), []
    torch.manual_seed(bmt.rank())
    for step in range(steps):
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            for part in range(accumulate):
                loss = getattr(outputs := inputs(model, accumulate * step + part), "loss", outputs)
                loss.backward()
                shown.append(bits(loss))
        shown += [bits(parameter.gather_gradient()) for parameter in trained]
        optimizer.step()
        optimizer.zero_grad()
    shown += [bits(value) for value in model.state_dict().values()] + [torch.get_rng_state()]
    return shown


def same(found: list, expected: list) -> None:
    assert len(found) == len(expected) > 20 and any(each is not None for each in found)
    for mine, other in zip(found, expected):
        assert (mine is None) == (other is None) and (mine is None or torch.equal(mine, other))


def call(model, step):
    return model(batch(step))


def compiled(model, guard: bool = True, **options) -> nn.Module:
    torch._dynamo.reset()
    counters.clear()
    with guarded(guard):
        return bmt.auto_wrap(model, float8=True, compile="aot_eager", **options)


# -- a layer with too much noise --------------------------------------------------------------------------------------


def leaves_float8(use_checkpoint: bool) -> list[str]:
    model = compiled(Stateful(noisy=True), use_checkpoint=use_checkpoint)
    with log_lines(logging.INFO) as lines:
        found = train(model, call)
    assert [state.active for state in states(model)] == [True, True, True, False, True, True]
    assert not guards(model) and counters["stats"]["unique_graphs"]
    expected = train(compiled(Stateful(noisy=True), False, keep=["layers.1.two"], use_checkpoint=use_checkpoint), call)
    same(found, expected)
    return [line for line in lines if "signal-to-noise" in line]


@full
@pytest.mark.parametrize(("size", "use_checkpoint"), [(2, True), *rows_in_slow([(2, False), (1, True), (1, False)])])
def test_a_compiled_layer_with_too_much_noise_leaves_float8(world, size, use_checkpoint):
    """Training goes on as that of a model in which this layer was kept out of float8."""
    told = [line for lines in world(size)(leaves_float8, use_checkpoint) for line in lines]
    warnings = [line for line in told if "From now on" in line]
    assert len(warnings) == 1 and "'layers.1.two'" in warnings[0] and "keep=['two']" in warnings[0]
    assert sum("not finite): layers.0.one" in line for line in told) == 1


class Centred(nn.Module):
    """A layer whose output is a cancellation if its input is centred."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)])
        self.layers[0][0].weight.data.fill_(1)

    def forward(self, x, centred: bool):
        return self.layers[1](self.layers[0](x - x.mean(-1, keepdim=True) if centred else x)).square().mean()


def noise_on_one_rank() -> list[bool]:
    model = compiled(Centred())
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    model(x + 1, centred=bmt.rank() == 0).backward()
    assert not guards(model)
    return [state.active for state in states(model)]


def test_the_ratio_is_that_of_all_ranks(world):
    assert world(2)(noise_on_one_rank) == [[True, True]] * 2


# -- no trace ---------------------------------------------------------------------------------------------------------


@full
@pytest.mark.parametrize(
    "options", [{"use_checkpoint": True}, {"use_checkpoint": False}, *in_slow({"zero_level": 2})], ids=str
)
@on_ranks(2)
def test_the_measurement_leaves_no_trace(options: dict) -> None:
    """The same bits and as many graphs as without it: random states, buffers, attributes and arguments are put back."""
    found = []
    for guard in (True, False):
        model = compiled(Stateful(), guard, **options)
        assert guards(model) == guard
        shown = train(model, lambda model, step: model(batch(step), seen=model.seen))
        found.append((shown, model.seen, model.forwards, counters["stats"]["unique_graphs"]))
        assert all(state.active and not state.measures and state.powers is None for state in states(model))
        assert not guards(model)
    (mine, *facts), (other, *expected) = found
    assert facts == expected and facts[-1] >= 1, (facts, expected)
    same(mine, other)


@on_ranks(2)
def test_blocks_that_are_compiled_later_are_measured_ahead_too():
    """As Trainer compiles them, with torch_compile=True: the graphs do not contain the measurement."""
    found = []
    for late in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = bmt.auto_wrap(Stateful(), float8=True, compile=False if late else "aot_eager", use_checkpoint=False)
        for layer in model.layers if late else ():
            layer.compile(backend="aot_eager")
        assert guards(model) == 1
        found.append((train(model, call), counters["stats"]["unique_graphs"]))
        assert not guards(model)
    (mine, graphs), (other, expected) = found
    assert graphs == expected
    same(mine, other)


class Written(nn.Module):
    """Writes tensors inside of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(False) for _ in range(2)])

    def forward(self, batch, scales=()):
        x = batch["x"].mul_(2)
        for layer, scale in zip(self.layers, scales):
            x = layer(x) * scale.add_(1)
        return x.square().mean()


@full
@on_ranks(2)
def test_tensors_inside_of_arguments_are_written_once() -> None:
    found = []
    for guard in (True, False):
        model = compiled(Written(), guard)
        arguments: dict = {"batch": {"x": torch.ones(8, WIDTH)}, "scales": [torch.zeros(1) for _ in range(2)]}
        torch.manual_seed(bmt.rank())
        loss = model(**arguments)
        found.append([loss, arguments["batch"]["x"], *arguments["scales"]])
    assert found[0][1].eq(2).all() and all(scale == 1 for scale in found[0][2:])
    same_bits = [torch.equal(one, other) for one, other in zip(*found, strict=True)]
    assert all(same_bits), same_bits


@on_ranks(2)
def test_the_measurement_sees_what_later_hooks_make_of_arguments() -> None:
    """Hooks that were registered after the model was wrapped; those before it have run already."""
    found = []
    for guard in (True, False):
        model = Stateful()
        model.register_forward_pre_hook(lambda _, args: ([args[0] // 2],))
        model = compiled(model, guard)
        model.register_forward_pre_hook(lambda _, args: args[0][0])
        model.register_forward_pre_hook(lambda _, args, kwargs: ((), {"x": args[0]}), with_kwargs=True)
        torch.manual_seed(bmt.rank())
        loss = model(2 * batch(0))
        assert not guards(model)
        loss.backward()
        found.append((loss, model.embed.weight.gather_gradient()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@on_ranks(2)
def test_rows_that_ranks_share() -> None:
    """Sequence parallelism divides a row in a hook that is registered after the check of the model."""
    model = bmt.auto_wrap(build("llama"), float8=True, sequence_parallel=2, compile="eager")
    for step in range(2):
        loss = model(**rows(step, 0)).loss
        assert not guards(model) and loss.isfinite()
        loss.backward()


# -- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_checkpoint", [True, *in_full(False)])
@on_ranks(2)
def test_weights_are_gathered_in_float8_from_the_first_compiled_forward_on(use_checkpoint: bool) -> None:
    model = compiled(Stateful(), use_checkpoint=use_checkpoint)
    buffers = [buffer for buffer in buffers_of(model) if isinstance(buffer.storage, Float8Storage)]
    seen = []
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda layer, args: seen.append(
                (
                    torch.is_grad_enabled(),
                    {buffer.storage.in_float8 for buffer in buffers},
                    counters["stats"]["unique_graphs"],
                )
            )
        )
    with torch.no_grad():
        model(batch(9))
    graphs = counters["stats"]["unique_graphs"]
    assert not any(state.measures or state.powers is not None for state in states(model)) and guards(model)
    loss = call(model, 0)
    assert seen[3:6] == [(False, {False}, graphs)] * 3  # measured, and not compiled
    assert [each[:2] for each in seen[6:]] == [(True, {True})] * 3
    reader = model.embed._parameters["weight"].on_demand
    assert not reader.unwatched, "a read of the measurement keeps it whole to the end of the backward"
    loss.backward()
    call(model, 1).backward()
    assert len([each for each in seen if not each[0]]) == 6, "measured again"


@full
@on_ranks(2)
def test_a_measurement_that_raises_changes_nothing() -> None:
    model = compiled(Stateful(noisy=True))
    before = [bits(value) for value in model.state_dict().values()]
    model.fails, x, seen = True, batch(0), []
    torch.manual_seed(bmt.rank())
    drawn = torch.get_rng_state()
    with pytest.raises(ArithmeticError):
        model(x, seen)
    assert guards(model) == 1 and model.forwards == 0 and not seen and torch.equal(x, batch(0))
    assert not any(state.measures or state.powers is not None or not state.active for state in states(model))
    assert torch.equal(drawn, torch.get_rng_state()) and torch.compiler.is_compiling() is False
    assert not any(
        buffer.storage.in_float8 for buffer in buffers_of(model) if isinstance(buffer.storage, Float8Storage)
    )
    assert all(torch.equal(bits(value), old) for value, old in zip(model.state_dict().values(), before))
    assert not counters["stats"]["unique_graphs"]
    model.fails = False
    found = train(model, call)
    assert counters["stats"]["unique_graphs"] and not guards(model)
    same(found, train(compiled(Stateful(noisy=True)), call))


@on_ranks(2, full=(1,))
def test_the_decision_waits_for_backwards_that_are_to_come() -> None:
    """A block of which a backward is to come would be recomputed in another dtype."""
    model = compiled(Stateful(noisy=True))
    part = model.layers[1](torch.randn(64, WIDTH, requires_grad=True)).sum()
    loss = call(model, 0)
    assert guards(model) == 1 and all(state.active and not state.measures for state in states(model))
    (part + loss).backward()
    call(model, 1).backward()
    assert not guards(model) and not all(state.active for state in states(model))


class Towers(nn.Module):
    """A tower that only some rows need, ahead of the layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.layers = (
            nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]) for _ in range(2)
        )

    def forward(self, x, image):
        for layer in [*self.tower, *self.layers] if image else self.layers:
            x = layer(x)
        return x.square().mean()


def not_called() -> list[str]:
    model = compiled(Towers(), use_checkpoint=False)
    with log_lines(logging.INFO) as lines:
        train(model, lambda model, step: model(torch.ones(8, WIDTH), image=step > 0), steps=2)
    in_float8 = [buffer.storage.in_float8 for buffer in buffers_of(model) if isinstance(buffer.storage, Float8Storage)]
    assert in_float8 == [False, False, True, True] and all(state.active for state in states(model))
    return [line for line in lines if "was not called" in line]


def test_layers_that_are_not_called_stay_in_float8_and_are_gathered_in_their_own_dtype(world):
    assert [len(lines) for lines in world(2)(not_called)] == [1, 0]


def tower_on_one_rank() -> list[bool]:
    model = compiled(Towers(), use_checkpoint=False)
    for layer in model.tower:
        layer.requires_grad_(False)
    found = train(model, lambda model, step: model(torch.ones(8, WIDTH), image=bmt.rank() == 0))
    assert not guards(model) and found
    return [buffer.storage.in_float8 for buffer in buffers_of(model) if isinstance(buffer.storage, Float8Storage)]


@full
def test_a_tower_may_run_on_one_rank_where_blocks_are_pulled(peers):
    assert peers(2)(tower_on_one_rank) == [[True] * 4] * 2


@on_ranks(1)
def test_evaluations_are_not_measured() -> None:
    """Where blocks are not compiled, the first training forward measures, and no evaluation before or after it."""
    model = bmt.auto_wrap(Towers(), float8=True)
    x, tower = torch.ones(8, WIDTH), states(model)[:2]
    for training in (False, True, False):
        with torch.set_grad_enabled(training):
            model(x, image=not training)
        assert not any(state.powers is not None for state in tower)
    assert all(state.powers is not None for state in states(model)[2:]) and guards(model)
    model(x, image=True)  # no backward yet
    assert all(state.powers is not None for state in tower) and guards(model)


# -- with what else runs ----------------------------------------------------------------------------------------------


class Recording(Stateful):
    def forward(self, x, seen=None):
        loss = super().forward(x, seen)
        bmt.inspect.record_tensor(loss, "loss")
        return loss


@full
@on_ranks(1)
def test_activations_are_recorded_once() -> None:
    model = compiled(Recording())
    with bmt.inspect.inspect_tensor() as inspector:
        call(model, 0).backward()
    assert [line["name"] for line in inspector.summary] == ["loss"]
    assert not guards(model)


@full
@on_ranks(2)
def test_parity_compares_one_forward() -> None:
    model = compiled(build("llama"))
    result = bmt.check_parity(model, rows(0, bmt.rank()), verbose=False)
    assert not [each for each in result.differences if each.kind == "output" and each.largest == float("inf")]


def under_autocast() -> list[torch.dtype]:
    model = compiled(Stateful())
    dtypes = []
    model.head.register_forward_hook(lambda head, args, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(model, 0).backward()
    assert not guards(model)
    return dtypes


@full
def test_autocast_is_that_of_the_forward(world):
    (dtypes,) = world(1)(under_autocast)
    assert dtypes == [torch.bfloat16] * 2
