"""Python interface to the commands."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace as replaced
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.cards.card import HEAD
from scanloom.cards.card_file import card_digest
from scanloom.cards.check import check_scan
from scanloom.convert.store import find_model
from scanloom.core import CaseRecord, ComputeOptions, Flag, Segmentation, Volume, settle_in
from scanloom.core.errors import check_type, in_python
from scanloom.core.paths import given_path
from scanloom.core.text import parse_bytes
from scanloom.engine.case.models import find_unchanged
from scanloom.engine.case.writers import conditions_of
from scanloom.engine.default_model import default_model
from scanloom.engine.results.tables import read_measurements_table
from scanloom.engine.segment import iter_segment
from scanloom.io.output.layout import no_results
from scanloom.options import (
    Dates,
    Engine,
    FolderNaming,
    Gaps,
    Mirror,
    Modality,
    Nan,
    Precision,
    SegKind,
    SegmentOptions,
    check_values,
    segment_options,
)

if TYPE_CHECKING:
    import pandas as pd

    from scanloom.cards.card import ModelCard
    from scanloom.inference.graph import Predictor

_PATHS = "paths must be a path or a list of paths (load_model(...).predict takes volumes)"
Progress = Callable[[str, int, int], None]
"""Is called with a stage, and the number of its parts that are done and of all."""


def load_model(name: str | Path, *, device: str = "auto", precision: Precision = "auto") -> Model:
    """Load a model; its `predict(volume)` labels one volume after another.

    Parameters
    ----------
    name : str or Path
        A name that `scanloom models list` shows, or the folder of a bundle.
    device : str
        "auto", "cpu", "cuda", "cuda:N", "mps", "xpu" or "xpu:N".
    precision : str
        "auto", "float32" or "half".

    Raises
    ------
    ScanError
        If there is no such model, it can't be expressed or trusted, or the device is not there.
    ValueError
        If the precision is unknown.
    TypeError
        If the name or the device is neither text nor, as a name, a path.
    """
    check_type(device, str, 'device must be text, such as "cuda:0"')
    compute = ComputeOptions(precision=precision)
    check_values(compute)
    return Model(_model_name(name), device, compute)


class Model:
    """A model that stays loaded on its device: what `load_model` returns.

    In another process, such as a worker of Dask, it is loaded anew: its weights are not sent. If
    another model has its name or path there, it is refused: MODEL_CHANGED. A caller's settings of
    torch, such as the default type and device or autocast, change no label.

    Attributes
    ----------
    predictor : Predictor
        Runs the networks, and checks nothing.
    """

    def __init__(
        self, name: str, device: str, compute: ComputeOptions, digest: str | None = None
    ) -> None:
        from scanloom.inference.combined import make_predictor

        settle_in()
        card = find_model(name) if digest is None else find_unchanged(name, digest)
        self._arguments = name, device, compute, card_digest(card)
        self.predictor: Predictor = make_predictor(card, compute, device=device)

    def __reduce__(self) -> tuple[type[Model], tuple[str, str, ComputeOptions, str]]:
        """Support pickling."""
        return type(self), self._arguments

    def __repr__(self) -> str:
        """Return name, version, device and precision in a line."""
        card, predictor = self.card, self.predictor
        return (
            f"Model({card.name} {card.version}, {predictor.device_name}, "
            f"{predictor.precision_name}; {len(card.structures)} structures)"
        )

    @property
    def card(self) -> ModelCard:
        """Structures, licence, limits and checks of the model."""
        return self.predictor.card

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of its structures."""
        return tuple(structure.label for structure in self.card.structures)

    def predict(
        self,
        volume: Volume,
        *,
        further_channels: Sequence[Volume] = (),
        uncertainty: bool = False,
    ) -> Segmentation:
        """Label a scan, after it was checked against the model's card as `segment` does.

        Parameters
        ----------
        volume : Volume
            The scan; for a model with several input channels, the first of them.
        further_channels : sequence of Volume
            The other input channels, in the card's order, on the same grid.
        uncertainty : bool
            Whether maps of the labels' uncertainty are returned too.

        Returns
        -------
        Segmentation
            On the scan's own grid, with the flags of the check: one layer, or one for each
            structure if structures may overlap. All structures of the model are in it.

        Raises
        ------
        ScanError
            MODALITY, CHANNELS or IMPLAUSIBLE if the scan is not for this model; NOT_FINITE if it
            overflows in the card's intensity steps, or a score is NaN or infinite in float32 too;
            OUT_OF_MEMORY if the device is too small; MODEL_NETWORK if the network does not have the
            card's output channels.
        TypeError
            If a channel is no `Volume`.
        """
        check_type(further_channels, Iterable, "further_channels must be a list of volumes")
        for each in (volume, *further_channels):
            check_type(each, Volume, "predict takes volumes, as load_volume returns them")
        flags = check_scan(volume, self.card, further_channels)
        prediction = self.predictor.predict(
            volume, further_channels=further_channels, uncertainty=uncertainty
        )
        flags = (*flags, *prediction.flags)  # in the order that a case has
        if HEAD in conditions_of(volume, [self.card]):
            flags = (*flags, Flag.HEAD_IN_VIEW)
        return replaced(
            prediction,
            flags=tuple(dict.fromkeys(flags)),
            reference_ranges=self.card.reference_ranges,
        )


