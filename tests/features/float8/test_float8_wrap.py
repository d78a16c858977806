"""auto_wrap(float8=True): equal to the same layers in plain torch, and what it leaves out."""

import copy
import functools
import logging
import math

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import full, in_full, needs_peft, pairwise, rows_in_full, slow
from compile_checks import float8_gradients
from float8_models import build, extend_all, rows
from hf_bmtrain.engine.runtime.world import current_world
from hf_bmtrain.engine.sharding.slots import buffers_of
from hf_bmtrain.features.float8.calibrate import (
    LEAST_DECIBELS,
    Calibration,
    decibels,
    float8_decision,
    restore_decision,
)
from hf_bmtrain.features.float8.linear import Float8Inputs, Float8Linear, extend_linear
from hf_bmtrain.features.float8.storage import Float8Storage
from hf_bmtrain.features.packed.arithmetic import FORMATS
from log_lines import log_lines
from ranks import Ranks, on_ranks
from twins import check_gradients


def check(family: str, steps: int = 3, prepare=None, accumulate: int = 1, dtype=torch.float32, **options) -> None:
    """Train sharded and plain, side by side. Means of two ranks are exact, so that both round alike at every step."""
    model, twin = build(family).to(dtype), extend_all(build(family).to(dtype))
    for either in (model, twin):
        if prepare is not None:
            prepare(either)
    bmt.auto_wrap(model, float8=True, **options)
    optimizer, plain = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, twin))
    for step in range(steps):
        for part in range(accumulate):
            mine = model(**rows(accumulate * step + part, bmt.rank())).loss
            mine.backward()
            ranks = [twin(**rows(accumulate * step + part, other)).loss for other in range(bmt.world_size())]
            torch.stack(ranks).mean().backward()
            torch.testing.assert_close(mine, ranks[bmt.rank()], rtol=2e-6, atol=0)
        check_gradients(model, twin)
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()


def freeze_half(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name and "mlp" not in name)


@pytest.mark.parametrize("size", [2, *in_full(1)])
@pytest.mark.parametrize("family", ["gpt2", *in_full("llama", "bert", "mixtral")])
def test_equal_to_the_same_layers_in_plain_torch(world, size, family):
    world(size)(check, family)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 3}, {"prepare": freeze_half, "keep_frozen": True},
        *in_full({"zero_level": 2}, {"use_checkpoint": False}, {"use_checkpoint": "auto"}, {"prepare": freeze_half}),
        pytest.param({"compile": "aot_eager"}, marks=full),
        pytest.param({"compile": "aot_eager", "use_checkpoint": False, "prepare": freeze_half}, marks=full),
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_with_other_options(world, options):
    world(2)(functools.partial(check, "llama", **options))


@full
@pytest.mark.parametrize(
    ("family", "backend", "dtype"),
    [
        ("llama", "aot_eager", torch.float32),
        pytest.param("llama", "inductor", torch.bfloat16, marks=slow),
        pytest.param("gpt2", "inductor", torch.bfloat16, marks=full),
    ],
)
def test_compiled_gradients(world, family, backend, dtype):
    for off in world(2)(float8_gradients, family, True, backend, dtype):
        assert off and max(off.values()) < 0.3, off


@full
def test_three_ranks(world):
    world(3)(functools.partial(check, "llama", steps=1))


def what_is_in_float8(family: str, keep: tuple = (), **options) -> tuple[list[str], list[str]]:
    with log_lines(logging.INFO) as lines:
        model = bmt.auto_wrap(build(family), float8=True, keep=keep, **options)
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    return sorted(names), [line for line in lines if "float8" in line]


