"""A result as one file with a name of the user's (label map, DICOM SEG, `.seg.nrrd`), and its JSON.

`segment -o labels.nii.gz` runs as with an output folder: a case is written, read back and published
in a hidden folder next to the file, and its label map is renamed to the file. `labels.json` comes
first, with the checksum of the file: it tells which result the file is, so that the same command
again finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from scanloom.cards.card import ModelCard, Threshold
from scanloom.core import Case, CaseRecord, Outputs, Reason, ScanError, printable
from scanloom.core.reasons import known_flags
from scanloom.engine.prepare import Prepared
from scanloom.io.dicom.series import dicom_source
from scanloom.io.extras.segnrrd import SEGNRRD
from scanloom.io.output import file_names
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.layout import listed_label_maps
from scanloom.io.output.measurements import parse_measurements
from scanloom.io.output.published import ResultState
from scanloom.io.output.single_file import FOREIGN, NIFTI, document_of
from scanloom.io.system.atomic_write import check_replaceable, fsync_path
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.regular_files import sha256_of
from scanloom.io.system.scratch_folders import HIDDEN_PREFIX, locked_temporary_folder
from scanloom.options import SegmentOptions

DICOM_SEG, SLICER = ".dcm", ".seg.nrrd"
WRITABLE: Final = (NIFTI, DICOM_SEG, SLICER)
"""Formats of a result that is one file, by their suffix."""
_OTHER_FORMATS: Final = (
    *(".nii", ".hdr", ".img", ".nrrd", ".nhdr", ".mha", ".mhd", ".mgz", ".mgh", ".mnc", ".gz"),
    *(".dicom", ".npy", ".npz", ".h5", ".hdf5", ".zarr", ".tif", ".tiff", ".png", ".jpg", ".stl"),
    *(".obj", ".zip", ".tar", ".json", ".csv"),
)
"""Suffixes of files that people ask for, and that scanloom does not write: a folder of such a name
would hide that."""


def suffix_of(path: Path) -> str:
    """Return the suffix by which a path is the name of a file, "" for that of a folder.

    A folder that exists is a folder, whatever its name.
    """
    name = path.name.lower()
    known = (suffix for suffix in (*WRITABLE, *_OTHER_FORMATS) if name.endswith(suffix))
    return "" if path.is_dir() else next(known, "")


def refuse_file_name(out: Path) -> None:
    """Refuse the name of a file where an output folder is expected.

    Raises
    ------
    ScanError
        RESULT_FILE.
    """
    if suffix := suffix_of(out):
        raise _refused(f"an output folder is expected here, not a {suffix} file")


@dataclass(frozen=True)
class ResultFile:
    """The file that a result becomes, and `labels.json` next to it.

    Parameters
    ----------
    path : Path
        The file; its suffix is one of `WRITABLE`.
    replace : bool
        Whether a file that exists is replaced.
    """

    path: Path
    replace: bool

    @classmethod
    def of(cls, options: SegmentOptions, paths: Sequence[Path]) -> ResultFile | None:
        """Return the file that is requested, None for an output folder.

        Raises
        ------
        ScanError
            RESULT_FILE if the format can't be written, or a file can't hold what is requested:
            several scans, models, or further files.
        """
        suffix = suffix_of(options.out)
        if not suffix:
            return None
        if suffix not in WRITABLE:
            written = f"{', '.join(WRITABLE[:-1])} and {WRITABLE[-1]}"
            raise _refused(f"{suffix} files can't be written, but {written}")
        if options.out.name.lower() == suffix:
            raise _refused(f"the file has no name before {suffix}")
        if len(paths) != 1 or options.series == "all":
            raise _refused("one file can't hold the results of several scans")
        if len(options.models) > 1:
            raise _refused("one file can't hold the results of several models")
        if options.outputs.also:
            also = " and ".join(options.outputs.also)
            raise _refused(f"{also} of `--also` would be further files")
        if options.names != "id":
            raise _refused("`--names` is for the folders of cases")
        return cls(options.out, options.replace)

    @property
    def document(self) -> Path:
        """The JSON next to the file: its structures, measurements and provenance."""
        return document_of(self.path)

    @property
    def left_out(self) -> frozenset[str]:
        """Names of the writers of a case that do not run, since their files are not kept."""
        return frozenset({"preview"} if self._is_seg else {"preview", "dicom_seg"})

    def requesting(self, options: SegmentOptions) -> SegmentOptions:
        """Return the options with which a case has the file."""
        if not self._is_slicer:
            return options
        return replace(options, outputs=replace(options.outputs, also=(SEGNRRD.name,)))

    @property
    def _is_seg(self) -> bool:
        return self.path.name.lower().endswith(DICOM_SEG)

    @property
    def _is_slicer(self) -> bool:
        return self.path.name.lower().endswith(SLICER)

    def check_models(self, cards: Sequence[ModelCard], outputs: Outputs) -> None:
        """Refuse a model whose result has several label maps, since structures may overlap.

        Raises
        ------
        ScanError
            RESULT_FILE.
        """
        for card in cards:
            kept = [
                s
                for s in card.structures
                if s.label in outputs.structures or not outputs.structures
            ]
            overlap = isinstance(card.decision, Threshold) and len(kept) > 1
            holds = self._is_slicer or (self._is_seg and outputs.seg == "binary")
            if overlap and not holds:
                detail = f"structures of {card.name} may overlap, which one label map can't hold"
                raise _refused(f"{detail}: name one with --structures, or a .dcm or .seg.nrrd file")

    def earlier(self, case: Case) -> CaseRecord | None:
        """Return the record of the file if it has the result of a case already.

        None if there is no file yet, or it is to be replaced. The JSON alone of this very result is
        what a command leaves that was killed between the two.

        Raises
        ------
        ScanError
            RESULT_FILE if it would replace a file of the scan, or the scan can't have a DICOM SEG;
            STALE if it is another result, or none.
        """
        self.check_source(case)
        if self._is_seg:
            source = dicom_source(case.series.files, case.phase, case.read.gaps)
            if missing := source.missing_uids:
                lacks = "the series lacks valid UIDs that a DICOM SEG must refer to"
                raise _refused(f"{lacks}: {', '.join(missing)}")
        if not any(path.exists() for path in (self.path, self.document)):
            return None
        known = self._read(case)
        if known is None and not self.replace and not self._is_half(case):
            exists = self.path if self.path.exists() else self.document
            raise ScanError(Reason.STALE, f"{printable(exists.name)} exists already")
        return known

    def compare(self, prepared: Prepared) -> Prepared:
        """Return a prepared case with the file as its result: its state, or why it is refused."""
        if prepared.refusal is not None:
            return prepared
        try:
            same = self.earlier(prepared.case) is not None
        except ScanError as error:
            return replace(prepared, refusal=error)
        exists = ResultState.REPLACEABLE if self.path.exists() else ResultState.ABSENT
        return replace(prepared, folder=self.path, state=ResultState.CURRENT if same else exists)

    def check_source(self, case: Case) -> None:
        """Refuse a file of the scan itself, and a DICOM SEG of a scan that is not DICOM.

        Raises
        ------
        ScanError
            RESULT_FILE; OUTPUT_UNWRITABLE if the path is a link, a device or a folder.
        """
        if self._is_seg and case.series.kind != "dicom":
            raise _refused("a DICOM SEG refers to a DICOM series, and the scan is none")
        for path in (self.path, self.document):
            check_replaceable(path, "the result")
            with suppress(OSError):  # it does not exist
                if any(path.samefile(file) for file in case.series.files):
                    raise _refused("the result would replace a file of the scan")

    def _read(self, case: Case) -> CaseRecord | None:
        """Return the record of an earlier result of the same case and recipe, None of another."""
        try:
            document = read_json(self.document)
            if not _is_of(document, case) or document["sha256"] != sha256_of(self.path):
                return None
            measurements = parse_measurements(document["measurements"])
            flags = known_flags(flag["code"] for flag in document["flags"])
            return CaseRecord(
                case.id, None, "", flags, None, measurements, reused=True, file=self.path
            )
        except FOREIGN:
            return None

    def _is_half(self, case: Case) -> bool:
        """Return whether there is the JSON of the result, but not the file."""
        with suppress(*FOREIGN):
            return not self.path.exists() and _is_of(read_json(self.document), case)
        return False

    @contextmanager
    def output_folder(self) -> Iterator[Path]:
        """Yield an output folder, in a hidden folder next to the file; it is removed at the end.

        The next command that writes to this place removes those of processes that were killed.

        Raises
        ------
        ScanError
            DISK_FULL or OUTPUT_UNWRITABLE.
        """
        parent = self.path.parent
        created = [each for each in (*reversed(parent.parents), parent) if not each.exists()]
        try:
            with ExitStack() as stack:
                try:
                    parent.mkdir(parents=True, exist_ok=True)
                    folder = stack.enter_context(locked_temporary_folder(parent, HIDDEN_PREFIX))
                except OSError as exc:
                    raise output_error(exc, "the result") from exc
                yield folder / "out"
        finally:
            for each in reversed(created):
                with suppress(OSError):  # not empty: it holds the result
                    each.rmdir()

    def publish(self, record: CaseRecord, case: Case) -> CaseRecord:
        """Rename the label map of a case in `output_folder` to the file, with the JSON next to it.

        Raises
        ------
        ScanError
            STALE if the file exists meanwhile; RESULT_FILE if the scan lacks what a DICOM SEG
            refers to; DISK_FULL or OUTPUT_UNWRITABLE.
        """
        if record.folder is None:
            raise ValueError("the case was not published")
        models = [model["name"] for model in read_json(record.folder / file_names.CASE)["models"]]
        name = file_names.seg_name if self._is_seg else file_names.label_map_name
        labels = record.folder / (
            file_names.slicer_name(models[0], models)
            if self._is_slicer
            else name("segmentation", models[0], models)
        )
        if not labels.is_file():
            raise _refused("the series lacks UIDs now: its files were exchanged meanwhile")
        self.check_source(case)
        if not self.replace and self.path.exists():
            raise ScanError(Reason.STALE, f"{printable(self.path.name)} was written meanwhile")
        draft = record.folder / self.document.name
        try:
            write_document(draft, _document(record.folder, self.path.name, sha256_of(labels)))
            fsync_path(draft)
            draft.replace(self.document)
            labels.replace(self.path)  # its bytes reached the disk before the case was published
            fsync_path(self.path.parent)
        except OSError as exc:
            raise output_error(exc, "the result") from exc
        return replace(record, folder=None, file=self.path)


def models_of(record: CaseRecord) -> list[dict[str, Any]]:
    """Return the models of a result as `case.json`, or the JSON next to its file, lists them.

    Raises
    ------
    OSError, ValueError
        If the document is missing or damaged.
    """
    if record.file is not None:
        document = document_of(record.file)
    elif record.folder is not None:
        document = record.folder / file_names.CASE
    else:
        return []
    models: list[dict[str, Any]] = read_json(document)["models"]
    return models


def _document(folder: Path, name: str, sha256: str) -> dict[str, Any]:
    """Return the file, its structures and measurements, and the provenance of the result."""
    segments = listed_label_maps(folder)
    measured = read_json(folder / file_names.MEASUREMENTS_JSON)
    return {
        "file": name,
        "sha256": sha256,
        "structures": [structure for each in segments for structure in each["structures"]],
        "measurements": measured["measurements"],
        **{k: v for k, v in read_json(folder / file_names.CASE).items() if k != "schema"},
    }


def _is_of(document: dict[str, Any], case: Case) -> bool:
    """Return whether a document is that of the same case and recipe."""
    same: bool = document["recipe"] == case.recipe
    return same and bool(document["source"]["hash"] == case.source_hash)


def _refused(detail: str) -> ScanError:
    return ScanError(Reason.RESULT_FILE, detail)
