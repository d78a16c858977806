"""Ranks that enter different blocks, or read different parameters outside blocks, in one step."""

import logging
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_bmtrain as bmt
from cases import full, rows_by_default, slow
from hf_bmtrain.engine.blocks.negotiation import Negotiation
from hf_bmtrain.engine.sharding.gradient import GradientBuffer
from hf_bmtrain.engine.wrap import root_params as outside
from log_lines import log_lines
from ranks import Ranks
from twins import WIDTH, Layer, Tower, check_twins, compare_backward, ids


class WithImages(Tower):
    """An image tower with weights around it, which is called for each image, and not at all without images."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(WIDTH, WIDTH)
        self.vision = nn.ModuleList([Layer() for _ in range(2)])
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.checkpointed = False

    def see(self, image):
        y = self.patch(image)
        for layer in self.vision:
            y = layer(y)
        return self.projector(y)

    def forward(self, ids, images=()):
        x = self.embedding(ids)
        for image in images:
            x = x + (checkpoint(self.see, image, use_reentrant=False) if self.checkpointed else self.see(image))
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


COUNTS = [(1, 0, 0), (0, 0, 0), (1, 1, 1), (0, 2, 1), (0, 0, 1)]
"""How many images each rank's rows have in a step."""


def images(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + 10 * step + rank)
    return [torch.randn(4, 3, WIDTH, generator=generator) for _ in range(COUNTS[step % len(COUNTS)][rank])]


def loss_with_images(model, step, rank):
    return model(ids(step, rank), images(step, rank))


def some_without_image(**wrap):
    check_twins(WithImages, loss_with_images, steps=len(COUNTS), **wrap)


def frozen(*names: str) -> Callable[[], nn.Module]:
    def make():
        model = WithImages()
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    return make


def frozen_tower(**wrap):
    check_twins(frozen("vision", "patch"), loss_with_images, steps=len(COUNTS), **wrap)


def frozen_language_model(**wrap):
    """Without an image, a rank's loss depends on no parameter that is trained."""
    check_twins(frozen("embedding", "layers", "head"), only_some_train, steps=4, **wrap)


def only_some_train(model, step, rank):
    return loss_with_images(model, [0, 2, 3, 4][step], rank)


def adapters_in_the_tower(**wrap):
    """Blocks with two buffers, of trained and of frozen parameters."""

    def make():
        model = WithImages()
        for layer in [*model.vision, *model.layers]:
            layer.linear.requires_grad_(False)
        return model

    check_twins(make, loss_with_images, steps=len(COUNTS), **wrap)


def accumulated(**wrap):
    """Three backwards a step, of ranks with other numbers of images."""
    model, twin = bmt.auto_wrap(WithImages(), **wrap), WithImages()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    for step in range(2):
        for micro in range(3):
            compare_backward(model, twin, loss_with_images, step + micro, rtol=1e-5)
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()


def checkpointed_tower(**wrap):
    """A checkpoint around the tower recomputes its blocks in the order of the forward."""

    def make():
        model = WithImages()
        model.checkpointed = True
        return model

    check_twins(make, loss_with_images, steps=len(COUNTS), **wrap)


def evaluated(**wrap):
    model, twin = bmt.auto_wrap(WithImages(), **wrap), WithImages()
    for step in range(len(COUNTS)):
        with torch.no_grad():
            torch.testing.assert_close(
                loss_with_images(model, step, bmt.rank()), loss_with_images(twin, step, bmt.rank())
            )
        compare_backward(model, twin, loss_with_images, step)
        model.zero_grad()
        twin.zero_grad()


def two_losses(**wrap):
    """One backward through two forwards of ranks with other numbers of images."""

    def loss(model, step, rank):
        return loss_with_images(model, step, rank) + loss_with_images(model, step + 1, rank)

    check_twins(WithImages, loss, steps=len(COUNTS), **wrap)


