"""Surfaces on request: `surface.glb`, a closed mesh of each structure, one file for a model.

A surface is extracted by marching cubes (scikit-image, extra `surface`), smoothed as Taubin
describes, and moved along its normals until its volume is that of the structure's voxels.

glTF 2.0 is in metres with Y up, and a model looks along Z. Meshes hold the RAS mm of the patient;
the node above them has the matrix to glTF's space, which viewers apply.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import ModelCard
from scanloom.core import Code, Grid, Outputs, Segmentation, Structure
from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.io.output.file_names import surface_name
from scanloom.io.readback.mismatch import count_labels, decoding, mismatch_error
from scanloom.version import __version__

MAX_VERTICES = 1_000_000
"""Most vertices of a file, which then has 48 MB. Large structures share what small ones leave."""
MIN_VERTICES = 1000
"""What each structure may have, however many there are."""
MAX_CELLS = 2**25
"""Most cells that a surface is extracted from, in float32: 128 MiB."""

SMOOTHINGS, SHRINK, INFLATE = 20, 0.5, -0.53
"""Taubin (1995, "Curve and surface smoothing without shrinkage"): number of pairs of steps, and
their factors. Waves of less than about 8 vertices, such as steps of voxels, are damped."""
MAX_LOSS = 0.1
"""Largest change of a connected part's volume by smoothing; a part that changes more, such as a
single voxel or a thin thread, is left as it was extracted."""
MAX_SHIFT = 0.45
"""Largest distance, in cells, by which a surface is moved to correct its volume: from half a cell
around a single voxel it does not reach the next one. Its 0.41 restore that voxel's volume."""
VOLUME_PRECISION = 1e-4
"""Relative error of the volume at which its correction ends."""

RAS_TO_GLTF = np.array([[-1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1000]]) / 1000
"""RAS mm to glTF: X is left, Y superior, Z anterior, in m."""

_GLTF, _JSON, _BIN = 0x46546C67, 0x4E4F534A, 0x004E4942
_FLOAT, _UINT32 = 5126, 5125
_VERTEX_BUFFER, _INDEX_BUFFER = 34962, 34963

_BYTES_PER_VOXEL, _BYTES_PER_VERTEX = 3, 450
"""Masks of a structure, and its mesh while it is smoothed, as measured."""

Steps = tuple[int, int, int]
"""Voxels that a cell spans along each axis."""


class Mesh(NamedTuple):
    """A closed surface whose triangles are counterclockwise seen from outside.

    Parameters
    ----------
    points : (N, 3) array
        Vertices.
    triangles : (M, 3) array
        Their indices.
    """

    points: NDArray[Any]
    triangles: NDArray[Any]


# --- cells ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cells:
    """A structure in cells of one or several voxels, from which its surface is extracted.

    Parameters
    ----------
    counts : (I', J', K') array
        Voxels of the structure in each cell; I' fastest in memory.
    steps : (i, j, k)
        Voxels along each axis that a cell spans.
    """

    counts: NDArray[Any]
    steps: Steps

    @property
    def threshold(self) -> int:
        """Least count of a cell inside: that with which all inside have the structure's volume."""
        size = math.prod(self.steps)
        if size == 1:
            return 1
        histogram = np.bincount(self.counts.ravel("K"), minlength=size + 1)
        inside = np.cumsum(histogram[::-1])[::-1]  # cells with at least as many voxels
        error = np.abs(inside * size - np.arange(len(inside)) @ histogram)
        least = 1 + int(np.argmin(error[1:]))
        return min(least, int(self.counts.max()))

    @property
    def vertices(self) -> int:
        """Number of vertices of the surface: one between each cell inside and one outside."""
        inside, faces = self.counts >= self.threshold, []
        for axis in range(3):
            cells = np.moveaxis(inside, axis, 0)
            faces += [cells[1:] != cells[:-1], cells[0], cells[-1]]
        return sum(int(np.count_nonzero(each)) for each in faces)


