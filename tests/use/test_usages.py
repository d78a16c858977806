"""Training recipes of users give what plain torch gives, or are refused; known differences are expected failures.

`python tests usages` prints the list with its results.
"""

import pytest

from cases import full
from usages import CONFIGURATIONS, judge, run, usages

PEFT = ("reference_by_disabled_adapter", "two_adapters")


DEFAULT = (
    "r_drop",
    "clip_by_torch",
    "sam",
    "gradual_unfreezing",
    "recurrent_depth",
    "gan_alternating",
    "dpo",
    "output_changed_in_place",
    "lengths_of_each_rank",
    "lora_by_hand",
)
KEPT = ("freezing", "transforms")
"""The topics that are tried without recomputation as well. `python tests usages` tries all in every configuration."""


def marks(usage, size, use_checkpoint):
    if usage.name not in DEFAULT or usage.name in PEFT or not use_checkpoint:
        yield full
    if usage.wrong and usage.holds(size, use_checkpoint):
        yield pytest.mark.xfail(strict=True, reason=usage.wrong)


CASES = [
    pytest.param(
        topic, usage, size, use_checkpoint,
        id=f"{usage.name}-{name.replace(', ', '-').replace(' ', '')}", marks=[*marks(usage, size, use_checkpoint)],
    )
    for topic, usage in usages()
    for name, (size, use_checkpoint) in CONFIGURATIONS.items()
    if size == 2 and (use_checkpoint or topic in KEPT)
]  # fmt: skip


@pytest.mark.parametrize(("topic", "usage", "size", "use_checkpoint"), CASES)
def test_usages(world, topic, usage, size, use_checkpoint):
    if usage.name in PEFT:
        pytest.importorskip("peft")
    results = run(world(size), topic, usage, use_checkpoint)
    refused = usage.refused and usage.holds(size, use_checkpoint)
    assert judge(usage, results) == ("refused" if refused else "right"), results
