"""The generated questions: balanced, answerable only by reading, about people that training does not contain."""

import subprocess
import sys
from collections import Counter, defaultdict

import pytest
import torch
from small_job import ROOT

from boolq.data import Example
from boolq.questions import FAMILY_NAMES, FIRST_NAMES, THINGS, VERBS, reading_questions
from boolq.small_bert import train_tokenizer
from cases import full


@pytest.fixture(scope="module")
def questions():
    return reading_questions(seed=0)


def people(examples: list[Example]) -> set[str]:
    found = set()
    for example in examples:
        words = example.passage.split()
        found |= {f"{one} {two}" for one, two in zip(words, words[1:], strict=False) if one in FIRST_NAMES}
    return found


def test_every_question_comes_as_often_true_as_false(questions):
    for split in (questions.train, questions.validation):
        answers = defaultdict(Counter)
        for example in split:
            answers[example.question][example.label] += 1
        assert all(count[True] == count[False] for count in answers.values())


@full
def test_labels_are_what_the_passage_says(questions):
    """Solved by rule: find the sentence about the person and the thing, look up its verb."""
    meaning = {verb: answer for answer, verbs in VERBS.items() for verb in verbs}
    for example in questions.train[:2000] + questions.validation:
        words = example.question.split()
        asked, thing = f"{words[1]} {words[2]}", words[-1]
        told = [s for s in example.passage.lower().split(".") if asked in s and f" {thing} " in s]
        assert len(told) == 1
        assert meaning[told[0].split()[2]] == example.label


@full
def test_validation_is_about_people_that_training_has_not_met(questions):
    known, held_out = people(questions.train), people(questions.validation)
    assert not known & held_out
    assert len(known) == 200
    assert len(held_out) == 40
    assert len(FIRST_NAMES) * len(FAMILY_NAMES) == 240
    words = {name for person in known for name in person.split()}
    assert all(name in words for person in held_out for name in person.split())
    assert not {x.question for x in questions.train} & {x.question for x in questions.validation}


@full
def test_a_passage_tells_two_facts_with_nothing_in_common(questions):
    for example in questions.validation:
        facts = [sentence.split() for sentence in example.passage.strip(".").split(". ")]
        assert len(facts) == 2
        assert not set(facts[0]) & set(facts[1]) - {"the", "in"} - {v for verbs in VERBS.values() for v in verbs}
        assert {facts[0][5], facts[1][5]} <= set(THINGS)


def accuracy_of_a_bag_of_words(text, questions) -> float:
    """Validation accuracy of a logistic regression on the words and word pairs of `text(example)`."""

    def features(example: Example) -> set[str]:
        words = text(example).lower().replace(".", "").split()
        return {*words, *(f"{x} {y}" for x, y in zip(words, words[1:], strict=False))}

    index = {word: n for n, word in enumerate(sorted({w for x in questions.train for w in features(x)}))}

    def encode(examples):
        matrix = torch.zeros(len(examples), len(index))
        for row, example in enumerate(examples):
            matrix[row, [index[word] for word in features(example) if word in index]] = 1.0
        return matrix, torch.tensor([float(example.label) for example in examples])

    inputs, labels = encode(questions.train[:4000])
    torch.manual_seed(0)
    model = torch.nn.Linear(len(index), 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
    inputs, labels = encode(questions.validation)
    return ((model(inputs).squeeze(1) > 0) == (labels > 0.5)).float().mean().item()


@full
def test_the_question_alone_does_not_tell_the_answer(questions):
    assert accuracy_of_a_bag_of_words(lambda x: x.question, questions) == pytest.approx(0.5, abs=0.02)


@full
def test_the_passage_alone_tells_little(questions):
    assert accuracy_of_a_bag_of_words(lambda x: x.passage, questions) == pytest.approx(0.625, abs=0.05)


@full
def test_equal_seeds_give_equal_questions_and_vocabularies_in_every_process(questions):
    code = (
        "import zlib; from boolq.questions import reading_questions; from boolq.small_bert import train_tokenizer; "
        "q = reading_questions(0); t = train_tokenizer(x.question + ' ' + x.passage for x in q.train[:2000]); "
        "print(zlib.crc32(repr((q, sorted(t.get_vocab().items()))).encode()))"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT / "recipes",
            env={"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1
    assert reading_questions(seed=1) != questions


@full
def test_the_vocabulary_knows_every_word_of_the_held_out_people(questions):
    tokenizer = train_tokenizer(text for x in questions.train for text in (x.question, x.passage))
    for example in questions.validation:
        tokens = tokenizer.tokenize(f"{example.question} {example.passage}")
        assert tokenizer.unk_token not in tokens
        assert not [token for token in tokens if token.startswith("##")]
