"""Models that change after the recipe was made are refused, wherever they are loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from scanloom.cards.card_file import card_digest
from scanloom.convert.store import find_model
from scanloom.core import Reason, ScanError
from scanloom.engine.case.models import check_unchanged, load_models
from scanloom.engine.prepare import OutputTarget
from scanloom.engine.segment import iter_segment
from scanloom.engine.worker.messages import ChildSetup
from scanloom.engine.worker.supervisor import WorkerSupervisor
from scanloom.engine.workflow.schema import Execution
from scanloom.options import segment_options
from support import engine_models as em
from support.commands import write_tiny_bundle
from support.real_run import other_weights

SOFT_TISSUE_HU = 60
"""Of the block in a scan that a model for CT accepts."""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_tiny_bundle(tmp_path / "bundles")


def test_changed_and_missing_models_are_refused(bundle: Path) -> None:
    models, digests = [str(bundle)], [card_digest(find_model(str(bundle)))]
    check_unchanged(models, digests)

    other_weights(bundle)
    with pytest.raises(ScanError, match="MODEL_CHANGED"):
        load_models(models, digests, Execution(device="cpu"))
    shutil.rmtree(bundle)
    with pytest.raises(ScanError, match="MODEL_CHANGED"):
        check_unchanged(models, digests)


@pytest.mark.slow
def test_an_engine_that_is_started_again_refuses_weights_that_changed(
    bundle: Path, tmp_path: Path
) -> None:
    models, digests = [str(bundle)], [card_digest(find_model(str(bundle)))]
    predictors = partial(load_models, models, digests, Execution(device="cpu"))
    engine = WorkerSupervisor(
        ChildSetup(OutputTarget(tmp_path / "out", bytes(32)), predictors), 120.0
    )
    try:
        first = engine.run(em.make_case(tmp_path, "a", SOFT_TISSUE_HU)).record
        other_weights(bundle)
        # Loaded before, so still right
        kept = engine.run(em.make_case(tmp_path, "b", SOFT_TISSUE_HU)).record
        assert engine._child
        engine._child.kill()
        with pytest.raises(ScanError) as fault:
            engine.run(em.make_case(tmp_path, "c", SOFT_TISSUE_HU))
    finally:
        engine.stop()

    assert [record and record.reason for record in (first, kept)] == [None, None]
    assert first is not None
    assert kept is not None
    assert fault.value.reason is Reason.MODEL_CHANGED


def test_segment_refuses_weights_that_changed_after_the_recipe(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    scan = em.make_case(tmp_path, "a").series.files[0]
    options = segment_options(
        models=(str(bundle),), out=tmp_path / "out", modality="CT", device="cpu"
    )

    class Paths(list[Path]):
        """Paths that are taken after the recipe was made: then the weights change."""

        def __iter__(self) -> Iterator[Path]:
            other_weights(bundle)
            return super().__iter__()

    with pytest.raises(ScanError) as caught:
        list(iter_segment(Paths([scan]), options))

    assert caught.value.reason is Reason.MODEL_CHANGED
    assert not list((tmp_path / "out").glob("cases/*"))
