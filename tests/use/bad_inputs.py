"""Bad inputs to what users call first: each must be an error that names the argument and the remedy.

    python tests bad_inputs [--defects]      every case with the first line of its error; only those that fail

`calls` are the functions, each with good arguments. A case replaces one argument by one of `HOSTILE`, unless it
is legitimate there (`KINDS` and the words after an argument say which are, and why). `bad_calls` has what was thought
of by hand. A case fails if nothing is raised, if the error is none of ERRORS, if torch or Python raised it far from
the call, or if it does not name the argument and what is accepted.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hf_bmtrain as bmt
from bad_calls import by_hand, manager, saved, scratch, sgd, shared, tiny, trained, wrapped
from twins import Tower, ids

ERRORS = (ValueError, TypeError, RuntimeError)
SECONDS = 20
REMEDY = re.compile(
    r"must|need|take|pass|call|use\b|give|make|leave|expect|one of|at least|should|are \d|lie in|missing \d"
    r"|not supported|unexpected keyword|name an|load|not iterable over|Choose|can only|holds? tensors"
    r"|No such file|Pad|Save|counts",
    re.IGNORECASE,
)

HOSTILE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: "seven",
    "bytes": lambda: b"seven",
    "object": object,
    "empty": list,
    "items": lambda: [object()],
    "mapping": lambda: {"a": 1},
    "negative": lambda: -3,
    "zero": lambda: 0,
    "half": lambda: 0.5,
    "nan": lambda: float("nan"),
    "infinite": lambda: float("inf"),
    "true": lambda: True,
    "huge": lambda: 10**30,
    "complex": lambda: 1j,
    "matrix": lambda: torch.ones(2, 3),
    "integers": lambda: torch.ones(2, 3, dtype=torch.int64),
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "module": lambda: nn.Linear(2, 2),
    "function": lambda: len,
}

KINDS = {
    "model": "module",
    "tensor": "matrix integers",
    "floats": "matrix",
    "number": "negative zero half huge",
    "amount": "zero half huge",  # at least 0
    "positive": "half huge",
    "fraction": "zero half",  # in [0, 1)
    "count": "zero",  # a whole number, at least 0
    "size": "",  # a whole number, at least 1
    "flag": "none true zero",  # 0, 1 and None are as good as False and True everywhere in Python
    "name": "text",
    "path": "text",
    "choice": "",
    "callable": "function module",
    "nothing": "",
}
"""What is legitimate for each kind of argument."""


@dataclass(frozen=True)
class Case:
    """A bad call. message: what the error must contain; in a case by hand that is the remedy too."""

    call: str
    value: str
    act: Callable[[], object]
    message: str
    by_hand: bool = False

    @property
    def name(self) -> str:
        return f"{self.call}: {self.value}"


@dataclass(frozen=True)
class Outcome:
    """What a case did. defect: None if that is as it should be."""

    case: str
    error: str
    defect: str | None


@dataclass(frozen=True)
class Call:
    """A public function with good arguments. legitimate: by argument, its kind and more that is legitimate there."""

    name: str
    function: Callable[..., object]
    good: Callable[[], dict[str, Any]]
    legitimate: dict[str, str]

    def bad(self) -> Iterator[Case]:
        for argument, words in self.legitimate.items():
            kind, *more = words.split()
            allowed = {*KINDS[kind].split(), *more}
            assert allowed <= set(HOSTILE), (self.name, argument, allowed)
            for word, make in HOSTILE.items():
                if word not in allowed:
                    yield Case(
                        f"{self.name}({argument}=)", word, lambda a=argument, m=make: self.run({a: m()}),
                        MESSAGES.get(f"{self.name}({argument}=): {word}", rf"\b{argument}\b"),
                    )  # fmt: skip

    def run(self, changes: dict[str, Any]) -> object:
        return self.function(**{**self.good(), **changes})


# -- the functions and their arguments ------------------------------------------------------------------------------


def enter(context: Any) -> None:
    with context:
        pass


PICKLED = ("object", "items", "module", "function")
EXTRA = " ".join(["nothing", *(word for word in HOSTILE if word not in PICKLED)])
LOSS = {
    "ignore_index": "count negative huge", "reduction": "choice", "label_smoothing": "fraction", "inplace": "flag",
    "z_loss": "amount", "softcap": "amount", "num_items_in_batch": "amount none",
}  # fmt: skip


def rows() -> dict[str, Any]:
    return {"logits": torch.randn(4, 5, requires_grad=True) * 1, "targets": torch.tensor([0, 1, 2, 3])}


def products() -> dict[str, Any]:
    rows = torch.randn(4, 3, requires_grad=True)
    return {"hidden": rows, "weight": torch.randn(5, 3), "targets": torch.tensor([0, 1, 2, 3])}


def saved_file() -> dict[str, Any]:
    model, path = wrapped(), f"{shared()}/model.pt"
    bmt.save(model, path)
    return {"model": model, "file_name": path}


def call(name: str, good: Callable[[], dict] | None = None, /, **legitimate: str) -> Call:
    """The public function of that name, its parents' names before it."""
    function: Any = bmt
    for part in name.split("."):
        function = getattr(function, part)
    return Call(name, function, good or dict, legitimate)


