"""model_types.md says of every model type of transformers whether the zoo has it, and why not."""

import pytest
import transformers

from zoo_account import KINDS, account, read_account
from zoo_families import FAMILIES


def test_every_model_type_is_accounted_for():
    """In model_types.md, for the transformers that made it; of another one the new types are named."""
    version, answers = read_account()
    assert answers and all(kind in set(KINDS) - {"unexplained"} for kind, _ in answers.values())
    assert {details for kind, details in answers.values() if kind == "zoo"} <= set(FAMILIES)
    unknown = sorted(set(transformers.CONFIG_MAPPING) - set(answers))
    if version != transformers.__version__:
        pytest.skip(f"model_types.md is of transformers {version}; not in it: {', '.join(unknown) or 'none'}")
    assert unknown == [], "run `python tests zoo --families`"


@pytest.mark.zoo
def test_the_account_is_up_to_date():
    version, answers = read_account()
    if version != transformers.__version__:
        pytest.skip(f"model_types.md is of transformers {version}")
    assert account() == answers
