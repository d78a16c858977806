"""Bad inputs that were thought of by hand: misplaced, mismatched and exhausted things, and wrong orders of calls."""

from __future__ import annotations

import contextlib
import copy
import io
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import hf_bmtrain as bmt
from twins import Tower, ids

Row = tuple[str, str, Callable[[], object], str]
"""The name of the call, the bad value, how to call it, and a regular expression of what the message must contain."""


def by_hand() -> Iterator[Row]:
    for rows in (models, steps, optimizers, losses, files, states, commands, hugging_face):
        yield from rows()


# -- what the calls are made of -------------------------------------------------------------------------------------


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def wrapped() -> Any:
    return bmt.auto_wrap(Tower())


def scratch() -> str:
    return tempfile.mkdtemp(prefix="bad_inputs-")


def shared() -> str:
    """An empty folder, the same on every rank. Collective."""
    return bmt.current_world().control.broadcast_object(scratch())


def written(name: str, content: str) -> str:
    path = Path(scratch(), name)
    path.write_text(content)
    return str(path)


def stored(name: str, state: object) -> str:
    path = f"{scratch()}/{name}"
    torch.save(state, path)
    return path


def manager(**options: Any) -> bmt.optim.OptimManager:
    made = bmt.optim.OptimManager(**options)
    made.add_optimizer(sgd())
    return made


def trained(loss_scale: float | None = None) -> tuple[Any, Any, Any]:
    """A sharded model with gradients, its optimizer and its manager."""
    model = wrapped()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
    made = bmt.optim.OptimManager(loss_scale=loss_scale)
    made.add_optimizer(optimizer)
    made.backward(model(ids(0, bmt.rank())))
    return model, optimizer, made


def saved() -> dict[str, Any]:
    """The arguments of `load_state` for a checkpoint."""
    model, _, made = trained()
    folder = shared()
    bmt.save_state(folder, model, made, step=1)
    return {"folder": folder, "model": model, "optimizer": made}


def adam(params: Any = None, **options: Any) -> Any:
    return bmt.optim.AdamOptimizer([nn.Parameter(torch.ones(2))] if params is None else params, **options)


# -- models ---------------------------------------------------------------------------------------------------------


