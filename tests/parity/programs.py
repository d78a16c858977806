"""Random programs of what users do around training, run sharded beside a plain twin.

`python tests programs --ranks 2 --seeds 0:1000` looks for one that goes wrong. Weights are float64 and
the optimizer is SGD with momentum, so that what differs is a fault and not rounding; or they are float32, under
AdamOptimizer and OptimManager's clipping. All ranks draw the same program; the twin computes the loss of every rank's
rows.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import hf_bmtrain as bmt
from hf_bmtrain.engine.wrap import root_params as outside
from program_models import draw_model
from twins import Tower, ids

LENGTH = 12  # actions
CLOSE = {torch.float64: {"rtol": 1e-8, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 3e-6}}
PLANS = (None, None, None, [0, 1, 2, 1], [2, 0], [0, 0, 0], [1])


class Program:
    """One program. Every method that changes something does it to `model` and to `twin`."""

    def __init__(self, seed: int, folder: str) -> None:
        self.random, self.folder = random.Random(seed), Path(folder)
        make = draw_model(self.random)
        own_buffers = self.random.choice([1, outside.OWN_BUFFER_NUMEL])
        self.options = {"zero_level": self.random.choice([2, 3]), "use_checkpoint": self.random.choice([False, True])}
        dtype = self.random.choice([torch.float64, torch.float64, torch.float32])
        self.adam, self.close = dtype == torch.float32, CLOSE[dtype]
        with mock.patch.object(outside, "OWN_BUFFER_NUMEL", own_buffers):
            self.model = bmt.auto_wrap(make().to(dtype), **self.options)
        self.twin = make().to(dtype)
        self.names = [name for name, _ in self.twin.named_parameters()]
        self.scale = self.random.choice([None, 2.0**10])
        self.new_optimizers()
        self.batches = 0
        self.done = [
            type(self.twin).__name__,
            self.twin.extra_repr(),
            f"own buffers from {own_buffers}",
            f"loss scale {self.scale}",
        ]

    def run(self) -> None:
        """Execute the program; what differs raises, with what was done until then. Collective."""
        actions = [
            self.train, self.train, self.train, self.add_up, self.two_forwards, self.evaluate, self.drop_a_forward,
            self.fail, self.freeze, self.thaw, self.rate, self.write_whole, self.write_slices, self.reload, self.files,
            self.resume, self.clear_one, self.edit_gradients, self.new_optimizers, self.modes, self.gradients_of_inputs,
        ]  # fmt: skip
        for _ in range(LENGTH):
            action = self.random.choice(actions)
            self.done.append(action.__name__)
            try:
                action()
                self.compare()
            except Exception as error:
                raise AssertionError(f"{self.options}: {', '.join(self.done)}: {error}") from error

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.twin

    # -- training -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        for _ in range(self.random.choice([1, 1, 2])):
            self.backward()
        if self.random.random() < 0.5:
            self.clip()
        self.manager.step()
        self.plain.step()
        to_none = self.random.choice([True, True, False])
        for optimizer in (self.optimizer, self.plain):
            optimizer.zero_grad(set_to_none=to_none)

    def clip(self) -> None:
        plain = nn.utils.clip_grad_norm_(self.twin.parameters(), 0.05)
        if self.adam:
            mine = self.manager.clip_grad_norm(self.optimizer.param_groups, 0.05)
        else:  # the manager computes in float32
            for parameter in self.model.parameters() if self.scale else ():
                parameter.grad = None if parameter.grad is None else parameter.grad / self.scale
            mine = nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            for parameter in self.model.parameters() if self.scale else ():
                parameter.grad = None if parameter.grad is None else parameter.grad * self.scale
        torch.testing.assert_close(mine, plain, **self.close)

    def add_up(self) -> None:
        self.backward()

    def backward(self) -> None:
        plan = self.random.choice(PLANS)
        walks = self.random.choice([1, 1, 1, 1, 2])
        step, size, rank = self.next_batch(), bmt.world_size(), bmt.rank()
        mine = self.model(ids(step, rank), plan)
        losses = torch.stack([self.twin(ids(step, other), plan) for other in range(size)])
        torch.testing.assert_close(mine, losses[rank], **self.close)
        if not mine.requires_grad:
            return
        for _ in range(walks - 1):
            (mine * (self.scale or 1.0)).backward(retain_graph=True)
            losses.mean().backward(retain_graph=True)
        self.manager.backward(mine)
        losses.mean().backward()
        self.fill_unused()

    def two_forwards(self) -> None:
        """Both graphs are there before the first backward, which goes through one of them, or through both."""
        steps, size = (self.next_batch(), self.next_batch()), bmt.world_size()
        mine = [self.model(ids(step, bmt.rank())) * (self.scale or 1.0) for step in steps]
        plain = [torch.stack([self.twin(ids(step, other)) for other in range(size)]).mean() for step in steps]
        order = self.random.choice([None, [0, 1], [1, 0], [0], [1]])
        if not mine[0].requires_grad:
            return
        for losses in (mine, plain):
            for loss in [sum(losses)] if order is None else [losses[number] for number in order]:
                loss.backward()
        self.fill_unused()

    def fill_unused(self) -> None:
        """A gradient that nobody has used is zero here, and None there."""
        whole = dict(self.model.named_parameters())
        for name, parameter in self.twin.named_parameters():
            if parameter.grad is None and whole[name].grad is not None:
                parameter.grad = torch.zeros_like(parameter)

    def next_batch(self) -> int:
        self.batches += 1
        return self.batches

    def evaluate(self) -> None:
        with torch.no_grad():
            for _ in range(self.random.choice([1, 3])):
                step = self.next_batch()
                torch.testing.assert_close(self.model(ids(step, 0)), self.twin(ids(step, 0)), **self.close)

    def gradients_of_inputs(self) -> None:
        """A hook on the embedding's output sees this rank's gradient, in a backward of its own."""
        if not getattr(self.twin, "watched", True):
            return
        seen = []
        for either in self.both:
            embedding = next(module for module in either.modules() if isinstance(module, nn.Embedding))
            handle = embedding.register_forward_hook(lambda module, inputs, output: seen.append(output))
            loss = either(ids(7, bmt.rank()))
            handle.remove()
            if seen[-1].requires_grad:
                (seen[-1],) = torch.autograd.grad(loss, seen[-1])
        torch.testing.assert_close(*seen, **self.close)
        self.manager.zero_grad()
        self.plain.zero_grad()

    def drop_a_forward(self) -> None:
        self.model(ids(0, bmt.rank()))

    def fail(self) -> None:
        """A forward, or a backward, that raises midway on every rank."""
        if self.random.random() < 0.5 and isinstance(self.twin, Tower):
            expected, call = IndexError, lambda: self.model(ids(0, bmt.rank()), [0, 9])
        else:
            output = self.model(ids(0, bmt.rank()))
            if not output.requires_grad:
                return
            output.register_hook(lambda gradient: 1 // 0)
            expected, call = ZeroDivisionError, output.backward
        try:
            call()
        except expected:
            return
        raise AssertionError(f"no {expected.__name__}")

    # -- changes between steps ----------------------------------------------------------------------------------

    def freeze(self) -> None:
        self.set_requires_grad(False)

    def thaw(self) -> None:
        self.set_requires_grad(True)

    def set_requires_grad(self, value: bool) -> None:
        name = self.random.choice(self.names)
        prefix = self.random.choice([name, name.rpartition(".")[0], name.split(".weight")[0]])
        for either in self.both:
            for name, parameter in either.named_parameters():
                if name.startswith(prefix):
                    parameter.requires_grad_(value)
                    parameter.grad = parameter.grad if value else None

    def rate(self) -> None:
        rate = self.random.choice([0.01, 0.1])
        for optimizer in (self.optimizer, self.plain):
            optimizer.param_groups[0]["lr"] = rate

    def modes(self) -> None:
        training = self.random.choice([True, False])
        for either in self.both:
            either.train(training)

    def write_whole(self) -> None:
        names = self.random.sample(self.names, 3)
        with bmt.gathered(self.model, modify=True), torch.no_grad():
            for name in names if bmt.rank() == 0 else ():
                self.model.get_parameter(name).mul_(0.9)
        with torch.no_grad():
            for name in names:
                self.twin.get_parameter(name).mul_(0.9)

    def write_slices(self) -> None:
        for either in self.both:
            for parameter in either.parameters():
                parameter.data.mul_(0.95)

    def reload(self) -> None:
        state = {
            key: value * 0.9 if value.is_floating_point() else value for key, value in self.twin.state_dict().items()
        }
        for either in self.both:
            either.load_state_dict(state)

    def files(self) -> None:
        path = self.folder / f"model.{self.random.choice(['pt', 'safetensors'])}"
        bmt.save(self.model, path)
        for parameter in self.model.parameters():
            parameter.data.zero_()
        bmt.load(self.model, path)

    def resume(self) -> None:
        """The optimizers' state goes through a state dict into new ones."""
        states = [optimizer.state_dict() for optimizer in (self.optimizer, self.plain)]
        self.new_optimizers()
        for optimizer, state in zip((self.optimizer, self.plain), states):
            optimizer.load_state_dict(state)

    def new_optimizers(self) -> None:
        if self.adam:
            make = self.random.choice([bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer])
            settings = {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}  # a large eps, or rounding moves weights
            self.optimizer = make(self.model.parameters(), **settings)
            self.plain = torch.optim.AdamW(self.twin.parameters(), **settings)
        else:
            self.optimizer, self.plain = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in self.both)
        self.manager = bmt.optim.OptimManager(loss_scale=self.scale)
        self.manager.add_optimizer(self.optimizer)

    # -- gradients ----------------------------------------------------------------------------------------------

    def clear_one(self) -> None:
        name = self.random.choice(self.names)
        for either in self.both:
            either.get_parameter(name).grad = None

    def edit_gradients(self) -> None:
        for either in self.both:
            for parameter in either.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def compare(self) -> None:
        """Weights and gradients are the twin's; the gradients but for the loss scale."""
        for name, parameter in self.model.named_parameters():
            plain = self.twin.get_parameter(name)
            torch.testing.assert_close(parameter.gather(), plain.data, **self.close, msg=f"{name} differs: {{}}".format)
            mine = parameter.gather_gradient()
            assert (mine is None) == (plain.grad is None), f"{name}: gradient {mine} for {plain.grad}"
            if mine is not None:
                message = f"the gradient of {name} differs: {{}}".format
                torch.testing.assert_close(mine / (self.scale or 1.0), plain.grad, **self.close, msg=message)


def run(seed: int, folder: str) -> None:
    Program(seed, folder).run()


def main() -> int:
    from ranks import Ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", default="0:100", help="FIRST:END (%(default)s)")
    parser.add_argument("--gather", choices=("auto", "peer"), default="auto")
    options = parser.parse_args()
    first, end = map(int, options.seeds.split(":"))
    world, wrong = Ranks(options.ranks, gather=options.gather), 0
    for seed in range(first, end):
        try:
            with tempfile.TemporaryDirectory() as folder:
                world(run, seed, folder)
        except AssertionError as error:
            wrong += 1
            print(f"seed {seed}: {error}"[-2000:], flush=True)
    world.stop()
    print(f"{end - first} programs, {wrong} wrong")
    return wrong > 0
