"""Random programs of what users do around training, run sharded beside a plain twin: `Program(seed).run(folder)`.

Weights are float64 and the optimizer is SGD with momentum, so that what differs is a fault and not rounding. All
ranks draw the same program; the twin computes the loss of every rank's rows.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

import hf_bmtrain as bmt
from twins import Tower, ids

LENGTH = 12  # actions
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Program:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.wrap = {"zero_level": self.random.choice([2, 3]), "use_checkpoint": self.random.choice([False, True])}
        self.model, self.twin = bmt.auto_wrap(Tower().double(), **self.wrap), Tower().double()
        self.optimizers = [self.new_optimizer(either) for either in (self.model, self.twin)]
        self.batches = 0
        self.done: list[str] = []

    def new_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def run(self, folder: str) -> list[str]:
        """Execute the program; what differs raises, with what was done until then. Collective."""
        actions = [
            self.train, self.train, self.train, self.add_up, self.evaluate, self.drop_a_forward, self.fail, self.freeze,
            self.thaw, self.rate, self.write_whole, self.write_slices, self.reload, lambda: self.files(folder),
            self.resume, self.clear_one, self.edit_gradients, self.new_optimizers, self.modes,
        ]  # fmt: skip
        for _ in range(LENGTH):
            action = self.random.choice(actions)
            self.done.append(getattr(action, "__name__", "files"))
            try:
                action()
                self.compare()
            except BaseException as error:
                error.add_note(f"{self.wrap}: {', '.join(self.done)}") if hasattr(error, "add_note") else None
                raise
        return self.done

    # -- training -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        for _ in range(self.random.choice([1, 1, 2])):
            self.backward()
        if self.random.random() < 0.5:
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (self.model, self.twin)]
            torch.testing.assert_close(*norms, **CLOSE)
        to_none = self.random.choice([True, True, False])
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

    def add_up(self) -> None:
        self.backward()

    def backward(self) -> None:
        plan = self.random.choice([None, None, None, [0, 1, 2, 1], [2, 0], [0, 0, 0], [1]])
        twice = self.random.random() < 0.15
        step, size, rank = self.next_batch(), bmt.world_size(), bmt.rank()
        mine = self.model(ids(step, rank), plan)
        losses = torch.stack([self.twin(ids(step, other), plan) for other in range(size)])
        torch.testing.assert_close(mine, losses[rank], **CLOSE)
        if not mine.requires_grad:
            return
        if twice:
            mine.backward(retain_graph=True)
            losses.mean().backward(retain_graph=True)
        mine.backward()
        losses.mean().backward()
        whole = dict(self.model.named_parameters())
        for name, parameter in self.twin.named_parameters():
            if parameter.grad is None and whole[name].grad is not None:  # unused: zero here, None there
                parameter.grad = torch.zeros_like(parameter)

    def next_batch(self) -> int:
        self.batches += 1
        return self.batches

    def evaluate(self) -> None:
        with torch.no_grad():
            for _ in range(self.random.choice([1, 3])):
                step = self.next_batch()
                torch.testing.assert_close(self.model(ids(step, 0)), self.twin(ids(step, 0)), **CLOSE)

    def drop_a_forward(self) -> None:
        self.model(ids(0, bmt.rank()))

    def fail(self) -> None:
        """A forward, or a backward, that raises midway on every rank."""
        if self.random.random() < 0.5:
            try:
                self.model(ids(0, bmt.rank()), [0, 9])
            except IndexError:
                return
            raise AssertionError("the plan has no such layer")
        output = self.model(ids(0, bmt.rank()), [0, 1])
        if output.requires_grad:
            output.register_hook(_raise)
            try:
                output.backward()
            except ZeroDivisionError:
                return
            raise AssertionError("the hook was not called")

    # -- changes between steps ----------------------------------------------------------------------------------

    def freeze(self) -> None:
        self.set_requires_grad(False)

    def thaw(self) -> None:
        self.set_requires_grad(True)

    def set_requires_grad(self, value: bool) -> None:
        names = [name for name, _ in self.twin.named_parameters()]
        prefix = self.random.choice(["embedding", "layers.0", "layers.1.linear", "head", self.random.choice(names)])
        for either in (self.model, self.twin):
            for name, parameter in either.named_parameters():
                if name.startswith(prefix):
                    parameter.requires_grad_(value)
                    if not value:
                        parameter.grad = None

    def rate(self) -> None:
        rate = self.random.choice([0.01, 0.1])
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate

    def modes(self) -> None:
        training = self.random.choice([True, False])
        for either in (self.model, self.twin):
            either.train(training)

    def write_whole(self) -> None:
        with bmt.gathered(self.model, modify=True), torch.no_grad():
            if bmt.rank() == 0:
                self.model.layers[1].linear.weight.mul_(0.9)
                self.model.embedding.weight.add_(0.01)
        with torch.no_grad():
            self.twin.layers[1].linear.weight.mul_(0.9)
            self.twin.embedding.weight.add_(0.01)

    def write_slices(self) -> None:
        for either in (self.model, self.twin):
            for parameter in either.parameters():
                parameter.data.mul_(0.95)

    def reload(self) -> None:
        state = {key: value * 0.9 for key, value in self.twin.state_dict().items()}
        for either in (self.model, self.twin):
            either.load_state_dict(state)

    def files(self, folder: str) -> None:
        path = Path(folder) / f"model.{self.random.choice(['pt', 'safetensors'])}"
        bmt.save(self.model, path)
        for parameter in self.model.parameters():
            parameter.data.zero_()
        bmt.load(self.model, path)

    def resume(self) -> None:
        """The optimizer's state goes through a state dict, into the old or a new optimizer."""
        for number, model in enumerate((self.model, self.twin)):
            state = self.optimizers[number].state_dict()
            self.optimizers[number] = self.new_optimizer(model)
            self.optimizers[number].load_state_dict(state)

    def new_optimizers(self) -> None:
        self.optimizers = [self.new_optimizer(either) for either in (self.model, self.twin)]

    # -- gradients ----------------------------------------------------------------------------------------------

    def clear_one(self) -> None:
        name = self.random.choice([name for name, _ in self.twin.named_parameters()])
        for either in (self.model, self.twin):
            dict(either.named_parameters())[name].grad = None

    def edit_gradients(self) -> None:
        for either in (self.model, self.twin):
            for parameter in either.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def compare(self) -> None:
        """Weights and gradients are the twin's."""
        twins = dict(self.twin.named_parameters())
        for name, parameter in self.model.named_parameters():
            torch.testing.assert_close(parameter.gather(), twins[name].data, **CLOSE, msg=lambda m: f"{name}: {m}")
            mine, expected = parameter.gather_gradient(), twins[name].grad
            assert (mine is None) == (expected is None), f"{name}: gradient {mine} for {expected}"
            if mine is not None:
                torch.testing.assert_close(mine, expected, **CLOSE, msg=lambda m: f"gradient of {name}: {m}")


def _raise(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def run(seed: int, folder: str) -> list[str]:
    return Program(seed).run(folder)