def models() -> Iterator[Row]:
    def wrap(name: str, make: Callable[[], Any], message: str, choose: Any = None, **options: Any) -> Row:
        def act() -> object:
            model = make()
            return bmt.auto_wrap(model, **options, **({} if choose is None else {"blocks": choose(model)}))

        return "auto_wrap", name, act, message

    yield wrap("its parameters", lambda: Tower().parameters(), "model must be a torch.nn.Module")
    yield wrap("a state dict", lambda: Tower().state_dict(), "model must be a torch.nn.Module")
    yield wrap("no parameters", nn.ReLU, "ReLU has no parameters")
    yield wrap("an empty list", nn.ModuleList, "ModuleList has no parameters")
    yield wrap("zero_level 2.0", Tower, "zero_level must be 2", zero_level=2.0)
    yield wrap("no such backend", Tower, "backend: 'nothing', see .*list_backends", compile="nothing")
    yield wrap("blocks of another", Tower, "blocks=.*not part of this Tower", lambda m: Tower().layers)
    yield wrap("names as blocks", Tower, "blocks= contains a str", lambda m: ["layers.0"])
    yield wrap("a name as blocks", Tower, "blocks= contains a str", lambda m: "layers")
    yield wrap("None among blocks", Tower, "blocks= contains a NoneType", lambda m: [None])
    yield wrap("itself as a block", Tower, "blocks= contains a Tower that is not part", lambda m: [m])
    yield wrap("a block in a block", Tower, "Pass one of the two", lambda m: [m.layers[0], m.layers[0].linear])
    yield wrap("one layer as blocks", Tower, "blocks= must be a list of modules", lambda m: m.layers[0])
    yield wrap("no weights there", Tower, "the folder has no Hugging Face weights", weights=scratch())
    yield wrap(
        "another's weights",
        Tower,
        "have 2 tensors that are not in the model",
        weights=stored("a.pt", nn.Linear(2, 2).state_dict()),
    )
    yield wrap("DataParallel", lambda: nn.DataParallel(Tower()), r"Pass its `\.module`")
    yield wrap("a lazy layer", lambda: nn.Sequential(nn.LazyLinear(2)), "Run one forward before wrapping")
    yield wrap("sparse gradients", lambda: nn.Embedding(3, 2, sparse=True), "its attribute `sparse` to False")
    yield wrap("no values", lambda: nn.Linear(2, 2, device="meta"), "weights=FOLDER")
    yield wrap("compiled", lambda: torch.compile(Tower()), "is compiled already. Pass the model")
    yield "torch.save", "a sharded model", lambda: torch.save(wrapped(), io.BytesIO()), r"bmt\.save\(model, file\)"
    yield "forward", "in gathered", called_in_gathered, "after the `with`"
    yield "gathered", "an exception", raised_in_gathered, "must reach the user"
    ordinary, unsharded = torch.ones(2), list(Tower().parameters())
    yield "gathered", "an ordinary tensor", lambda: gather(ordinary), "must be .*ordinary tensors are full"
    yield "gathered", "an unsharded model's", lambda: gather(unsharded), "must be one module or sharded"
    for name, message, options in (
        ("pipe_size 2", "pipe_size=2 is not supported", {"pipe_size": 2}),
        ("a host", "init_method must be env://", {"init_method": "host:1"}),
        ("a backend", "unexpected keyword.*'backend'", {"backend": "nccl"}),
    ):
        yield "init_distributed", name, lambda options=options: bmt.init_distributed(**options), message


def gather(what: Any) -> None:
    with bmt.gathered(what):
        pass


def called_in_gathered() -> None:
    model = wrapped()
    with bmt.gathered(model):
        model(ids(0, 0))


def raised_in_gathered() -> None:
    with bmt.gathered(wrapped()):
        raise RuntimeError("this must reach the user")


# -- steps ----------------------------------------------------------------------------------------------------------


def steps() -> Iterator[Row]:
    def managed(name: str, act: Callable[[Any, Any, Any], object], message: str) -> Row:
        return "OptimManager", name, lambda: act(*trained()), message

    yield "OptimManager", "bounds", lambda: manager(min_loss_scale=8.0, max_loss_scale=4.0), "max_loss_scale must be"
    yield "OptimManager", "factor 0", lambda: manager(loss_scale_factor=0), "loss_scale_factor must be above 0"
    yield managed("added twice", lambda m, o, made: made.add_optimizer(o), "optimizer: .* was added before")
    yield managed("parameters", lambda m, o, made: made.add_optimizer(m.parameters()), "optimizer must be")
    yield managed("a class", lambda m, o, made: made.add_optimizer(torch.optim.SGD), "optimizer must be")
    yield managed("a number", lambda m, o, made: made.add_optimizer(sgd(), 0.1), r"lr_scheduler must have a step\(\)")
    yield managed("detached", lambda m, o, made: made.backward(torch.ones(())), r"loss must require .*\.detach\(\)")
    yield managed(
        "a vector", lambda m, o, made: made.backward(torch.ones(3)), r"loss must be one .* \(3,\). Take its \.mean"
    )
    yield managed("no_grad", lambda m, o, made: made.backward(ungraded(m)), r"loss must require .* torch\.no_grad")
    yield managed(
        "clip parameters", lambda m, o, made: made.clip_grad_norm(m.parameters(), 1.0), "param_groups must be"
    )
    yield managed("clip optimizer", lambda m, o, made: made.clip_grad_norm(o, 1.0), "param_groups must be")
    yield managed(
        "norm 0", lambda m, o, made: made.clip_grad_norm(o.param_groups, 1.0, 0), "norm_type must be positive"
    )
    yield "backward", "a second time", backward_twice, "retain_graph=True"
    yield "backward", "create_graph", lambda: wrapped()(ids(0, 0)).backward(create_graph=True), "create_graph=True"
    yield "optimizer.step", "before wrapping", stale_step, "Create the optimizer after auto_wrap"


