"""Observers: which events they see, in which order, and until when."""

import functools
import gc
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_bmtrain as bmt
from hf_bmtrain.engine.blocks.observer import EVENTS, Observer, Observers
from hf_bmtrain.engine.wrap.extension import Extension
from ranks import on_ranks
from twins import Layer, Tower, ids


class First(Observer):
    position = 10

    def __init__(self, seen):
        self.seen = seen

    def before_forward(self, model, args, kwargs):
        self.seen.append((type(self).__name__, model, args))


class Last(First):
    position = 90

    def before_reduce(self, gradient, index, values):
        self.seen.append((gradient.number, index))

    def end_backward(self):
        self.seen.append("end")


def test_an_event_has_the_observers_that_override_it():
    observers = Observers()
    assert all(getattr(observers, event) == () for event in EVENTS)
    last, first = Last([]), First([])
    observers.add(last)
    observers.add(first)
    assert observers.before_forward == (first, last) and observers.end_backward == (last,)
    assert observers.record == observers.out_of_memory == ()
    observers.remove(last)
    observers.remove(last)
    assert observers.before_forward == (first,) and observers.end_backward == ()


def sees(recompute):
    schedule, seen = bmt.current_world().schedule, []
    model = bmt.auto_wrap(Tower(), use_checkpoint=recompute)
    handles = [schedule.observe(kind(seen), model) for kind in (Last, First)]
    inputs = ids(0, bmt.rank())
    model(inputs).backward()
    assert [each[0] for each in seen[:2]] == ["First", "Last"], "by position, once a forward"
    assert all(each[1] is model and each[2][0] is inputs for each in seen[:2])
    buffers = {p.buffer.number: p.buffer for p in model.parameters()}
    expected = {(number, index) for number, buffer in buffers.items() for index in range(len(buffer.full_params))}
    assert set(seen[2:-1]) == expected and seen[-1] == "end"
    handles[0].remove()
    seen.clear()
    with torch.no_grad():
        model(inputs)
    assert [each[0] for each in seen] == ["First"]
    with schedule.calibration():
        model(inputs)
    assert len(seen) == 1, "a rehearsal is not seen"
    seen.clear()
    del model, buffers
    gc.collect()
    assert schedule.observer(First) is None, "removed with its model"


def test_observers_see_a_step(world):
    for recompute in (True, False):
        world(2)(sees, recompute)
    world(1)(sees, True)


def hooks():
    """What a model's own hook returns is what observers see; what is refused, they do not see."""
    schedule, seen = bmt.current_world().schedule, []
    model, other = Tower(), ids(1, 0)
    model.register_forward_pre_hook(lambda module, args: (other,))
    bmt.auto_wrap(model)
    handle = schedule.observe(First(seen))
    model(ids(0, 0))
    assert seen[0][2][0] is other
    model.extra = torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="was added to the model after auto_wrap"):
        model(ids(0, 0))
    handle.remove()
    assert len(seen) == 1


def test_the_model_hook_runs_behind_others(world):
    world(1)(hooks)


class Router(torch.nn.Linear):
    """Returns what routers of Transformers do."""

    def __init__(self):
        super().__init__(6, 4)

    def forward(self, x):
        logits = super().forward(x)
        return logits, *logits.softmax(-1).topk(2)


class Routed(Layer):
    """A layer that scores experts with a `gate`."""

    def __init__(self):
        super().__init__()
        self.gate = Router()

    def forward(self, x, shift=None):
        _, weights, _ = self.gate(x.flatten(0, -2))
        return super().forward(x + weights.sum(-1).view(*x.shape[:-1], 1), shift)


@on_ranks(1)
def test_the_example_of_the_source_s_readme():
    """It counts each token once, also of recomputed blocks."""
    readme = (Path(bmt.__file__).parent / "README.md").read_text("utf-8")
    (example,) = (code for code in re.findall(r"```py\n(.+?)```", readme, re.DOTALL) if "(Extension)" in code)
    lines = []
    log = SimpleNamespace(info=lambda text, *args: lines.append(args))
    names = {"Observer": Observer, "Extension": Extension, "functools": functools, "log": log, "torch": torch}
    exec(example, names)
    model = Tower()
    model.layers = torch.nn.ModuleList([Routed(), Routed()])
    auto_wrap_file = sys.modules["hf_bmtrain.features.auto_wrap"]
    listed = auto_wrap_file.extensions_of
    auto_wrap_file.extensions_of = lambda options: [*listed(options), names["LogLoad"]()]
    try:
        bmt.auto_wrap(model)
    finally:
        auto_wrap_file.extensions_of = listed
    for step in range(2):
        with torch.no_grad():
            model(ids(step, 0))
        model(ids(step, 0)).backward()
    assert [name for name, _ in lines] == ["layers.0.gate", "layers.1.gate"] * 2
    assert all(sum(tokens) == 2 * ids(0, 0).numel() for _, tokens in lines)
