"""Counts calls of operators, also those of compiled code."""

from collections.abc import Callable
from typing import Any

from hf_bmtrain.engine.base.torch_internals import TorchDispatchMode


class OperatorCalls(TorchDispatchMode):
    """Counts, while it is entered, the calls (operator, args) that `counted` selects."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __init__(self, counted: Callable[[Any, tuple], bool]):
        super().__init__()
        self.counted, self.count = counted, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.counted(function, args)
        return function(*args, **(kwargs or {}))
