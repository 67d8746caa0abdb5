"""Settings of all tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from scanloom.core import user_cache_folder

# Threads of PyTorch that wait do not spin: two test processes on two cores take half the time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


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


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measurements of engines, rates and indexes of other runs from changing results.

    Compiled code is shared: it takes a minute to compile.
    """
    compiled = user_cache_folder() / "numba"
    folder = tmp_path_factory.mktemp("cache")
    (folder / "scanloom").mkdir(mode=0o700)
    if compiled.is_dir():
        (folder / "scanloom" / "numba").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield
