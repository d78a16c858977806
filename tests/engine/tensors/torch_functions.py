"""What torch's functions do with a sharded parameter and with its gradient, next to the plain ones.

    python tests torch_functions [--ranks 2]

prints a table: a row for each function, and in its columns what came of it for a parameter's `.data`, a parameter under
`no_grad`, one that autograd records, and a gradient: right (numbers and shape of plain torch, and its gradient), raises
(as plain torch does), refused (by name, where plain torch has a result), or WRONG.
"""

from __future__ import annotations

import argparse
import collections
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F

import hf_bmtrain as bmt
from ranks import Ranks

ROWS, COLUMNS = 20, 8
OTHER = torch.linspace(0.5, 2.0, ROWS * COLUMNS).view(ROWS, COLUMNS)
ONE = torch.full((1, 1), 2.0)
ROW = torch.linspace(-1.0, 1.0, COLUMNS)
INPUT = torch.linspace(-1.0, 1.0, 3 * COLUMNS).view(3, COLUMNS)
INDEX = torch.tensor([3, 0, 11])
MASK = OTHER > 1.2


class Holder(nn.Module):
    """A matrix that two ranks share, a vector that one rank holds, and a scalar."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.matrix = nn.Parameter(torch.rand(ROWS, COLUMNS, generator=generator) + 0.1)
        self.vector = nn.Parameter(torch.rand(COLUMNS, generator=generator) + 0.1)
        self.scalar = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return (F.linear(x, self.matrix).tanh().sum(-1, keepdim=True) * self.vector * self.scalar).sum()


def _set(x, key, value):
    x[key] = value
    return x


def _in_place(x, function):
    function(x)
    return x


@functools.cache
def functions() -> dict[str, Callable[[Any], Any]]:
    """The functions by name; `x` is a matrix, and most of them take a vector or a scalar as well."""
    table: dict[str, Callable[[Any], Any]] = {}
    for (
        name
    ) in """abs neg sign sgn sqrt rsqrt square exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sinh cosh asin
        atan asinh sigmoid relu erf erfc ceil floor round trunc frac reciprocal isnan isinf isfinite logical_not signbit
        nan_to_num sum mean prod max min amax amin argmax argmin any all norm std var median logsumexp count_nonzero
        clone detach contiguous double half bfloat16 float long bool cpu tolist t unique nonzero cumsum cumprod
        sort softmax log_softmax flatten ravel squeeze logcumsumexp diff aminmax isneginf argsort positive
        """.split():
        by_dimension = {"cumsum", "cumprod", "softmax", "log_softmax", "logsumexp", "logcumsumexp"}
        if name in by_dimension:
            table[f"{name}(0)"] = lambda x, name=name: getattr(x, name)(0)
        elif name == "logical_not":
            table[name] = lambda x: x.logical_not()
        else:
            table[name] = lambda x, name=name: getattr(x, name)()
    for name in "add sub mul div pow fmod remainder maximum minimum fmax fmin hypot atan2 eq ne lt le gt ge".split():
        table[f"torch.{name}(x, x)"] = lambda x, name=name: getattr(torch, name)(x, x)
        table[f"torch.{name}(x, whole)"] = lambda x, name=name: getattr(torch, name)(x, _like(x))
        table[f"torch.{name}(whole, x)"] = lambda x, name=name: getattr(torch, name)(_like(x), x)
        table[f"torch.{name}(x, row)"] = lambda x, name=name: getattr(torch, name)(x, ROW)
    for name in "add sub mul div pow clamp_min fill".split():
        table[f"x.{name}_(0.5)"] = lambda x, name=name: _in_place(x, lambda y: getattr(y, name + "_")(0.5))
    for name in "zero sqrt exp tanh sigmoid relu normal uniform abs".split():
        table[f"x.{name}_()"] = lambda x, name=name: _in_place(x, lambda y: getattr(y, name + "_")())
    for name in "add sub mul div copy".split():
        table[f"x.{name}_(whole)"] = lambda x, name=name: _in_place(x, lambda y: getattr(y, name + "_")(_like(y)))
        table[f"x.{name}_(row)"] = lambda x, name=name: _in_place(x, lambda y: getattr(y, name + "_")(ROW))
    for name in "zeros_like ones_like empty_like rand_like randn_like".split():
        if name == "empty_like":
            table[name] = lambda x: torch.empty_like(x).fill_(2.0)
        else:
            table[name] = lambda x, name=name: getattr(torch, name)(x)
    for name in "add sub mul div copy".split():
        table[f"x.{name}_([[2]])"] = lambda x, name=name: _in_place(x, lambda y: getattr(y, name + "_")(ONE))
    table |= {
        "x * [[2]]": lambda x: x * ONE,
        "[[2]] - x": lambda x: ONE - x,
        "foreach_mul_([[2]])": lambda x: _in_place(x, lambda y: torch._foreach_mul_([y], [ONE])),
        "foreach_add([[2]])": lambda x: torch._foreach_add([x], [ONE])[0],
        "apply_": lambda x: _in_place(x, lambda y: y.detach().apply_(lambda value: 2 * value)),
        "map_": lambda x: _in_place(x, lambda y: y.detach().map_(_like(y), lambda a, b: a + 2 * b)),
        "set_": lambda x: _in_place(x, lambda y: y.set_(_like(y))),
        "conj": lambda x: x.conj(),
        "real": lambda x: x.real,
        "contiguous().mul_": lambda x: _in_place(x, lambda y: y.contiguous().mul_(2)),
        "contiguous() @": lambda x: x.contiguous().t() @ x.positive(),
        "shape": lambda x: x.shape,
        "size()": lambda x: x.size(),
        "size(0)": lambda x: x.size(0),
        "size(-1)": lambda x: x.size(-1),
        "dim": lambda x: (x.dim(), x.ndim, torch.numel(x)),
        "numel": lambda x: (x.numel(), x.nelement(), x.nbytes),
        "stride": lambda x: (x.stride(), x.is_contiguous()),
        "len": lambda x: len(x),
        "is_same_size": lambda x: x.is_same_size(_like(x)),
        "zeros of its shape * x": lambda x: torch.ones(x.shape) * x,
        "zeros of its shape.add_(x)": lambda x: x.new_zeros(x.shape).add_(x),
        "x + 1": lambda x: x + 1,
        "x * numpy.float64": lambda x: x * numpy.float64(0.5),
        "numpy.float32 + x": lambda x: x + numpy.float32(0.5),
        "x.mul_(numpy.float64)": lambda x: _in_place(x, lambda y: y.mul_(numpy.float64(0.5))),
        "1 - x": lambda x: 1 - x,
        "2 / x": lambda x: 2 / x,
        "2 ** x": lambda x: 2**x,
        "x // 0.3": lambda x: x // 0.3,
        "x % 0.3": lambda x: x % 0.3,
        "-x": lambda x: -x,
        "x > 0.5": lambda x: x > 0.5,
        "x == x": lambda x: x == x,
        "abs(x)": lambda x: abs(x),
        "clamp": lambda x: x.clamp(0.2, 0.8),
        "lerp": lambda x: x.lerp(_like(x), 0.3),
        "full_like": lambda x: torch.full_like(x, 3.0),
        "addcmul": lambda x: torch.addcmul(x, x, x, value=0.1),
        "addcdiv": lambda x: torch.addcdiv(x, x, _like(x)),
        "where": lambda x: torch.where(x > 0.5, x, 0.0),
        "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
        "x * mask": lambda x: x * (_like(x) > 1.2),
        "to(float64)": lambda x: x.to(torch.float64),
        "type_as": lambda x: x.type_as(OTHER.double()),
        "plain.to(x)": lambda x: OTHER.double().to(x),
        "isclose": lambda x: torch.isclose(x, x),
        "allclose": lambda x: torch.allclose(x, x),
        "equal": lambda x: torch.equal(x, x),
        "norm(1)": lambda x: x.norm(1),
        "norm(inf)": lambda x: x.norm(float("inf")),
        "norm(dim=0)": lambda x: x.norm(dim=0),
        "vector_norm": lambda x: torch.linalg.vector_norm(x),
        "vector_norm(dim=-1)": lambda x: torch.linalg.vector_norm(x, dim=-1),
        "matrix_norm": lambda x: torch.linalg.matrix_norm(x),
        "linalg.norm(2)": lambda x: torch.linalg.norm(x, 2),
        "torch.norm": lambda x: torch.norm(x),
        "nuclear": lambda x: torch.linalg.norm(x, "nuc"),
        "sum(0)": lambda x: x.sum(0),
        "sum(-1)": lambda x: x.sum(-1),
        "mean(0)": lambda x: x.mean(0),
        "max(0)": lambda x: x.max(0),
        "var_mean": lambda x: torch.var_mean(x),
        "quantile": lambda x: torch.quantile(x, 0.5),
        "topk": lambda x: x.flatten().topk(3),
        "kthvalue": lambda x: x.kthvalue(1),
        "histc": lambda x: torch.histc(x.detach(), 4),
        "dot": lambda x: torch.dot(x.reshape(-1), x.reshape(-1)),
        "trace": lambda x: torch.trace(x),
        "item of sum": lambda x: x.sum().item(),
        "item": lambda x: x.item(),
        "float(x.mean())": lambda x: float(x.mean()),
        "float(x)": lambda x: float(x),
        "bool of any": lambda x: bool((x > 9).any()),
        "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
        "(x**2).sum().sqrt()": lambda x: (x**2).sum().sqrt(),
        "x[3]": lambda x: x[3] * 1,
        "x[:2]": lambda x: x[:2] * 1,
        "x[..., 0]": lambda x: x[..., 0] * 1,
        "x[index]": lambda x: x[INDEX % len(_like(x))],
        "x[mask]": lambda x: x[_like(x) > 1.2],
        "take": lambda x: torch.take(x, INDEX % 8),
        "gather": lambda x: torch.gather(x, 0, torch.zeros(1, COLUMNS, dtype=torch.long)),
        "index_select": lambda x: x.index_select(0, INDEX % 8),
        "masked_select": lambda x: x.masked_select(_like(x) > 1.2),
        "narrow": lambda x: x.narrow(0, 1, 2) * 1,
        "select": lambda x: x.select(0, 1) * 1,
        "chunk": lambda x: [y * 1 for y in x.chunk(2)],
        "split": lambda x: [y * 1 for y in x.split(5)],
        "unbind": lambda x: [y * 1 for y in x.unbind(0)],
        "list(x)": lambda x: [y * 1 for y in x.unbind()],
        "view(-1)": lambda x: x.view(-1),
        "view(4, -1)": lambda x: x.view(4, -1),
        "reshape(-1, 2)": lambda x: x.reshape(-1, 2),
        "unsqueeze(0)": lambda x: x.unsqueeze(0),
        "transpose": lambda x: x.transpose(0, -1) * 1,
        "x.T": lambda x: x.T * 1,
        "x.mT": lambda x: x.mT * 1,
        "permute": lambda x: x.permute(*range(_like(x).dim())[::-1]) * 1,
        "expand": lambda x: x.expand(2, *_like(x).shape) * 1,
        "repeat": lambda x: x.repeat(2, 1),
        "tile": lambda x: x.tile(2),
        "roll": lambda x: x.roll(1),
        "flip": lambda x: x.flip(0),
        "tril": lambda x: x.tril(),
        "triu": lambda x: torch.triu(x),
        "diag": lambda x: torch.diag(x),
        "cat": lambda x: torch.cat([x, x]),
        "stack": lambda x: torch.stack([x, x]),
        "pad": lambda x: F.pad(x, (1, 1)),
        "rot90": lambda x: torch.rot90(x),
        "movedim": lambda x: x.movedim(0, -1) * 1,
        "view_as": lambda x: x.view_as(_like(x)),
        "view(dtype=)": lambda x: x.view(dtype=torch.int32),
        "view(dtype)": lambda x: x.view(torch.int32),
        "view(size=)": lambda x: x.view(size=(1, -1)),
        "x == None": lambda x: (x == None, x != None),  # noqa: E711
        "where(mask)": lambda x: torch.where(x > 0.5),
        "where(condition=)": lambda x: torch.where(condition=x > 0.5, input=x, other=0.0),
        "sum(axis=)": lambda x: x.sum(axis=0),
        "mean(axis=, keepdims=)": lambda x: x.mean(axis=-1, keepdims=True),
        "norm(axis=)": lambda x: x.norm(p=2, dim=0, keepdim=True),
        "sum(input=)": lambda x: torch.sum(input=x),
        "mean(input=)": lambda x: torch.mean(input=x, dim=0),
        "add(input=)": lambda x: torch.add(input=x, other=x, alpha=2),
        "zeros_like(input=)": lambda x: torch.zeros_like(input=x),
        "dot(input=)": lambda x: torch.dot(input=x, tensor=x),
        "unfold": lambda x: x.unfold(0, 2, 1) * 1,
        "diagonal": lambda x: x.diagonal() * 1,
        "swapaxes": lambda x: x.swapaxes(0, -1) * 1,
        "x @ x.T": lambda x: x @ x.T,
        "x @ row": lambda x: x @ ROW,
        "mm": lambda x: torch.mm(x, OTHER.T),
        "mv": lambda x: x.mv(ROW),
        "matmul(input, x.T)": lambda x: torch.matmul(INPUT, x.T),
        "input @ x.T": lambda x: INPUT @ x.T,
        "outer": lambda x: torch.outer(x, x),
        "addmm": lambda x: torch.addmm(torch.zeros(ROWS, ROWS), x, OTHER.T),
        "einsum": lambda x: torch.einsum("ij,kj->ik", x, OTHER),
        "tensordot": lambda x: torch.tensordot(x, OTHER, 2),
        "bmm": lambda x: torch.bmm(x[None], OTHER.T[None]),
        "svdvals": lambda x: torch.linalg.svdvals(x),
        "qr": lambda x: torch.linalg.qr(x),
        "kron": lambda x: torch.kron(x, torch.ones(2)),
        "cosine_similarity": lambda x: F.cosine_similarity(x, ROW, dim=-1),
        "normalize": lambda x: F.normalize(x, dim=-1),
        "F.linear": lambda x: F.linear(INPUT, x),
        "F.embedding": lambda x: F.embedding(INDEX, x),
        "F.mse_loss": lambda x: F.mse_loss(x, _like(x)),
        "F.softmax": lambda x: F.softmax(x, -1),
        "F.layer_norm": lambda x: F.layer_norm(INPUT, (COLUMNS,), x),
        "F.gelu": lambda x: F.gelu(x),
        "F.dropout(p=0)": lambda x: F.dropout(x, 0.0),
        "F.cross_entropy": lambda x: F.cross_entropy(x, torch.arange(ROWS) % COLUMNS),
        "F.conv1d": lambda x: F.conv1d(INPUT.T[None], x[None, :3].mT * 1),
        "cdist": lambda x: torch.cdist(x, OTHER),
        "parameters_to_vector": lambda x: torch.nn.utils.parameters_to_vector([x, x]),
        "input + x": lambda x: INPUT + x,
        "x * input": lambda x: x * INPUT,
        "_foreach_add": lambda x: torch._foreach_add([x, x], 1.0),
        "_foreach_mul": lambda x: torch._foreach_mul([x], [x]),
        "_foreach_norm": lambda x: torch._foreach_norm([x, x]),
        "_foreach_add_": lambda x: _in_place(x, lambda y: torch._foreach_add_([y], [_like(y)], alpha=0.1)),
        "_foreach_lerp_": lambda x: _in_place(x, lambda y: torch._foreach_lerp_([y], [_like(y)], 0.1)),
        "_foreach_abs": lambda x: torch._foreach_abs([x]),
        "x[3] = 0": lambda x: _set(x, 3, 0.0),
        "x[:2] = row": lambda x: _set(x, slice(2), ROW),
        "x[index] = 1": lambda x: _set(x, INDEX % len(_like(x)), 1.0),
        "x[mask] = 0": lambda x: _set(x, _like(x) > 1.2, 0.0),
        "index_fill_": lambda x: _in_place(x, lambda y: y.index_fill_(0, INDEX % 8, 2.0)),
        "index_add_": lambda x: _in_place(x, lambda y: y.index_add_(0, INDEX, INPUT)),
        "scatter_": lambda x: _in_place(x, lambda y: y.scatter_(0, torch.zeros(1, COLUMNS, dtype=torch.long), 5.0)),
        "masked_fill_": lambda x: _in_place(x, lambda y: y.masked_fill_(_like(y) > 1.2, 0.0)),
        "fill_diagonal_": lambda x: _in_place(x, lambda y: y.fill_diagonal_(1.0)),
        "clamp_": lambda x: _in_place(x, lambda y: y.clamp_(0.2, 0.5)),
        "x += 1": lambda x: _in_place(x, lambda y: y.__iadd__(1)),
        "cumsum_": lambda x: _in_place(x, lambda y: y.cumsum_(0)),
        "renorm_": lambda x: _in_place(x, lambda y: y.renorm_(2, 0, 0.5)),
        "transpose_": lambda x: x.clone().transpose_(0, -1),
        "resize_": lambda x: _in_place(x, lambda y: y.resize_(3)),
        "t_": lambda x: _in_place(x, lambda y: y.t_()),
        "x[3].zero_()": lambda x: _in_place(x, lambda y: y[3].zero_()),
        "x.view(-1)[0] = 1": lambda x: _in_place(x, lambda y: _set(y.view(-1), 0, 1.0)),
        "x.T.mul_(2)": lambda x: _in_place(x, lambda y: y.T.mul_(2)),
        "init.kaiming_uniform_": lambda x: _in_place(x, nn.init.kaiming_uniform_),
        "init.constant_": lambda x: _in_place(x, lambda y: nn.init.constant_(y, 2.0)),
        "init.xavier_normal_": lambda x: _in_place(x, nn.init.xavier_normal_),
        "init.orthogonal_": lambda x: _in_place(x, nn.init.orthogonal_),
        "init.trunc_normal_": lambda x: _in_place(x, nn.init.trunc_normal_),
        "init.eye_": lambda x: _in_place(x, nn.init.eye_),
        "out=": lambda x: torch.add(x, 1.0, out=torch.zeros_like(_like(x))),
        "plain.add_(x)": lambda x: _like(x).clone().add_(x),
        "plain.copy_(x)": lambda x: torch.zeros_like(_like(x)).copy_(x),
        "plain.lerp_(x)": lambda x: _like(x).clone().lerp_(x, 0.5),
    }
    return table


def _like(x: Any) -> torch.Tensor:
    """Return an ordinary constant of the whole shape of `x`."""
    shape = getattr(x, "full_shape", x.shape)
    return OTHER[: shape[0], : shape[1]] if len(shape) == 2 else OTHER.reshape(-1)[: shape.numel()].view(shape)


def _full(result: Any) -> Any:
    """Return `result` with whole tensors for slices."""
    if isinstance(result, torch.Tensor):
        if hasattr(result, "placement"):
            return result.detach().read_full()
        return result.detach().as_subclass(torch.Tensor)
    if isinstance(result, (list, tuple)):
        return [_full(each) for each in result]
    return result


def _same(mine: Any, plain: Any) -> bool:
    if isinstance(plain, list):
        return len(mine) == len(plain) and all(_same(a, b) for a, b in zip(mine, plain))
    if isinstance(plain, torch.Tensor):
        if not isinstance(mine, torch.Tensor) or mine.shape != plain.shape or mine.dtype != plain.dtype:
            return False
        return torch.allclose(mine, plain, rtol=1e-5, atol=1e-6, equal_nan=True)
    if isinstance(plain, float):
        return abs(mine - plain) <= 1e-5 * max(1.0, abs(plain))
    return mine == plain


CONTEXTS = (".data", "no_grad", "autograd", "gradient")


def _try(function: Callable, model: nn.Module, name: str, context: str) -> tuple[Any, Any, str]:
    """Return the result of `function`, the values and gradients of the model's parameter after it, and an error."""
    parameter: Any = getattr(model, name)
    torch.manual_seed(5)
    result = error = None
    argument = {".data": lambda: parameter.data, "gradient": lambda: parameter.grad}.get(context, lambda: parameter)()
    try:
        with torch.set_grad_enabled(context != "no_grad"):
            result = function(argument)
            if context == "autograd" and isinstance(result, torch.Tensor) and result.requires_grad:
                (result * result).sum().backward()
        result = _full(result)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as raised:
        result, error = None, f"{type(raised).__name__}: {raised}"
    gradient = _full(parameter.grad)
    return result, [_full(parameter.data), gradient], error or ""