def ungraded(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids(0, 0))


def backward_twice() -> None:
    loss = wrapped()(ids(0, 0))
    loss.backward()
    loss.backward()


def stale_step() -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bmt.auto_wrap(model)
    model(ids(0, 0)).backward()
    optimizer.step()


def optimizers() -> Iterator[Row]:
    def make(name: str, message: str, params: Any = None, **options: Any) -> Row:
        return "AdamOptimizer", name, lambda: adam(params, **options), message

    weight = nn.Parameter(torch.ones(2))
    yield make("a model", "params must be model.parameters", Tower())
    yield make("nothing", "params must contain parameters, but is empty", [])
    yield make("an exhausted generator", "call it again for each use", exhausted())
    yield make("double weights", "Use torch.optim.AdamW for it", [nn.Parameter(torch.ones(2).double())])
    yield make("an inner tensor", "non-leaf", [torch.ones(2, requires_grad=True) * 2])
    yield make("two lrs", "lr must be a number", lr=torch.ones(2))
    yield make("one beta", "betas must be two numbers", betas=(0.9,))
    yield make("beta 1", r"betas at least 0 and below 1, got .*1\.0\)", betas=(0.9, 1.0))
    yield make("a group's lr", "must be finite and at least 0, .* got lr=-0.5", [{"params": [weight], "lr": -0.5}])
    yield make("a group's betas", "betas must be two numbers", [{"params": [weight], "betas": 1}])
    yield make("no params in a group", 'param_group must have the key "params"', [{"lr": 1.0}])
    yield make("float16 moments", "exp_avg_dtype must be torch.float32", exp_avg_dtype=torch.float16)
    yield make("a fused option", "unexpected keyword argument 'fused'", fused=True)
    yield "AdamOptimizer.step", "scale 0", lambda: trained()[1].step(scale=0.0), "scale must be finite and above 0"
    yield "AdamOptimizer.step", "a loss", lambda: trained()[1].step(torch.ones(())), "closure must be a function"
    load = lambda state: trained()[1].load_state_dict(state)  # noqa: E731
    state = adam().state_dict()
    yield "AdamOptimizer.load_state_dict", "{}", lambda: load({}), "state_dict must be .* no state and no param_groups"
    yield "AdamOptimizer.load_state_dict", "a model's", lambda: load(Tower().state_dict()), "state_dict must be"
    yield "AdamOptimizer.load_state_dict", "another's", lambda: load(state), "different number|doesn't match the size"
    yield "AdamOptimizer.load_state_dict", "other shapes", misshapen_state, r"exp_avg.*\(7,\)"


def exhausted() -> Iterator[Any]:
    generator = Tower().parameters()
    list(generator)
    return generator


def misshapen_state() -> None:
    model, optimizer, made = trained()
    made.step()
    state = copy.copy(optimizer.state_dict())
    first = next(iter(state["state"]))
    state["state"] = {**state["state"], first: {**state["state"][first], "exp_avg": torch.ones(7)}}
    optimizer.load_state_dict(state)
    made.backward(model(ids(0, 0)))
    made.step()


# -- losses and results ---------------------------------------------------------------------------------------------


