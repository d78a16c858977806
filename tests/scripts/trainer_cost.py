"""What BMTrainCallback adds to a step of stock Trainer, in milliseconds of the host: `python tests trainer_cost`.

    torchrun --nproc-per-node 2 tests trainer_cost [--layers 44]

A model of about 1,000 parameters with LoRA, so small that all of a step is the host's. Times are of the processor and
of the thread that trains, since machines are shared. Prints one JSON line, medians over steps:

* "in the callback, ms": within BMTrainCallback's methods, and within what it adds to a step: the speedometer at each
  forward of the model, and the count of parameters, which replaces the model's own;
* "a step, ms": with the callback and without it, of trainings in turn;
* "reads": places in the package that read a number of a tensor or wait for the device in each step, and how often. On a
  CPU these are found too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import peft
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import hf_bmtrain as bmt
from hf_bmtrain.hf.callback import BMTrainCallback
from hf_bmtrain.hf.speed import ParameterCount, Speedometer

PACKAGE = str(Path(bmt.__file__).parent)
WARM_UP, STEPS = 3, 15
READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
"""`item`, `bool`, `float` and the like of a tensor, and indexing by a mask."""
WAITS = ("tolist", "numpy", "cpu", "synchronize")
Observer = TypeVar("Observer", bound=transformers.TrainerCallback)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=44, help="of 23 parameters, 14 of them of adapters (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="trainings with the callback, and without (%(default)s)")
    options = parser.parse_args()
    bmt.init_distributed(seed=0)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    bmt.print_rank(json.dumps(measure(options.layers, options.turns)))


def measure(layers: int, turns: int) -> dict[str, Any]:
    """Return the report. Collective."""
    models = {"with": build(layers), "without": build(layers)}  # the callback replaces what a model counts by
    within, steps = [], {"with": [], "without": []}
    for _ in range(turns):
        with timed_callback() as clock:
            within += train(models["with"], True, clock).shares[WARM_UP + 1 :]
        for name, model in models.items():
            steps[name] += train(model, name == "with", Clock()).steps[WARM_UP + 1 :]
    found = train(models["with"], True, ReadCounter()).found
    return {
        "parameters": len(list(models["with"].parameters())),
        "ranks": bmt.world_size(),
        "in the callback, ms": round(statistics.median(within), 3),
        "a step, ms": {name: round(statistics.median(each), 1) for name, each in steps.items()},
        "reads": {place: round(number / (STEPS - 1), 1) for place, number in found.items()},
    }


def build(layers: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=16, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    return bmt.auto_wrap(model, use_checkpoint=False)


class Clock(transformers.TrainerCallback):
    """The milliseconds of each step, and of what `around` was put around in it."""

    def __init__(self) -> None:
        self.within, self.steps, self.shares = 0.0, [], []
        self._depth, self._last = 0, time.thread_time()

    def around(self, function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, outermost = time.thread_time(), self._depth == 0
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                self.within += (time.thread_time() - begin) * outermost

        return timed

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.thread_time()  # from one begin to the next, so that both callback methods of a step are in it
        self.steps.append(1e3 * (now - self._last))
        self.shares.append(1e3 * self.within)
        self.within, self._last = 0.0, now


@contextmanager
def timed_callback() -> Iterator[Clock]:
    """A clock around all that BMTrainCallback does in a step."""
    clock = Clock()
    added = [(BMTrainCallback, "on_step_begin"), (BMTrainCallback, "on_step_end"), (Speedometer, "before_forward")]
    with ExitStack() as stack:
        for kind, name in [*added, (ParameterCount, "_count")]:
            stack.enter_context(mock.patch.object(kind, name, clock.around(getattr(kind, name))))
        yield clock


class ReadCounter(transformers.TrainerCallback):
    """Counts in the timed steps, but for the end of the last, the reads and waits of the package, by place."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._counting = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP:
            self._counting.enter_context(Reads(self.found))
            self._counting.callback(sys.setprofile, sys.getprofile())
            sys.setprofile(self._note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP + STEPS - 1:
            self._counting.close()

    def _note(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in WAITS:
            count(frame, self.found)
        elif event == "call" and frame.f_code.co_name in WAITS and frame.f_back is not None:
            count(frame.f_back, self.found)


class Reads(TorchDispatchMode):
    """Counts the operations after which the host knows a number, by the place in the package that asked for it."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in READS:
            frame = sys._getframe(1)
            while "torch" in Path(frame.f_code.co_filename).parts and frame.f_back is not None:
                frame = frame.f_back
            count(frame, self._found)
        return func(*args, **kwargs or {})


def count(frame: Any, found: Counter[str]) -> None:
    if frame.f_code.co_filename.startswith(PACKAGE):
        path = Path(frame.f_code.co_filename).relative_to(Path(PACKAGE).parent)
        found[f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"] += 1


def train(model: Any, callback: bool, observer: Observer) -> Observer:
    """Train, and return the observer, another callback. Collective."""
    rows: Any = [{"input_ids": row, "labels": row} for row in torch.randint(16, (4 * (WARM_UP + STEPS), 4))]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, max_steps=WARM_UP + STEPS, per_device_train_batch_size=1, save_strategy="no", report_to="none",
            logging_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizers = bmt.optim.AdamOptimizer(trained, lr=1e-3), None
        callbacks = [observer, *([BMTrainCallback()] if callback else [])]
        trainer = transformers.Trainer(model, args, train_dataset=rows, optimizers=optimizers, callbacks=callbacks)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        bmt.synchronize()
    return observer