class Heads(Tower):
    """Of four heads, each with a buffer of its own, a rank computes some."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 5) for name in "abcd"})

    def forward(self, ids, names):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.stack([self.heads[name](x).square().mean() for name in names]).sum()


def task_heads(**wrap):
    names = [("a", "b", "ab"), ("c", "dc", "d"), ("b", "b", "b")]
    with mock.patch.object(outside, "OWN_BUFFER_NUMEL", 8):
        check_twins(Heads, lambda model, step, rank: model(ids(step, rank), names[step][rank]), **wrap)


class Dropping(Tower):
    """Drops layers at random."""

    layerdrop = 0.5

    def __init__(self) -> None:
        super().__init__(6)

    def forward(self, ids, seed):
        drawn = torch.rand(len(self.layers), generator=torch.Generator().manual_seed(seed))
        x = self.embedding(ids)
        for layer, number in zip(self.layers, drawn):
            if number >= self.layerdrop:
                x = layer(x)
        return self.head(x).square().mean()


def dropped_layers(**wrap):
    check_twins(Dropping, lambda model, step, rank: model(ids(step, rank), 10 * step + rank), steps=4, **wrap)


class Ordered(Tower):
    """Calls its layers in an order that the caller passes, where others might drop some."""

    layerdrop = 0.5

    def __init__(self) -> None:
        super().__init__(4)


def other_orders(**wrap):
    """Ranks that call layers in other orders, and again: gathers and reductions are repeated, and add up."""
    plans = [[2, 1, 0, 3], [0, 1, 2], [3, 0, 3, 1, 0]]
    check_twins(Ordered, lambda model, step, rank: model(ids(step, rank), plans[(rank + step) % 3]), **wrap)


def counted() -> list[tuple[int, int]]:
    """How many gradients are reduced, and how many entries all-gathers make in the log, in three steps."""
    model = bmt.auto_wrap(WithImages(), use_checkpoint=True)
    collective_log, counts = bmt.current_world().gather.collective_log, []
    for step in (1, 0, 2):
        begin = collective_log.count
        with mock.patch.object(GradientBuffer, "send", autospec=True, side_effect=GradientBuffer.send) as send:
            loss_with_images(model, step, bmt.rank()).backward()
        counts.append((send.call_count, collective_log.count - begin))
        model.zero_grad()
    return counts


def even_models_agree_on_nothing() -> int:
    model = bmt.auto_wrap(Tower())
    with mock.patch.object(Negotiation, "_agree") as agree:
        model(ids(0, bmt.rank())).backward()
    return agree.call_count


def hooks_that_communicate():
    """They are called in one order, also while other ranks are in the tower."""
    model, called = bmt.auto_wrap(WithImages()), []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: called.append((names[id(p)], p.gather_gradient().sum().item()))
        )
    loss_with_images(model, 0, bmt.rank()).backward()
    assert len({repr(each) for each in bmt.current_world().gather_objects(called)}) == 1
    assert len(called) == len(names)


def problem_of(function: Callable[[nn.Module], object]) -> str:
    model = bmt.auto_wrap(WithImages())
    with pytest.raises(RuntimeError) as raised:
        function(model)
    return str(raised.value)


def left_early(model):
    """Rank 1 makes fewer steps."""
    for step in range(3):
        if bmt.rank() and step == 2:
            bmt.synchronize()
        loss_with_images(model, step, bmt.rank()).backward()
        model.zero_grad()


def evaluates_alone(model):
    with torch.set_grad_enabled(bmt.rank() != 0):
        loss_with_images(model, 0, bmt.rank())


def another_forward(model):
    loss = loss_with_images(model, 0, bmt.rank())
    if bmt.rank():
        loss_with_images(model, 1, bmt.rank())
    loss.backward()


CASES = [
    some_without_image, frozen_tower, frozen_language_model, adapters_in_the_tower, accumulated, checkpointed_tower,
    evaluated, two_losses, task_heads, dropped_layers, other_orders,
]  # fmt: skip
OPTIONS = [{}, {"use_checkpoint": False}]
MORE_OPTIONS = [{"zero_level": 2}, {"keep_frozen": True}]
each_case = pytest.mark.parametrize(
    ("case", "options"),
    [
        *rows_by_default(
            [(case, options) for case in CASES for options in OPTIONS],
            (some_without_image, {}),
            (frozen_language_model, {"use_checkpoint": False}),
            (dropped_layers, {}),
            (evaluated, {}),
        ),
        *(pytest.param(case, options, marks=slow) for case in CASES for options in MORE_OPTIONS),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(map(str, value)) or "default",
)


def run(case, options):
    case(**options)


@each_case
def test_ranks_in_different_blocks(world, case, options):
    world(3)(run, case, options)


@full
@pytest.mark.parametrize("case", CASES)
def test_ranks_in_different_blocks_by_copies(peers, case):
    peers(3)(case)


def test_nothing_is_gathered_or_reduced_twice(world):
    """Without images; with one on one rank; and with one on each, whose image towers run together: two blocks more."""
    for without, on_one, on_each in world(2)(counted):
        assert on_one == on_each
        assert (without[0], on_each[0]) == (4, 6)
        assert on_each[1] > without[1]


def test_even_models_are_not_slowed_down(world):
    assert world(2)(even_models_agree_on_nothing) == [0, 0]


def test_hooks_may_communicate(world):
    world(3)(hooks_that_communicate)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (left_early, ["rank 0: the next operation of a forward", "rank 1: 'synchronize'"]),
        (evaluates_alone, ["rank 0: the next operation of a forward without gradients"]),
        (another_forward, ["rank 0: the next operation of a backward", "rank 1: the next operation of a forward"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_programs_are_named(case, words):
    ranks = Ranks(2)
    try:
        told = ranks(problem_of, case)
    finally:
        ranks.stop()
    for text in told:
        assert "the ranks issued different operations" in text and all(each in text for each in words), text


def what_is_logged() -> list[str]:
    lines = []
    for make in (WithImages, Heads, Dropping, Tower):
        with log_lines(logging.INFO) as told:
            bmt.auto_wrap(make())
        lines += [line for line in told if "different parts" in line]
    return lines


def test_the_log_says_why(world):
    lines = world(2)(what_is_logged)[0]
    assert [line.partition("because ")[2].partition(". Before")[0] for line in lines] == [
        "it has 2 lists of blocks",
        "it has an nn.ModuleDict outside the blocks (a, b, c, d)",
        "Dropping drops layers at random",
    ]
