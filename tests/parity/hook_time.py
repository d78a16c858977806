"""Host time of what stands around every block: `python tests hook_time [--profile]`.

    torchrun --nproc-per-node 2 tests hook_time --watch [--layers 40]

One process plays rank 0 of two with lanes that cost nothing, and runs the same layers plain and sharded in turn, so
narrow that all of their time is the host's. Two numbers come of it, both medians over steps, per block:

* in the hooks: the clock between entering a block's code and its layer's own forward, and within what autograd calls
  back (gather, release, packing, the gradients of slices, and the torch operations in them);
* in all: how much longer the sharded step takes than the plain one, which adds autograd's part in the two boundaries,
  the deallocation of gradients and colder caches, and is noisier.

--watch: real ranks train the smallest Llama, with the notes in the journals and without them in turn. Times are of the
processor, since machines are shared: of the thread that trains, and of the watch's thread per second of training.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import gc
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import transformers

import hf_bmtrain as bmt
from hf_bmtrain.engine.blocks.schedule import ForwardDepth, Schedule
from hf_bmtrain.engine.comm.collective_log import CollectiveLog, code
from hf_bmtrain.engine.comm.communicator import CollectiveGather, SingleProcess
from hf_bmtrain.engine.comm.object_comm import ObjectComm
from hf_bmtrain.engine.comm.reduce import CollectiveReduction
from hf_bmtrain.engine.comm.streams import DONE, Ticket
from hf_bmtrain.engine.runtime import world
from hf_bmtrain.engine.runtime.monitor import Monitor
from hf_bmtrain.features.auto_wrap import LayerFeatures
from inner import state_of

BLOCKS, STEPS, WIDTH = 12, 60, 16


class Stopwatch:
    """Adds up the seconds in some calls, less those in others."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable, sign: int = 1) -> Callable:
        def timed(*args, **kwargs):
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += sign * (time.thread_time() - begin)

        return timed

    def read(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Clock(Stopwatch):
    """Never stops."""

    def read(self) -> float:
        now = time.thread_time()
        seconds, self.seconds = now + self.seconds, -now
        return seconds


class FreeLane(SingleProcess):
    """Rank 0 of two, the other of which holds zeros. watch: told what filling took, to be left out."""

    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.watch = Stopwatch()

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        begin = time.thread_time()
        whole.zero_()  # what memory happens to hold may be slow to compute with
        self.watch.seconds -= time.thread_time() - begin
        return DONE

    def reduce_scatter_mean(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        return DONE


@contextmanager
def pretend_two_ranks() -> Iterator[FreeLane]:
    """Make this process rank 0 of two, without the other, within this context."""
    lane = FreeLane()
    device = torch.device("cpu")
    reduction = CollectiveReduction(lane, device)
    control = ObjectComm(1, timedelta(seconds=1))
    gather, inside = CollectiveGather(lane), ForwardDepth()
    schedule = Schedule(gather, reduction, reduction, inside, control)
    pretended = world.World(
        0,
        2,
        0,
        device,
        lane,
        lane,
        gather,
        lane,
        control,
        Monitor(),
        inside,
        schedule,
        LayerFeatures(),
        3,
        2,
        1024,
        lambda size: lane,
    )
    with mock.patch.object(world, "_world", pretended):
        yield lane


class Llama(torch.nn.Module):
    """Decoder layers of nine parameters."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=8, attn_implementation="sdpa",
        )  # fmt: skip
        model = transformers.LlamaModel(config)
        self.layers, self._rotary = model.layers, model.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        rotary = self._rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_ids=positions, position_embeddings=rotary)
            x = x[0] if isinstance(x, tuple) else x
        return x


class GPT2(torch.nn.Module):
    """Blocks of twelve parameters."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            n_embd=WIDTH, n_inner=WIDTH, n_layer=BLOCKS, n_head=2, n_positions=8, vocab_size=8,
            bos_token_id=0, eos_token_id=0, attn_implementation="sdpa", attn_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        self.layers = transformers.GPT2Model(config).h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


def sharded(tower: torch.nn.Module, use_checkpoint: bool = False) -> torch.nn.Module:
    """`tower` with its layers as linked blocks."""
    for layer in tower.layers:
        bmt.CheckpointBlock(layer, use_checkpoint=use_checkpoint)
    tower.layers = bmt.TransformerBlockList(tower.layers)
    return tower


def watched(tower: torch.nn.Module) -> Stopwatch:
    """Starts and stops with the code of the blocks of `tower`."""
    watch = Stopwatch()
    for layer in tower.layers:
        state = state_of(layer)
        state.own_forward = watch.around(super(type(layer), layer).forward, -1)
        for name in ("forward", "before_backward", "after_backward", "finish_backward"):
            setattr(state, name, watch.around(getattr(state, name)))
    return watch


def run(tower: torch.nn.Module, x: torch.Tensor, watch: Stopwatch) -> tuple[float, float]:
    """What `watch` reads after a forward and after its backward."""
    watch.read()
    y = tower(x)
    forward = watch.read()
    y.backward(x)
    backward = watch.read()
    tower.zero_grad(set_to_none=True)
    return forward, backward


def measure(make: Callable[[], torch.nn.Module], lane: FreeLane) -> tuple[list[float], list[float]]:
    """Microseconds a block in the hooks, and in all, as `per_block` gives them."""
    plain = make()
    ours, seen = sharded(copy.deepcopy(plain)), sharded(copy.deepcopy(plain))
    watch = watched(seen)
    x = torch.zeros(1, 4, WIDTH, requires_grad=True)
    inside, added = [], []
    gc.collect()
    gc.disable()
    for _ in range(STEPS):
        lane.watch = Clock()
        without, with_us = run(plain, x, lane.watch), run(ours, x, lane.watch)
        added.append([mine - theirs for mine, theirs in zip(with_us, without)])
        lane.watch = watch
        inside.append(run(seen, x, watch))
    gc.enable()
    return per_block(inside), per_block(added)


def per_block(steps: list) -> list[float]:
    """Medians of forward and backward, and of their sum in the fastest step, which a busy machine disturbs least."""
    medians = [statistics.median(each) for each in zip(*steps)]
    return [1e6 / BLOCKS * seconds for seconds in (*medians, min(sum(step) for step in steps))]


def added_calls(make: Callable[[], torch.nn.Module]) -> list[float]:
    """Calls a block, of Python and of C functions, that being sharded adds to a forward and to a backward."""
    plain = make()
    ours = sharded(copy.deepcopy(plain))
    x = torch.zeros(1, 4, WIDTH, requires_grad=True)
    run(ours, x, Stopwatch())
    run(plain, x, Stopwatch())
    return [(mine - theirs) / BLOCKS for mine, theirs in zip(count_calls(ours, x), count_calls(plain, x))]


def count_calls(tower: torch.nn.Module, x: torch.Tensor) -> list[int]:
    """In a forward, and in its backward."""
    counts = [0, 0]

    def count(frame, event, function) -> None:
        counts[phase] += event in ("call", "c_call")

    y = x
    gc.disable()  # its callbacks come when they come
    for phase in (0, 1):
        sys.setprofile(count)
        try:
            y = tower(x) if phase == 0 else y.backward(x)
        finally:
            sys.setprofile(None)
    gc.enable()
    tower.zero_grad(set_to_none=True)
    return counts


def profile(make: Callable[[], torch.nn.Module]) -> None:
    tower, x = sharded(make()), torch.zeros(1, 4, WIDTH, requires_grad=True)
    run(tower, x, Stopwatch())
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STEPS):
        run(tower, x, Stopwatch())
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats("hf_bmtrain|method|built-in", 45)


def watched_training(layers: int) -> None:
    """Print what the journals and the watch's thread take of a step of real ranks."""
    noting, notes, note = [True], [0], CollectiveLog.note

    def counted(collective_log: CollectiveLog, entry: int) -> None:
        notes[0] += 1
        if noting[0]:
            note(collective_log, entry)

    with mock.patch.object(CollectiveLog, "note", counted):
        bmt.init_distributed(seed=0)
        step = training(layers)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(20):
            step()
        bmt.synchronize()
        begun, counts, watching = time.monotonic(), notes[0], thread_seconds("hf_bmtrain watch")
        for number in range(600):
            noting[0] = number // 20 % 2 == 0
            begin = time.thread_time()
            step()
            seconds[noting[0]].append(time.thread_time() - begin)
        share = (thread_seconds("hf_bmtrain watch") - watching) / (time.monotonic() - begun)
        counts = (notes[0] - counts) / 600
        noting[0] = True
        bmt.synchronize()
    begin, collective_log = time.thread_time(), bmt.current_world().reduce.collective_log
    for _ in range(20000):
        collective_log.note(code("all-reduce", 1))
    each = 1e6 * (time.thread_time() - begin) / 20000
    bmt.synchronize()
    mine, without = (1e3 * statistics.median(seconds[which]) for which in (True, False))
    bmt.print_rank(
        f"{layers} layers: {mine:.3f} ms a step with journals, {without:.3f} without ({mine / without - 1:+.2%}); "
        f"{counts:.0f} notes a step of {each:.2f} µs: {counts * each:.0f} µs ({counts * each / without / 10:.2f} %); "
        f"the watch's thread: {1e3 * share:.2f} ms a second ({share:.2%})"
    )


def training(layers: int) -> Callable[[], None]:
    """Return a function that makes one step."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = bmt.auto_wrap(transformers.LlamaForCausalLM(config).train())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    ids = torch.randint(61, (2, 8))

    def step() -> None:
        manager.zero_grad()
        manager.backward(model(input_ids=ids, labels=ids).loss)
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()

    return step


def thread_seconds(name: str) -> float:
    """Return the processor's time of a thread of this process."""
    (thread,) = (each for each in threading.enumerate() if each.name == name)
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--watch", action="store_true", help="the journals and the watch, under torchrun")
    parser.add_argument("--layers", type=int, default=3, help="of --watch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.watch:
        watched_training(options.layers)
        return
    with pretend_two_ranks() as lane:
        for make in (Llama, GPT2):
            if options.profile:
                profile(make)
            report(make, lane)


def report(make: Callable[[], torch.nn.Module], lane: FreeLane) -> None:
    (*inside, fastest), (*added, _) = measure(make, lane)
    for name, (forward, backward) in ((f"in the hooks (fastest step: {fastest:.0f})", inside), ("in all", added)):
        print(f"{make.__name__}: {forward:.0f} + {backward:.0f} = {forward + backward:.0f} µs a block {name}")
    forward, backward = added_calls(make)
    print(f"{make.__name__}: {forward:.0f} + {backward:.0f} = {forward + backward:.0f} calls a block")
