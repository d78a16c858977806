"""Each bad input is an error that names the argument and the remedy, and no rank hangs on it."""

import inspect
import multiprocessing
import queue
import re

import pytest
import torch.distributed as dist

import hf_bmtrain as bmt
from bad_inputs import SECONDS, as_a_script, calls, outcomes
from cases import by_default, full
from ranks import PRELOADED

CALLS = {each.name: each for each in calls()}

FREE = {
    "init_distributed.num_micro_batches": "BMTrain's, of its pipeline, and without effect",
    "optim.OptimManager.clip_grad_norm.scale": "BMTrain's, and ignored",
    "loss.FusedCrossEntropy.num_items_in_batch": "an argument of its forward",
}
"""Arguments of which every value is legitimate, and why."""


@pytest.mark.parametrize("name", by_default([*CALLS, "by hand"], "auto_wrap"))
def test_bad_inputs(world, name, tmp_path):
    (found,) = world(1)(outcomes, name, str(tmp_path))
    assert [outcome for outcome in found if outcome.defect] == []


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
    ("auto_wrap", "model", "none"), ("save_state", "keep", "zero"),
]  # fmt: skip
MORE_ON_ONE_RANK = [
    ("load", "strict", "text"), ("optim.OptimManager.clip_grad_norm", "max_norm", "nan"),
    ("gathered", "modify", "text"), ("save", "file_name", "half"), ("load_state", "model", "module"),
    ("optim.OptimManager.state_dict", "gather_opt", "text"), ("loss.linear_cross_entropy", "reduction", "text"),
    ("auto_wrap", "zero_level", "text"), ("auto_wrap", "use_checkpoint", "text"), ("auto_wrap", "blocks", "half"),
    ("auto_wrap", "weights", "half"), ("gathered", "what", "matrix"), ("save", "model", "none"),
    ("load", "file_name", "text"), ("save_state", "folder", "half"), ("save_state", "optimizer", "object"),
    ("save_state", "extra", "object"), ("load_state", "folder", "none"),
    ("optim.OptimManager.clip_grad_norm", "param_groups", "none"),
]  # fmt: skip
"""More arguments of the same functions; `test_bad_inputs` has them on a single rank."""


@full
@pytest.mark.parametrize(
    ("name", "argument", "word"),
    [*ON_ONE_RANK, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_ON_ONE_RANK)],
)
def test_on_one_rank(name, argument, word):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
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
