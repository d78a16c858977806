"""MuonOptimizer against torch.optim.Muon and AdamW, which step over the full parameters with the same gradients."""

import functools
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from beside_twin import shared_folder
from cases import full, in_full, pairwise, rows_in_full
from hf_bmtrain.features.muon import matrices
from ranks import on_ranks
from tiny_models import batch, build
from twins import Tower, ids

needs_torch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon comes with torch 2.9")
MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAM = {"adam_lr": 3e-3, "betas": (0.9, 0.95), "adam_eps": 1e-6, "adam_weight_decay": 0.05}


class Twin:
    """torch.optim.Muon for what is in a layer and has two dimensions, or each matrix of three; AdamW for the rest."""

    def __init__(self, model, **options):
        self.names = {name for name, p in model.named_parameters() if ".layers." in name and p.dim() in (2, 3)}
        self.full = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        hidden = [row for n in sorted(self.names) for row in self._parts(self.full[n])]
        rest = [self.full[n] for n in self.full if n not in self.names]
        self.optimizers = [
            torch.optim.Muon(hidden, **{**MUON, **options}),
            torch.optim.AdamW(rest, ADAM["adam_lr"], ADAM["betas"], ADAM["adam_eps"], ADAM["adam_weight_decay"]),
        ]
        self.hidden, self.rest = hidden, rest

    def _parts(self, tensor):
        return [tensor] if tensor.dim() == 2 else [*tensor]

    def step(self, gradients):
        parts = [row for n in sorted(self.names) for row in self._parts(gradients[n])]
        parts += [gradients[n] for n in self.full if n not in self.names]
        for value, gradient in zip([*self.hidden, *self.rest], parts, strict=True):
            value.grad = gradient.contiguous()
        for optimizer in self.optimizers:
            optimizer.step()


def full_gradients(model):
    """In float32, as the optimizer reads them: of several backwards in bfloat16, it reads the float32 sum."""
    found = {}
    for name, parameter in model.named_parameters():
        local = parameter.buffer.local_ranges[parameter.index]
        wide = parameter.buffer.gradient.wide(local.shard_start, local.shard_stop)
        found[name] = (parameter.gather_gradient() if wide is None else parameter.placement.gather(wide)).float()
    return found


def check_equal(model, twin, dtype, exact):
    for name, value in model.state_dict().items():
        if name not in twin.full:
            continue
        expected = twin.full[name].to(dtype)
        if exact or name in twin.names:
            assert torch.equal(value, expected), (name, (value - expected).abs().max())
        else:
            torch.testing.assert_close(value, expected, rtol=2e-2 if dtype != torch.float32 else 1e-6, atol=1e-6)


