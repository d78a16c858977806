"""`fuse_causal_loss` computes the loss of a Hugging Face language model without storing its logits."""

from __future__ import annotations

import functools
import inspect
import logging
import numbers
from typing import Any

import torch
import torch.nn.functional as F

from ...engine.base.arguments import expect_module
from ...engine.base.torch_internals import has_hooks, pytree
from ...engine.blocks.distributed_module import DistributedModule, distribute
from ...engine.blocks.sharded_module import STAYS, extend_class, own_class
from .fused import linear_cross_entropy

_log = logging.getLogger("hf_bmtrain")
_warn_once = functools.cache(_log.warning)
_ARMED = "_bmt_armed"


def fuse_causal_loss(model: torch.nn.Module) -> bool:
    """Make `model(input_ids, labels=...)` compute its training loss in chunks, without storing the full logits.

    The output's `loss` is the one that the model itself would compute, with the same shift of the labels and the same
    `num_items_in_batch`. The output has no logits: `output.logits` is None, and an output tuple does not contain them.
    Calls without labels, or in `model.eval()`, do not change.

    The model's own forward runs, but its head (the output layer) returns a placeholder instead of logits. The
    placeholder records what the model does with the logits: scaling (Cohere, Granite), soft-capping (Gemma), casts to
    float32, reshaping and slicing of rows. When the model calls cross_entropy, the loss is computed in chunks. For any
    other operation the head computes the full logits, which the model then uses, and the log names the first of these
    operations.

    Deep copies of the model compute their loss in the same way. So does a model whose head is replaced later, for
    example by `resize_token_embeddings`. If that is impossible with the new head, the log gives the reason.

    Args:
        model: a model whose forward takes `labels`, and whose `get_output_embeddings()` returns a plain
            `torch.nn.Linear` without hooks. It is changed in place, before or after `auto_wrap`.

    Returns:
        True if the loss is now computed in chunks. False if that is impossible; the model is then unchanged, and the
        log gives the reason.
    """
    expect_module("model", model)
    find_head = getattr(model, "get_output_embeddings", None)
    head: Any = find_head() if callable(find_head) else None
    reason = _why_not(model, head)
    if reason:
        _log.warning(
            "fuse_causal_loss leaves %s unchanged, because %s. Full logits are stored.", type(model).__name__, reason
        )
        return False
    _convert(head)
    if _arm not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_arm, with_kwargs=True)
        model.register_forward_hook(_disarm, with_kwargs=True, always_call=True)
    _log.info("%s computes its training loss without storing full logits", type(model).__name__)
    return True


class ChunkedHead:
    """A model's output layer that can return an `UnbornLogits` object instead of logits.

    `fuse_causal_loss` turns the output layer of a model into such a layer.

    The `UnbornLogits` object stores the layer's input, the hidden states. When the model passes the object to torch's
    cross_entropy, the loss is computed in chunks of rows, so that the full logits are never in memory.

    The layer returns such an object only while its attribute `_bmt_armed` is True, which is during a training forward
    with labels. Otherwise it returns logits.

    To compute the loss, the object calls the layer again, with a second argument: a function that computes the loss
    from the hidden states, the layer's weight and its bias. The layer calls this function and returns the loss. Because
    this happens inside a call of the layer, a sharded weight is all-gathered and resharded, and its gradient is
    reduced, as in any call of a sharded module.

    If the model applies an unsupported operation to the object, the full logits are computed. The first time, a warning
    is logged, and the layer's attribute `_bmt_warned` is set to True, so that the warning is not repeated.
    """

    _bmt_armed: bool = False
    _bmt_warned: bool = False


@functools.cache
def _chunked_class(cls: Any) -> type:
    """Return a subclass of ChunkedHead and `cls`, which replaces `cls` as the class of a model's output layer."""

    @functools.wraps(cls.forward)
    def forward(self, hidden, loss=None):
        if loss is not None:
            return loss(hidden, self.weight, self.bias)
        if self._bmt_armed and isinstance(hidden, torch.Tensor):
            return UnbornLogits(self, functools.partial(cls.forward, self), hidden)
        return cls.forward(self, hidden)

    return extend_class(ChunkedHead, cls, {"forward": forward})


