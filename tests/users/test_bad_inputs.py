"""Every bad input of the public API is an error that names the argument and the remedy, and no rank hangs on it."""

import ast
import inspect
import multiprocessing
import queue
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from bad_inputs import SECONDS, as_a_script, calls, outcomes

import hf_bmtrain as bmt

CALLS = {each.name: each for each in calls()}

UNCHECKED = {
    "DistributedModule": "takes what the user's class takes",
    "PipelineTransformerBlockList.forward": "as TransformerBlockList's",
    "config": "a mapping: a key that it lacks is a KeyError with the keys that there are",
    "current_world": "takes nothing", "rank": "takes nothing", "world_size": "takes nothing",
    "synchronize": "takes nothing", "wait_loader": "takes nothing", "install_as_bmtrain": "takes nothing",
    "inspect.inspect_tensor": "takes nothing",
    "inspect.InspectTensor": "inspect_tensor makes it",
    "see_memory": "prints whatever it is given",
    "lr_scheduler.WarmupLRScheduler": "a base class, tested by its subclasses",
    "nn.OpLinear": "torch's linear", "nn.ColumnParallelLinear": "by hand", "nn.RowParallelLinear": "by hand",
    "nn.VPEmbedding": "by hand",
    "hf.Trainer": "takes what transformers.Trainer takes; by hand", "hf.TrainerMixin": "as Trainer",
}  # fmt: skip
"""Public names that have no case that is generated, and why."""
FREE = {
    "init_distributed.num_micro_batches": "BMTrain's, of its pipeline, and without effect",
    "CheckpointBlock.mode": "BMTrain's, of its pipeline, and without effect",
    "Block.mode": "BMTrain's, of its pipeline, and without effect",
    "optim.OptimManager.clip_grad_norm.scale": "BMTrain's, and ignored",
    "store.broadcast_object.obj": "any picklable object",
    "print_block.title": "whatever can be printed", "print_block.content": "whatever can be printed",
    "print_dict.title": "whatever can be printed",
    "loss.FusedCrossEntropy.num_items_in_batch": "an argument of its forward",
}  # fmt: skip
"""Arguments of which every value is legitimate, and why."""


@pytest.mark.parametrize("name", [*CALLS, "by hand"])
def test_bad_inputs(world, name, tmp_path):
    (found,) = world(1)(outcomes, name, str(tmp_path))
    assert [outcome for outcome in found if outcome.defect] == []


def test_there_are_enough():
    assert sum(len(list(each.bad())) for each in CALLS.values()) >= 200


def public_names():
    """The callables of the package's `__all__`, and of the modules there."""
    for name in bmt.__all__:
        value = getattr(bmt, name)
        if inspect.ismodule(value):
            names = getattr(value, "__all__", None) or [
                each for each, what in vars(value).items()
                if getattr(what, "__module__", "") == value.__name__ and not each.startswith("_")
            ]  # fmt: skip
            yield from (f"{name}.{each}" for each in names)
        else:
            yield name
    tree = ast.parse(Path(bmt.__file__).with_name("hf").joinpath("__init__.py").read_text())
    yield from (f"hf.{alias.name}" for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names)


def test_every_public_function_is_there():
    checked = {*CALLS} | {f"distributed.{name}" for name in ("sum_loss", "gather_result")}
    checked |= {"store.load", "store.save", "hf.check_versions"}
    checked |= {f"utils.{name}" for name in bmt.utils.__all__ if name in bmt.__all__}
    assert {*public_names()} - checked - {*UNCHECKED} == set()


def test_every_argument_is_there():
    missing = []
    for name, each in CALLS.items():
        target = bmt if not name.startswith("hf.") else None
        for part in name.split(".") if target is not None else ():
            target = getattr(target, part, None)
        for argument in inspect.signature(target).parameters.values() if callable(target) else ():
            plain = argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY) and argument.name != "self"
            if plain and argument.name not in each.legitimate and f"{name}.{argument.name}" not in FREE:
                missing.append(f"{name}.{argument.name}")
    assert missing == []


# -- two ranks, one of which passes a bad value ----------------------------------------------------------------------

ON_ONE_RANK = [
    ("auto_wrap", "model", "none"), ("auto_wrap", "zero_level", "text"), ("auto_wrap", "use_checkpoint", "text"),
    ("auto_wrap", "blocks", "half"), ("auto_wrap", "weights", "half"), ("BMTrainModelWrapper", "model", "object"),
    ("CheckpointBlock", "layer", "none"), ("CheckpointBlock", "use_checkpoint", "text"),
    ("TransformerBlockList", "modules", "items"), ("DistributedParameter", "data", "half"),
    ("init_parameters", "model", "none"), ("gathered", "what", "matrix"), ("gathered", "modify", "text"),
    ("save", "model", "none"), ("save", "file_name", "half"), ("load", "file_name", "text"), ("load", "strict", "text"),
    ("save_state", "folder", "half"), ("save_state", "optimizer", "object"), ("save_state", "keep", "zero"),
    ("save_state", "extra", "object"), ("load_state", "folder", "none"), ("load_state", "model", "module"),
    ("optim.OptimManager.clip_grad_norm", "param_groups", "none"),
    ("optim.OptimManager.clip_grad_norm", "max_norm", "nan"), ("optim.OptimManager.state_dict", "gather_opt", "text"),
    ("inspect.inspect_model", "param_name", "none"), ("distributed.all_gather", "x", "none"),
    ("distributed.all_reduce", "op", "text"), ("distributed.broadcast", "root", "negative"),
    ("sum_loss", "loss", "half"), ("gather_result", "result", "items"), ("store.broadcast_object", "src", "huge"),
    ("loss.linear_cross_entropy", "reduction", "text"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "word"), ON_ONE_RANK)
def test_on_one_rank(name, argument, word):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.modeling_utils", "accelerate", "hf_bmtrain"])
    outbox, store = context.Queue(), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, name, argument, word, outbox)
    processes = [context.Process(target=as_a_script, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = {rank: (text, seconds) for rank, text, seconds in (outbox.get(timeout=120) for _ in processes)}
    except queue.Empty:
        pytest.fail("a rank hangs")
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    assert re.search(rf"\b{argument}\b|could not be (read|filled)|extra", found[1][0])
    for text, seconds in found.values():
        assert text
        assert seconds < 2 * SECONDS