def segment(
    paths: str | Path | Sequence[str | Path],
    *,
    model: str | Path | Sequence[str | Path] | None = None,
    out: str | Path,
    progress: Progress | None = None,
    archives: bool = False,
    series: str | int | None = None,
    phase: int | None = None,
    gaps: Gaps = "refuse",
    nan: Nan = "refuse",
    orientation: str | None = None,
    modality: Modality | None = None,
    max_size: int | str | None = None,
    seg: SegKind = "binary",
    dates: Dates = "source",
    also: str | Sequence[str] = (),
    structures: str | Sequence[str] = (),
    device: str = "auto",
    precision: Precision = "auto",
    skip_air: bool = True,
    compiled_restore: bool = True,
    mirror: Mirror = "auto",
    remove_small: float = 0.0,
    overlap: float | None = None,
    fast: bool = False,
    engine: Engine = "auto",
    memory_limit: int | str | None = None,
    names: FolderNaming = "id",
    replace: bool = False,
    key: str | Path | None = None,
) -> tuple[CaseRecord, ...]:
    """Segment scans and publish a case folder for each, as `scanloom segment` does.

    Every option has the name, default and meaning of the command's. The keywords after `progress`
    are written by docs/write_api.py from `scanloom.options`.

    Parameters
    ----------
    paths : path, or sequence of paths
        Paths as in `load_volume`.
    model : str, Path, sequence of them, or None
        Names or bundle folders; None for the only model of the store that fits the scans.
    out : path
        The output folder; or one file for one scan: labels.nii.gz, labels.seg.nrrd or labels.dcm.
    progress : callable, optional
        Is called with a stage, the number of its parts that are done, and that of all. The stage
        "scans" counts scans; their total grows with `series="all"`. Each step of a scan, such as
        "load", "network" or "write", is a stage too: 0 of 1 as it begins. After each batch,
        "network" counts the windows of the network that runs.
    archives : bool
        Whether archives in a folder are looked into.
    series : str, int or None
        Which series, as in `load_volume`; "all" for each series of a path.
    phase : int or None
        Index of the volume, from 0, if a scan has several.
    gaps : "refuse" or "interpolate"
        Missing slices: refuse the series, or interpolate them and set a flag.
    nan : "refuse" or "padding"
        Voxels that are not numbers (NaN): refuse the scan, or replace them by its padding value
        (air in a CT, else its smallest value) and set a flag.
    orientation : str or None
        Axis codes for files that do not state theirs.
    modality : "CT", "MR", "PT", "NM" or None
        Modality for files that do not state theirs (NIfTI).
    max_size : int, str or None
        Largest size of a scan's voxels: 8 GiB; 4 GiB if not given.
    seg : "binary" or "labelmap"
        Kind of DICOM SEG.
    dates : "source" or "now"
        Content dates of DICOM SEG.
    also : str, or sequence of str
        Also the scan, as image.nii.gz (image), a mask for each structure (masks), maps of the
        uncertainty of labels (uncertainty), a segmentation for 3D Slicer (segnrrd), outlines in
        DICOM RTSTRUCT (rtstruct), measurements in DICOM SR (sr), IBSI features of the structures
        (radiomics), or closed surfaces, in glTF (surface).
    structures : str, or sequence of str
        Labels to keep; by default, all but those that their model has on request only.
    device : str
        "auto", "cpu", "cuda", "cuda:N", "mps", "xpu" or "xpu:N".
    precision : "auto", "float32" or "half"
        Numeric precision of the networks.
    skip_air : bool
        Whether windows of air are skipped.
    compiled_restore : bool
        Whether compiled kernels map labels back to the scan's grid, or plain PyTorch.
    mirror : "auto" or "no"
        Whether networks also run on mirrored scans: as the model says, or not.
    remove_small : float
        Connected components of a structure up to this volume, in mm3, are removed.
    overlap : float or None
        Fraction of a window that the next window overlaps, instead of the model's: fewer windows
        are faster, labels differ slightly.
    fast : bool
        Whether less is computed than the model says: by the model's own preset, else the first of
        several folds, no mirrored scans, and windows that overlap by a quarter at most; labels
        differ.
    engine : str
        "auto", "torch", "openvino", "tensorrt", "onnxruntime", "fused", "cudagraphs" or "compile".
        Library that runs the networks: the fastest with the labels of torch, as measured on this
        machine, or a named one.
    memory_limit : int, str or None
        Memory that the process may use; by default, that of the machine.
    names : "id" or "source"
        How case folders are named; "source" uses words of headers and paths.
    replace : bool
        Whether results made with other models or options are replaced.
    key : str, Path or None
        File with the key of the case ids; by default, SCANLOOM_KEY or the user's own key.

    Returns
    -------
    tuple of CaseRecord
        One for each path, in order, or for each series with `series="all"`: its `folder`, or the
        `reason` for which nothing was published. If `out` is a file, it has a `file` instead.

    Raises
    ------
    ScanError
        If the models, the key or the output folder cannot be used; MODEL_UNKNOWN if none is named
        and no model fits, or several do; RESULT_FILE if `out` is a file that can't hold the result.
    ValueError
        If an option has an unknown value.
    TypeError
        If paths, models or names are of another type.
    """
    options_by_name = dict(locals())  # before other names are bound: the keywords above, by name
    settle_in()
    inputs = tuple(given_path(path, "paths") for path in _listed(paths, _PATHS))
    named = (
        () if model is None else _listed(model, "model must be a name, a path, or a list of them")
    )
    for name in ("paths", "progress", "model"):
        del options_by_name[name]
    options_by_name |= {
        "models": tuple(map(_model_name, named)),
        "out": given_path(out, "out"),
        "series": None if series is None else str(series),
        "also": _names(also, "also"),
        "structures": _labels(structures),
        "key": None if key is None else given_path(key, "key"),
        "orientation": orientation.strip().upper() if isinstance(orientation, str) else orientation,
        "memory_limit": _bytes(memory_limit, "memory_limit"),
        "max_size": _bytes(max_size, "max_size"),
    }
    options = segment_options(**options_by_name)
    check_values(options)
    if not options.models:
        name = default_model(
            inputs, options.read.modality, selection=options.series, archives=archives
        )
        options = replaced(options, models=(name,))
    return _segment(inputs, options, progress)


