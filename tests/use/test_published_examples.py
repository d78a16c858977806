"""BMTrain's published code blocks run as they stand, but for the import and what they leave to the reader.

The documents are not part of this repository: HF_BMTRAIN_PUBLISHED names the folder they lie in, by default
`shared/published` beside the checkout.
"""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cases import full, in_full
from processes import environment
from published import ROOT, programs, read_blocks

FOLDER = Path(os.environ.get("HF_BMTRAIN_PUBLISHED", ROOT.parent / "shared" / "published"))
DOCUMENTS = sorted(FOLDER.glob("*.txt"))
PROGRAMS = [(document, number) for document in DOCUMENTS for number in range(len(programs(document)))]
LAUNCHES = sorted({
    code.strip().removeprefix("$ ") for document in DOCUMENTS for language, code in read_blocks(document)
    if language == "shell"
})  # fmt: skip
HAS_MODEL_CENTER = importlib.util.find_spec("model_center") is not None
NO_PROGRAMS = ("python3 setup.py install", "├── layers")  # BMTrain's own installation; a listing of files


def test_the_documents_are_there():
    # They are BMTrain's own texts, which this repository does not copy: who has them names their folder.
    if not DOCUMENTS:
        pytest.skip(f"no documents in {FOLDER}: name their folder with HF_BMTRAIN_PUBLISHED")
    assert len(PROGRAMS) >= len(DOCUMENTS)


ENVIRONMENT = environment(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true", HF_BMTRAIN_POISON="1")


@pytest.mark.skipif(not DOCUMENTS, reason=f"no documents in {FOLDER}")
def test_every_block_is_run():
    run = {code for document in DOCUMENTS for program in programs(document) for code in program}
    for document in DOCUMENTS:
        for language, code in read_blocks(document):
            known = language == "shell" or code.strip().startswith(NO_PROGRAMS) or code in run
            assert known, f"{document.name}: nobody runs this block:\n{code}"


def run(command: list[str], **options) -> str:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.parametrize("size", [2, *in_full(1)])
@pytest.mark.parametrize(("document", "number"), PROGRAMS, ids=lambda value: getattr(value, "name", value))
def test_program(document, number, size):
    text = "".join(programs(document)[number])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if size == 2 else []
    said = run([sys.executable, *launcher, str(Path(__file__).with_name("published.py")), str(document), str(number)])
    if "accuracy" in text:
        assert said.count("loss: ") == 5 * 4  # epochs × batches, told by rank 0 alone
        assert said.count("accuracy: ") == 5
    proof = {"class MyModule": "modules agree", "GPT(": "losses ", "accuracy": "answers "}
    expected = next(words for mark, words in proof.items() if mark in text)
    assert said.count(expected) == size


@full
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_model_center(size):
    """The programs of the model zoo's with its own package, which is no part of BMTrain, in place of a stand-in."""
    if not HAS_MODEL_CENTER:
        pytest.skip("model_center is not installed: the model zoo's program has run with a stand-in for it alone")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if size == 2 else []
    found = [(d, number) for d, number in PROGRAMS if "model_center" in "".join(programs(d)[number])]
    for document, number in found:
        script = [str(Path(__file__).with_name("published.py")), str(document), str(number), "model_center"]
        said = run([sys.executable, *launcher, *script])
        assert said.count("loss: ") == 5 and said.count("answers ") == size  # one batch an epoch


TRAIN = """
import sys, torch, hf_bmtrain as bmt
bmt.init_distributed(seed=0)
mean = bmt.sum_loss(torch.tensor(float(bmt.rank()))).item()
sys.stdout.write(f"rank {bmt.rank()} of {bmt.world_size()} {mean}\\n")
"""


@pytest.mark.parametrize("command", LAUNCHES, ids=lambda command: "torchrun" if "torchrun" in command else "launch")
def test_launcher(command, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    values = {"NNODES": "1", "GPU_PER_NODE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    for name, value in values.items():
        command = command.replace(f"${{{name}}}", value)
    program, *arguments = shlex.split(command)
    prefix = [sys.executable, "-m", "torch.distributed.run"] if program == "torchrun" else [sys.executable]
    said = run([*prefix, *arguments], cwd=tmp_path)
    assert sorted(said.strip().splitlines()) == ["rank 0 of 2 0.5", "rank 1 of 2 0.5"]
