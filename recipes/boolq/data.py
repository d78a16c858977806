"""Yes/no reading questions, read from a folder or from the Hub and checked before training."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.hub import check_hub, first_line, is_hub_name

# The name of the validation file determines the layout of a folder, and thus the key of its labels.
LABEL_KEYS = {"val.jsonl": "label", "dev.jsonl": "answer"}
# BoolQ's published name -> (repository, configuration) on the hub
HUB_REPOSITORIES = {"super_glue/boolq": ("aps/super_glue", "boolq")}


@dataclass(frozen=True)
class Example:
    """A question, the passage that answers it, and the answer: True for yes."""

    question: str
    passage: str
    label: bool


@dataclass(frozen=True)
class Questions:
    """The two splits of a data set. origin: their source, for messages."""

    train: list[Example]
    validation: list[Example]
    origin: str


def read_questions(data: str) -> Questions:
    """Read a folder, or a data set of the Hub if `data` has the form of a Hub name and is not a folder.

    Raises FileNotFoundError for a path that does not exist and ValueError for invalid content; the messages give the
    file, the line and the way out.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        return read_folder(path)
    if path.exists():
        raise ValueError(f"--data {data} is a file: give the folder that holds train.jsonl")
    if not is_hub_name(data):
        raise FileNotFoundError(
            f"--data {data}: no such folder; give a folder with train.jsonl and val.jsonl (key `label`) "
            "or dev.jsonl (key `answer`), or a data set of the hub such as super_glue/boolq"
        )
    return download(data)


def read_folder(folder: Path) -> Questions:
    """Read the SuperGLUE layout (train/val.jsonl, `label`) or Google's (train/dev.jsonl, `answer`)."""
    validation_files = [folder / name for name in LABEL_KEYS if (folder / name).is_file()]
    missing = [] if (folder / "train.jsonl").is_file() else ["train.jsonl"]
    if not validation_files:
        missing.append("val.jsonl or dev.jsonl")
    if missing:
        raise FileNotFoundError(
            f"{folder} has no {' and no '.join(missing)}: put them there, or give another folder with --data"
        )
    if len(validation_files) > 1:
        raise ValueError(f"{folder} has both val.jsonl and dev.jsonl: move away the one not to be used")
    key = LABEL_KEYS[validation_files[0].name]
    return Questions(read_file(folder / "train.jsonl", key), read_file(validation_files[0], key), str(folder))


def read_file(file: Path, label_key: str) -> list[Example]:
    """Read one JSON object per line, with a boolean under `label_key`; blank lines are skipped."""
    examples = [to_example(parse_line(line, place), label_key, place) for place, line in numbered_lines(file)]
    if not examples:
        raise ValueError(f"{file} is empty: it needs one JSON object a line")
    return examples


def numbered_lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield ("file, line n", bytes of the line) for every line that is not blank."""
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
    """Convert one row. Raises ValueError unless it has two texts that are not blank and a boolean label."""
    absent = [key for key in ("question", "passage", label_key) if key not in row]
    if absent:
        names = (
            "; labels are called 'label' beside val.jsonl and 'answer' beside dev.jsonl" if label_key in absent else ""
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
    """Load `name` from the Hub or its local cache. Only this function imports `datasets`."""
    check_hub(f"--data {name}")
    repository, configuration = HUB_REPOSITORIES.get(name, (name, None))
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"--data {name} is no folder, and the hub needs: pip install datasets") from error
    try:
        splits: Any = datasets.load_dataset(repository, configuration)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"cannot load {name!r} from the hub ({first_line(error)}); check the name and the network, "
            "or give a local folder with --data"
        ) from error
    return from_hub_splits(splits, name)


def from_hub_splits(splits: Mapping[str, Iterable[Mapping[str, Any]]], name: str) -> Questions:
    """Convert the splits `train` and `validation`, whose labels may be the class numbers 0 and 1."""
    absent = [split for split in ("train", "validation") if split not in splits]
    if absent:
        raise ValueError(f"{name} has no split {' and no '.join(absent)} (found {', '.join(splits)})")
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
