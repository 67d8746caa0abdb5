"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from scanloom.core import user_cache_folder

# Threads of PyTorch that wait do not spin: two test processes on two cores take half the time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


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
