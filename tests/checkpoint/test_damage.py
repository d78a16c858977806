"""Every damage to a checkpoint is noticed: file and tensor are named, and the one before it is loaded."""

import errno
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full, in_full
from hf_bmtrain.checkpoint.header import Damaged, find_tensors, read_header
from hf_bmtrain.checkpoint.manifest import Checked, Manifest
from log_lines import log_lines
from processes import environment
from ranks import on_ranks
from resumable import Training, damage

FILES = ["model.safetensors", "optimizer.safetensors", "state.pt", "manifest.json", "config.json"]


# -- bits and sectors -----------------------------------------------------------------------------------------------


def damages(file: Path, flips: int, seed: int):
    """Yield (what, content) for damaged contents of a file."""
    data, draw = file.read_bytes(), random.Random(seed)
    step = len(data) / flips
    for at in [0, 7, len(data) - 1, *(int(step * (i + draw.random())) for i in range(flips))]:
        bit = draw.randrange(8)
        yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    for size in (0, 1, 7, len(data) // 2, len(data) - 1):
        yield f"the first {size} bytes", data[:size]
    yield "a byte more", data + b"\0"
    sectors = len(data) // 512
    if sectors > 1:
        a, b = sorted(draw.sample(range(sectors), 2))
        cut = [data[i * 512 : (i + 1) * 512] for i in range(sectors + 1)]
        yield f"sector {a} zeroed", b"".join([*cut[:a], bytes(512), *cut[a + 1 :]])
        cut[a], cut[b] = cut[b], cut[a]
        yield f"sectors {a} and {b} exchanged", b"".join(cut)


def two_checkpoints(folder):
    training = Training(blocks=1)
    for step in (1, 2):
        training.train(step)
        training.save(folder)


def damaged_in_many_ways(folder, file, flips, seed):
    """Damage, load, restore. Returns what went wrong."""
    two_checkpoints(folder)
    path, saved = Path(folder) / "checkpoint-2" / file, Path(folder) / "saved"
    names = {name for name, _ in Training(blocks=1).model.named_parameters()}
    if bmt.rank() == 0:
        shutil.copy(path, saved)
    bmt.synchronize()
    training, wrong = Training(blocks=1), []
    for what, content in damages(saved, flips, seed):
        if bmt.rank() == 0:
            path.write_bytes(content)
        bmt.synchronize()
        with log_lines() as lines:
            step = training.load(folder).step
        bmt.synchronize()
        if content == saved.read_bytes():  # zeros or equal sectors
            continue
        line = " ".join(lines)
        if step != 1 or (bmt.rank() == 0 and "checkpoint-2: " not in line) or (bmt.rank() == 0 and file not in line):
            wrong.append(f"{what}: step {step}, {line}")
        in_data = (
            file.endswith("safetensors") and "do not match the saved checksum" in line and "bytes 0 to" not in line
        )
        if in_data and not any(f"{name} in {file}" in line or f"{name}." in line for name in names):
            wrong.append(f"{what}: no tensor in {line}")
    return wrong


@pytest.mark.parametrize("file", by_default(FILES, "optimizer.safetensors", "manifest.json"))
def test_every_damage(world, tmp_path, file):
    assert world(2)(damaged_in_many_ways, str(tmp_path), file, 6, 1) == [[], []]


def with_frozen_layer(seed=0):
    training = Training(blocks=2, seed=seed)
    training.model.model.layers[0].requires_grad_(False)
    return training


def unfreezes_between(folder):
    """Two checkpoints of trained weights, the newer one of more of them, and damaged."""
    training = with_frozen_layer()
    for step in (1, 2):
        training.train(step)
        training.save(folder, trained_only=True)
        training.model.model.layers[0].requires_grad_(True)
    bmt.synchronize()
    if bmt.rank() == 0:
        damage(Path(folder) / "checkpoint-2" / "optimizer.safetensors")
    bmt.synchronize()
    other = with_frozen_layer(1)
    reason = "cannot replace these values, because it was saved with trained_only"
    expected = rf"checkpoint-2.*checkpoint-1, {reason}.*layers\.0\."
    with pytest.raises(RuntimeError, match=expected):
        other.load(folder)
    other = with_frozen_layer(1)
    before = other.model.state_dict()
    assert other.load(f"{folder}/checkpoint-1").step == 1
    changed = {name for name, value in other.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and not any(".layers.0." in name for name in changed)


def test_an_older_checkpoint_of_fewer_weights(world, tmp_path):
    """Weights of the damaged checkpoint would stay in the model beside those of the older one."""
    world(2)(unfreezes_between, str(tmp_path))


@full
@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("file", FILES)
def test_every_damage_at_many_positions(world, tmp_path, file, seed):
    assert world(2)(damaged_in_many_ways, str(tmp_path), file, 50, seed) == [[], []]


# -- what cannot be read ----------------------------------------------------------------------------------------------


def unreadable(folder, function, name, ranks):
    """Some ranks cannot read a file of the newest checkpoint: a bad sector, or missing rights."""
    two_checkpoints(folder)
    original = getattr(os, function)
    path = Path(folder) / "checkpoint-2" / name

    def fail(where, *arguments, **options):
        of_handle = isinstance(where, int) and os.readlink(f"/proc/self/fd/{where}") == str(path)
        if bmt.rank() in ranks and (of_handle or str(where) == str(path)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(where, *arguments, **options)

    with mock.patch.object(os, function, fail), log_lines() as lines:
        step = Training(blocks=1).load(folder).step
    return step, " ".join(lines)


@pytest.mark.parametrize("ranks", [(1,), *in_full((0,))])
@pytest.mark.parametrize("name", ["optimizer.safetensors", *in_full("state.pt")])
def test_a_bad_sector(world, tmp_path, name, ranks):
    (step, line), (other, _) = world(2)(unreadable, str(tmp_path), "preadv", name, ranks)
    assert step == other == 1
    assert f"rank {ranks[0]}: " in line and name in line and "Input/output error" in line


def bad_manifest(folder, names):
    two_checkpoints(folder)
    original = Path.read_bytes

    def fail(path):
        if path.name == "manifest.json" and path.parent.name in names:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return original(path)

    with mock.patch.object(Path, "read_bytes", fail):
        return Training(blocks=1).load(folder).step


@full
def test_a_manifest_that_cannot_be_read(world, tmp_path):
    assert world(2)(bad_manifest, str(tmp_path), ["checkpoint-2"]) == [1, 1]


@on_ranks(2)
def test_a_folder_that_cannot_be_read(folder):
    with mock.patch.object(Path, "iterdir", side_effect=PermissionError(errno.EACCES, "Permission denied", folder)):
        with pytest.raises(RuntimeError, match=r"load_state.*rank 0: PermissionError.*Permission denied"):
            Training(blocks=1).load(folder)


# -- files that were made to harm ---------------------------------------------------------------------------------


def seal(folder: Path) -> None:
    """Write a manifest that fits the files as they are."""
    manifest = Manifest.read(folder)
    for name in manifest.files:
        data = (folder / name).read_bytes()
        manifest.files[name] = [Checked(0, len(data), zlib.crc32(data))]
    (folder / "manifest.json").write_bytes(manifest.to_bytes())


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def load_one(folder):
    with pytest.raises(RuntimeError, match=r"load_state: .*rank 0: "):
        Training(blocks=1).load(folder)


@pytest.mark.parametrize("how", ["pickle", *in_full("torch")])
def test_a_pickle_does_not_run(world, tmp_path, how):
    world(2)(two_checkpoints, str(tmp_path))
    folder, ran = tmp_path / "checkpoint-2", tmp_path / "ran"
    if how == "torch":
        torch.save({"ranks": Harm(ran)}, folder / "state.pt")
    else:
        (folder / "state.pt").write_bytes(pickle.dumps(Harm(ran)))
    seal(folder)
    world(2)(load_one, str(tmp_path))
    assert not ran.exists()


@pytest.mark.parametrize(
    "name", ["a/../../b", *in_full("../outside", "/etc/passwd", "..", ".", "", "a\0b", "checkpoint-1/x")]
)
def test_a_manifest_names_no_file_elsewhere(tmp_path, name):
    manifest = Manifest(1, 1, 1, {})
    manifest.files[name] = [Checked(0, 1, 0)]
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
    with pytest.raises(Damaged, match="lists files outside its folder"):
        Manifest.read(tmp_path)


@full
@pytest.mark.parametrize("content", ["[" * 10**5, *in_full("[]", "{}", '{"files": 3}', '{"files": {"a": [[1]]}}')])
def test_a_manifest_of_nonsense(tmp_path, content):
    outer = {"hf_bmtrain": 1, "crc": zlib.crc32(content.encode()), "content": content}
    (tmp_path / "manifest.json").write_text(json.dumps(outer))
    with pytest.raises(Damaged, match=r"manifest.json cannot be read"):
        Manifest.read(tmp_path)


@full
@pytest.mark.parametrize(
    "place", ["../model.safetensors", *in_full("/etc/passwd", ".", "..", ".hidden", "a/b", 3, None, ["x"])]
)
def test_an_index_names_no_file_elsewhere(tmp_path, place):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": place}}))
    with pytest.raises(Damaged, match=r"model.safetensors.index.json"):
        find_tensors(tmp_path, "model")


def header(entries, length=None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


LIES = {
    "long": (header(entry(), 2**63), 8), "negative shape": (header(entry((-1, -2))), 8),
    "large shape": (header(entry((2**40, 2**40))), 8), "fraction": (header(entry((2.0,))), 8),
    "text": (header(entry("2")), 8), "beyond": (header(entry((4,), (0, 16))), 8),
    "gap": (header(entry((1,), (4, 8))), 8),
    "reverse": (header(entry((2,), (8, 0))), 8), "dtype": (header(entry(dtype="F33")), 8),
    "overlap": (header({**entry(), "v": entry()["w"]}), 8), "short": (b"1234", 0), "list": (header([]), 0),
    "number": (header({"w": 3}), 0), "nested": (header(b"[" * 10**5), 0), "extra": (header(entry()), 9),
}  # fmt: skip


@pytest.mark.parametrize("lie", by_default(LIES, "beyond", "overlap", "negative shape"))
def test_a_header_that_lies(tmp_path, lie):
    head, size = LIES[lie]
    (tmp_path / "model.safetensors").write_bytes(head + bytes(size))
    with pytest.raises(Damaged, match=r"model.safetensors"):
        read_header(tmp_path / "model.safetensors")


@full
def test_a_moment_of_another_shape(world, tmp_path):
    """Its elements would be read from the next tensor."""
    world(2)(two_checkpoints, str(tmp_path))
    path = tmp_path / "checkpoint-2" / "optimizer.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert b"[24,24]" in data[:length]
    path.write_bytes(data[: 8 + length].replace(b"[24,24]", b"[12,48]", 1) + data[8 + length :])
    seal(path.parent)
    world(2)(load_one, str(tmp_path))


MEASURED = """
import resource, sys, time
from pathlib import Path
from hf_bmtrain.checkpoint.header import read_header
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
tensors = read_header(Path(sys.argv[1]))
print(len(tensors), time.process_time() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000)
"""


@full
@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=[full, pytest.mark.slow])])
def test_a_long_legal_header(tmp_path, count):
    """80 bytes for each tensor."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        header({f"layer.{i}.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(count)})
    )
    command = [sys.executable, "-c", MEASURED, str(path)]
    found, seconds, megabytes = subprocess.check_output(command, env=environment(), text=True).split()
    print(f"\n{path.stat().st_size:,} bytes, {found} tensors: {float(seconds):.1f} s, {float(megabytes):.0f} MB")
    assert int(found) == count and float(seconds) < 40 * count / 1e6 + 1 and float(megabytes) < 1400 * count / 1e6 + 20