def steps(family, zero_level, dtype, backwards, adjust_lr_fn=None, nesterov=True):
    """Five steps, of which the rates fall; with small rounds, so that several are under way."""
    options = {"adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    built = build(family).to(dtype)
    twin = Twin(built, **options)
    model = bmt.auto_wrap(built, zero_level=zero_level)
    optimizer = bmt.optim.MuonOptimizer(model, **MUON, **ADAM, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in twin.optimizers]
    with mock.patch.object(matrices, "ROUND_ELEMENTS", 500):
        for step in range(5):
            for micro in range(backwards):
                model(**batch(family, 100 * step + 10 * micro + bmt.rank())).loss.backward()
            twin.step(full_gradients(model))
            optimizer.step()
            for each in (schedule, *schedules):
                each.step()
            optimizer.zero_grad()
            if family == "mixtral":  # whose batched products round their own way
                continue
            check_equal(model, twin, dtype, exact=dtype == torch.float32)
    assert len(optimizer._rounds) > 3 or bmt.world_size() == 1
    named = {p: name for name, p in model.named_parameters()}
    taken = {named[p] for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    assert taken == twin.names
    if family == "mixtral":
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, twin.full[name].to(dtype), rtol=2e-2, atol=2e-3, msg=name)


@needs_torch_muon
@pytest.mark.parametrize(
    ("size", "family", "zero_level", "dtype", "backwards", "adjust_lr_fn", "nesterov"),
    pairwise(
        [
            (2, "llama", 3, torch.float32, 1, None, True),
            (3, "llama", 2, torch.float32, 2, "match_rms_adamw", False),
            (2, "mixtral", 3, torch.float32, 1, "original", True),
            (1, "llama", 3, torch.bfloat16, 1, None, True),
        ],
        [1, 2, 3],
        ["llama", "mixtral"],
        [2, 3],
        [torch.float32, torch.bfloat16],
        [1, 2],
        [None, "original", "match_rms_adamw"],
        [True, False],
    ),
)
def test_steps(world, size, family, zero_level, dtype, backwards, adjust_lr_fn, nesterov):
    world(size)(steps, family, zero_level, dtype, backwards, adjust_lr_fn, nesterov)


def managed(dtype):
    """A loss scale, clipping and a step that is skipped; the masters go on from where they were."""
    model = bmt.auto_wrap(Tower().to(dtype))
    optimizer = bmt.optim.MuonOptimizer(model, **MUON, **ADAM)
    manager = bmt.optim.OptimManager(loss_scale=1024.0)
    manager.add_optimizer(optimizer)
    full = {n: p.gather().detach().float() for n, p in model.named_parameters()}
    hidden = {n for n in full if n.startswith("layers") and n.endswith("linear.weight")}
    plain = [
        torch.optim.Muon([full[n] for n in sorted(hidden)], **MUON),
        torch.optim.AdamW([full[n] for n in full if n not in hidden], 3e-3, (0.9, 0.95), 1e-6, 0.05),
    ]
    for step in range(6):
        scale, bad = manager.loss_scale, step == 3 and bmt.rank() == 0
        manager.backward(model(ids(step, bmt.rank())) * (float("inf") if bad else 1.0))
        for name, parameter in model.named_parameters():
            full[name].grad = parameter.gather_gradient().float() / scale
        norm = manager.clip_grad_norm(optimizer.param_groups, 0.05)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        manager.step()
        manager.zero_grad()
        if step == 3:
            assert not norm.isfinite() and manager.loss_scale == 512
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            continue
        assert norm > 0.05
        torch.nn.utils.clip_grad_norm_(full.values(), 0.05)
        for each in plain:
            each.step()
        for name, value in model.state_dict().items():
            rtol, atol = (5e-2, 3e-4) if name in hidden else (2e-2, 2e-5)  # a bit of the gradient turns a rounding over
            torch.testing.assert_close(value.float(), full[name], rtol=rtol, atol=atol, msg=f"{name} {step}")
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


@needs_torch_muon
@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), *rows_in_full([(1, torch.float16), (3, torch.bfloat16)])]
)
def test_with_a_manager(world, size, dtype):
    world(size)(managed, dtype)


class Training:
    """A tiny model in float32 or bfloat16 that takes two micro-batches a step."""

    def __init__(self, dtype, seed=0):
        self.model = bmt.auto_wrap(build("llama", seed=seed).to(dtype))
        self.optimizer = bmt.optim.MuonOptimizer(self.model, **MUON, **ADAM)

    def train(self, first, last):
        for step in range(first, last):
            for micro in range(6 // bmt.world_size()):
                rows = batch("llama", 100 * step + bmt.world_size() * micro + bmt.rank())
                (self.model(**rows).loss * bmt.world_size() / 6).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self):
        state = self.optimizer.state_dict(gather=True)["state"]
        values = {f"{key} {name}": torch.as_tensor(v) for key, each in state.items() for name, v in each.items()}
        return {**self.model.state_dict(), **values}

    def goes_on(self, folder):
        assert bmt.load_state(folder, self.model, self.optimizer).step == 3
        self.train(3, 6)
        return self.values()


def resumed(folder, dtype):
    whole = Training(dtype)
    whole.train(0, 3)
    bmt.save_state(folder, whole.model, whole.optimizer, step=3)
    saved = whole.values()
    whole.train(3, 6)
    expected = whole.values()
    found = Training(dtype, seed=1).goes_on(folder)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(found) == len(expected)
    local = Training(dtype)  # by state_dict, of this rank's elements
    local.train(0, 3)
    state, weights = local.optimizer.state_dict(), local.model.state_dict()
    again = Training(dtype, seed=1)
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(state)
    again.train(3, 6)
    found = again.values()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return saved, expected


def elsewhere(folder, dtype):
    training = Training(dtype, seed=2)
    bmt.load_state(folder, training.model, training.optimizer)
    return training.values(), training.goes_on(folder)


@full
@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)])
def test_saved_on_two_ranks_and_resumed_on_two_and_three(world, folder, dtype):
    saved, expected = world(2)(resumed, folder, dtype)[0]
    loaded, found = world(3)(elsewhere, folder, dtype)[0]
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    for name, value in expected.items():
        if name in dict(build("llama").named_parameters()) and value.dim() == 2:
            # The iteration amplifies how three ranks round a mean: about a quarter of three steps' movement.
            difference, moved = (other[name].float() - value.float() for other in (found, saved))
            assert difference.norm() < 0.5 * moved.norm(), name


