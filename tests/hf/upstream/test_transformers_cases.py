"""transformers' own Trainer tests around a sharded model; `python tests upstream_cases` counts them."""

import inspect
import types

import pytest
import upstream_best_model
import upstream_callbacks
import upstream_checkpoints
import upstream_evaluation
import upstream_generation
import upstream_logging
import upstream_training
from upstream_cases import cases

from cases import full, slow

MODULES = (
    upstream_best_model, upstream_callbacks, upstream_checkpoints, upstream_evaluation, upstream_generation,
    upstream_logging, upstream_training,
)  # fmt: skip


DEFAULT = ("trainer_with_datasets", "evaluate", "save_checkpoints")
SLOW = (
    "logging_inf_nan_filter", "get_num_trainable_parameters", "number_of_steps_in_training", "return_sequences",
    "num_train_epochs_in_training", "special_token_alignment", "eval_use_gather_object", "remove_callback_by_class",
    "save_collator_tokenizer_by_default", "trainer_saves_tokenizer", "metric_for_best_model_behavior",
)  # fmt: skip
"""Little in them depends on sharding. The others are `full`; `python tests upstream_cases` runs all on one rank."""


def marks(name):
    return () if name in DEFAULT else slow if name in SLOW else full


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=marks(name)) for name, case, size in cases() if size == 2],
)
def test_transformers_case(world, tmp_path, case):
    world(2)(case, str(tmp_path))


@full
def test_every_case_is_in_the_table():
    """Each function of a folder alone is a case, and stands there under its own name."""
    known = {name: case for name, case, _ in cases()}
    for module in MODULES:
        for name, value in vars(module).items():
            own = isinstance(value, types.FunctionType) and value.__module__ == module.__name__
            if own and list(inspect.signature(value).parameters) == ["folder"]:
                assert known.get(name) is value, name
    assert all(case.__name__ == name for name, case in known.items())