def test_layers_are_chosen_and_told(world):
    found, lines = world(1)(what_is_in_float8, "llama")[0]
    assert found == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert "in float8: 2 x q_proj" in lines[0] and "not: embeddings, head" in lines[0]
    found, lines = world(1)(what_is_in_float8, "llama", ("down_proj", "layers.1.self_attn"))[0]
    assert found == ["gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert "not: 2 x down_proj, 1 x q_proj, 1 x k_proj, 1 x v_proj, 1 x o_proj (named in keep)" in lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"float8": True, "keep": ["w_proj"]},
            r"names in keep= match no .*\['w_proj'\].*linear layers are named: down_proj, gate_proj",
        ),
        ({"float8": True, "odd": True}, "no linear layer.*multiples of 16"),
        *rows_in_full(
            [
                ({"float8": "blocks"}, "'rows', not 'blocks'"),
                ({"float8": None}, "'rows', not None"),
                ({"float8": 1}, "'rows', not 1"),
                ({"float8": True, "keep": "q_proj"}, "keep must be a list of names of modules"),
                ({"keep": ["q_proj"]}, "Pass float8=True"),
            ]
        ),
    ],
    ids=str,
)
@on_ranks(1)
def test_what_cannot_be_is_refused(options: dict, words: str) -> None:
    model = build("llama")
    if options.pop("odd", False):
        model.model.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 10), nn.Linear(10, 32)) for _ in range(2)])
    with pytest.raises((ValueError, TypeError), match=words):
        bmt.auto_wrap(model, **options)


@full
@pytest.mark.parametrize("first", [True, *in_full(False)])
@on_ranks(1)
def test_float8_is_chosen_when_a_model_is_wrapped_first(first: bool) -> None:
    model = bmt.auto_wrap(build("llama"), float8=first)
    model.adapter = nn.Linear(32, 32)
    if first:
        bmt.auto_wrap(model, float8=True)
        assert isinstance(model.adapter.weight, bmt.DistributedParameter)
        return
    with pytest.raises(ValueError, match="was wrapped without float8"):
        bmt.auto_wrap(model, float8=True)
    assert not isinstance(model.adapter.weight, bmt.DistributedParameter)


