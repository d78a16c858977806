"""What importing the library and training with it leave behind in the process: nothing but modules and operators."""

import subprocess
import sys

from cases import full
from processes import environment

PROGRAM = """
import atexit
import builtins
import sys

import torch
import transformers
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optim_hooks
from torch.utils import _foreach_utils

PACKAGES = "torch", "transformers"
REGISTRIES = {
    f"{place.__name__}.{name}": getattr(place, name)
    for place in (hooks, optim_hooks, _foreach_utils)
    for name, value in vars(place).items()
    if isinstance(value, (dict, list)) and (name.startswith("_global_") or name == "_foreach_supported_types")
}

def parts_of(place):
    '''The functions, classes and the like among the attributes of a module or class.'''
    return {name: value for name, value in vars(place).items() if callable(value) or isinstance(value, property)}

def snapshot():
    modules = [sys, builtins]
    modules += [m for name, m in list(sys.modules.items()) if name.split(".")[0] in PACKAGES and hasattr(m, "__dict__")]
    seen = {}
    for module in modules:
        seen[module.__name__] = parts_of(module)
        for name, value in seen[module.__name__].items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                seen[f"{module.__name__}.{name}"] = parts_of(value)
    return seen

def changes(before, after):
    for place, parts in before.items():
        for name, value in parts.items():
            if after[place].get(name) is not value:
                yield f"{place}.{name}"

def registered():
    return {name: list(value) for name, value in REGISTRIES.items()}

def model():
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    return transformers.LlamaForCausalLM(config)

def train(model, optimizer):
    ids = torch.arange(8).view(1, 8)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

plain = model()
train(plain, torch.optim.AdamW(plain.parameters()))  # at its first use torch itself changes some attributes
before, present = snapshot(), registered()
import hf_bmtrain as bmt
assert registered() == present, "by the import"
print("import", *changes(before, snapshot()))
bmt.init_distributed()
{act}
wrapped = bmt.auto_wrap(model())
train(wrapped, bmt.optim.AdamOptimizer(wrapped.parameters()))
foreign = torch.optim.AdamW(wrapped.parameters())
manager = bmt.optim.OptimManager()
manager.add_optimizer(foreign)
train(wrapped, manager)
print("training", *changes(before, snapshot()))
atexit._run_exitfuncs()
print("end", *(name for name, value in registered().items() if value != present[name]))
"""


def left_behind(act: str = "") -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.replace("{act}", act)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nothing_is_left_behind():
    assert left_behind() == ["import", "training", "end"]


CHANGES = """
sys.excepthook = print
torch.nn.Linear.extra_repr = print
hooks.register_module_forward_hook(lambda *_: None)
"""


@full
def test_changes_are_found():
    _, training, end = left_behind(CHANGES)
    assert training.split() == ["training", "sys.excepthook", "torch.nn.modules.linear.Linear.extra_repr"]
    assert end.split() == ["end", "torch.nn.modules.module._global_forward_hooks"]