def losses() -> Iterator[Row]:
    logits, targets = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 1, 2, 3])

    def entropy(name: str, message: str, *given: Any, **options: Any) -> Row:
        return "cross_entropy", name, lambda: bmt.loss.cross_entropy(*(given or (logits, targets)), **options), message

    yield entropy("swapped", "logits must be float16", targets, logits)
    yield entropy("targets as floats", "targets must be class indices", logits, targets.float())
    yield entropy("too few targets", r"targets of shape \(N,\)", logits, targets[:2])
    yield entropy("a target of 5", r"target 5 at \[0\]", logits, targets + 5)
    yield entropy("a target of -1", r"target -1 at \[0\]", logits, targets - 1)
    yield entropy("one dimension", r"\(N, C\) need targets", logits[0], targets[0])
    yield entropy("no classes", "have no classes", logits[:, :0], targets)
    yield entropy("double logits", "logits must be float16, bfloat16 or float32", logits.double(), targets)
    yield entropy("smoothing 1.1", r"label_smoothing must be between 0 and 1", label_smoothing=1.1)
    yield entropy("4 weights", "4 class weights were given for 5 classes", weight=torch.ones(4))
    yield entropy("a matrix of weights", "class weights .* one number per class", weight=torch.ones(2, 3))
    yield entropy("items of a sum", "num_items_in_batch is the divisor", reduction="sum", num_items_in_batch=3)
    yield entropy("two items", "num_items_in_batch must be one number", num_items_in_batch=torch.ones(2))
    yield entropy("a leaf in place", "Use inplace=False", inplace=True)
    yield "FusedCrossEntropy", "parallel", lambda: bmt.loss.FusedCrossEntropy(parallel=True, softcap=1.0), "softcap"
    rows, head = torch.randn(4, 3), torch.randn(5, 3)

    def linear(name: str, message: str, *given: Any, **options: Any) -> Row:
        arguments = given or (rows, head, targets)
        return "linear_cross_entropy", name, lambda: bmt.loss.linear_cross_entropy(*arguments, **options), message

    yield linear("a transposed weight", r"weight must have shape \(V, H\)", rows, head.t(), targets)
    yield linear("a module as weight", "a torch.Tensor, got an object of type Linear", rows, nn.Linear(3, 5), targets)
    yield linear("shifted targets", "needs targets of shape", rows, head, targets[1:])
    yield linear("two dtypes", "hidden, weight and bias must share", rows, head.half(), targets)
    yield linear("a bias of 4", "needs a bias of 5 numbers", bias=torch.ones(4))
    yield linear("two devices", "must be on the same device", rows, head.to("meta"), targets)
    yield linear("a target of 5", "target 5 at", rows, head, targets + 5)


# -- files and states -----------------------------------------------------------------------------------------------


def files() -> Iterator[Row]:
    def load(name: str, file: Callable[[], str], message: str) -> Row:
        return "load", name, lambda: bmt.load(wrapped(), file()), message

    state = Tower().state_dict()
    yield load("a folder without weights", scratch, "the folder has no Hugging Face weights")
    yield load("text", lambda: written("a.pt", "hello"), "a.pt could not be read")
    yield load("an empty file", lambda: written("a.pt", ""), "could not be read")
    yield load("text as safetensors", lambda: written("a.safetensors", "hello"), "not a safetensors file")
    yield load("a broken index", lambda: written("model.safetensors.index.json", "{"), "index.json could not be read")
    yield load("an index of nothing", lambda: written("a.index.json", "{}"), "not a Hugging Face index")
    lost = '{"weight_map": {"a": "b.bin"}}'
    yield load(
        "lost files", lambda: written("a.index.json", lost), r"b\.bin is missing, although a\.index\.json lists it"
    )
    yield load("a list", lambda: stored("a.pt", [1, 2]), "not a model's state dict")
    yield load("an optimizer's", lambda: stored("a.pt", sgd().state_dict()), "not a model's state dict")
    yield load(
        "another shape", lambda: stored("a.pt", {**state, "head.weight": torch.ones(3, 6)}), r"head\.weight.*\(2, 6\)"
    )
    yield "load", "swapped", lambda: bmt.load("a.pt", wrapped()), "model must be a torch.nn.Module"
    yield "save", "swapped", lambda: bmt.save("a.pt", wrapped()), "model must be a torch.nn.Module"
    yield "save", "an empty name", lambda: bmt.save(wrapped(), ""), "file_name must be a path, got an empty string"
    yield "save", "below a file", lambda: bmt.save(wrapped(), written("a", "") + "/b.pt"), "could not be written"
    yield "save", "a folder", lambda: bmt.save(wrapped(), scratch()), "could not be written"