def cells_of(mask: NDArray[np.bool_], steps: Steps = (1, 1, 1)) -> Cells:
    """Return the cells of a mask (I, J, K) that is not empty, I fastest in memory."""
    counts: NDArray[Any] = mask.view(np.uint8)
    for axis, step in enumerate(steps):
        if step == 1:
            continue
        shape, before = list(counts.shape), (slice(None),) * axis
        shape[axis] = -(-shape[axis] // step)
        summed = np.zeros(shape, np.min_scalar_type(math.prod(steps)), order="F")
        for first in range(min(step, counts.shape[axis])):  # reduceat takes ten times longer
            planes = counts[(*before, slice(first, None, step))]
            summed[(*before, slice(planes.shape[axis]))] += planes
        counts = summed
    return Cells(counts, steps)


def coarse_cells(mask: NDArray[np.bool_], spacing: Sequence[float], vertices: int) -> Cells:
    """Return the smallest cells whose surface has at most so many vertices.

    Parameters
    ----------
    mask : (I, J, K) bool array
        A structure that is not empty; I fastest in memory.
    spacing : (i, j, k)
        Of its voxels, mm. Cells are as cubic as whole voxels allow.
    vertices : int
        Most vertices.
    """
    sizes, cells = np.array(spacing), cells_of(mask)
    # The number of vertices falls about with the square of the step
    first = max(1, math.isqrt(cells.vertices // vertices))
    for length in itertools.count(first):
        i, j, k = (int(n) for n in np.maximum(1, sizes.min() * length / sizes + 1e-6))
        cells = cells_of(mask, (i, j, k))
        if cells.counts.size <= MAX_CELLS and cells.vertices <= vertices:
            return cells
    raise AssertionError("one cell has few vertices")


def _share(counts: Sequence[int], total: int) -> int:
    """Return the largest number that each may have so that all have `total` at most."""
    available, remaining = total, len(counts)
    for count in sorted(counts):
        if count * remaining > available:
            return max(available // remaining, MIN_VERTICES)
        available, remaining = available - count, remaining - 1
    return total


# --- meshes ---------------------------------------------------------------------------------------


def surface_of(cells: Cells, voxels: int, affine: NDArray[np.float64]) -> Mesh:
    """Return the smooth closed surface of a structure, in mm.

    Parameters
    ----------
    cells : Cells
        The structure. Beyond their border, nothing belongs to it.
    voxels : int
        Number of voxels that the surface is to have the volume of.
    affine : (4, 4) array
        Voxel index to RAS mm; the first cell begins with voxel (0, 0, 0).
    """
    from skimage.measure import marching_cubes

    field = np.zeros([n + 2 for n in cells.counts.shape], np.float32, order="F")
    field[1:-1, 1:-1, 1:-1] = cells.counts
    # Vertices on edges of cells only, each edge in two triangles; Lewiner's variant adds others
    points, triangles, _, _ = marching_cubes(field.T, cells.threshold - 0.5, method="lorensen")
    mesh = Mesh(points[:, ::-1] - 1.0, triangles.astype(np.int32))
    points, triangles = _with_volume(_smoothed(mesh), voxels / math.prod(cells.steps))
    if np.linalg.det(affine[:3, :3]) < 0:
        triangles = triangles[:, ::-1]
    index = points * cells.steps + (np.array(cells.steps) - 1) / 2
    return Mesh(index @ affine[:3, :3].T + affine[:3, 3], np.ascontiguousarray(triangles))


def _smoothed(mesh: Mesh) -> Mesh:
    """Return a mesh smoothed by Taubin's method, but for parts that would lose their volume."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    count, triangles = len(mesh.points), mesh.triangles
    # Of a closed surface, each direction of an edge is in one triangle
    edges = triangles.ravel(), triangles[:, [1, 2, 0]].ravel()
    ones = np.ones(triangles.size, np.float64)
    neighbours = csr_array((ones, edges), shape=(count, count))
    degrees = np.diff(neighbours.indptr)
    neighbours.data /= np.repeat(degrees, degrees)
    points = mesh.points
    for _, factor in itertools.product(range(SMOOTHINGS), (SHRINK, INFLATE)):
        points = points + factor * (neighbours @ points - points)
    n_components, component_of = connected_components(neighbours, directed=False)
    smooth = Mesh(points, triangles)
    before, after = (
        np.bincount(component_of[triangles[:, 0]], _cones(each), n_components)
        for each in (mesh, smooth)
    )
    kept = np.abs(after - before) <= MAX_LOSS * np.abs(before)
    return Mesh(np.where(kept[component_of, None], points, mesh.points), triangles)


def _cones(mesh: Mesh) -> NDArray[np.float64]:
    """Return the signed volume (M,) from the origin to each triangle; their sum is the mesh's."""
    a, b, c = (mesh.points[mesh.triangles[:, n]] for n in range(3))
    return np.asarray(np.einsum("ij,ij->i", a, np.cross(b, c)) / 6)


def _normals(mesh: Mesh) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the unit normal (N, 3) of each vertex, outwards, and its area (N,)."""
    a, b, c = (mesh.points[mesh.triangles[:, n]] for n in range(3))
    thirds = np.repeat(np.cross(b - a, c - a) / 6, 3, axis=0)
    vertices, count = mesh.triangles.ravel(), len(mesh.points)
    vectors = np.stack([np.bincount(vertices, thirds[:, n], count) for n in range(3)], axis=1)
    areas = np.linalg.norm(vectors, axis=1)
    vectors[areas == 0] = (0, 0, 1)  # opposite triangles: no direction is right
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), areas


def _with_volume(mesh: Mesh, volume: float) -> Mesh:
    """Return a mesh moved along its normals until it has a volume, both in cells."""
    shift = 0.0
    for _ in range(10):  # Newton's method: two or three steps, of single cells more
        missing = volume - _cones(mesh).sum()
        if abs(missing) <= VOLUME_PRECISION * volume:
            break
        normals, areas = _normals(mesh)
        step = float(np.clip(shift + missing / areas.sum(), -MAX_SHIFT, MAX_SHIFT)) - shift
        mesh, shift = Mesh(mesh.points + step * normals, mesh.triangles), shift + step
    return mesh


# --- the file -------------------------------------------------------------------------------------


def write_surface(segmentation: Segmentation, path: Path) -> None:
    """Write the meshes of all structures that have voxels; equal content has equal bytes."""
    grid = segmentation.grid
    regions = list(_regions(segmentation))
    vertices = _share([cells_of(each.mask()).vertices for each in regions], MAX_VERTICES)
    document, chunks = _Document(segmentation), []
    for each in regions:
        mask = each.mask()
        cells = coarse_cells(mask, grid.spacing, vertices)
        affine = grid.affine.copy()
        affine[:3, 3] = grid.world([axis.start for axis in each.box])
        mesh = surface_of(cells, int(np.count_nonzero(mask)), affine)
        chunks += document.add(each.structure, mesh, cells.steps)
    text = document.encoded()
    length = sum(map(len, chunks))
    with path.open("wb") as file:
        file.write(struct.pack("<III", _GLTF, 2, 20 + len(text) + (8 + length if length else 0)))
        file.write(struct.pack("<II", len(text), _JSON) + text)
        if length:
            file.write(struct.pack("<II", length, _BIN))
            file.writelines(chunks)


class _Region(NamedTuple):
    """A structure that a label map contains, and its box."""

    structure: Structure
    labels: NDArray[Any]
    box: tuple[slice, slice, slice]

    def mask(self) -> NDArray[np.bool_]:
        """Return its voxels in its box; I fastest in memory."""
        return np.asarray(self.labels[self.box] == self.structure.number, order="F")


def _regions(segmentation: Segmentation) -> Iterator[_Region]:
    from scipy.ndimage import find_objects

    for layer in segmentation.layers:
        boxes = dict(enumerate(find_objects(layer.labels.T), 1))  # in the order of memory
        for structure in layer.structures:
            if (box := boxes.get(structure.number)) is not None:
                yield _Region(structure, layer.labels, box[::-1])


class _Document:
    """The JSON of a glTF file: a node for each mesh, below one that states their space."""

    def __init__(self, segmentation: Segmentation) -> None:
        self.model, self.version = segmentation.model, segmentation.version
        self.nodes: list[dict[str, Any]] = []
        self.meshes: list[dict[str, Any]] = []
        self.materials: list[dict[str, Any]] = []
        self.accessors: list[dict[str, Any]] = []
        self.views: list[dict[str, Any]] = []
        self.length = 0

    def add(self, structure: Structure, mesh: Mesh, steps: Steps) -> list[bytes]:
        """Add the mesh of a structure; return its binary data."""
        points = mesh.points.astype("<f4")
        normals, _ = _normals(mesh)
        corners = mesh.triangles.astype("<u4")
        attributes = {
            "POSITION": self._accessor(points, _FLOAT, "VEC3", _VERTEX_BUFFER),
            "NORMAL": self._accessor(normals, _FLOAT, "VEC3", _VERTEX_BUFFER),
        }
        self.accessors[-2]["min"] = points.min(axis=0).tolist()
        self.accessors[-2]["max"] = points.max(axis=0).tolist()
        indices = self._accessor(corners.ravel(), _UINT32, "SCALAR", _INDEX_BUFFER)
        number = len(self.meshes)
        self.meshes.append(
            {
                "name": structure.label,
                "primitives": [{"attributes": attributes, "indices": indices, "material": number}],
            }
        )
        self.materials.append(_material(structure))
        self.nodes.append(
            {"name": structure.name, "mesh": number, "extras": _extras(structure, steps)}
        )
        return [points.tobytes(), normals.astype("<f4").tobytes(), corners.tobytes()]

    def _accessor(self, values: NDArray[Any], component: int, kind: str, target: int) -> int:
        """Describe an array of 4-byte values, as the next of the binary data; return its number."""
        number, size = len(self.views), values.size * 4
        self.views.append(
            {"buffer": 0, "byteOffset": self.length, "byteLength": size, "target": target}
        )
        self.accessors.append(
            {"bufferView": number, "componentType": component, "count": len(values), "type": kind}
        )
        self.length += size
        return number

    def encoded(self) -> bytes:
        """Return the JSON chunk, padded to whole words."""
        root: dict[str, Any] = {
            "name": self.model,
            "matrix": RAS_TO_GLTF.T.ravel().tolist(),
            "extras": {"space": "RAS mm", "model": self.model, "version": self.version},
        }
        if self.nodes:
            root["children"] = list(range(1, len(self.nodes) + 1))
        lists = {
            "meshes": self.meshes,
            "materials": self.materials,
            "accessors": self.accessors,
            "bufferViews": self.views,
            "buffers": [{"byteLength": self.length}] if self.length else [],
        }
        document = {
            "asset": {"version": "2.0", "generator": f"scanloom {__version__}"},
            "scene": 0,
            "scenes": [{"nodes": [0]}],
            "nodes": [root, *self.nodes],
            **{name: items for name, items in lists.items() if items},  # none may be empty
        }
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        return text + b" " * (-len(text) % 4)


def _material(structure: Structure) -> dict[str, Any]:
    """Return a matt material in the structure's colour, which glTF has in linear light."""
    linear = [_linear(value / 255) for value in structure.color]
    return {
        "name": structure.label,
        "pbrMetallicRoughness": {
            "baseColorFactor": [*(round(value, 6) for value in linear), 1.0],
            "metallicFactor": 0.0,
            "roughnessFactor": 0.7,
        },
    }


def _linear(value: float) -> float:
    """Return the linear light of a value of sRGB (IEC 61966-2-1), both from 0 to 1."""
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def _extras(structure: Structure, steps: Steps) -> dict[str, Any]:
    """Return what glTF has no field for."""
    codes = {
        "category": structure.category,
        "type": structure.type,
        "laterality": structure.laterality,
    }
    return {
        "label": structure.label,
        "number": structure.number,
        **{name: [c.scheme, c.value, c.meaning] for name, c in codes.items() if c is not None},
        "cell_voxels": list(steps),
    }


# --- read-back ------------------------------------------------------------------------------------
# Independent of the extraction: rays through the centres of voxels find those that a mesh encloses.

_VOLUME_TOLERANCE, _LARGE_ML = 0.01, 5.0
"""Relative error of the volume of structures above a volume, if their cells are voxels."""
_FACE_SHARE, _COARSE_FACE_SHARE = 0.1, 0.15
"""Voxels that may differ, as a share of the structure's outer faces of voxels; if cells are several
voxels, a share for each along their longest side. Random voxels reach 0.05 and 0.10."""
_MIN_COSINE, _MAX_SLIVERS = 0.9, 0.01
"""Least agreement of a normal with the surface, and the share of vertices that may have less."""
_RAY = np.array([1.3e-3, 2.1e-3, 0.0])
"""Distance of rays from the centres of voxels, in voxels: on these, vertices may lie."""
_TRIANGLES_AT_ONCE = 20_000
_AXES = np.array([[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1]])
"""Where glTF has the points 1 m to the left, superior and anterior, and the patient's origin."""


def check_surface(path: Path, segmentation: Segmentation) -> None:
    """Compare a file with the label maps of its model.

    Raises
    ------
    ScanError
        WRITE_MISMATCH.
    """
    document, data = _read(path)
    root, *nodes = document["nodes"]
    patient = np.array([[-1000, 0, 0, 1], [0, 0, 1000, 1], [0, 1000, 0, 1], [0, 0, 0, 1]])
    if not np.allclose(patient @ np.reshape(root["matrix"], (4, 4)), _AXES, rtol=0, atol=1e-9):
        raise mismatch_error("the surface has a different space")
    present: dict[int, tuple[Structure, NDArray[Any]]] = {}
    for layer in segmentation.layers:
        voxels = count_labels(layer.labels.T, layer.labels.dtype)
        present |= {s.number: (s, layer.labels) for s in layer.structures if voxels[s.number]}
    if [node["extras"]["number"] for node in nodes] != list(present):
        raise mismatch_error("the surface has different structures")
    if root.get("children", []) != list(range(1, len(document["nodes"]))):
        raise mismatch_error("the surface has structures in a different space")
    for node, (structure, labels) in zip(nodes, present.values(), strict=True):
        _check_description(document, node, structure)
        mesh = _mesh(document, data, node)
        _check_closed(mesh, structure)
        fault = _fault(
            mesh, node["extras"]["cell_voxels"], structure.number, labels, segmentation.grid
        )
        if fault:
            raise mismatch_error(f"the surface of {structure.label} {fault}")
        _check_arrays(document, data, node, mesh)


def _read(path: Path) -> tuple[dict[str, Any], memoryview]:
    """Return the JSON of a GLB file, and its binary data."""
    data = memoryview(path.read_bytes())
    magic, version, length, json_length, kind = struct.unpack_from("<5I", data)
    if (magic, version, length, kind) != (_GLTF, 2, len(data), _JSON):
        raise mismatch_error("the surface is no GLB file")
    document: dict[str, Any] = json.loads(bytes(data[20 : 20 + json_length]))
    return document, data[20 + json_length + 8 :]


def _check_description(
    document: dict[str, Any], node: dict[str, Any], structure: Structure
) -> None:
    """Compare names, codes and colour of a node."""
    mesh, extras = document["meshes"][node["mesh"]], node["extras"]
    codes = [extras.get(name) for name in ("category", "type", "laterality")]
    if [code and Code(code[1], code[0], code[2]) for code in codes] != [
        structure.category,
        structure.type,
        structure.laterality,
    ]:
        raise mismatch_error(f"the surface of {structure.label} has a different code")
    if (node["name"], mesh["name"]) != (structure.name, structure.label):
        raise mismatch_error(f"the surface of {structure.label} has a different name")
    material = document["materials"][mesh["primitives"][0]["material"]]
    light = np.array(material["pbrMetallicRoughness"]["baseColorFactor"][:3])
    values = np.where(light > 0.0031308, 1.055 * light ** (1 / 2.4) - 0.055, 12.92 * light)
    if np.rint(values * 255).tolist() != list(structure.color):
        raise mismatch_error(f"the surface of {structure.label} has a different colour")


def _mesh(document: dict[str, Any], data: memoryview, node: dict[str, Any]) -> Mesh:
    """Return the mesh of a node."""
    [primitive] = document["meshes"][node["mesh"]]["primitives"]

    def array(number: int, dtype: str) -> NDArray[Any]:
        accessor = document["accessors"][number]
        view = document["bufferViews"][accessor["bufferView"]]
        return np.frombuffer(data, dtype, view["byteLength"] // 4, view["byteOffset"])

    points = array(primitive["attributes"]["POSITION"], "<f4").reshape(-1, 3)
    triangles = array(primitive["indices"], "<u4").reshape(-1, 3)
    if not np.isfinite(points).all() or triangles.max() >= len(points):
        raise mismatch_error("the surface has vertices that are not there")
    return Mesh(points.astype(np.float64), triangles.astype(np.int64))


def _check_arrays(
    document: dict[str, Any], data: memoryview, node: dict[str, Any], mesh: Mesh
) -> None:
    """Compare what viewers need besides: the form of the arrays, their box, and the normals."""
    [primitive] = document["meshes"][node["mesh"]]["primitives"]
    positions, normals = (primitive["attributes"][each] for each in ("POSITION", "NORMAL"))
    for number, form in (
        (positions, ("VEC3", _FLOAT, len(mesh.points))),
        (normals, ("VEC3", _FLOAT, len(mesh.points))),
        (primitive["indices"], ("SCALAR", _UINT32, mesh.triangles.size)),
    ):
        accessor = document["accessors"][number]
        if (accessor["type"], accessor["componentType"], accessor["count"]) != form:
            raise mismatch_error("the surface has an array of another form")
    box = [document["accessors"][positions][each] for each in ("min", "max")]
    if box != [mesh.points.min(axis=0).tolist(), mesh.points.max(axis=0).tolist()]:
        raise mismatch_error("the surface has a different box")
    view = document["bufferViews"][document["accessors"][normals]["bufferView"]]
    written = np.frombuffer(data, "<f4", 3 * len(mesh.points), view["byteOffset"]).reshape(-1, 3)
    expected, _ = _normals(mesh)
    # Of slivers, whose vertices are rounded to float32, the direction is not known
    if np.mean(~(np.einsum("ij,ij->i", written, expected) > _MIN_COSINE)) > _MAX_SLIVERS:
        raise mismatch_error("the surface has different normals")


def _check_closed(mesh: Mesh, structure: Structure) -> None:
    """Check that each edge is in two triangles, in opposite directions."""
    begin, end = mesh.triangles.ravel(), np.roll(mesh.triangles, -1, axis=1).ravel()
    edges = np.sort(begin * len(mesh.points) + end)
    if (begin == end).any() or (edges[1:] == edges[:-1]).any():
        raise mismatch_error(f"the surface of {structure.label} has an edge twice")
    if not np.array_equal(edges, np.sort(end * len(mesh.points) + begin)):
        raise mismatch_error(f"the surface of {structure.label} is not closed")


def _fault(mesh: Mesh, cell: Sequence[int], number: int, labels: NDArray[Any], grid: Grid) -> str:
    """Return how a mesh differs from a structure; empty if volume and enclosed voxels agree.

    `cell` (3,) are the voxels that a cell of the mesh spans.
    """
    index = grid.index(mesh.points)
    first, last = index.min(axis=0), index.max(axis=0)
    margin = np.array(cell) + 0.5
    if (first < -margin).any() or (last > np.array(grid.shape) - 1 + margin).any():
        return "leaves the scan"
    low = np.maximum(np.floor(first), 0).astype(int)
    high = np.minimum(np.ceil(last), np.array(grid.shape) - 1).astype(int) + 1
    i, j, k = map(slice, low, high)
    expected, voxels = labels[i, j, k] == number, np.count_nonzero(labels == number)
    faces = 0
    for axis in range(3):
        planes = np.moveaxis(expected, axis, 0)
        for each in (planes[1:] != planes[:-1], planes[0], planes[-1]):
            faces += int(np.count_nonzero(each))
    coarse = max(cell) > 1
    allowed = faces * (_COARSE_FACE_SHARE * max(cell) if coarse else _FACE_SHARE)
    right_handed = np.linalg.det(grid.affine[:3, :3]) > 0
    triangles = mesh.triangles if right_handed else mesh.triangles[:, ::-1]
    inside = _enclosed(Mesh(index - low, triangles), expected.shape)
    different = voxels - np.count_nonzero(expected) + np.count_nonzero(inside != expected)
    if different > allowed:
        return "encloses different voxels"
    a, b, c = (mesh.points[mesh.triangles[:, n]] - mesh.points[0] for n in range(3))
    volume = np.einsum("ij,ij->", a, np.cross(b, c)) / 6 / grid.voxel_volume
    if not coarse and voxels * grid.voxel_volume > 1000 * _LARGE_ML:
        allowed = _VOLUME_TOLERANCE * voxels
    return "has a different volume" if abs(volume - voxels) > allowed else ""


def _enclosed(mesh: Mesh, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return which voxels (I, J, K) have their centres in a closed mesh, whose points are indices.

    A ray along K, beside the centres, enters the mesh where a triangle looks down, and leaves it
    where one looks up.
    """
    crossings = np.zeros((*shape[:2], shape[2] + 1), np.int8, order="F")
    last = np.array(shape[:2]) - 1
    for begin in range(0, len(mesh.triangles), _TRIANGLES_AT_ONCE):
        triangles = mesh.triangles[begin : begin + _TRIANGLES_AT_ONCE]
        corners = mesh.points[triangles] - _RAY  # (M, 3, 3)
        low = np.maximum(np.ceil(corners.min(axis=1)[:, :2]), 0).astype(np.int64)
        high = np.minimum(np.floor(corners.max(axis=1)[:, :2]), last).astype(np.int64)
        size = np.maximum(high - low + 1, 0)
        columns = size.prod(axis=1)
        of = np.repeat(np.arange(len(triangles)), columns)
        number = np.arange(len(of)) - np.repeat(np.cumsum(columns) - columns, columns)
        ij = low[of] + np.stack([number % size[of, 0], number // size[of, 0]], axis=1)
        # Twice the area of the triangle of the ray and each side: all of one sign if it crosses
        x, y = np.moveaxis(corners[of, :, :2] - ij[:, None], 2, 0)
        sides = np.roll(x, -1, 1) * np.roll(y, -2, 1) - np.roll(x, -2, 1) * np.roll(y, -1, 1)
        crossed = (sides >= 0).all(axis=1) | (sides < 0).all(axis=1)
        of, ij, sides = of[crossed], ij[crossed], sides[crossed]
        areas = sides.sum(axis=1)
        height = (sides * corners[of, :, 2]).sum(axis=1) / areas
        k = np.clip(np.ceil(height), 0, shape[2]).astype(np.int64)
        np.add.at(crossings, (ij[:, 0], ij[:, 1], k), np.where(areas > 0, np.int8(-1), np.int8(1)))
    np.cumsum(crossings, axis=2, dtype=np.int8, out=crossings)
    return np.asarray(crossings[..., :-1] > 0)


# --- the writer -----------------------------------------------------------------------------------


def _files(content: CaseContent) -> set[str]:
    return {surface_name(s.model, content.models) for s in content.segmentations}


def _write(folder: Path, content: CaseContent) -> None:
    for segmentation in content.segmentations:
        write_surface(segmentation, folder / surface_name(segmentation.model, content.models))


def _read_back(folder: Path, content: CaseContent) -> None:
    for segmentation in content.segmentations:
        name = surface_name(segmentation.model, content.models)
        with decoding(name):
            check_surface(folder / name, segmentation)


def _memory(grid: Grid, cards: Sequence[ModelCard], outputs: Outputs) -> int:
    voxels = math.prod(grid.shape)
    cells, vertices = min(voxels, MAX_CELLS), min(3 * voxels, MAX_VERTICES)
    return voxels * _BYTES_PER_VOXEL + cells * 4 + vertices * _BYTES_PER_VERTEX


SURFACE = Writer("surface", _files, _write, _read_back, _memory, modules=("skimage",))
