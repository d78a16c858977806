"""The line and the exit code of a program that leaves by `sys.exit`, `exit` or `quit`."""

import os
import subprocess
import sys
import threading
from unittest import mock

from cases import full
from hf_bmtrain.faults.process import install
from hf_bmtrain.faults.status import Status
from processes import environment

PROGRAM = """
import atexit
import os
import sys
import threading

from hf_bmtrain.faults.process import Exits

def leave(status=None):
    sys.exit(status)  # here

def caught():
    try:
        leave(5)
    except SystemExit:
        pass

def in_thread():
    thread = threading.Thread(target=leave, args=(5,))
    thread.start()
    thread.join()

def raised():
    raise SystemExit(6)

def by_name():
    exit(code=7)  # there

def in_fork():
    if os.fork() == 0:
        leave(5)  # its exit handler prints as well
    os.wait()
    leave(8)  # parent

def twice():
    try:
        leave(5)
    except SystemExit:
        quit(9)  # again

CASES = [leave, lambda: leave(3), lambda: leave("no more"), caught, in_thread, raised, by_name, in_fork, twice]
for case in CASES:
    if os.fork() == 0:
        break
    _, code = os.wait()
    print(os.waitstatus_to_exitcode(code), flush=True)
else:
    os._exit(0)
before, rank = (sys.exit, exit, quit), os.getpid()
exits = Exits()
restore = exits.install()

def tell():
    restore()
    assert (sys.exit, exit, quit) == before
    if os.getpid() == rank:
        print(exits.code, exits.last, "", sep="|", end="", flush=True)

atexit.register(tell)
case()
"""
HERE, THERE, PARENT, AGAIN = (
    next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith(f"# {mark}"))
    for mark in ("here", "there", "parent", "again")
)
LINES = PROGRAM.splitlines()
LAST, CASES = (
    next(number for number, line in enumerate(LINES, 1) if line.startswith(begin)) for begin in ("case()", "CASES = [")
)
EXPECTED = [
    f"0|sys.exit() at program.py:{HERE} (leave, from line {LAST})|0",
    f"3|sys.exit(3) at program.py:{HERE} (leave, from line {CASES})|3",
    f"1|sys.exit('no more') at program.py:{HERE} (leave, from line {CASES})|1",
    f"5|sys.exit(5) at program.py:{HERE} (leave, from line",  # caught: it was the last call all the same
    "0||0",
    "0||6",
    f"7|exit(7) at program.py:{THERE} (by_name, from line {LAST})|7",
    f"8|sys.exit(8) at program.py:{HERE} (leave, from line {PARENT})|8",
    f"9|quit(9) at program.py:{AGAIN} (twice, from line {LAST})|9",
]


@full
def test_the_line_and_the_code_of_an_exit(tmp_path):
    """Also of one that is caught; not of one that ends a thread or another process."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command, variables = [sys.executable, "program.py"], environment()
    done = subprocess.run(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True, timeout=200)
    told = done.stdout.splitlines()
    assert len(told) == len(EXPECTED)
    assert all(line.startswith(expected) for line, expected in zip(told, EXPECTED)), told


def test_a_forked_child_does_not_end_its_rank(capfd):
    """It told the other ranks that its parent had left or raised, and took part in their next operation."""
    world, watch, before = mock.Mock(), mock.Mock(problem=None, **{"raised_before.return_value": None}), sys.excepthook
    with mock.patch("atexit.register") as register:
        restore = install(world, watch, [], False)
    child = os.fork()
    if not child:
        try:
            sys.excepthook(ValueError, ValueError("in the child"), None)
            register.call_args.args[0]()
        finally:
            os._exit(len([*watch.mock_calls, *world.mock_calls]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    restore()
    assert sys.excepthook is before and not watch.mock_calls
    told = capfd.readouterr().err
    assert "ValueError: in the child" in told and "other ranks" not in told


def test_a_syntax_error_is_named():
    watch = mock.Mock(problem=None, **{"raised_before.return_value": None, "status.blamed": []})
    restore = install(mock.Mock(), watch, [], False)
    try:
        compile("a =", "settings.py", "exec")
    except SyntaxError as error:
        sys.excepthook(SyntaxError, error, None)
    restore()
    assert watch.end.call_args.args[0].startswith("raised SyntaxError: invalid syntax (settings.py, line 1)")


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch):
    """sys.exit raised FileNotFoundError, and a rank that failed told no other rank."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status = Status()
    status.look(threading.get_ident())
    assert "test_ending.py:" in status.place