def outcomes(labels: list[str]) -> dict[tuple[str, str, str], str]:
    """Return what came of these functions, with every parameter and in every context, on this rank."""
    table = {}
    model = bmt.auto_wrap(Holder())
    start = {name: parameter.detach().clone() for name, parameter in Holder().named_parameters()}
    for label in labels:
        function = functions()[label]
        for name in start:
            for context in CONTEXTS:
                plain = Holder()  # a function may have changed a shape
                for each in (plain, model):
                    each.zero_grad()
                    with torch.no_grad():
                        for key, value in each.named_parameters():
                            value.copy_(start[key])
                    if context == "gradient":
                        each(INPUT).backward()
                        for parameter in each.parameters():  # the mean over three ranks is rounded otherwise
                            parameter.grad.mul_(1024).round_().div_(1024)
                expected, effect, error = _try(function, plain, name, context)
                mine, my_effect, my_error = _try(function, model, name, context)
                if error:
                    right = my_error and _same(my_effect, effect)
                    table[label, name, context] = "raises" if right else f"WRONG: plain torch raises {error}"
                elif my_error:
                    table[label, name, context] = f"refused: {my_error}"
                else:
                    right = _same(mine, expected) and _same(my_effect, effect)
                    table[label, name, context] = "right" if right else f"WRONG: {mine} and not {expected}"
    return table


