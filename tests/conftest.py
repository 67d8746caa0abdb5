"""Settings of all tests."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress

import numpy as np
import pytest

from scanloom.core import user_cache_folder
from scanloom.own_python import make_private_folder

# Threads of PyTorch that wait do not spin: two test processes on two cores take half the time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# pytest-xdist tells workers the terminal's width: outputs would not be as in a pipe
os.environ.pop("COLUMNS", None)

with suppress(ImportError):  # the GPU's tests run without it, too
    from hypothesis import HealthCheck, settings

    # The same examples in each run, however busy the machine is
    settings.register_profile(
        "certain",
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("certain")

ENDS_WITHIN_S = 300
"""Of the process of the tests, after the last one; longer than the wait for one of its helpers."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for garbage neither while tests are collected nor among tests and modules later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark all cases of a `sampled(n)` test as thorough but every n-th, from the first."""
    cases: Counter[str] = Counter()
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            test, (n,) = item.nodeid.partition("[")[0], marker.args
            if cases[test] % n:
                item.add_marker(pytest.mark.thorough)
            cases[test] += 1


def pytest_runtest_setup() -> None:
    """Draw the same numbers in a test whatever ran before it; PyTorch begins with others."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # that of libraries
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


def pytest_sessionfinish() -> None:
    """Let no thread or process that a test left keep this one from ending: say where it waits."""
    faulthandler.dump_traceback_later(ENDS_WITHIN_S, exit=True, file=sys.__stderr__)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measurements of engines, rates and indexes of other runs from changing results.

    Compiled code is shared, from the first test on: it takes a minute to compile.
    """
    compiled = user_cache_folder() / "numba"
    with suppress(OSError):  # a home that can't be written: each module compiles
        make_private_folder(compiled)
    folder = tmp_path_factory.mktemp("cache")
    (folder / "scanloom").mkdir(mode=0o700)
    if compiled.is_dir():
        (folder / "scanloom" / "numba").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> str:
    """The layout of `OUT/cases`: "flat", or "fanned" as asked for by `both_layouts`."""
    return str(getattr(request, "param", "flat"))