class Noisy(nn.Module):
    """Blocks of two layers; in `bad`, a cancellation leaves of the output what rounding adds to it."""

    def __init__(self, width: int = 32, bad: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Pair(width, number == bad) for number in range(2)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Pair(nn.Module):
    def __init__(self, width: int, bad: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        if bad:
            with torch.no_grad():
                self.two.weight.fill_(1)

    def forward(self, x):
        y = self.one(x)
        return x + self.two(y - y.mean(-1, keepdim=True))


def present_calibrations() -> int:
    return sum(isinstance(observer, Calibration) for observer in bmt.current_world().schedule.observers)


def left_out(use_checkpoint: bool) -> tuple[list[bool], list[str], int]:
    model = bmt.auto_wrap(Noisy(), float8=True, use_checkpoint=use_checkpoint)
    with log_lines(logging.INFO) as lines:
        for step in range(3):
            model(torch.randn(64, 32, generator=torch.Generator().manual_seed(step + bmt.rank()))).backward()
    active = [each.float8_state.active for each in model.modules() if isinstance(each, Float8Linear)]
    return active, [line for line in lines if "float8" in line], present_calibrations()


@pytest.mark.parametrize("use_checkpoint", [True, *in_full(False)])
def test_a_layer_with_too_much_noise_leaves_float8_on_every_rank(world, use_checkpoint):
    told = world(2)(left_out, use_checkpoint)
    for active, _, calibrations in told:
        assert active == [True, True, True, False] and calibrations == 0
    assert sum("not finite): layers.0.one" in line for _, lines, _ in told for line in lines) == 1
    warnings = [line for _, lines, *_ in told for line in lines if "From now on" in line]
    assert len(warnings) == 1 and "'layers.1.two'" in warnings[0] and "keep=['two']" in warnings[0]


def resumed(folder: str, saved_after: int, options: dict) -> tuple[list[float], list[float]]:
    """Losses after a save, with and without a stop. The noise of the layer that leaves float8 is gone by then."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = bmt.auto_wrap(Noisy(), float8=True, **options)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = model(torch.randn(64, 32, generator=torch.Generator().manual_seed(2 * step + bmt.rank())))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def actives(model: nn.Module) -> list[bool]:
        return [each.float8_state.active for each in model.modules() if isinstance(each, Float8Linear)]

    model, optimizer = make()
    train(model, optimizer, range(saved_after))
    with bmt.gathered(model, modify=True), torch.no_grad():
        model.layers[1].two.weight.normal_(generator=torch.Generator().manual_seed(0))
    bmt.save_state(folder, model, optimizer, step=saved_after)
    expected = train(model, optimizer, range(saved_after, saved_after + 3))
    state = actives(model)
    other, optimizer = make()
    bmt.load_state(folder, other, optimizer)
    losses = train(other, optimizer, range(saved_after, saved_after + 3))
    assert actives(other) == state == [True, True, True, saved_after < 1]
    assert present_calibrations() == 0
    buffers = [
        [b.storage.in_float8 for b in buffers_of(each) if isinstance(b.storage, Float8Storage)]
        for each in (model, other)
    ]
    assert buffers[0] == buffers[1] and any(buffers[0]) == (bmt.world_size() > 1)
    return expected, losses


@pytest.mark.parametrize(
    ("size", "saved_after", "options"),
    pairwise([(2, 1, {})], [1, 2], [0, 1, 3], [{}, {"compile": "aot_eager"}]),
    ids=str,
)
def test_a_resumed_run_has_the_same_layers_in_float8(world, tmp_path, size, saved_after, options):
    for expected, losses in world(size)(resumed, str(tmp_path), saved_after, options):
        assert losses == expected


def train_noisy(model: nn.Module, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(torch.randn(64, 32, generator=torch.Generator().manual_seed(2 * step + bmt.rank())))
        loss.backward()
        losses.append(loss.item())
    return losses


def two_models(folder: str, saves: bool) -> tuple[list[bool], list[float], list[str]]:
    """What one checkpoint has of two models that decide by themselves; one has decided before it is loaded."""
    both = nn.ModuleList(bmt.auto_wrap(Noisy(), float8=True) for _ in range(2))
    if saves:
        for model in both:
            train_noisy(model, 2)
        bmt.save_state(folder, both)
    else:
        with bmt.gathered(both, modify=True), torch.no_grad():
            both[0].layers[1].two.weight.normal_(generator=torch.Generator().manual_seed(0))
        train_noisy(both[0], 2)
    with log_lines(logging.WARNING) as lines:
        if not saves:
            bmt.load_state(folder, both)
    active = [each.float8_state.active for each in both.modules() if isinstance(each, Float8Linear)]
    return active, [train_noisy(model, 1)[0] for model in both], [line for line in lines if "float8" in line]


@full
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_models_decide_by_themselves_also_when_they_are_resumed(world, tmp_path, size):
    saved = world(size)(two_models, str(tmp_path), True)
    loaded = world(size)(two_models, str(tmp_path), False)
    for rank, (active, losses, _) in enumerate(saved):
        found, after, lines = loaded[rank]
        assert active == 2 * [True, True, True, False] and found == [True] * 7 + [False]
        assert after[1] == losses[1] and after[0] == after[0]
        assert len(lines) == (rank == 0) and all("float8: for 1 of 8 layers" in line for line in lines)


def one_is_not_trained(folder: str) -> list[bool]:
    both = nn.ModuleList(bmt.auto_wrap(Noisy(), float8=True) for _ in range(2))
    train_noisy(both[0], 2)
    bmt.save_state(folder, both)
    others = nn.ModuleList(bmt.auto_wrap(Noisy(), float8=True) for _ in range(2))
    bmt.load_state(folder, others)
    return [each.float8_state.active for each in others.modules() if isinstance(each, Float8Linear)]


@full
def test_what_is_decided_is_saved_beside_what_is_not(world, tmp_path):
    assert world(2)(one_is_not_trained, str(tmp_path)) == [[True, True, True, False, True, True, True, True]] * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Noisy()

    def forward(self, x):
        return self.inner(x)


def saved_from_within(folder: str) -> tuple[list[float], list[float], int]:
    model, other = (bmt.auto_wrap(Outer(), float8=True) for _ in range(2))
    train_noisy(model, 2)
    bmt.save_state(folder, model.inner)
    bmt.load_state(folder, other.inner)
    present = present_calibrations()
    return train_noisy(model, 2), train_noisy(other, 2), present


@full
def test_a_part_of_a_model_is_saved_and_loaded(world, tmp_path):
    for expected, losses, calibrations in world(2)(saved_from_within, str(tmp_path)):
        assert losses == expected and not calibrations


class Prompted(nn.Module):
    """A layer whose key is a projection of a trained parameter, as in PEFT's AdaptionPrompt."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 32).requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(16, 32))

    def forward(self, x):
        return x + self.project(self.prompt).mean(0)


@full
@on_ranks(2, full=(1,))
def test_a_parameter_that_is_projected_trains() -> None:
    model = Noisy()
    torch.manual_seed(1)
    model.layers = nn.ModuleList([Prompted() for _ in range(2)])
    twin = extend_all(copy.deepcopy(model))
    bmt.auto_wrap(model, float8=True)
    for step in range(4):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        mine, expected = model(x), twin(x)
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)
        for each, loss in ((model, mine), (twin, expected)):
            loss.backward()
            torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.5).step()
            each.zero_grad()


