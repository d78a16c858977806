"""Reading questions: both layouts, the Hub's form, and invalid files."""

import subprocess
import sys

import pytest
from huggingface_hub import constants
from small_job import ROOT

from boolq.data import Example, from_hub_splits, read_questions
from cases import full, in_full, rows_in_full

ROW = {"question": "is it so", "passage": "It is so.", "label": True, "idx": 7}
GOOGLE_ROW = {"question": "is it so", "passage": "It is so.", "answer": False, "title": "So"}


def test_superglue_layout(write_lines, tmp_path):
    write_lines("train.jsonl", ROW, "", ROW | {"label": False})
    write_lines("val.jsonl", ROW)
    write_lines("test.jsonl", {"question": "unlabelled", "passage": "and left alone"})
    questions = read_questions(str(tmp_path))
    assert questions.train == [
        Example("is it so", "It is so.", True),
        Example("is it so", "It is so.", False),
    ]
    assert len(questions.validation) == 1
    assert questions.origin == str(tmp_path)


def test_google_layout(write_lines, tmp_path):
    write_lines("train.jsonl", GOOGLE_ROW)
    write_lines("dev.jsonl", GOOGLE_ROW | {"answer": True})
    questions = read_questions(str(tmp_path))
    assert [row.label for row in (*questions.train, *questions.validation)] == [False, True]


@full
def test_byte_order_mark_and_other_alphabets(write_lines, tmp_path):
    passage = '"passage": "Ж 日本"'.encode()
    write_lines("train.jsonl", b'\xef\xbb\xbf{"question": "q", ' + passage + b', "label": true}')
    write_lines("val.jsonl", ROW)
    assert read_questions(str(tmp_path)).train[0].passage == "Ж 日本"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "passage"', r"train.jsonl, line 3: not valid JSON \(.* at column \d+\)"),
        (b'{"question": "\xff"}', r"train.jsonl, line 3: not UTF-8 at byte 14"),
        *rows_in_full(
            [
                ("[1, 2]", "train.jsonl, line 3: a JSON object is needed, found list"),
                (
                    {"question": "q", "passage": "p"},
                    r"train.jsonl, line 3: no key 'label' \(found 'question', 'passage'\)",
                ),
                (GOOGLE_ROW, "line 3: no key 'label'.* 'answer' beside dev.jsonl"),
                ({"question": "q", "label": True}, "line 3: no key 'passage'"),
                (ROW | {"question": None}, "line 3: 'question' must be a text, found null"),
                (ROW | {"passage": "  "}, "line 3: 'passage' must be a text, found \"  \""),
                (ROW | {"label": 1}, "line 3: 'label' must be true or false, found 1"),
                (ROW | {"label": "true"}, "line 3: 'label' must be true or false, found \"true\""),
                (ROW | {"label": None}, "line 3: 'label' must be true or false, found null"),
                (ROW | {"label": "x" * 99}, r"line 3: 'label' must be true or false, found \"x{36}\.\.\."),
            ]
        ),
    ],
)
def test_a_broken_line_is_named(write_lines, tmp_path, line, message):
    write_lines("train.jsonl", ROW, "", line, ROW)
    write_lines("val.jsonl", ROW)
    with pytest.raises(ValueError, match=message):
        read_questions(str(tmp_path))


@full
def test_the_validation_file_is_read_too(write_lines, tmp_path):
    write_lines("train.jsonl", ROW)
    write_lines("val.jsonl", ROW, "{")
    with pytest.raises(ValueError, match=r"val.jsonl, line 2: not valid JSON"):
        read_questions(str(tmp_path))


@full
@pytest.mark.parametrize("content", [("", "  "), *in_full(())])
def test_an_empty_file(write_lines, tmp_path, content):
    write_lines("train.jsonl", *content)
    write_lines("val.jsonl", ROW)
    with pytest.raises(ValueError, match="train.jsonl is empty: it needs one JSON object a line"):
        read_questions(str(tmp_path))


@full
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["dev.jsonl"], "has no train.jsonl: "),
        *rows_in_full(
            [
                ([], "has no train.jsonl and no val.jsonl or dev.jsonl"),
                (["train.jsonl"], "has no val.jsonl or dev.jsonl"),
            ]
        ),
    ],
)
def test_missing_files(write_lines, tmp_path, files, message):
    for name in files:
        write_lines(name, ROW)
    with pytest.raises(FileNotFoundError, match=message):
        read_questions(str(tmp_path))


@full
def test_two_validation_files_are_one_too_many(write_lines, tmp_path):
    for name in ("train.jsonl", "val.jsonl", "dev.jsonl"):
        write_lines(name, ROW)
    with pytest.raises(ValueError, match="has both val.jsonl and dev.jsonl"):
        read_questions(str(tmp_path))


@full
@pytest.mark.parametrize("path", ["~/nowhere", *in_full("/no/such/folder", "./nowhere", "a/b/c")])
def test_a_path_that_does_not_exist(path):
    with pytest.raises(FileNotFoundError, match="no such folder; give a folder with train.jsonl"):
        read_questions(path)


@full
def test_a_file_instead_of_a_folder(write_lines):
    with pytest.raises(ValueError, match="is a file: give the folder"):
        read_questions(str(write_lines("train.jsonl", ROW)))


def test_a_name_the_hub_does_not_answer_for(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(repository, configuration):
        assert (repository, configuration) == ("aps/super_glue", "boolq")
        raise ConnectionError("Couldn't reach the Hub\nand a page of advice")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ValueError, match=r"cannot load 'super_glue/boolq' from the hub \(Couldn't reach the Hub\); .*--data"
    ):
        read_questions("super_glue/boolq")


def test_the_hub_form_of_superglue():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        question=datasets.Value("string"),
        passage=datasets.Value("string"),
        label=datasets.ClassLabel(names=["False", "True"]),
    )
    columns = {"question": ["a", "b"], "passage": ["c", "d"], "label": [1, 0]}
    split = datasets.Dataset.from_dict(columns, features)
    questions = from_hub_splits(datasets.DatasetDict(train=split, validation=split), "super_glue/boolq")
    assert questions.train == [Example("a", "c", True), Example("b", "d", False)]


@full
def test_the_hub_form_of_google_and_its_mistakes():
    rows = [{"question": "a", "passage": "b", "answer": True}]
    assert from_hub_splits({"train": rows, "validation": rows}, "x").validation == [Example("a", "b", True)]
    with pytest.raises(ValueError, match=r"x has no split validation \(found train, test\)"):
        from_hub_splits({"train": rows, "test": rows}, "x")
    unlabelled = [{"question": "a", "passage": "b", "label": -1}]
    with pytest.raises(ValueError, match="x, validation, row 1: 'label' must be true or false, found -1"):
        from_hub_splits({"train": rows, "validation": unlabelled}, "x")
    with pytest.raises(ValueError, match="x, train is empty"):
        from_hub_splits({"train": [], "validation": rows}, "x")


@full
def test_a_folder_needs_no_datasets_package(write_lines, tmp_path):
    write_lines("train.jsonl", ROW)
    write_lines("val.jsonl", ROW)
    code = (
        "import sys; sys.modules['datasets'] = None; from boolq.data import read_questions; "
        "print(len(read_questions(sys.argv[1]).train))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT / "recipes", capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
