"""Corrections in progress, one of each reviewer and case, on disk with every stroke.

`private/drafts/<case>/<reviewer>.jsonl` has a line about the result that is corrected, then a line
for each stroke, undone and repeated one, in their order. A line is synced to the disk before the
stroke is answered, so that a killed server has every stroke that a page was told of: the labels
are painted again from the lines when they are needed. A process that dies while it writes leaves
at most half a line, which is cut off.

If the result was replaced since, the strokes are painted on the new one, where it has the same
voxels and structures, by numbers and labels: nobody's strokes are lost because another saved a
correction first.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import secrets
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.output.layout import is_case_name
from scanloom.io.output.private import PRIVATE, write_private
from scanloom.io.system.atomic_write import append_synced, fsync_path
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.regular_files import check_folder, open_link_free
from scanloom.review.server.cases import OpenedCase
from scanloom.review.server.security import RefusedError
from scanloom.review.verdicts.verdict import Seen

DRAFTS = "drafts"
SCHEMA = 1
CHANGED = "The correction was changed in another window."
MAX_PAINTED_BYTES = 1 << 30
"""Memory of drafts that stay painted besides the one in use; others are painted again, stroke by
stroke, when they are used. Room for 16 of 512 x 512 x 256 voxels: as many reviewers as a server has
correct side by side without repainting. Larger label maps have fewer: what counts is the memory."""

MAX_POINTS = 5_000
"""Points of a stroke."""
MAX_UNDO = 200
"""Strokes that can be undone."""
MAX_UNDO_BYTES = 32 << 20
"""Memory of strokes that can be undone; the last one is kept in any case."""
ROUNDING_MM = 1e-6
"""A voxel whose centre is farther than the radius by this much is on the edge, and is painted."""

Box = tuple[slice, slice, slice]


@dataclass(frozen=True)
class Stroke:
    """A stroke of a round brush in a slice.

    Parameters
    ----------
    layer : int
        Index of the label map.
    normal, across, down : int
        Axes of the slice: across slices, along its columns, along its rows.
    points : sequence of (column, row)
        Centres of the brush in voxels; between them it moves in straight lines.
    radius_mm : float
        Radius of the brush. Voxels whose centre is within it are painted.
    label : int
        Number of the structure; 0 erases.
    only : tuple of int or None
        Labels that are replaced; None for all.
    """

    layer: int
    normal: int
    across: int
    down: int
    index: int
    points: Sequence[tuple[float, float]]
    radius_mm: float
    label: int
    only: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Region:
    """Voxels of a box with their new labels, as a tool found them: as a line of a file has them.

    Parameters
    ----------
    layer : int
        Index of the label map.
    low, high : (x, y, z)
        First voxel of the box, and the one after the last, in the view.
    bits, labels : str
        Whether each voxel of the box changes, as bits, and the new labels as little-endian 16 bits:
        compressed by zlib, in base 64.
    """

    layer: int
    low: tuple[int, int, int]
    high: tuple[int, int, int]
    bits: str
    labels: str

    @classmethod
    def of(cls, layer: int, box: Box, before: NDArray[Any], after: NDArray[Any]) -> Region | None:
        """Return the change of a box from labels to others; None if they are equal."""
        changed = after != before
        if not changed.any():
            return None
        x, y, z = (extent.start or 0 for extent in box)
        width, height, depth = before.shape
        return cls(
            layer,
            (x, y, z),
            (x + width, y + height, z + depth),
            _packed(np.packbits(changed)),
            _packed(after[changed].astype("<u2")),
        )

    @property
    def box(self) -> Box:
        """The box as slices."""
        a, b, c = (slice(low, high) for low, high in zip(self.low, self.high, strict=True))
        return a, b, c

    def check(self, shape: tuple[int, ...]) -> None:
        """Check that it has a label for each of its voxels, in a label map; else ValueError."""
        ends = zip(self.low, self.high, shape, strict=True)
        if not all(0 <= low < high <= size for low, high, size in ends):  # before room is made
            raise ValueError("a region of no voxels of the label map")
        if len(self.after) != np.count_nonzero(self.mask):
            raise ValueError("a region without a label for each voxel")

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Whether each voxel of the box changes."""
        shape = tuple(high - low for low, high in zip(self.low, self.high, strict=True))
        count = math.prod(shape)
        bits = np.frombuffer(_unpacked(self.bits, -(-count // 8)), np.uint8)
        return np.unpackbits(bits, count=count).astype(bool).reshape(shape)

    @property
    def after(self) -> NDArray[np.uint16]:
        """The new labels of the voxels that change."""
        return np.frombuffer(_unpacked(self.labels, 2 * math.prod(self.mask.shape)), "<u2")


def _packed(array: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 6)).decode("ascii")


def _unpacked(text: str, most: int) -> bytes:
    """Return the bytes of a packed array; ValueError if they are damaged or more than expected."""
    machine = zlib.decompressobj()
    try:
        content = machine.decompress(base64.b64decode(text, validate=True), most + 1)
    except (zlib.error, binascii.Error) as exc:
        raise ValueError("a damaged region") from exc
    if len(content) > most or not machine.eof:
        raise ValueError("a region of other voxels than its box")
    return content


@dataclass(frozen=True, eq=False)
class _Change:
    """Voxels that a step changed: their place as bits, labels before, and new label or labels."""

    layer: int
    box: Box
    bits: NDArray[np.uint8]
    before: NDArray[Any]
    label: NDArray[Any] | int

    @property
    def nbytes(self) -> int:
        after = 0 if isinstance(self.label, int) else self.label.nbytes
        return self.bits.nbytes + self.before.nbytes + after


class LabelDraft:
    """Label maps as they are being corrected; those given are not changed.

    Parameters
    ----------
    layers : sequence of (X, Y, Z) arrays
        Label maps.
    spacing : (x, y, z)
        Spacing in mm.
    """

    def __init__(self, layers: Sequence[NDArray[Any]], spacing: tuple[float, float, float]) -> None:
        self._given, self.spacing = tuple(layers), spacing
        self._copies: dict[int, NDArray[Any]] = {}
        self.done: list[_Change] = []
        """Strokes that can be undone."""
        self.undone: list[_Change] = []
        """Strokes that can be painted again."""
        self._forgot = False  # whether strokes can't be undone any more

    @property
    def has_strokes(self) -> bool:
        """Whether there are strokes that were not undone."""
        return bool(self.done) or self._forgot

    @property
    def nbytes(self) -> int:
        """Memory that it takes, without the label maps that were given."""
        copies = sum(copy.nbytes for copy in self._copies.values())
        return copies + sum(change.nbytes for change in (*self.done, *self.undone))

    def layer(self, index: int) -> NDArray[Any]:
        """Return a label map as it is now."""
        return self._copies.get(index, self._given[index])

    @property
    def changed(self) -> dict[int, int]:
        """Number of voxels that differ, by the index of their label map."""
        counts = {
            index: int(np.count_nonzero(copy != self._given[index]))
            for index, copy in self._copies.items()
        }
        return {index: count for index, count in counts.items() if count}

    def stroke(self, stroke: Stroke) -> int:
        """Paint a stroke; return the number of voxels that it changed.

        Raises
        ------
        IndexError
            If there is no such layer or slice.
        """
        labels = self.layer(stroke.layer)
        if not 0 <= stroke.index < labels.shape[stroke.normal]:
            raise IndexError("there is no such slice")
        painted = painted_box(stroke, labels.shape, self.spacing)
        if painted is None:
            return 0
        box, inside = painted
        before = labels[box]
        changed = inside & (before != stroke.label)
        if stroke.only is not None:
            changed &= np.isin(before, stroke.only)
        return self._change(stroke.layer, box, changed, stroke.label)

    def region(self, region: Region) -> int:
        """Give voxels their new labels; return the number of those that had another one.

        Raises
        ------
        IndexError
            If there is no such layer.
        ValueError
            If it is damaged.
        """
        labels, box = self.layer(region.layer), region.box
        region.check(labels.shape)
        mask, after = region.mask, region.after
        differs = labels[box][mask] != after
        changed = mask.copy()
        changed[mask] = differs
        return self._change(region.layer, box, changed, after[differs].astype(labels.dtype))

    def _change(
        self, layer: int, box: Box, changed: NDArray[np.bool_], after: NDArray[Any] | int
    ) -> int:
        count = int(np.count_nonzero(changed))
        if count:
            before = self.layer(layer)[box][changed]
            change = _Change(layer, box, np.packbits(changed), before, after)
            self._apply(change, change.label)
            self.done.append(change)
            self._forget()
            self.undone.clear()
        return count

    def _forget(self) -> None:
        """Forget how the first strokes are undone, to stay within the limits."""
        held = sum(each.nbytes for each in self.done)
        # the last stroke can always be undone, however large
        while len(self.done) > MAX_UNDO or (held > MAX_UNDO_BYTES and len(self.done) > 1):
            held -= self.done.pop(0).nbytes
            self._forgot = True

    def apply(self, step: Step) -> int:
        """Paint, undo or redo a stroke; return the number of voxels, or whether it changed."""
        if isinstance(step, Stroke):
            return self.stroke(step)
        if isinstance(step, Region):
            return self.region(step)
        return self.undo() if step == "undo" else self.redo()

    def undo(self) -> bool:
        """Undo the last stroke; return whether there was one."""
        if not self.done:
            return False
        change = self.done.pop()
        self._apply(change, change.before)
        self.undone.append(change)
        return True

    def redo(self) -> bool:
        """Paint the last undone stroke again; return whether there was one."""
        if not self.undone:
            return False
        change = self.undone.pop()
        self._apply(change, change.label)
        self.done.append(change)
        return True

    def _apply(self, change: _Change, values: NDArray[Any] | int) -> None:
        if change.layer not in self._copies:
            self._copies[change.layer] = self._given[change.layer].copy(order="K")
        box = self._copies[change.layer][change.box]
        changed = np.unpackbits(change.bits, count=box.size).astype(bool).reshape(box.shape)
        box[changed] = values


def painted_box(
    stroke: Stroke, shape: tuple[int, ...], spacing: tuple[float, float, float]
) -> tuple[Box, NDArray[np.bool_]] | None:
    """Return the box around a stroke, and the voxels in it that the brush covers; None if none.

    A voxel is covered if its centre is at most the radius, in mm, from a point of the stroke or
    from the straight line between two successive points.
    """
    mm = np.array((spacing[stroke.across], spacing[stroke.down]))
    radius = stroke.radius_mm + ROUNDING_MM
    points = np.array(stroke.points, dtype=np.float64).reshape(-1, 2)
    ends = np.array((shape[stroke.across], shape[stroke.down]))
    low = np.maximum(np.ceil(points.min(axis=0) - radius / mm), 0).astype(int)
    high = np.minimum(np.floor(points.max(axis=0) + radius / mm), ends - 1).astype(int)
    if (low > high).any():
        return None
    x, y = (np.arange(a, b + 1) * step for a, b, step in zip(low, high, mm, strict=True))
    covered = np.zeros((len(x), len(y)), bool)
    for begin, end in zip(points, points[1:] if len(points) > 1 else points, strict=False):
        # a point is a line of no length; only around it, since a stroke has thousands of them
        first = np.ceil(np.minimum(begin, end) - radius / mm).astype(int).clip(low, high + 1) - low
        last = np.floor(np.maximum(begin, end) + radius / mm).astype(int).clip(low - 1, high) - low
        across, down = (slice(a, b + 1) for a, b in zip(first, last, strict=True))
        near = _near(x[across, None], y[None, down], begin * mm, end * mm)
        covered[across, down] |= near <= radius**2
    if not covered.any():
        return None
    # the axes of a view may be in any order
    box = [slice(0, 0)] * 3
    box[stroke.normal] = slice(stroke.index, stroke.index + 1)
    box[stroke.across] = slice(int(low[0]), int(high[0]) + 1)
    box[stroke.down] = slice(int(low[1]), int(high[1]) + 1)
    inside = covered if stroke.across < stroke.down else covered.T
    return (box[0], box[1], box[2]), np.expand_dims(inside, stroke.normal)


def _near(
    x: NDArray[Any], y: NDArray[Any], begin: NDArray[Any], end: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the squared distance of points from a line between two points."""
    along = end - begin
    length = float(along @ along)
    share = ((x - begin[0]) * along[0] + (y - begin[1]) * along[1]) / length if length else 0.0
    at = np.clip(share, 0, 1)
    distance = (x - begin[0] - at * along[0]) ** 2 + (y - begin[1] - at * along[1]) ** 2
    return np.asarray(distance, dtype=np.float64)


Step = Stroke | Region | Literal["undo", "redo"]
"""What changes a draft."""


@dataclass(eq=False)
class HeldDraft:
    """A correction in progress, which several windows of a reviewer may change.

    Parameters
    ----------
    path : Path
        Its file, which is there once it has a stroke.
    name, reviewer : str
        Name of the case, and code of the reviewer.
    shape : (X, Y, Z)
    number : str
        Random: no other draft has it.
    structures : tuple of mapping, or None
        Label of each number of each label map; None if an earlier version wrote its file.
    steps : tuple of Step
        The steps that changed it, in their order.
    size : int
        Bytes of its file.
    guard : lock
        Held while the draft is used.
    painted : LabelDraft or None
        The label maps with its strokes, if they are in memory.
    closed : bool
        Whether it was saved or dropped.
    carried, dropped : int
        Strokes on an earlier result that were painted on this one, or can't be, until that is told.
    """

    path: Path
    name: str
    reviewer: str
    seen: Seen
    shape: tuple[int, ...]
    number: str
    structures: tuple[Mapping[int, str], ...] | None
    steps: tuple[Step, ...] = ()
    size: int = 0
    guard: threading.Lock = field(default_factory=threading.Lock)
    painted: LabelDraft | None = None
    closed: bool = False
    carried: int = 0
    dropped: int = 0

    @property
    def strokes(self) -> list[Stroke | Region]:
        """The strokes, and changes by tools, that were not undone."""
        done, undone = list[Stroke | Region](), list[Stroke | Region]()
        for step in self.steps:
            if isinstance(step, Stroke | Region):
                done.append(step)
                undone.clear()
            elif step == "undo":
                undone.append(done.pop())
            else:
                done.append(undone.pop())
        return done

    @property
    def content(self) -> bytes:
        """Its file: a line about the result, and one for each step."""
        about = {"recipe": self.seen.recipe, "labels": dict(self.seen.labels)}
        head = {"schema": SCHEMA, "number": self.number, "shape": self.shape, **about}
        head["structures"] = self.structures
        return b"".join((_line(head), *map(_step_line, self.steps)))

    @property
    def version(self) -> str:
        """Text that changes with every stroke; equal for all drafts of a result without strokes."""
        count = len(self.steps)
        return f"{self.seen.version}.{f'{self.number}.{count}' if count else '0'}"

    @property
    def state(self) -> dict[str, Any]:
        """Numbers of strokes to undo and redo, as JSON; read it while the draft is used."""
        draft = self.painted
        return {
            "undo": len(draft.done) if draft else 0,
            "redo": len(draft.undone) if draft else 0,
            "strokes": bool(draft and draft.has_strokes),
            "version": self.version,
        }

    def is_about(self, case: OpenedCase) -> bool:
        """Return whether it corrects the result of an open case."""
        return (self.name, self.seen) == (case.name, case.seen)

    @contextmanager
    def using(self, case: OpenedCase) -> Iterator[LabelDraft]:
        """Hold the draft, painted on the label maps of the case that it is about."""
        with self.guard:
            if self.painted is None:
                self.painted = _blank(case)
                for step in self.steps:
                    self.painted.apply(step)
            del case  # it may be closed while the draft is in use
            yield self.painted

    @contextmanager
    def changing(self, case: OpenedCase, version: str) -> Iterator[LabelDraft]:
        """Hold the draft as of `using`, if it has the version that was seen.

        Raises
        ------
        ScanError
            STALE if another result was seen.
        RefusedError
            DRAFT_CHANGED if another window changed, saved or dropped the draft since.
        """
        # before the draft is painted: its labels are those of another result
        case.check(version)
        with self.using(case) as draft:
            del case
            if self.closed or version != self.version:
                raise RefusedError(409, "DRAFT_CHANGED", CHANGED)
            yield draft

    def change(self, draft: LabelDraft, step: Step) -> int:
        """Change the held draft; return the number of voxels, or whether it changed.

        Returns once the step is on the disk.

        Raises
        ------
        IndexError
            If a stroke is on a slice that there is not.
        ScanError
            DISK_FULL or OUTPUT_UNWRITABLE: then the draft is as before.
        """
        changed = draft.apply(step)
        if changed:
            try:
                self._append(step)
            except OSError as exc:
                self.painted = None  # it has the step: painted again without it
                raise output_error(exc, "the stroke") from exc
            self.steps = (*self.steps, step)
        return changed

    def _append(self, step: Step) -> None:
        # a file that another program removed or cut off is written anew: all steps are here too
        new = not self.size or not self._is_whole()
        lines = (self.content if new else b"") + _step_line(step)
        if new:
            self.size = 0
            for folder in (self.path.parent.parent, self.path.parent):
                check_folder(folder.parent)
                folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = open_link_free(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab"):
            # half a line that an earlier failure, or a killed server, left
            os.ftruncate(descriptor, self.size)
            append_synced(descriptor, lines, self.size)
        self.size += len(lines)
        if new:
            # a new file is found after a crash only if the folders above it are on the disk as well
            for folder in (self.path.parent, self.path.parent.parent, self.path.parents[2]):
                fsync_path(folder)

    def _is_whole(self) -> bool:
        """Return whether the file has at least the bytes that were written."""
        try:
            with os.fdopen(open_link_free(self.path, os.O_RDONLY), "rb") as file:
                return os.fstat(file.fileno()).st_size >= self.size
        except (FileNotFoundError, NotADirectoryError):
            return False

    def let_go(self) -> None:
        """Let go of the label maps, unless the draft is in use."""
        if self.guard.acquire(blocking=False):
            self.painted = None
            self.guard.release()


class Drafts:
    """The corrections in progress of all reviewers.

    Parameters
    ----------
    out : Path
        The output folder, whose log of verdicts is held: one server changes its drafts.
    """

    def __init__(self, out: Path) -> None:
        self.folder = out / PRIVATE / DRAFTS
        self._held: OrderedDict[tuple[str, str], HeldDraft] = OrderedDict()
        self._guard = threading.Lock()

    def find(self, name: str, reviewer: str) -> HeldDraft | None:
        """Return the draft of a reviewer for a case, or for a result that it had before.

        Raises
        ------
        ScanError
            REVIEW_DAMAGED if its file is damaged.
        OSError
            If it can't be read for the moment.
        """
        with self._guard:
            return self._find(name, reviewer)

    def of(self, case: OpenedCase, reviewer: str) -> HeldDraft:
        """Return the draft of a reviewer for a case, or one without strokes.

        One of a result that was replaced since is painted on the new one. A draft's own lock is
        taken before that of all drafts, as when a draft that is in use is dropped.

        Raises
        ------
        ScanError, OSError
            As of `find`.
        """
        while True:
            with self._guard:
                held = self._find(case.name, reviewer)
                if held is None:
                    held = self._held[case.name, reviewer] = _new(self.folder, case, reviewer)
                if held.is_about(case):
                    return held
            with held.guard:  # a step that is under way ends first
                if held.closed:
                    continue
                new = _new(self.folder, case, reviewer)
                if _fit(held, case):
                    new.carried = _carry(held.strokes, new, case)
                else:
                    new.dropped = len(held.strokes)
                if new.carried:
                    held.closed = True
                else:
                    self.drop(held)
                with self._guard:
                    self._held[case.name, reviewer] = new
                return new

    def describe(self, case: OpenedCase, reviewer: str) -> dict[str, Any]:
        """Return how far a reviewer's draft of a case is, as JSON.

        `carried` is the number of strokes that were painted on the result by which that of the
        draft was replaced since; `dropped` of those that can't be.
        """
        held = self.of(case, reviewer)
        with held.using(case):
            state = {**held.state, "carried": held.carried, "dropped": held.dropped}
            held.carried = held.dropped = 0  # stated once
            return state

    def drop(self, held: HeldDraft) -> None:
        """Drop a draft that is in use; OUTPUT_UNWRITABLE if its file can't be removed."""
        held.closed = True
        with self._guard:
            if self._held.get((held.name, held.reviewer)) is held:
                del self._held[held.name, held.reviewer]
        if held.size:
            try:
                held.path.unlink(missing_ok=True)
                fsync_path(held.path.parent)
            except FileNotFoundError:
                pass  # another program removed the folder
            except OSError as exc:
                raise output_error(exc, "the corrections in progress") from exc
            with suppress(OSError):  # another reviewer has a draft of the case
                held.path.parent.rmdir()

    def kept(self) -> dict[tuple[str, str], int]:
        """Return the number of strokes of each draft on disk, by case and reviewer."""
        counts = {}
        with suppress(OSError):
            for path in sorted(self.folder.glob("*/*.jsonl")):
                with suppress(OSError, ScanError):
                    count = len(_read(path).strokes)
                    if is_case_name(path.parent.name) and count:
                        counts[path.parent.name, path.stem] = count
        return counts

    def cases_of(self, reviewer: str) -> set[str]:
        """Return the cases of which a reviewer has a draft."""
        return {path.parent.name for path in self.folder.glob(f"*/{reviewer}.jsonl")}

    def _find(self, name: str, reviewer: str) -> HeldDraft | None:
        held = self._held.get((name, reviewer))
        if held is None:
            path = self.folder / name / f"{reviewer}.jsonl"
            try:
                held = _read(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            self._held[name, reviewer] = held
        self._held.move_to_end((name, reviewer))
        room = MAX_PAINTED_BYTES
        # those that were used last keep their room
        for earlier in reversed(self._held.values()):
            painted = earlier.painted  # it may be let go of meanwhile
            if earlier is not held and painted is not None:
                room -= painted.nbytes
                if room < 0:
                    earlier.let_go()
        return held


def _new(folder: Path, case: OpenedCase, reviewer: str) -> HeldDraft:
    path, number = folder / case.name / f"{reviewer}.jsonl", secrets.token_hex(4)
    of_case = case.seen, tuple(case.view.shape), number, _structures(case)
    return HeldDraft(path, case.name, reviewer, *of_case)


def _structures(case: OpenedCase) -> tuple[Mapping[int, str], ...]:
    """Return the label of each number of each label map."""
    return tuple({s["number"]: s["label"] for s in layer.structures} for layer in case.layers)


def _fit(draft: HeldDraft, case: OpenedCase) -> bool:
    """Return whether strokes on another result can be painted on that of a case."""
    now = _structures(case)
    before = now if draft.structures is None else draft.structures
    return draft.shape == tuple(case.view.shape) and all(
        each.layer < min(len(before), len(now))
        # a number may be that of another structure, of another model
        and all(now[each.layer].get(n) == before[each.layer].get(n, "") for n in _numbers_of(each))
        for each in draft.strokes
    )


def _numbers_of(step: Stroke | Region) -> set[int]:
    """Return the numbers of the structures that a step paints or replaces."""
    if isinstance(step, Stroke):
        return {step.label, *(step.only or ())} - {0}
    return set(np.unique(step.after).tolist()) - {0}


def _carry(strokes: Sequence[Stroke | Region], new: HeldDraft, case: OpenedCase) -> int:
    """Paint strokes on a new draft, and replace the file by its own; return how many change it."""
    new.painted = _blank(case)
    new.steps = tuple(stroke for stroke in strokes if new.painted.apply(stroke))
    if new.steps:
        content = new.content
        try:
            write_private(new.path, lambda path: path.write_bytes(content))
        except OSError as exc:
            raise output_error(exc, "the corrections in progress") from exc
        new.size = len(content)
    return len(new.steps)


def _blank(case: OpenedCase) -> LabelDraft:
    spacing = tuple(case.view.source.spacing[n] for n in case.view.order)
    layers = [layer.labels for layer in case.layers]
    return LabelDraft(layers, spacing)  # type: ignore[arg-type]  # three axes


def _read(path: Path) -> HeldDraft:
    """Return the draft in a file without half a line at its end; REVIEW_DAMAGED, NEWER_VERSION."""
    with os.fdopen(open_link_free(path, os.O_RDONLY), "rb") as file:
        content = file.read()
    whole = content.rfind(b"\n") + 1
    try:
        head, *lines = [json.loads(line) for line in content[:whole].splitlines()] or [None]
        if head is None:  # the server was killed before the first stroke was on the disk
            raise FileNotFoundError
        if head["schema"] > SCHEMA:
            detail = "a correction in progress is of a newer version of scanloom"
            raise ScanError(Reason.NEWER_VERSION, detail)
        draft = HeldDraft(
            path=path,
            name=path.parent.name,
            reviewer=path.stem,
            seen=Seen(head["recipe"], head["labels"]),
            shape=tuple(head["shape"]),
            number=head["number"],
            structures=_read_structures(head.get("structures")),
            steps=tuple(_step(line, tuple(head["shape"])) for line in lines),
            size=whole,
        )
        _ = draft.strokes  # each undone stroke was there
    except (ValueError, LookupError, TypeError) as exc:
        detail = f"{PRIVATE}/{DRAFTS}/{path.parent.name}/{path.name} is damaged"
        raise ScanError(Reason.REVIEW_DAMAGED, detail) from exc
    return draft


def _read_structures(plain: Any) -> tuple[Mapping[int, str], ...] | None:
    """Return the structures in the first line of a file; None if it has none."""
    if plain is None:
        return None
    return tuple({int(n): str(label) for n, label in dict(each).items()} for each in plain)


def _step(plain: Mapping[str, Any], shape: tuple[int, ...]) -> Step:
    if "region" in plain:
        entry = plain["region"]
        region = Region(**{**entry, "low": tuple(entry["low"]), "high": tuple(entry["high"])})
        region.check(shape)
        return region
    if "stroke" not in plain:
        known: dict[str, Step] = {"undo": "undo", "redo": "redo"}
        return known[plain["step"]]
    stroke = Stroke(**plain["stroke"])
    only = None if stroke.only is None else tuple(stroke.only)
    return replace(stroke, points=[(x, y) for x, y in stroke.points], only=only)


def _step_line(step: Step) -> bytes:
    match step:
        case Stroke():
            return _line({"stroke": asdict(step)})
        case Region():
            return _line({"region": asdict(step)})
    return _line({"step": step})


def _line(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"