class Towers(Noisy):
    """A frozen tower of other layers, which only some rows need."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList([nn.Sequential(nn.Linear(32, 32)) for _ in range(2)]).requires_grad_(False)

    def forward(self, x, image=False):
        for layer in self.tower if image else ():
            x = layer(x)
        return super().forward(x)


def tower_on_one_rank() -> list[bool]:
    model = bmt.auto_wrap(Towers(), float8=True, keep_frozen=True)
    for step in range(4):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        model(x, image=bmt.rank() == 0).backward()
    return [each.float8_state.active for each in model.modules() if isinstance(each, Float8Linear)]


def test_a_frozen_tower_may_run_on_one_rank():
    """Where blocks are pulled, nothing of it is collective."""
    ranks = Ranks(2, gather="peer")
    try:
        told = ranks(tower_on_one_rank)
    finally:
        ranks.stop()
    assert told[0] == told[1] and not all(told[0])


@on_ranks(2)
def test_a_refused_model_is_as_before() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="finds no frozen weight"):
        bmt.auto_wrap(model, float8=True, quantize_frozen="nf4")
    with pytest.raises(ValueError, match="names in keep="):
        bmt.auto_wrap(model, float8=True, keep=["q"])
    assert not any(isinstance(each, Float8Linear) for each in model.modules())
    assert torch.equal(model(**rows(0, 0)).loss, build("llama")(**rows(0, 0)).loss)
    bmt.auto_wrap(model, float8=True)


@needs_peft
@on_ranks(1)
def test_an_adapted_router_is_left() -> None:
    from peft import LoraConfig, get_peft_model

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(32, 32), nn.Linear(32, 32)
            self.router = nn.ModuleDict({"classifier": nn.Linear(32, 32)})  # as in Longcat Flash

        def forward(self, hidden):
            scores = self.gate(hidden) + self.router["classifier"](hidden)
            return hidden + self.up(hidden) * scores.softmax(-1)

    model = nn.Sequential(nn.ModuleList([Routed(), Routed()]))
    model = get_peft_model(model, LoraConfig(target_modules=["gate", "up"]))
    bmt.auto_wrap(model, float8=True)
    found = {tuple(name.split(".")[-2:]) for name, each in model.named_modules() if isinstance(each, Float8Linear)}
    assert found == {("up", "base_layer")}


@full
def test_decibels():
    assert decibels(100.0, 1.0) == 20 == LEAST_DECIBELS and decibels(0.0, 0.0) == decibels(1.0, 0.0) == float("inf")


def adapters() -> None:
    """LoRA over frozen layers in float8, added before and after auto_wrap."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    first, twin = (peft.get_peft_model(build("llama"), copy.deepcopy(config)) for _ in range(2))
    twin.load_state_dict(first.state_dict())
    bmt.auto_wrap(first, float8=True)
    for name, layer in twin.named_modules():
        if isinstance(layer, nn.Linear) and "layers" in name and "lora" not in name:
            extend_linear(layer, False, Float8Inputs())
    first(**rows(0, bmt.rank())).loss.backward()
    torch.stack([twin(**rows(0, other)).loss for other in range(bmt.world_size())]).mean().backward()
    check_gradients(first, twin)
    assert not any(isinstance(each, Float8Linear) for name, each in first.named_modules() if "lora" in name)