NAMED = re.compile(r"gather|take|bmt\.|auto_wrap|expand|no_grad|slice|sharded")
"""A refusal says one of these."""


def judge(table: dict[tuple[str, str, str], str]) -> list[str]:
    """Return the entries that are wrong, or refused without the way out."""
    return [
        f"{label} of {name}, {context}: {outcome[:400]}"
        for (label, name, context), outcome in table.items()
        if outcome.startswith("WRONG") or (outcome.startswith("refused") and not NAMED.search(outcome))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="the label of one function")
    options = parser.parse_args()
    ranks = Ranks(options.ranks)
    labels = [options.only] if options.only else [*functions()]
    tables: list[dict[tuple[str, str, str], str]] = [{} for _ in range(options.ranks)]
    for begin in range(0, len(labels), 40):
        for table, part in zip(tables, ranks(outcomes, labels[begin : begin + 40])):
            table |= part
    ranks.stop()
    table = tables[0]
    print(f"{'function':24} {'parameter':8}" + "".join(f"{context:>12}" for context in CONTEXTS))
    for label, name in dict.fromkeys((label, name) for label, name, _ in table):
        row = [table[label, name, context].split(":")[0] for context in CONTEXTS]
        print(f"{label:24} {name:8}" + "".join(f"{cell:>12}" for cell in row))
    problems = [problem for each in tables for problem in judge(each)]
    counts = collections.Counter(outcome.split(":")[0] for outcome in table.values())
    print(*problems, sep="\n")
    print(f"{len(labels)} functions on {options.ranks} ranks: {dict(counts)}, {len(problems)} problems")