def measurements(out: str | Path) -> pd.DataFrame:
    """Return the measurements of all cases in an output folder as a table.

    Parameters
    ----------
    out : path
        The output folder of `scanloom segment` or `scanloom run`.

    Returns
    -------
    pandas.DataFrame
        A row for each case, model and structure, with the columns of `measurements.csv`. Unknown
        values are missing, never 0. A case that can't be read is left out, with a warning.

    Raises
    ------
    ScanError
        NOT_FOUND or NO_RESULTS if there are no results.
    ImportError
        If pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("tables need pandas: pip install 'scanloom[pandas]'") from error
    import pyarrow as pa

    folder = given_path(out, "out")
    if not (folder / "cases").is_dir():
        raise no_results(folder)
    damaged = set[str]()
    table = read_measurements_table(folder, damaged)
    if damaged:
        cases = ", ".join(sorted(damaged))
        warnings.warn(f"left out, since they can't be read: {cases}", stacklevel=2)
    types = {pa.int64(): pd.Int64Dtype()}  # an empty structure has no box
    return table.to_pandas(types_mapper=types.get)


def _segment(
    paths: Sequence[Path], options: SegmentOptions, progress: Progress | None
) -> tuple[CaseRecord, ...]:
    """Return the records of all scans, with progress.

    Warnings of the DICOM libraries are not shown: they quote names of patients.
    """
    records: list[CaseRecord] = []
    report = progress or (lambda stage, done, total: None)
    with warnings.catch_warnings():
        for library in ("highdicom", "pydicom"):
            warnings.filterwarnings("ignore", module=library)
        report("scans", 0, len(paths))
        steps = iter_segment(
            paths,
            options,
            (lambda _, step: report(step, 0, 1)) if progress else None,
            (lambda _, count: report("network", count.done, count.total)) if progress else None,
        )
        for _, record in steps:
            records.append(record)
            report("scans", len(records), max(len(records), len(paths)))
    for unused in dict.fromkeys(u for r in records if r.choice for u in r.choice.unused):
        warnings.warn(in_python(unused), stacklevel=3)
    return tuple(records)


def _model_name(model: str | Path) -> str:
    """Return a name as it is, and a whole path: a `Path` is a folder, never a name in the store."""
    check_type(model, (str, Path), "a model must be a name or a path")
    return str(model.absolute()) if isinstance(model, Path) else model


def _listed(given: str | Path | Iterable[str | Path], expected: str) -> Iterable[str | Path]:
    """Return the items of an argument that is one, or a sequence of them."""
    if isinstance(given, (str, Path)):
        return [given]
    check_type(given, Iterable, expected)
    return given


def _names(names: str | Sequence[str], name: str) -> tuple[str, ...]:
    """Return names as given, or those of a text with commas, as on the command line."""
    check_type(names, Iterable, f"{name} must be a name or a list of names")
    listed = names.split(",") if isinstance(names, str) else names
    for each in listed:
        check_type(each, str, f"{name} must be a name or a list of names")
    return tuple(each.strip() for each in listed if each.strip())


def _bytes(size: int | str | None, name: str) -> int | None:
    """Return a size in bytes."""
    try:
        return None if size is None else parse_bytes(size)
    except ValueError as error:
        raise ValueError(f"{name} must be {error}, got {size!r}") from None


def _labels(structures: str | Sequence[str]) -> tuple[str, ...]:
    """Return labels as `_names` does; an empty text would mean all, and is refused."""
    labels = _names(structures, "structures")
    if not labels and structures != ():
        raise ValueError("structures must name at least one structure; leave it out for all")
    return labels