@full
def test_adapters_train_beside_it(world):
    pytest.importorskip("peft")
    world(2)(adapters)


def gathers(model: nn.Module) -> set[bool]:
    """Whether weights are all-gathered in float8."""
    return {b.storage.in_float8 for b in buffers_of(model) if isinstance(b.storage, Float8Storage)}


@needs_peft
@on_ranks(2)
def test_adapters_that_read_weights_of_a_trained_model() -> None:
    """DoRA reads the weights under it, which were all-gathered in float8 until it was added."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "down_proj"], use_dora=True, init_lora_weights=False)
    trained, first = build("llama"), extend_all(build("llama"))
    bmt.auto_wrap(trained, float8=True)
    for step in range(2):
        loss = trained(**rows(step, bmt.rank())).loss
        loss.backward()
        torch.stack([first(**rows(step, other)).loss for other in range(bmt.world_size())]).mean().backward()
    assert gathers(trained) == {True}
    models = []
    for each in (trained, first):
        torch.manual_seed(7)
        each.zero_grad()
        models.append(peft.get_peft_model(each, copy.deepcopy(config)))
    model, twin = models
    bmt.auto_wrap(model)
    assert gathers(model) == {False}
    for step in range(2, 4):
        mine = model(**rows(step, bmt.rank())).loss
        ranks = [twin(**rows(step, other)).loss for other in range(bmt.world_size())]
        torch.testing.assert_close(mine, ranks[bmt.rank()], rtol=2e-6, atol=0)
        mine.backward()
        torch.stack(ranks).mean().backward()
    check_gradients(model, twin)
    decision = dict.fromkeys(float8_decision(current_world(), model), (True, None))
    again = bmt.auto_wrap(build("llama"), float8=True)
    adapted = peft.get_peft_model(again, copy.deepcopy(config))
    bmt.auto_wrap(adapted)
    restore_decision(current_world(), adapted, decision)
    assert gathers(adapted) == {False} and math.isfinite(adapted(**rows(0, bmt.rank())).loss.item())


@needs_peft
@on_ranks(2)
def test_adapters_are_not_added_before_a_backward() -> None:
    """The backward would read weights that were all-gathered in float8."""
    peft = pytest.importorskip("peft")
    model = bmt.auto_wrap(build("llama"), float8=True)
    for step in range(2):
        loss = model(**rows(step, bmt.rank())).loss
        loss.backward()
    loss = model(**rows(2, bmt.rank())).loss
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="2 blocks .* waiting for their backward"):
        bmt.auto_wrap(adapted)
    loss.backward()
    bmt.auto_wrap(adapted)


@pytest.mark.parametrize("name", ["nf4", *in_full("fp8")])
@on_ranks(2)
def test_a_packed_base_computes_in_float8(name: str) -> None:
    """A frozen base that is packed, unpacked and then rounded to float8."""
    model = Noisy(width=128)
    for layer in model.layers:
        layer.requires_grad_(False)
    twin = copy.deepcopy(model)
    form = FORMATS[name]
    bmt.auto_wrap(model, float8=True, quantize_frozen=name)
    for layer in twin.layers:
        for linear in (layer.one, layer.two):
            values = torch.empty_like(linear.weight)
            form.unpack(form.pack(linear.weight), values.view(-1))
            linear.weight.data.copy_(values)
            extend_linear(linear, False, Float8Inputs())
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    mine, expected = model(x), twin(x)
    assert torch.equal(mine, expected)
    mine.backward()
    expected.backward()
    check_gradients(model, twin)


def test_a_saved_model_is_whole_and_unrounded(world, tmp_path):
    world(2)(saved_equals, str(tmp_path / "model.pt"))


def saved_equals(path: str) -> None:
    model, plain = bmt.auto_wrap(build("llama"), float8=True), build("llama")
    bmt.save(model, path)
    states = torch.load(path), plain.state_dict()
    assert [*states[0]] == [*states[1]] and all(torch.equal(states[0][name], states[1][name]) for name in states[1])
