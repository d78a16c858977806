"""One training step passes through few files, and the tracer that counts them misses none."""

import threading

from cases import full
from step_path import LANDMARKS, Tracer, trace

FILES = 27
"""Files of the package that a step may pass through.

Of these, 26 are the engine's and one is `features/replay/replay.py`. A step without an Accelerator, without inf or nan,
and without torch's own clipping enters no file that serves only these.
"""

SOURCE = """
class Defined:
    made = [value for value in range(3)]

    def method(self):
        return inner()

def inner():
    return 1
"""


@full
def test_a_step_passes_through_few_files_and_by_the_landmarks():
    phases = trace()
    for visits in phases.values():
        assert len({visit.file for visit in visits}) == len(visits)
    assert len(phases["step"]) <= FILES
    passed = {visit.file for phase in phases.values() for visit in phase}
    assert passed.issuperset(LANDMARKS)
    assert {"engine/comm/communicator.py", "engine/blocks/autograd.py", "engine/optim/adam.py"} <= passed, (
        "communication, backward, update"
    )


def test_functions_are_recorded_on_every_thread_and_module_bodies_are_not(tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.py").write_text(SOURCE)
    tracer, modules = Tracer(tmp_path), {}
    with tracer.record():
        for name in ("one", "two", "three"):
            modules[name] = {"__name__": name}
            exec(compile((tmp_path / f"{name}.py").read_text(), str(tmp_path / f"{name}.py"), "exec"), modules[name])
        modules["two"]["Defined"]().method()
        thread = threading.Thread(target=modules["one"]["inner"])
        thread.start()
        thread.join()
    files = {visit.file: (visit.first.split(".")[-1], visit.functions) for visit in tracer.visits()}
    assert files["two.py"] == ("method", 2)
    assert files["one.py"] == ("inner", 1)
    assert list(files) == ["two.py", "one.py"]
    with tracer.record():
        pass
    assert tracer.visits() == []