def states() -> Iterator[Row]:
    def save(what: str, message: str, folder: Any = None, **options: Any) -> Row:
        act = lambda: bmt.save_state(scratch() if folder is None else folder, wrapped(), **options)  # noqa: E731
        return "save_state", what, act, message

    yield save("below a file", "nothing was saved", written("a", "") + "/b")
    yield save("an empty name", "folder must be a path, got an empty string", "")
    yield save("swapped", "folder must be a path", Tower())
    yield save("a stranger's optimizer", "Pass the module that contains all parameters", optimizer=adam())
    yield save("a scheduler as optimizer", "optimizer must be an OptimManager", optimizer=constant())
    yield save("an optimizer as scheduler", "scheduler must be", scheduler=0.1)
    yield save("a function as extra", "extra` and .* may contain only tensors", extra=len)
    yield save("a name with a slash", "name must be", name="../b")
    by_position = lambda: bmt.save_state("a", wrapped(), None, None, None, 1)  # noqa: E731
    yield "save_state", "step by position", by_position, "takes from 2 to 5 positional"

    def load(name: str, message: str, **changes: Any) -> Row:
        return "load_state", name, lambda: bmt.load_state(**{**saved(), **changes}), message

    other = bmt.auto_wrap(nn.Linear(2, 2))
    yield load("another model", r"not fit the model\. \d+ tensors of the checkp", model=other, optimizer=None)
    yield load("two optimizers", "of 1 optimizers, but this load_state call passes 2", optimizer=[adam(), adam()])
    yield load("a stranger's optimizer", "Pass the module that contains all", optimizer=adam())
    yield load("a scheduler it lacks", "of 0 schedulers, but this load_state call passes 1", scheduler=constant())
    yield load("a file", r"this path is a file\. Pass", folder=written("a", ""))
    yield load("an empty name", "folder must be a path, got an empty string", folder="")
    yield "load_state", "a damaged one", damaged, "no checkpoint in .* is intact"
    yield "load_state", "swapped", lambda: bmt.load_state(wrapped(), "a"), "folder must be a path"
    loads = lambda state: trained()[2].load_state_dict(state)  # noqa: E731
    yield "OptimManager.load_state_dict", "{}", lambda: loads({}), "state_dict must be .*, but it lacks optimizers"
    yield "OptimManager.load_state_dict", "an optimizer's", lambda: loads(adam().state_dict()), "it lacks optimizers"
    yield (
        "OptimManager.load_state_dict",
        "of none",
        lambda: loads(bmt.optim.OptimManager().state_dict()),
        "call add_optimizer for the same",
    )
    yield (
        "OptimManager.load_state_dict",
        "scaled",
        lambda: loads(manager(loss_scale=2.0).state_dict()),
        "otherwise with a loss_scale",
    )


def constant() -> Any:
    return torch.optim.lr_scheduler.ConstantLR(sgd())


def damaged() -> None:
    given = saved()
    for file in Path(given["folder"]).rglob("*.safetensors"):
        file.write_bytes(b"nothing")
    bmt.load_state(**given)


# -- the command line, and Hugging Face ------------------------------------------------------------------------------