def _unless_born(operation: Any) -> Any:
    """Decorate a method of UnbornLogits: if the full logits exist, call the full logits' method of this name instead.

    The full logits are a tensor. They exist once `UnbornLogits._born` has computed them.
    """

    @functools.wraps(operation)
    def act(self, *args, **kwargs):
        if self._full is not None:
            return getattr(self._full, operation.__name__)(*args, **kwargs)
        return operation(self, *args, **kwargs)

    return act


class UnbornLogits:
    """A placeholder for logits: `head(hidden) * scale`, or with a softcap `cap * tanh(head(hidden) * scale)`.

    A ChunkedHead returns it in a training forward with labels. torch's functions accept it in place of a tensor.
    cross_entropy computes the loss in chunks. Scaling, tanh, casts to float32, reshaping and slicing of rows return
    another UnbornLogits. The shape, dtype and device are known without logits. Any other operation computes the full
    logits. From then on, this object applies every operation to these full logits, so that in-place changes of the full
    logits have an effect on later operations.

    Args:
        head: the model's output layer, a ChunkedHead.
        linear: the layer's original forward, which computes full logits from hidden states.
        hidden: the hidden states, (..., H).
        scale: the number by which the head's output is multiplied.
        cap: the softcap, or None if there is none.
        dtype: the dtype of the logits; None for the dtype of `hidden`.
    """

    def __init__(
        self, head: Any, linear: Any, hidden: torch.Tensor, scale: float = 1.0, cap: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._head, self._linear, self._hidden, self._scale, self._cap = head, linear, hidden, scale, cap
        self.dtype = dtype or hidden.dtype
        self._full: torch.Tensor | None = None  # the full logits, once they have been computed
        # Whether these logits and those of another UnbornLogits would share memory, because one is a view of the other.
        self._shared = False

    def _view(self, hidden: torch.Tensor) -> UnbornLogits:
        """Return a placeholder for a view of the logits that this placeholder represents.

        Both objects are marked as sharing memory, because an in-place change of the full logits would also change the
        view.

        hidden: the hidden states of the rows in the view.
        """
        view = self._but(hidden=hidden)
        self._shared = view._shared = True
        return view

    def _but(self, **changes) -> UnbornLogits:
        """Return a copy of this placeholder, with the given values of `hidden`, `scale`, `cap` or `dtype`."""
        values = {"hidden": self._hidden, "scale": self._scale, "cap": self._cap, "dtype": self.dtype} | changes
        return UnbornLogits(self._head, self._linear, **values)

    def _born(self, asked: str) -> torch.Tensor:
        """Return the full logits, and compute them first if necessary.

        Called when the model applies an operation that this class does not support. Raises NotImplementedError for an
        in-place operation if another UnbornLogits is a view of the same logits (see `_view`), because the view would
        not change with them.

        asked: the name of the operation. It is logged only the first time that full logits are computed.
        """
        in_place = asked in _IN_PLACE or (asked.endswith("_") and not asked.endswith("__"))
        if in_place and self._shared:
            raise NotImplementedError(
                f"fuse_causal_loss: the model changes its logits in place ({asked}) after it has reshaped or sliced "
                "them. Change the model so that it modifies its logits before it reshapes or slices them, or modifies "
                "a copy of them. Otherwise, do not call fuse_causal_loss."
            )
        if self._full is not None:
            return self._full
        if not self._head._bmt_warned:
            self._head._bmt_warned = True
            _log.warning(
                "fuse_causal_loss: full logits are computed, because the model or its loss applies %s to them. The "
                "loss is the same, but takes as much memory as without fuse_causal_loss. To save memory, change the "
                "model so that it does not apply this operation.",
                asked,
            )
        logits = self._linear(self._hidden).to(self.dtype)
        logits = logits * self._scale if self._scale != 1 else logits
        self._full = logits = logits if self._cap is None else torch.tanh(logits) * self._cap
        return logits

    def _loss(self, target, weight=None, size_average=None, reduce=None, **options) -> torch.Tensor:
        """Compute F.cross_entropy in chunks, for the logits that this placeholder represents.

        The arguments are those of F.cross_entropy.

        size_average, reduce: deprecated arguments, always None here (see `_is_usual_loss`).
        """
        # The logits are cap * tanh(scale * x) for x = head(hidden), and `linear_cross_entropy` computes
        # softcap * tanh(y / softcap). Both are equal for softcap = cap and y = factor * x with factor = scale * cap.
        # Without a cap, the factor is `scale`.
        factor = self._scale * (self._cap or 1.0)

        def loss(hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            if factor != 1:
                hidden, bias = hidden * factor, None if bias is None else bias * factor
            return linear_cross_entropy(
                hidden, head, target, bias, class_weight=weight, softcap=self._cap or 0.0, **options
            )

        # The loss is computed inside a call of the head, so that the head's parameters are all-gathered and resharded,
        # and their gradients reduced, as in any call of a sharded module.
        return self._head(self._hidden, loss)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, UnbornLogits) and first._full is None:
            if function is F.cross_entropy and first._is_usual_loss(args, kwargs):
                return first._loss(*args[1:], **kwargs)
            if function in (torch.tanh, F.tanh) and len(args) == 1 and not kwargs:
                return first.tanh()
        name = getattr(function, "__name__", str(function))
        if kwargs.get("inplace") or isinstance(kwargs.get("out"), UnbornLogits):
            name += "_"
        args, kwargs = pytree.tree_map(
            lambda value: value._born(name) if isinstance(value, UnbornLogits) else value, (args, kwargs)
        )
        return function(*args, **kwargs)

    def _is_usual_loss(self, args: tuple, kwargs: dict) -> bool:
        """Return whether the loss of this call of F.cross_entropy can be computed in chunks.

        This is possible for logits of shape (N, V) and class indices of shape (N,), without deprecated arguments.

        args, kwargs: the arguments of F.cross_entropy. The first one is this placeholder.
        """
        if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
            return False
        target = args[1] if len(args) > 1 else kwargs.get("target")
        indices = isinstance(target, torch.Tensor) and target.dim() == 1 and not target.is_floating_point()
        return indices and self.dim() == 2 and len(args) <= 3

    # -- operations between the head and the loss ----------------------------------------------------------------

    @_unless_born
    def __mul__(self, other):
        if not isinstance(other, numbers.Real) or not float(other) > 0:
            return self._born("a product") * other
        if self._cap is not None:
            return self._but(cap=self._cap * float(other))
        return self._but(scale=self._scale * float(other))

    __rmul__ = __mul__

    @_unless_born
    def __truediv__(self, other):
        if not isinstance(other, numbers.Real) or not float(other) > 0:
            return self._born("a quotient") / other
        return self * (1 / float(other))

    def __imul__(self, other: Any):
        if self._full is None and not self._shared and isinstance(other, numbers.Real) and float(other) > 0:
            vars(self).update(vars(self * other))  # change this object itself, to which other variables may refer
            return self
        full = self._born("__imul__")
        full *= other
        return full

    def __itruediv__(self, other: Any):
        if self._full is None and not self._shared and isinstance(other, numbers.Real) and float(other) > 0:
            return self.__imul__(1 / float(other))
        full = self._born("__itruediv__")
        full /= other
        return full

    @_unless_born
    def tanh(self):
        return self._but(cap=1.0) if self._cap is None else self._born("tanh").tanh()

    @_unless_born
    def float(self):
        # The new dtype does not affect the chunked loss, which is computed in float32 anyway. But if an unsupported
        # operation makes the full logits be computed, they must have this dtype.
        return self if self.dtype == torch.float32 else self._but(dtype=torch.float32)

    @_unless_born
    def contiguous(self):
        return self

    @_unless_born
    def to(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and args[0] in (torch.float32, self.dtype, self.device):
            return self.float() if args[0] == torch.float32 else self
        return self._born("to").to(*args, **kwargs)

    @_unless_born
    def view(self, *shape, **named):
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if named or len(sizes) < 2 or sizes[-1] != self.shape[-1]:
            return self._born("view").view(*shape, **named)
        return self._view(self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))

    @_unless_born
    def reshape(self, *shape, **named):
        return self._born("reshape").reshape(**named) if named else self.view(*shape)

    @_unless_born
    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        if all(part is ... or isinstance(part, (slice, int)) for part in parts) and len(parts) <= self.dim():
            if len(parts) < self.dim() and ... not in parts or parts[-1] == slice(None):  # the result has whole rows
                return self._view(self._hidden[index])
        return self._born("indexing")[index]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._head.out_features))

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._hidden.dim()

    @property
    def ndim(self) -> int:
        return self._hidden.dim()

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._born(name), name)


