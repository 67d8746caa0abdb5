"""A child that crashes, hangs or swallows memory costs its job, and nothing else."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from scanloom.core import Flag, Reason, ScanError
from scanloom.io.system import sandbox
from scanloom.io.system.sandbox import AVAILABLE, SandboxLimits, run_sandboxed, shared_empty
from support import sandbox_jobs as jobs

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="children have limits on Linux only")

LIMITS = SandboxLimits(memory_bytes=64 << 20, silence_s=30, total_s=30)
SHORT = SandboxLimits(memory_bytes=64 << 20, silence_s=0.2, total_s=300)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Limits of tests are short: on a busy machine, a child may get little of them by the clock."""
    monkeypatch.setattr(sandbox, "_PATIENCE", 1000)


def code_of(job, *arguments, limits=LIMITS):
    with pytest.raises(ScanError) as caught:
        run_sandboxed(job, *arguments, limits=limits)
    return caught.value.code


def workers() -> list[psutil.Process]:
    """Return the sandbox's processes: its helper, and what that has started, with zombies."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # another test's, which has just ended
            if "sandbox_server" in " ".join(child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2**40,
        0.1,
        "\u00e4\udc80",
        b"\0\xff",
        [1, (2, "x"), {"k": [None]}],
        {3: "three"},
        Reason.TRUNCATED,
        Flag.SHEARED,
    ],
)
def test_plain_values_go_there_and_back(value):
    assert run_sandboxed(jobs.give_back, value, limits=LIMITS) == value


def test_a_path_means_the_same_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_sandboxed(jobs.give_back, Path("a"), limits=LIMITS) == tmp_path / "a"


@pytest.mark.parametrize("kind", [np.uint8, ">i2", np.float32, np.complex64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_go_there_and_back(kind, order):
    array = np.asarray(np.arange(24).reshape(2, 3, 4).astype(kind), order=order)
    back = run_sandboxed(jobs.give_back, array, limits=LIMITS)
    np.testing.assert_array_equal(back, array)
    assert (back.dtype, back.strides) == (array.dtype, array.strides)


def test_a_child_writes_into_the_callers_array():
    array = shared_empty((3, 4), np.float32)
    assert run_sandboxed(jobs.fill, array[1], 7.0, limits=LIMITS) != os.getpid()
    np.testing.assert_array_equal(array, np.repeat([[0], [7], [0]], 4, axis=1))


def test_arrays_made_in_the_child_come_back():
    text, array, copied = run_sandboxed(jobs.make, 9, limits=LIMITS)
    assert text == "made"
    np.testing.assert_array_equal(array, np.repeat(np.arange(9)[:, None], 2, axis=1))
    np.testing.assert_array_equal(copied, np.arange(0, 9, 2))


def test_objects_are_not_sent():
    with pytest.raises(TypeError):
        run_sandboxed(jobs.give_back, np.array([object()]), limits=LIMITS)
    assert workers() == [p for p in workers() if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (jobs.segfault, "DAMAGED"),
        (jobs.abort, "DAMAGED"),
        (jobs.be_killed, "OUT_OF_MEMORY"),
        (jobs.babble, "DAMAGED"),
        (jobs.refuse, "TRUNCATED"),
        (jobs.have_a_fault, "INTERNAL"),
    ],
)
def test_what_goes_wrong_has_its_code_and_the_next_job_runs(job, code):
    assert code_of(job) == code
    assert run_sandboxed(jobs.give_back, 1, limits=LIMITS) == 1
    assert len(workers()) == 1  # the helper: no worker, no zombie is left


def test_a_limit_of_processor_time_convicts_no_file():
    with pytest.raises(ScanError, match="ulimit -t") as caught:
        run_sandboxed(jobs.tire, limits=LIMITS)
    assert caught.value.reason is Reason.ENVIRONMENT


def test_an_error_does_not_tell_what_an_exception_said():
    with pytest.raises(ScanError) as caught:
        run_sandboxed(jobs.have_a_fault, limits=LIMITS)
    assert "Nobody" not in str(caught.value)
    assert "KeyError in sandbox_jobs.py" in caught.value.detail


def test_a_hanging_child_is_given_up():
    start = time.monotonic()
    assert code_of(jobs.hang, limits=SHORT) == "DECODE_TIMEOUT"
    assert time.monotonic() - start < 200
    assert len(workers()) == 1


def test_a_child_that_waits_convicts_no_file(monkeypatch):
    """As on a busy machine: it may wait for longer than it may compute, but not for ever."""
    limits = SandboxLimits(memory_bytes=64 << 20, silence_s=0.1, total_s=30)
    assert run_sandboxed(jobs.wait, 0.3, limits=limits) == 0.3
    monkeypatch.setattr(sandbox, "_PATIENCE", 10)
    assert code_of(jobs.wait, 60.0, limits=limits) == "ENVIRONMENT"
    assert len(workers()) == 1


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_a_limit_of_open_files_convicts_no_file(free):
    """A worker has a socket; of its arrays each has a descriptor, and another when it is mapped."""
    assert run_sandboxed(jobs.give_back, 1, limits=LIMITS) == 1
    with open_files_limited(free):
        assert code_of(jobs.make, 9) == "ENVIRONMENT"
    assert run_sandboxed(jobs.give_back, 1, limits=LIMITS) == 1


@pytest.mark.parametrize("free", [0, 1])
def test_no_more_open_files_are_no_lack_of_memory(free):
    with open_files_limited(free), pytest.raises(ScanError, match="EMFILE"):
        shared_empty((2,), np.uint8)


@contextmanager
def open_files_limited(free: int) -> Iterator[None]:
    """Let this process open no more than so many further files."""
    lowest = os.dup(0)
    os.close(lowest)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_progress_prolongs_the_silence_but_not_the_whole():
    slow = SandboxLimits(memory_bytes=64 << 20, silence_s=0.2, total_s=30)
    assert run_sandboxed(jobs.dawdle, 6, 0.05, limits=slow) == 6
    hurried = SandboxLimits(memory_bytes=64 << 20, silence_s=5, total_s=0.2)
    assert code_of(jobs.dawdle, 1000, 0.05, limits=hurried) == "DECODE_TIMEOUT"


def test_memory_beyond_the_limit_is_refused():
    assert run_sandboxed(jobs.swallow, 16 << 20, limits=LIMITS) == 16 << 20
    assert code_of(jobs.swallow, 512 << 20) == "TOO_LARGE"
    assert code_of(jobs.swallow_in_c, 512 << 20) == "DAMAGED"  # it crashed on the null pointer


def test_a_crash_does_not_touch_the_neighbours():
    """Good and bad jobs at once, from several threads."""
    arrays = [shared_empty((64, 64), np.int32) for _ in range(12)]

    def result_of(n: int) -> str:
        if n % 3 == 0:
            return code_of((jobs.segfault, jobs.hang)[n % 2], limits=SHORT)
        run_sandboxed(jobs.fill, arrays[n], n, limits=LIMITS)
        return "good"

    with ThreadPoolExecutor(4) as pool:
        reported = list(pool.map(result_of, range(12)))
    assert reported == ["DAMAGED", "good", "good", "DECODE_TIMEOUT", "good", "good"] * 2
    for n, array in enumerate(arrays):
        assert (array == (n if n % 3 else 0)).all()


def test_threads_that_end_do_not_take_the_helper_with_them():
    for _ in range(3):
        thread = threading.Thread(
            target=run_sandboxed, args=(jobs.give_back, 1), kwargs={"limits": LIMITS}
        )
        thread.start()
        thread.join()
    [helper] = workers()
    assert run_sandboxed(jobs.give_back, 2, limits=LIMITS) == 2
    assert workers() == [helper]


def test_a_helper_that_was_killed_is_replaced():
    run_sandboxed(jobs.give_back, 1, limits=LIMITS)
    [helper] = workers()
    helper.kill()
    assert run_sandboxed(jobs.give_back, 2, limits=LIMITS) == 2


def test_jobs_whose_helper_was_killed_are_no_damaged_files_and_the_next_helper_lives(tmp_path):
    """Each of them ended its worker at the new helper, which did not know it, and died of that."""
    places = [tmp_path / name for name in "abc"]
    with ThreadPoolExecutor(3) as pool:
        codes = [pool.submit(code_of, jobs.tell_and_hang, place) for place in places]
        until(lambda: all(place.exists() for place in places))
        psutil.Process(int(places[0].read_text())).parent().kill()
        assert {code.result() for code in codes} == {"OUT_OF_MEMORY"}
    run_sandboxed(jobs.give_back, 1, limits=LIMITS)
    [helper] = workers()
    assert sandbox._SERVER.end(int(places[0].read_text())) is None
    assert workers() == [helper]


def test_a_helper_that_is_late_convicts_no_file(monkeypatch):
    sandbox._SERVER.stop()
    monkeypatch.setattr(sandbox, "_FORK_TIMEOUT_S", 1e-3)  # less than Python's own start
    assert code_of(jobs.give_back, 1) == "ENVIRONMENT"
    monkeypatch.undo()
    assert run_sandboxed(jobs.give_back, 1, limits=LIMITS) == 1


def test_nothing_lives_on_after_the_parent_was_killed(tmp_path):
    """SIGKILL lets nobody clean up: the kernel has to."""
    reported = tmp_path / "worker"
    text = (
        "import sys; sys.path[:] = eval(sys.argv[1])\n"
        "import pathlib, scanloom.io.system.sandbox as s\n"
        "from support import sandbox_jobs\n"
        "s.run_sandboxed(sandbox_jobs.tell_and_hang, pathlib.Path(sys.argv[2]),"
        " limits=s.SandboxLimits(1 << 28, 60, 60))"
    )
    parent = subprocess.Popen([sys.executable, "-c", text, repr(sys.path), str(reported)])
    until(reported.exists)
    worker = psutil.Process(int(reported.read_text()))
    helper = worker.parent()
    assert helper.parent().pid == parent.pid
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not alive(worker) and not alive(helper))


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_program_that_ends_leaves_no_process_and_no_warning():
    text = (
        "import sys; sys.path[:] = eval(sys.argv[1])\n"
        "import scanloom.io.system.sandbox as s\n"
        "from support import sandbox_jobs\n"
        "print(s.run_sandboxed(sandbox_jobs.fill, s.shared_empty((2,), 'u1'), 1,"
        " limits=s.SandboxLimits(1 << 28, 60, 60)))"
    )
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", text, repr(sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert not psutil.pid_exists(int(done.stdout))


def until(holds, seconds: float = 120) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
