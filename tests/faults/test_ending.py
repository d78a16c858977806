"""The line and the exit code of a program that leaves by `sys.exit`, `exit` or `quit`."""

import subprocess
import sys

from processes import environment

PROGRAM = """
import atexit
import os
import sys
import threading
from types import SimpleNamespace

from hf_bmtrain.faults.process import Departure

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
    exit(7)  # there

def in_fork():
    status.pid = 0  # the rank is another process
    leave(8)

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
status = SimpleNamespace(pid=os.getpid(), place="", ended="")
departure = Departure(SimpleNamespace(status=status, end=lambda how: setattr(status, "ended", how)))
atexit.register(lambda: print(departure.code, status.ended, status.place, "", sep="|", end="", flush=True))
case()
"""
HERE, THERE, AGAIN = (
    next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith(f"# {mark}"))
    for mark in ("here", "there", "again")
)
LAST = len(PROGRAM.splitlines())
EXPECTED = [
    f"0|has left the program|program.py:{HERE} (leave, from line {LAST}), in sys.exit()|0",
    f"3|has left the program|program.py:{HERE} (leave, from line {LAST - 11}), in sys.exit(3)|3",
    f"1|has left the program|program.py:{HERE} (leave, from line {LAST - 11}), in sys.exit('no more')|1",
    "0|||0",
    "0|||0",
    "0|||6",
    f"7|has left the program|program.py:{THERE} (by_name, from line {LAST}), in exit(7)|7",
    "0|||8",
    f"9|has left the program|program.py:{AGAIN} (twice, from line {LAST}), in quit(9)|9",
]


def test_the_line_and_the_code_of_an_exit(tmp_path):
    """Not of one that is caught, or that ends a thread or another process."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command, variables = [sys.executable, "program.py"], environment()
    done = subprocess.run(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True, timeout=200)
    assert done.stdout.splitlines() == EXPECTED
