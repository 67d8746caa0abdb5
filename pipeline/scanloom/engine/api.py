"""Python interface to the commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.cards.store import find_model
from scanloom.core import CaseRecord, ComputeOptions, settle_in
from scanloom.engine.segment import segment_options, segment_paths

if TYPE_CHECKING:
    from scanloom.engine.case.types import Predictor


def load_model(name: str, *, device: str = "auto", precision: str = "auto") -> Predictor:
    """Load a model; its `predict(volume)` labels one volume after another.

    Parameters
    ----------
    name : str
        A name that `scanloom models list` shows, or the folder of a bundle.
    device : str
        "auto", "cpu", "cuda" or "cuda:N".
    precision : str
        "auto", "float32" or "half".

    Raises
    ------
    ScanError
        If there is no such model, it can't be expressed or trusted, or the device is not there.
    """
    from scanloom.inference.combined.composite import make_predictor

    settle_in()
    compute = ComputeOptions(precision=precision)  # type: ignore[arg-type]
    return make_predictor(find_model(name), compute, device=device)


def segment(
    paths: str | Path | Sequence[str | Path],
    *,
    model: str | Sequence[str],
    out: str | Path,
    **options: Any,
) -> tuple[CaseRecord, ...]:
    """Segment scans and publish a case folder for each, as `scanloom segment` does.

    Parameters
    ----------
    paths : path, or sequence of paths
        Paths as in `load_volume`.
    model : str, or sequence of str
        Names or bundle folders.
    out : path
        The output folder.
    **options
        Fields of `scanloom.engine.segment.SegmentOptions`, such as `series`, `device`, `outputs`,
        and of the options objects in it, such as `gaps` or `precision`.

    Returns
    -------
    tuple of CaseRecord
        One for each path, in order, or for each series with `series="all"`: its `folder`, or the
        `reason` for which nothing was published.

    Raises
    ------
    ScanError
        If the models, the key or the output folder cannot be used.
    """
    settle_in()
    models = (model,) if isinstance(model, str) else tuple(model)
    request = segment_options(models=models, out=Path(out), **options)
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    return segment_paths([Path(path) for path in listed], request)