def copied():
    """A deep copy has full parameters, and takes the same step by itself."""
    import copy

    training = Training(torch.float32)
    training.train(0, 2)
    model, optimizer = copy.deepcopy((training.model, training.optimizer))
    gradients = {}
    for step in range(2, 4):
        training.model(**batch("llama", step + bmt.rank())).loss.backward()
        gradients = full_gradients(training.model)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        for each in (optimizer, training.optimizer):
            each.step()
            each.zero_grad()
    full = dict(model.named_parameters())
    for name, value in training.model.state_dict().items():
        torch.testing.assert_close(value, full[name].detach(), rtol=0, atol=0, msg=name)


@on_ranks(2)
def test_deep_copy():
    copied()


@on_ranks(1, 2)
def test_groups_may_be_replaced_between_steps():
    """The settings of a new dict count from the next step on, as those that are written into the old one do."""
    trained = []
    for replaced in (False, True):
        model = bmt.auto_wrap(Tower())
        optimizer = bmt.optim.MuonOptimizer(model)
        groups = optimizer.param_groups
        for step, settings in enumerate([{}, {"lr": 0.0, "weight_decay": 0.0}, {"lr": 0.1, "nesterov": False}]):
            if replaced:
                groups[0] = {**groups[0], **settings}
            else:
                groups[0].update(settings)
            before = model.state_dict()
            model(ids(step, bmt.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            same = [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
            assert same == [f"layers.{number}.linear.weight" for number in range(3) if step == 1], (replaced, step)
        trained.append(model.state_dict())
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.places = torch.nn.Embedding(5, 4)
        self.mix = torch.nn.Conv1d(4, 4, 3)
        self.experts = torch.nn.Parameter(torch.randn(5, 4, 6))
        self.gate = torch.nn.Parameter(torch.randn(1, 4))
        self.up = torch.nn.Linear(4, 8)


def test_only_hidden_matrices_are_taken(world):
    world(2)(taken)


def taken():
    tower = Tower()
    tower.layers = torch.nn.ModuleList([Odd(), Odd()])
    tower.layers[1].up.weight = torch.nn.Parameter(torch.randn(8, 4))
    tower.head.weight = tower.layers[1].up.weight
    names = {p: n for n, p in bmt.auto_wrap(tower).named_parameters()}
    optimizer = bmt.optim.MuonOptimizer(tower)
    muon, adam = optimizer.param_groups
    assert [names[p] for p in muon["params"]] == ["layers.0.experts", "layers.0.up.weight", "layers.1.experts"]
    assert {*adam["params"], *muon["params"]} == set(tower.parameters())


def test_work_is_divided_evenly():
    """As many operations on every rank, in rounds, each of which has work for all."""
    shapes = [(64, 64)] * 2 + [(16, 64)] * 2 + [(64, 172)] * 3
    found = []
    for size in (2, 3, 8):
        all_matrices = []
        for run in range(16):
            for shape in shapes:
                matrix = matrices.Matrix(run, torch.nn.Parameter(torch.empty(shape)), 0, shape)
                matrix.counts = [0] * size
                matrix.counts[(run + len(all_matrices) % 7) % size] = 64 * 64
                all_matrices.append(matrix)
        matrices.assign(all_matrices, size)
        totals = [sum(m.cost for m in all_matrices if m.owner == rank) for rank in range(size)]
        assert max(totals) <= 1.03 * sum(totals) / size, (size, totals)
        found.append(sum(m.counts[m.owner] > 0 for m in all_matrices) / len(all_matrices))
        with mock.patch.object(matrices, "ROUND_ELEMENTS", 1):
            rounds = matrices.rounds_of(all_matrices, size)
        assert sum(map(len, rounds)) == len(all_matrices)
        assert len(rounds) > len(all_matrices) / size / 2
        for each in rounds:  # no rank waits for longer than for one matrix
            costs = [sum(m.cost for m in each if m.owner == rank) for rank in range(size)]
            assert max(costs) - min(costs) <= 2 * max(m.cost for m in all_matrices)
        assert len(matrices.rounds_of(all_matrices, size)) == 1
    assert min(found) > 0.8  # most need not travel


@on_ranks(2)
def test_refusals():
    model = bmt.auto_wrap(Tower())
    plain = Tower()
    cases = [
        (plain, {}, "is a matrix in a block"),
        (model, {"momentum": -1}, "momentum must be finite"),
        (model, {"ns_steps": 100}, "ns_steps must be"),
        (model, {"ns_coefficients": (1, 2)}, "ns_coefficients must be three"),
        (model, {"adjust_lr_fn": "none"}, "adjust_lr_fn must be None or one of original, match_rms_adamw"),
        ([{"params": [*model.parameters()]}], {}, 'needs the key "muon"'),
        ([{"params": [*model.parameters()], "muon": True}], {}, r"such as one of shape"),
        ([{"params": [model.layers[0].linear.weight], "muon": True, "hold_steps": 2}], {}, "hold_steps"),
    ]
    for params, options, message in cases:
        with pytest.raises(ValueError, match=message):
            bmt.optim.MuonOptimizer(params, **options)
    with pytest.raises(TypeError, match="An entry of a parameter group must be a torch.Tensor, got .*str"):
        bmt.optim.MuonOptimizer(model).add_param_group({"muon": True, "params": ["x"]})


@pytest.mark.parametrize("by", ["a dict", "a checkpoint"])
@on_ranks(1, 2)
def test_a_state_of_another_optimizer_is_refused(by):
    """In both directions, before anything changes. Groups that AdamW updates take the state of any AdamW."""
    model, folder = bmt.auto_wrap(Tower()), shared_folder()
    muon = bmt.optim.MuonOptimizer(model, lr=0.01)
    adam, sgd = (
        make([{"params": group["params"]} for group in muon.param_groups])
        for make in (bmt.optim.AdamOptimizer, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    )
    model(ids(0, bmt.rank())).backward()
    for optimizer in (muon, adam, sgd):
        optimizer.step()
    for saved, loaded, message in (
        (adam, muon, r"group 0 \(counted from 0\) is updated by Muon, but was updated by AdamW in the saved state"),
        (muon, adam, r"in group 0 \(counted from 0\) lacks exp_avg and exp_avg_sq, and has only momentum_buffer"),
        (sgd, adam, r"group 0 \(counted from 0\) of the saved state lacks betas and eps, so"),
        (sgd, muon, r"group 0 \(counted from 0\) of the saved state lacks betas and eps, so"),
    ):
        before = loaded.state_dict(gather=True)
        if by == "a checkpoint":
            bmt.save_state(folder, model, saved, step=1)
            load = functools.partial(bmt.load_state, folder, model, loaded)
        else:
            load = functools.partial(loaded.load_state_dict, saved.state_dict())
        with pytest.raises((ValueError, RuntimeError), match=message):
            load()
        after = loaded.state_dict(gather=True)
        assert after["param_groups"] == before["param_groups"]
        torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
        loaded.step()
    others = bmt.optim.MuonOptimizer([{"params": [*model.parameters()], "muon": False, "decoupled": False}])
    plain = torch.optim.Adam(model.parameters())
    plain.step()
    others.load_state_dict(plain.state_dict())
    assert others.param_groups[0]["decoupled"] is False and others.param_groups[0]["muon"] is False


@on_ranks(2)
def test_groups_with_names_and_empty_groups():
    models = [bmt.auto_wrap(Tower()) for _ in range(2)]
    optimizers = []
    for named, model in enumerate(models):
        matrices = [(name, p) for name, p in model.named_parameters() if name.endswith("linear.weight")]
        others = [(name, p) for name, p in model.named_parameters() if not name.endswith("linear.weight")]
        parts = [(matrices, True), (others, False)] + ([] if named else [([], True), ([], False)])
        optimizers.append(bmt.optim.MuonOptimizer([
            {"params": members if named else [p for _, p in members], "muon": muon} for members, muon in parts
        ]))  # fmt: skip
        for step in range(2):
            model(ids(step, bmt.rank())).backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*(model.state_dict().values() for model in models)))
    assert optimizers[1].param_groups[0]["param_names"][0] == "layers.0.linear.weight"


@needs_torch_muon
@on_ranks(2)
def test_torch_muon_is_refused():
    model = bmt.auto_wrap(Tower())
    optimizer = torch.optim.Muon([p for p in model.layers.parameters() if p.dim() == 2], lr=0.1)
    model(ids(0, 0)).backward()
    with pytest.raises(TypeError, match=r"Muon depends on the shapes .*bmt\.optim\.MuonOptimizer\(model\)"):
        optimizer.step()