_IN_PLACE = {f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv", "imod")}


def _operator(name: str):
    return lambda self, *others: getattr(self._born(name), name)(*others)


_OPERATORS = (
    "add radd sub rsub neg pos abs pow rpow matmul rmatmul rtruediv floordiv rfloordiv mod rmod lt le gt ge eq ne iter "
    "len bool setitem iadd isub ipow ifloordiv imod"
)
for _name in _OPERATORS.split():
    setattr(UnbornLogits, f"__{_name}__", _operator(f"__{_name}__"))


# -- the model ------------------------------------------------------------------------------------------------


def _why_not(model: torch.nn.Module, head: Any) -> str | None:
    """Return the reason why the loss of `model` cannot be fused, or None if it can be.

    head: the model's output layer, or None if it has none.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(p.name == "labels" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return "its forward takes no labels"
    if head is None:
        return "it has no output embeddings (get_output_embeddings)"
    if isinstance(head, ChunkedHead):
        return None
    foreign = [c for c in type(head).__mro__[:-1] if not c.__module__.startswith(("torch.nn.", "hf_bmtrain."))]
    forward = getattr(type(head), "_extends", type(head)).forward
    changed = foreign or forward is not torch.nn.Linear.forward or "forward" in head.__dict__
    if not isinstance(head, torch.nn.Linear) or changed:
        return f"its head is a {type(head).__module__}.{type(head).__qualname__}, not a plain torch.nn.Linear"
    if has_hooks(head):
        return "its head has hooks, which need the logits"
    return None


def _convert(head: Any) -> None:
    """Make a model's output layer a ChunkedHead, which can compute the loss in chunks. Do nothing if it is one already.

    A layer that is already sharded gets the same class as if it had been converted before it was sharded: a subclass of
    DistributedModule (the class of sharded modules) and of its ChunkedHead class. Deep copies and pickles are not
    sharded. They keep the ChunkedHead class (see `own_class`).
    """
    if isinstance(head, DistributedModule) and not isinstance(head, ChunkedHead):
        schedule = head._schedule
        head.__class__ = _chunked_class(own_class(head))
        distribute(head, schedule)
    elif not isinstance(head, ChunkedHead):
        head.__class__ = _chunked_class(type(head))
    vars(head).setdefault(_ARMED, False)


def _arm(model: Any, args: tuple, kwargs: dict) -> None:
    """Forward pre-hook: choose whether the head (output layer) returns logits or, in their place, an UnbornLogits.

    An UnbornLogits represents the logits, and computes the loss without storing them. The head returns an UnbornLogits
    if the model is in training mode and gets labels. If the head is not a ChunkedHead yet (it was replaced, or the
    model is a deep copy), it is first made one. If that is impossible, a warning is logged, and the head returns
    logits.
    """
    labels = kwargs.get("labels")
    if labels is None and args:
        labels = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments.get("labels")
    head, fuses = model.get_output_embeddings(), model.training and labels is not None
    known = _ARMED in getattr(head, "__dict__", ())
    if fuses and not known:  # the model is a deep copy, or its head was replaced, as by resize_token_embeddings
        reason = _why_not(model, head)
        if reason:
            _warn_once("fuse_causal_loss: %s stores full logits from now on, because %s", type(model).__name__, reason)
            return
        _convert(head)
    if fuses or known:
        head._bmt_armed = fuses


def _disarm(model: Any, args: tuple, kwargs: dict, output: Any) -> Any:
    """Forward hook: make the head (output layer) return logits again, and remove UnbornLogits from the model's output.

    An UnbornLogits is a placeholder for logits. In a ModelOutput or a named tuple, it becomes None. In any other tuple,
    it is left out. The hook also runs after a forward that raised an error.
    """
    head = model.get_output_embeddings()
    if _ARMED in getattr(head, "__dict__", ()):
        head._bmt_armed = False
    if isinstance(output, tuple):
        if make := getattr(output, "_make", None):  # a named tuple keeps its length, with None in place of logits
            return make(None if isinstance(value, UnbornLogits) else value for value in output)
        return type(output)(value for value in output if not isinstance(value, UnbornLogits))
    if isinstance(output, dict):  # a ModelOutput: rebuild it without UnbornLogits, so that their fields are None
        return type(output)(**{key: value for key, value in output.items() if not isinstance(value, UnbornLogits)})
    return output


# Deep copies of a sharded model lose the hooks of this package, except those with the attribute STAYS. A copy needs
# these two hooks, so that it also computes its loss in chunks.
for _hook in (_arm, _disarm):
    setattr(_hook, STAYS, True)
