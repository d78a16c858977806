"""The launchers of recipes/guides/launchers.md, as printed there: a short job equals plain torch in one process."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cases import full, slow
from launched_job import plain_losses
from processes import environment, kill_all
from ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
JOB = Path(__file__).with_name("launched_job.py")

SRUN = """
test "$1" = --ntasks || exit 64
export SLURM_NTASKS="$2"
shift 2
task=0 tasks=
while [ "$task" -lt "$SLURM_NTASKS" ]; do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks="$tasks $!" task=$((task + 1))
done
status=0
for task in $tasks; do wait "$task" || status=$?; done
exit "$status"
"""
"""What stands for Slurm: starts the command N times and tells each which it is."""

PROGRAMS = {
    "python": f'exec "{sys.executable}" "$@"',
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    "accelerate": f'exec "{sys.executable}" -m accelerate.commands.accelerate_cli "$@"',
    "srun": SRUN,
}


def commands() -> dict[str, str]:
    """{on: command} of the table in recipes/guides/launchers.md."""
    section = re.search(
        r"^## Commands$(.*?)^## ",
        (ROOT / "recipes" / "guides" / "launchers.md").read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert section is not None
    return dict(re.findall(r"^\| ([^|]+?) \| `([^`]+)`", section[1], re.MULTILINE))


@pytest.fixture
def folder(tmp_path):
    """Where the command of a user runs: their script, and the programs that it names."""
    (tmp_path / "train.py").symlink_to(JOB)
    for name, lines in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)
    return tmp_path


def start(folder: Path, command: str, host: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    """`command` with `train.py result.json` for `train.py`, as a user would type it."""
    line, path = command.replace("train.py", "train.py result.json"), f"{folder}/bin:{os.environ['PATH']}"
    return subprocess.Popen(
        [*host, "bash", "-c", line], cwd=folder, env=environment(PATH=path, **variables), text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(status, output) of each; whatever happens, none goes on."""
    try:
        with ThreadPoolExecutor() as readers:
            outputs = list(readers.map(lambda process: process.communicate(timeout=SECONDS)[0], processes))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
    return [(process.returncode, output) for process, output in zip(processes, outputs)]


def check(folder: Path, processes: list[subprocess.Popen[str]], places: list[list[int]]) -> None:
    """All end well, and trained as `len(places)` ranks; places: (rank, local rank) of each."""
    for status, output in finish(processes):
        assert status == 0, output
    result = json.loads((folder / "result.json").read_text())
    assert result["places"] == places
    expected = plain_losses(len(places))
    assert expected[-1] < 0.9 * expected[0]
    assert result["losses"] == pytest.approx(expected, rel=1e-5)


COMMANDS = commands()


ONE_HOST = [
    ("Slurm", 2),
    ("2 processes on CPU, Accelerate", 2),
    pytest.param("one GPU, or one process on CPU", 1, marks=slow),
    pytest.param("2 processes on CPU", 2, marks=slow),
    pytest.param("4 GPUs, the older launcher", 4, marks=slow),
]  # fmt: skip


@full
@pytest.mark.parametrize(("on", "size"), ONE_HOST)
def test_one_host(folder, on, size):
    command = COMMANDS[on].replace("--ntasks N", f"--ntasks {size}")
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if on == "Slurm" else {}
    check(folder, [start(folder, command, **variables)], [[rank, rank] for rank in range(size)])


RAY = """
import ray
from launched_job import train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

ray.init(num_cpus=2, include_dashboard=False)
scaling = ScalingConfig(num_workers=2)
TorchTrainer(train, train_loop_config={"result": "FOLDER/result.json"}, scaling_config=scaling).fit()
"""


@full
def test_ray(folder):
    """The function given to Ray Train's TorchTrainer is the script; Ray has made the process group."""
    pytest.importorskip("ray")
    (folder / "ray_train.py").write_text(RAY.replace("FOLDER", str(folder)))
    started = start(folder, "python ray_train.py", HOME=str(folder), RAY_AUTH_MODE="disabled")
    check(folder, [started], [[0, 0], [1, 1]])


# -- two hosts ------------------------------------------------------------------------------------------------

RESTARTED = """
import os, signal, sys
import torch, hf_bmtrain as bmt
bmt.init_distributed(timeout=60)
assert bmt.sum_loss(torch.tensor(float(bmt.rank()))) == 0.5
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and bmt.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
bmt.synchronize()
bmt.print_rank("done after", os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


@full
def test_restarted_by_torchrun(tmp_path):
    """The ranks do not try to connect to those of the first start, whose addresses torchrun's store still has."""
    (tmp_path / "job.py").write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", "2", str(tmp_path / "job.py")]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        try:
            output, _ = job.communicate(timeout=SECONDS)
        finally:
            kill_all(job)
    assert job.returncode == 0 and "done after 1" in output, output[-4000:]


ADDRESSES = "10.213.7.1", "10.213.7.2"
WIRE = "wire0"


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def hosts():
    """Two network namespaces with a cable between them, each with a name of its own: what to put before a command."""
    # Namespaces take these programs and root's rights, which a machine of CI may not give.
    if not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("needs the programs ip and unshare")
    names = [f"hf-bmtrain-{os.getpid()}-{number}" for number in range(2)]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", WIRE, "netns", names[0], "type", "veth", "peer", "name", WIRE, "netns", names[1])
        for name, address in zip(names, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/24", "dev", WIRE)
            for device in ("lo", WIRE):
                ip("-n", name, "link", "set", device, "up")
            subprocess.run(["unshare", "--uts", "hostname", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine makes no network namespaces: {error}")
    else:
        rename = 'hostname {0} && exec "$@"'
        yield [
            ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename.format(name), "sh") for name in names
        ]
    finally:
        for name in made:
            ip("netns", "delete", name)


def start_hosts(folder, hosts, options: str = "") -> list[subprocess.Popen[str]]:
    command = COMMANDS["2 hosts"].replace("HOST", ADDRESSES[0]).replace("--nproc-per-node 4", "--nproc-per-node 1")
    command += options
    return [
        start(folder, command.replace("-rank R", f"-rank {number}"), host, GLOO_SOCKET_IFNAME=WIRE)
        for number, host in enumerate(hosts)
    ]


@full
def test_two_hosts(folder, hosts):
    check(folder, start_hosts(folder, hosts), [[0, 0], [1, 0]])


@full
def test_two_hosts_cannot_pull(folder, hosts):
    for status, output in finish(start_hosts(folder, hosts, " --gather peer")):
        assert status != 0
        assert "the ranks are on 2 hosts" in output