def method(name: str, make: Callable[[], Any], good: Callable[[], dict] = dict, /, **legitimate: str) -> Call:
    """The method of that name, its class's name before it, of what `make` returns."""
    attribute = name.rpartition(".")[2]
    return Call(name, lambda *args, **kwargs: getattr(make(), attribute)(*args, **kwargs), good, legitimate)


def calls() -> Iterator[Call]:
    yield call(
        "init_distributed", seed="number", zero_level="choice", loss_scale_factor="nothing huge",
        loss_scale_steps="size huge", timeout="positive", gather="choice", pipe_size="choice", tp_size="choice",
        init_method="choice", shard_over="choice",
    )  # fmt: skip
    yield call(
        "auto_wrap", lambda: {"model": Tower()}, model="model", zero_level="choice none", use_checkpoint="choice true",
        compile="flag text", blocks="nothing none empty", weights="choice none", keep_frozen="choice true",
        quantize_frozen="choice none", float8="choice true", keep="nothing empty",
        sequence_parallel="size huge", offload_activations="flag",
        mlp_chunks="size huge", cuda_graphs="flag",
    )  # fmt: skip
    yield Call(
        "gathered", lambda what, modify: enter(bmt.gathered(what, modify)),
        lambda: {"what": wrapped(), "modify": False}, {"what": "model empty", "modify": "flag"},
    )  # fmt: skip
    yield from files()
    yield from optimizers()
    yield call(
        "loss.FusedCrossEntropy", weight="nothing none", parallel="flag", **{k: LOSS[k] for k in list(LOSS)[:-1]}
    )
    yield call("loss.cross_entropy", rows, logits="nothing", targets="nothing", weight="nothing none", **LOSS)
    yield call(
        "loss.linear_cross_entropy", products, hidden="nothing", weight="floats", targets="nothing",
        bias="nothing none", class_weight="nothing none", chunk_bytes="size huge",
        **{k: v for k, v in LOSS.items() if k != "inplace"},
    )  # fmt: skip
    yield call("hf.BMTrainCallback", save_on_sigterm="flag", average_router_loss="flag")
    yield call(
        "hf.from_pretrained", lambda: {"auto_class": AutoModel(), "name_or_path": tiny()}, auto_class="nothing",
        name_or_path="path none", zero_level="choice none", use_checkpoint="choice true", compile="flag text",
        blocks="nothing none empty",
    )  # fmt: skip


def files() -> Iterator[Call]:
    yield call(
        "save", lambda: {"model": wrapped(), "file_name": f"{scratch()}/a.pt"}, model="model", file_name="path",
        non_blocking="flag",
    )  # fmt: skip
    yield call("load", saved_file, model="nothing", file_name="nothing", strict="flag")
    yield call(
        "save_state", lambda: {"folder": scratch(), "model": wrapped()}, folder="path", model="model",
        optimizer="nothing none empty", scheduler="nothing none empty", extra=EXTRA,
        step="count none huge", keep="size none huge", trained_only="flag", non_blocking="flag", name="name none",
        add="nothing none",
    )  # fmt: skip
    yield call(
        "load_state", saved, folder="path", model="nothing", optimizer="nothing none empty",
        scheduler="nothing none empty", weights="flag", random="flag",
    )  # fmt: skip


