"""Yes/no reading questions, read from a folder or from the Hub and checked before training."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.hub import check_hub, first_line, is_hub_name

# {name of the validation file: key of the labels in the folder's files}, for SuperGLUE's files and for Google's
LABEL_KEYS = {"val.jsonl": "label", "dev.jsonl": "answer"}
# {published name of the data set: (repository, configuration) on the Hub}
HUB_REPOSITORIES = {"super_glue/boolq": ("aps/super_glue", "boolq")}


@dataclass(frozen=True)
class Example:
    """A question, the passage that answers it, and the answer: True for yes."""

    question: str
    passage: str
    label: bool


@dataclass(frozen=True)
class Questions:
    """The two splits of a data set.

    Attributes:
        train: the examples to train on.
        validation: the examples to evaluate on.
        origin: where the examples come from (a folder, a Hub name, or a description), for messages.
    """

    train: list[Example]
    validation: list[Example]
    origin: str


def read_questions(data: str) -> Questions:
    """Read questions from the folder `data`, or from the Hub if no such path exists and `data` may be a Hub name.

    Raises FileNotFoundError for a path that does not exist, and ValueError for invalid content. The messages contain
    the file, the line, and what to do.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        return read_folder(path)
    if path.exists():
        raise ValueError(f"--data {data} is a file: give the folder that contains train.jsonl")
    if not is_hub_name(data):
        raise FileNotFoundError(
            f"--data {data}: no such folder; give a folder with train.jsonl and val.jsonl (key `label`) "
            "or dev.jsonl (key `answer`), or a data set of the hub such as super_glue/boolq"
        )
    return download(data)


def read_folder(folder: Path) -> Questions:
    """Read a folder with the files of SuperGLUE or those of Google.

    SuperGLUE's are train.jsonl and val.jsonl, with labels under the key "label". Google's are train.jsonl and
    dev.jsonl, with labels under "answer". Raises FileNotFoundError or ValueError.
    """
    validation_files = [folder / name for name in LABEL_KEYS if (folder / name).is_file()]
    missing = [] if (folder / "train.jsonl").is_file() else ["train.jsonl"]
    if not validation_files:
        missing.append("val.jsonl or dev.jsonl")
    if missing:
        raise FileNotFoundError(
            f"{folder} has no {' and no '.join(missing)}: put them there, or give another folder with --data"
        )
    if len(validation_files) > 1:
        raise ValueError(f"{folder} has both val.jsonl and dev.jsonl: move the file away that is not to be used")
    key = LABEL_KEYS[validation_files[0].name]
    return Questions(read_file(folder / "train.jsonl", key), read_file(validation_files[0], key), str(folder))


def read_file(file: Path, label_key: str) -> list[Example]:
    """Read a file with one JSON object per line, each with a bool under `label_key`. Blank lines are skipped.

    Raises ValueError if the file is empty, or if a line is invalid.

    Args:
        file: the file, in UTF-8.
        label_key: "label" or "answer".
    """
    examples = [to_example(parse_line(line, place), label_key, place) for place, line in numbered_lines(file)]
    if not examples:
        raise ValueError(f"{file} is empty: it needs one JSON object a line")
    return examples


def numbered_lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield ("FILE, line N", the bytes of the line) for every line that is not blank. N counts all lines, from 1."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{file}, line {number}", line


def parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 at byte {error.start}; convert the file to UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}: not valid JSON ({error.msg} at column {error.colno}); repair or delete the line"
        ) from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a JSON object is needed, found {type(row).__name__}; repair the line")
    return row


def to_example(row: Mapping[str, Any], label_key: str, place: str) -> Example:
    """Convert one row of a file or of a data set of the Hub to an Example.

    Raises ValueError if `row` lacks one of the keys, a text is blank, or the label is not a bool.

    Args:
        row: a dict with the keys "question", "passage" and `label_key`.
        label_key: "label" or "answer".
        place: where the row comes from, such as "FILE, line 3", for error messages.
    """
    absent = [key for key in ("question", "passage", label_key) if key not in row]
    if absent:
        names = (
            "; labels are called 'label' beside val.jsonl and 'answer' beside dev.jsonl"
            if label_key in absent
            else "; repair the line"
        )
        raise ValueError(f"{place}: no key {', '.join(map(repr, absent))} (found {', '.join(map(repr, row))}){names}")
    for key in ("question", "passage"):
        if not isinstance(row[key], str) or not row[key].strip():
            raise ValueError(f"{place}: {key!r} must be a text, found {shortened(row[key])}; repair the line")
    if not isinstance(row[label_key], bool):
        raise ValueError(f"{place}: {label_key!r} must be true or false, found {shortened(row[label_key])}; repair it")
    return Example(row["question"], row["passage"], row[label_key])


def shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def download(name: str) -> Questions:
    """Load the data set `name` from the Hub or from its local cache.

    Raises ValueError if the Hub does not answer, the package `datasets` is not installed, or the data set cannot be
    loaded. Only this function imports `datasets`, so folders can be read without this package.
    """
    check_hub(f"--data {name}")
    repository, configuration = HUB_REPOSITORIES.get(name, (name, None))
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"--data {name} is no folder; to load it from the hub, run: pip install datasets") from error
    try:
        splits: Any = datasets.load_dataset(repository, configuration)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"cannot load {name!r} from the hub ({first_line(error)}); check the name and the network, "
            "or give a local folder with --data"
        ) from error
    return from_hub_splits(splits, name)


def from_hub_splits(splits: Mapping[str, Iterable[Mapping[str, Any]]], name: str) -> Questions:
    """Convert the splits "train" and "validation" of a data set of the Hub.

    Labels may be bools or the class numbers 0 and 1. Raises ValueError if a split is missing or has an invalid row.

    Args:
        splits: {name of a split: its rows}.
        name: the name of the data set, for error messages.
    """
    absent = [split for split in ("train", "validation") if split not in splits]
    if absent:
        raise ValueError(
            f"{name} has no split {' and no '.join(absent)} (found {', '.join(splits)}): give other --data"
        )
    return Questions(
        from_hub_split(splits["train"], f"{name}, train"),
        from_hub_split(splits["validation"], f"{name}, validation"),
        name,
    )


def from_hub_split(rows: Iterable[Mapping[str, Any]], split: str) -> list[Example]:
    examples = []
    for number, row in enumerate(rows, start=1):
        key = "label" if "label" in row else "answer"
        if row.get(key) in (0, 1):
            row = {**row, key: bool(row[key])}
        examples.append(to_example(row, key, f"{split}, row {number}"))
    if not examples:
        raise ValueError(f"{split} is empty: give another data set with --data")
    return examples
