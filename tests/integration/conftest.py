"""Fixtures that several modules of runs share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from support import engine_models as em
from support.commands import write_tiny_bundle
from support.make_run import Runs
from support.warm_workers import WARM_WORKERS


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MONAI bundle, which no test changes."""
    return write_tiny_bundle(tmp_path_factory.mktemp("model") / "bundles")


@pytest.fixture(scope="session")
def warm_workers() -> SimpleNamespace:
    """Stands in for `subprocess`: worker processes are forked from one that has all imports."""
    return WARM_WORKERS


@pytest.fixture
def runs(
    tmp_path: Path,
    model: Path,
    warm_workers: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> Runs:
    """Runs in this process, by formula, over an archive that is empty at first."""
    (tmp_path / "archive").mkdir()
    formula_runs = Runs(tmp_path, tmp_path / "archive", model)
    for name in ("FORMULA", "FORMULA_SECONDS", "SCANLOOM_KEY"):
        monkeypatch.setenv(name, formula_runs.environment[name])
    monkeypatch.setattr("scanloom.engine.worker.supervisor.subprocess", warm_workers)
    monkeypatch.setattr("scanloom.engine.run.model_loader", em.formula_loader)
    return formula_runs