def optimizers() -> Iterator[Call]:
    yield call(
        "optim.AdamOptimizer", lambda: {"params": [nn.Parameter(torch.ones(2))]}, params="nothing", lr="amount",
        betas="nothing", eps="amount", weight_decay="amount", hold_steps="amount", decoupled="flag",
        exp_avg_dtype="choice", state_bits="choice",
    )  # fmt: skip
    yield call(
        "optim.MuonOptimizer", lambda: {"params": wrapped()}, params="nothing", lr="amount", weight_decay="amount",
        momentum="amount", nesterov="flag", ns_coefficients="nothing", eps="amount", ns_steps="count",
        adjust_lr_fn="choice none", adam_lr="amount none", betas="nothing", adam_eps="amount",
        adam_weight_decay="amount none",
    )  # fmt: skip
    adam = lambda: trained()[1]  # noqa: E731
    yield method("optim.AdamOptimizer.step", adam, closure="callable none", scale="positive")
    yield method("optim.AdamOptimizer.state_dict", adam, gather="flag")
    yield method("optim.AdamOptimizer.load_state_dict", adam, state_dict="nothing")
    yield method("optim.AdamOptimizer.add_param_group", adam, param_group="nothing")
    yield call(
        "optim.OptimManager", loss_scale="positive none", loss_scale_factor="positive none",
        loss_scale_steps="size none huge", min_loss_scale="positive", max_loss_scale="nothing huge infinite",
        grad_scale="positive none", max_skipped_steps="size none huge",
    )  # fmt: skip
    yield method(
        "optim.OptimManager.add_optimizer", bmt.optim.OptimManager, lambda: {"optimizer": sgd()}, optimizer="nothing",
        lr_scheduler="nothing none",
    )  # fmt: skip
    yield method("optim.OptimManager.zero_grad", manager, set_to_none="flag")
    yield method("optim.OptimManager.backward", manager, loss="nothing")
    yield method("optim.OptimManager.scale_loss", manager, loss="tensor meta")
    yield method(
        "optim.OptimManager.clip_grad_norm", lambda: trained()[2],
        lambda: {"param_groups": sgd().param_groups, "max_norm": 1.0}, param_groups="nothing empty",
        max_norm="amount infinite", norm_type="positive infinite", eps="amount",
    )  # fmt: skip
    yield Call(
        "optim.OptimManager.loss_scale", lambda loss_scale: setattr(manager(), "loss_scale", loss_scale), dict,
        {"loss_scale": "positive"},
    )  # fmt: skip
    yield method("optim.OptimManager.state_dict", manager, gather_opt="flag")
    yield method(
        "optim.OptimManager.load_state_dict", manager, lambda: {"state_dict": manager().state_dict()},
        state_dict="nothing", gather_opt="flag",
    )  # fmt: skip


def AutoModel() -> Any:
    import transformers

    return transformers.AutoModelForCausalLM


MESSAGES = {
    "load(file_name=): text": "load: seven could not be read.*No such file",
    "auto_wrap(weights=): text": "could not be loaded from weights=seven.*No such file",
}
"""Messages that name an argument in another way."""


# -- running them ---------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """A case has run for SECONDS."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(case: Case) -> Outcome:
    try:
        with limited():
            result = case.act()
    except Hang:
        return Outcome(case.name, "", f"still running after {SECONDS} s")
    except BaseException as error:
        return Outcome(case.name, f"{type(error).__name__}: {str(error).strip()}", defect_of(case, error))
    return Outcome(case.name, "", f"accepted: returned a {type(result).__name__}")


def defect_of(case: Case, error: BaseException) -> str | None:
    text = str(error)
    if not isinstance(error, ERRORS):
        return f"a {type(error).__name__}"
    if re.search(case.message, text) is None:
        return f"does not say {case.message!r}"
    if not case.by_hand and REMEDY.search(text) is None:
        return "says no remedy"
    return None


def cases() -> dict[str, list[Case]]:
    """All cases by the name of their call."""
    found: dict[str, list[Case]] = {each.name: list(each.bad()) for each in calls()}
    found["by hand"] = [Case(*row, by_hand=True) for row in by_hand()]
    return found


def outcomes(name: str, folder: str) -> list[Outcome]:
    """Run the cases of a call, whose files go to `folder`. Afterwards the world must still train."""
    tempfile.tempdir = folder
    found = [run(case) for case in cases()[name]]
    model = wrapped()
    model(ids(0, bmt.rank())).backward()
    assert all(torch.isfinite(p.gather_gradient()).all() for p in model.parameters())
    return found


def as_a_script(rank: int, port: int, name: str, argument: str, word: str, outbox: Any) -> None:
    """Call it with a bad value on rank 1, wait for all ranks, and end as a script with that exception does."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    (chosen,) = (each for each in calls() if each.name == name)
    started = time.monotonic()
    try:
        bmt.init_distributed(timeout=4 * SECONDS)
        started = time.monotonic()
        chosen.run({argument: HOSTILE[word]()} if rank == 1 else {})
        bmt.synchronize()
    except Exception as error:
        sys.last_value = error
        outbox.put((rank, f"{type(error).__name__}: {error}", time.monotonic() - started))
    else:
        outbox.put((rank, "", time.monotonic() - started))
    outbox.close()
    outbox.join_thread()
    atexit._run_exitfuncs()
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests bad_inputs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--defects", action="store_true", help="print only the cases that fail")
    parser.add_argument("calls", nargs="*", help="names of calls, or 'by hand'; default: all")
    given = parser.parse_args()
    bmt.init_distributed()
    total = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        for name, some in cases().items():
            for case in some if name in (given.calls or [name]) else ():
                outcome = run(case)
                total, wrong = total + 1, wrong + (outcome.defect is not None)
                if outcome.defect or not given.defects:
                    defect = f"   <<< {outcome.defect}" if outcome.defect else ""
                    print(f"{case.name:60} {outcome.error.splitlines()[0][:160] if outcome.error else ''}{defect}")
    print(f"{total} bad inputs, {wrong} wrong")