def command(module: str, *words: str) -> None:
    """Run `python -m MODULE WORDS` in this process. Raises ValueError with what it printed if its status is not 0."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [module, *words]), contextlib.redirect_stderr(printed):
        with contextlib.redirect_stdout(printed):
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as error:
                if error.code:
                    raise ValueError(f"status {error.code}: use it as follows: {printed.getvalue()}") from error


def commands() -> Iterator[Row]:
    def check(name: str, message: str, *words: Any) -> Row:
        return "hf_bmtrain.checkpoint", name, lambda: command("hf_bmtrain.checkpoint", *map(str, words)), message

    yield check("nothing", "required: command")
    yield check("no such command", "invalid choice: 'repair'", "repair", "a")
    yield check("no folder", "required: folder", "verify")
    yield check("nowhere", "neither a checkpoint of save_state", "verify", "no/where")
    yield check("an empty folder", "neither a checkpoint of save_state", "inspect", scratch())
    yield check("a file", "neither a checkpoint of save_state", "verify", written("a", ""))
    yield check("a size of 5XB", "'5XB' is not a size such as 5GB", "merge", "a", "--max-shard-size", "5XB")
    yield check("a size of 0", "'0' is less than one byte", "merge", "a", "--max-shard-size", "0")
    yield check(
        "output exists", "already exists. Choose another --output", "merge", saved()["folder"], "--output", scratch()
    )
    yield check("a needless base", "Leave out --base", "merge", saved()["folder"], "--base", scratch())
    run = "hf_bmtrain.run"
    yield run, "nothing", lambda: command(run), "usage: python -m hf_bmtrain.run SCRIPT"
    yield run, "no such script", lambda: command(run, "no/where.py"), "there is no script 'no/where.py'"
    yield run, "a folder", lambda: command(run, scratch()), "there is no script"


def hugging_face() -> Iterator[Row]:
    import transformers

    from tiny_models import build

    auto = transformers.AutoModelForCausalLM

    def read(name: str, message: str, *given: Any, **options: Any) -> Row:
        return (
            "hf.from_pretrained",
            name,
            lambda: bmt.hf.from_pretrained(*(given or (auto, tiny())), **options),
            message,
        )

    yield read("a name alone", "missing 1 required.*'name_or_path'", "gpt2")
    yield read(
        "a configuration's class",
        "loads only models from transformers, but this is a GPT2Config",
        transformers.AutoConfig,
        tiny(),
    )
    yield read("blocks that it lacks", "blocks= must be names of modules.*'no.such'", blocks=["no.such"])
    yield read("modules as blocks", "blocks must be a list of module names", blocks=[nn.ReLU()])
    yield read("device_map", "Leave out device_map", device_map="auto")
    yield read("8 bits", "Leave out load_in_8bit", load_in_8bit=True)
    trainer = lambda model, **options: bmt.hf.Trainer(model, **options)  # noqa: E731
    arguments = transformers.TrainingArguments(scratch(), use_cpu=True, report_to=[])
    yield "hf.Trainer", "not sharded", lambda: trainer(build("gpt2"), args=arguments), "Call model = bmt.auto_wrap"
    yield (
        "hf.Trainer",
        "a batch size to find",
        lambda: trainer(
            bmt.auto_wrap(build("gpt2")),
            args=transformers.TrainingArguments(scratch(), use_cpu=True, report_to=[], auto_find_batch_size=True),
        ),
        "choose a smaller per_device_train_batch_size",
    )
    yield (
        "hf.Trainer",
        "a callback alone",
        lambda: trainer(bmt.auto_wrap(build("gpt2")), args=arguments, callbacks=bmt.hf.BMTrainCallback()),
        "callbacks must be a list",
    )
    yield "hf.shard_checkpoints", "a model", lambda: bmt.hf.shard_checkpoints(wrapped()), "accelerator must be an"
    yield "hf.shard_checkpoints", "no folder", nameless, "pass output_dir"


def tiny() -> str:
    from tiny_models import build  # imports the models of transformers, which ranks of other cases do without

    folder = scratch()
    build("gpt2").save_pretrained(folder)
    return folder


def nameless() -> None:
    from accelerate import Accelerator

    bmt.hf.shard_checkpoints(Accelerator(cpu=True)).save_state()
