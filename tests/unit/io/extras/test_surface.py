"""Surfaces: shapes of known volume, the file as trimesh reads it, faults that read-back finds."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from scipy.ndimage import gaussian_filter

from scanloom.core import Grid, Layer, Outputs, Reason, ScanError, Segmentation
from scanloom.engine.case import writers
from scanloom.io.extras import surface
from scanloom.io.extras.surface import (
    SURFACE,
    cells_of,
    check_surface,
    coarse_cells,
    surface_of,
    write_surface,
)
from scanloom.io.output.case_folder import CaseContent
from support import case_folders

ISOTROPIC, THICK = (1.0, 1.0, 1.0), (0.8, 0.8, 5.0)


def grid_of(
    shape: tuple[int, ...],
    spacing: tuple[float, ...] = ISOTROPIC,
    codes: str = "RAS",
    oblique: float = 0.0,
    tilt: float = 0.0,
) -> Grid:
    axes = case_folders.turned(case_folders.directions(codes), oblique)
    affine = np.eye(4)
    affine[:3, :3] = axes * spacing
    affine[:3, 2] += np.tan(np.radians(tilt)) * spacing[2] * axes[:, 1]
    affine[:3, 3] = (-31.5, 12.25, -240.75)
    return Grid(shape, affine)


def segmentation_of(grid: Grid, *masks: np.ndarray, dtype: type = np.uint8) -> Segmentation:
    """Return a layer for each mask."""
    layers = []
    for number, mask in enumerate(masks, 1):
        structure = replace(case_folders.LIVER, label=f"s{number}", number=number)
        layers.append(Layer(np.asfortranarray(mask * dtype(number)), (structure,)))
    return Segmentation("organs", tuple(layers), grid, "1.2.0")


def read(path: Path) -> dict[str, trimesh.Trimesh]:
    """Return the meshes of a file, RAS mm, as trimesh reads them."""
    scene = trimesh.load(path, process=False)
    return dict(scene.geometry.items())


def written(folder: Path, grid: Grid, *masks: np.ndarray) -> list[trimesh.Trimesh]:
    """Return the meshes of masks after the read-back; each is closed, with its volume."""
    segmentation = segmentation_of(grid, *masks)
    write_surface(segmentation, folder / "surface.glb")
    check_surface(folder / "surface.glb", segmentation)
    meshes = list(read(folder / "surface.glb").values())
    for mesh, mask in zip(meshes, masks, strict=True):
        assert mesh.is_watertight
        assert mesh.is_winding_consistent
        assert mesh.volume == pytest.approx(mask.sum() * grid.voxel_volume, rel=2e-4)
    return meshes


def ball(shape: tuple[int, ...], radius_mm: float, spacing: tuple[float, ...]) -> np.ndarray:
    axes = [(np.arange(n) - 0.48 * n) * s for n, s in zip(shape, spacing, strict=True)]
    i, j, k = np.meshgrid(*axes, indexing="ij")
    return np.asarray(i**2 + j**2 + k**2 < radius_mm**2)


# --- shapes ---------------------------------------------------------------------------------------


def test_a_ball_is_smooth_and_round(tmp_path: Path) -> None:
    grid = grid_of((50, 50, 50))
    mask = ball(grid.shape, 20.0, ISOTROPIC)
    [mesh] = written(tmp_path, grid, mask)
    centre = grid.world([0.48 * 50] * 3)
    radii = np.linalg.norm(mesh.vertices - centre, axis=1)
    assert radii.std() < 0.12  # half as much as of the steps of voxels
    assert radii.mean() == pytest.approx(20.0, abs=0.05)
    directions = (mesh.vertices - centre) / radii[:, None]
    cosines = (mesh.vertex_normals * directions).sum(axis=1)
    assert np.degrees(np.arccos(np.quantile(cosines, 0.05))) < 12


def test_normals_are_those_of_the_surface(tmp_path: Path) -> None:
    grid = grid_of((20, 20, 20))
    segmentation = segmentation_of(grid, ball(grid.shape, 7.0, ISOTROPIC))
    write_surface(segmentation, tmp_path / "surface.glb")
    document, data = glb(tmp_path / "surface.glb")
    view = document["bufferViews"][1]
    normals = np.frombuffer(data, "<f4", view["byteLength"] // 4, view["byteOffset"])
    normals = normals.reshape(-1, 3)
    [mesh] = read(tmp_path / "surface.glb").values()
    centre = grid.world([0.48 * 20] * 3)
    directions = mesh.vertices - centre
    assert ((normals * directions).sum(axis=1) > 0).all()
    np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("codes", case_folders.ORDERS)
def test_every_order_of_axes_looks_outwards(codes: str, tmp_path: Path) -> None:
    """Both hands: the mirrored orders too."""
    grid = grid_of((14, 17, 9), (1.0, 1.2, 2.5), codes)
    i, j, k = np.indices(grid.shape)
    mask = (i > 3) & (i < 10) & (j > 2) & (j < 14) & (k > 1) & (k < 5 + i // 4)
    [mesh] = written(tmp_path, grid, mask)
    centres = grid.world(np.argwhere(mask))
    np.testing.assert_allclose(mesh.center_mass, centres.mean(axis=0), atol=0.1)


@pytest.mark.parametrize("codes", ["RAS", "LPS", "LAS"])
@pytest.mark.parametrize(("oblique", "tilt"), [(25.0, 0.0), (0.0, 18.0), (10.0, 12.0)])
@pytest.mark.parametrize("spacing", [ISOTROPIC, THICK])
def test_oblique_sheared_and_thick_slices(
    spacing: tuple[float, ...], oblique: float, tilt: float, codes: str, tmp_path: Path
) -> None:
    """The surface encloses the centres of exactly the structure's voxels, as trimesh decides."""
    grid = grid_of((26, 24, 12), spacing, codes, oblique, tilt)
    mask = ball(grid.shape, 9.0, spacing)
    [mesh] = written(tmp_path, grid, mask)
    centres = grid.world(np.argwhere(mask))
    np.testing.assert_allclose(mesh.center_mass, centres.mean(axis=0), atol=0.05 * max(spacing))
    half = 0.8 * np.abs(grid.affine[:3, :3]).sum(axis=1)
    assert (mesh.bounds[0] > centres.min(axis=0) - half).all()
    assert (mesh.bounds[1] < centres.max(axis=0) + half).all()


def _torus(shape: tuple[int, ...]) -> np.ndarray:
    i, j, k = (x - n / 2 for x, n in zip(np.indices(shape), shape, strict=True))
    return np.asarray((np.hypot(i, j) - 12) ** 2 + k**2 < 25)


def _hollow(shape: tuple[int, ...]) -> np.ndarray:
    """Return a ball with a cavity that contains an island."""
    radius = np.sqrt(sum((x - n / 2) ** 2 for x, n in zip(np.indices(shape), shape, strict=True)))
    return np.asarray((radius < 4) | ((radius > 8) & (radius < 14)))


def _full(shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, bool)


def _apart(shape: tuple[int, ...]) -> np.ndarray:
    """Return voxels at all corners, and bars along the border."""
    mask = np.zeros(shape, bool)
    mask[:: shape[0] - 1, :: shape[1] - 1, :: shape[2] - 1] = True
    mask[5:30, 5:8, 0:3] = mask[-4:, 10:20, 10:20] = True
    return mask


def _voxel(shape: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(shape, bool)
    mask[7, 8, 9] = True
    return mask


def _thread(shape: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(shape, bool)
    mask[3, 4, :] = mask[range(20), range(20), 12] = True
    return mask


EULER = {_torus: 0, _hollow: 6, _full: 2, _apart: 20, _voxel: 2}
"""Euler characteristic: 2 for each closed surface without handles."""


@pytest.mark.parametrize("make", [_torus, _hollow, _full, _apart, _voxel, _thread])
def test_shapes_with_handles_cavities_islands_and_borders(
    make: Callable[[tuple[int, ...]], np.ndarray], tmp_path: Path
) -> None:
    grid = grid_of((36, 34, 32))
    [mesh] = written(tmp_path, grid, make(grid.shape))
    if make in EULER:
        assert mesh.euler_number == EULER[make]


def test_a_grid_of_one_voxel(tmp_path: Path) -> None:
    written(tmp_path, grid_of((1, 1, 1), THICK), np.ones((1, 1, 1), bool))


@pytest.mark.parametrize("share", [0.01, 0.3, 0.8])
@pytest.mark.parametrize("sigma", [0.0, 1.2])
def test_noise_is_closed_and_keeps_its_volume(sigma: float, share: float, tmp_path: Path) -> None:
    noise = np.random.default_rng(4).random((24, 22, 20))
    smooth = gaussian_filter(noise, sigma) if sigma else noise
    written(tmp_path, grid_of(noise.shape, THICK), smooth > np.quantile(smooth, 1 - share))


def test_a_surface_lies_in_the_steps_of_voxels() -> None:
    """No vertex is further than a voxel from the unsmoothed surface."""
    mask = np.asfortranarray(ball((40, 40, 12), 15.0, THICK))
    mesh = surface_of(cells_of(mask), int(mask.sum()), np.eye(4))
    inside, outside = mask, ~np.pad(mask, 1)
    index = np.rint(mesh.points).astype(int)
    near = [
        (index + step).clip(0, np.array(mask.shape) - 1).T
        for step in np.ndindex(3, 3, 3)
        for step in [np.array(step) - 1]
    ]
    assert np.any([inside[tuple(each)] for each in near], axis=0).all()
    assert np.any([outside[tuple(each + 1)] for each in near], axis=0).all()


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spacing", "expected"), [(ISOTROPIC, (2, 2, 2)), ((0.8, 0.8, 2.4), (3, 3, 1))]
)
def test_a_large_surface_has_larger_cells(
    spacing: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    mask = np.asfortranarray(ball((61, 61, 61), 22.0, spacing))
    full = cells_of(mask)
    cells = coarse_cells(mask, spacing, full.vertices // 3)
    assert cells.steps == expected
    assert cells.vertices <= full.vertices // 3
    mesh = surface_of(cells, int(mask.sum()), np.diag([*spacing, 1.0]))
    assert len(mesh.points) == cells.vertices
    drawn = trimesh.Trimesh(mesh.points, mesh.triangles, process=False)
    assert drawn.is_watertight
    assert drawn.volume == pytest.approx(mask.sum() * np.prod(spacing), rel=1e-3)
    radii = np.linalg.norm(mesh.points - 0.48 * 61 * np.array(spacing), axis=1)
    assert abs(radii - 22.0).max() < 0.6 * max(spacing)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.97])
def test_noise_has_a_bounded_file(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Structures that larger cells can't show get no volume of their own, and no refusal."""
    monkeypatch.setattr(surface, "MAX_VERTICES", 3000)
    monkeypatch.setattr(surface, "MIN_VERTICES", 10)
    mask = np.random.default_rng(4).random((40, 40, 16)) < share
    segmentation = segmentation_of(grid_of(mask.shape, THICK), mask, ball(mask.shape, 4.0, THICK))
    write_surface(segmentation, tmp_path / "surface.glb")
    check_surface(tmp_path / "surface.glb", segmentation)
    noise, small = read(tmp_path / "surface.glb").values()
    assert len(noise.vertices) + len(small.vertices) <= 3000
    assert noise.is_watertight
    assert len(small.vertices) == cells_of(np.asfortranarray(ball(mask.shape, 4.0, THICK))).vertices


def test_small_structures_leave_their_share_to_large_ones() -> None:
    assert surface._share([1000, 2000, 3000], 10_000) == 10_000
    assert surface._share([1000, 20_000, 30_000], 10_000) == 4500
    assert surface._share([5000] * 100, 10_000) == surface.MIN_VERTICES
    assert surface._share([], 10_000) == 10_000


# --- the file -------------------------------------------------------------------------------------


def glb(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = struct.unpack_from("<I", data, 12)[0]
    return json.loads(data[20 : 20 + size]), data[28 + size :]


def test_structures_are_named_coloured_and_coded(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    write_surface(case_folders.segmentation_of(scan), tmp_path / "surface.glb")
    document, _ = glb(tmp_path / "surface.glb")
    root, *nodes = document["nodes"]
    assert root["extras"] == {"space": "RAS mm", "model": "organs", "version": "1.2.0"}
    assert [node["name"] for node in nodes] == ["Liver", "Left kidney", "Spleen"]
    assert nodes[1]["extras"] == {
        "label": "kidney_left",
        "number": 2,
        "category": ["SCT", "123037004", "Anatomical Structure"],
        "type": ["SCT", "64033007", "Kidney"],
        "laterality": ["SCT", "7771000", "Left"],
        "cell_voxels": [1, 1, 1],
    }
    meshes = read(tmp_path / "surface.glb")
    assert list(meshes) == ["liver", "kidney_left", "spleen"]
    # sRGB (150, 60, 40) in linear light
    color = document["materials"][0]["pbrMetallicRoughness"]["baseColorFactor"]
    assert color == pytest.approx([0.3050, 0.0452, 0.0212, 1.0], abs=1e-4)


def test_viewers_stand_before_the_patient(tmp_path: Path) -> None:
    """In glTF's metres, X is left, Y superior and Z anterior; the meshes themselves are RAS mm."""
    grid = grid_of((20, 20, 20), ISOTROPIC, "LPS", 20.0)
    mask = ball(grid.shape, 6.0, ISOTROPIC)
    [mesh] = written(tmp_path, grid, mask)
    right, anterior, superior = mesh.vertices.mean(axis=0)
    scene = trimesh.load(tmp_path / "surface.glb", process=False)
    shown = scene.to_geometry().vertices.mean(axis=0)
    np.testing.assert_allclose(shown * 1000, [-right, superior, anterior], atol=1e-3)


def test_overlapping_structures_have_a_mesh_each(tmp_path: Path) -> None:
    shape = (20, 20, 20)
    left, right = ball(shape, 8.0, ISOTROPIC), ball(shape, 5.0, ISOTROPIC)
    assert len(written(tmp_path, grid_of(shape), left, right, left | right)) == 3


def test_large_numbers(tmp_path: Path) -> None:
    grid = grid_of((9, 8, 7))
    structure = replace(case_folders.LIVER, number=60_000)
    labels = np.asfortranarray(ball(grid.shape, 2.5, ISOTROPIC) * np.uint16(60_000))
    segmentation = Segmentation("organs", (Layer(labels, (structure,)),), grid)
    write_surface(segmentation, tmp_path / "a.glb")
    check_surface(tmp_path / "a.glb", segmentation)


def test_structures_that_were_not_found_are_left_out(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    whole = case_folders.segmentation_of(scan)
    labels = whole.layers[0].labels
    for kept, names in ((labels == 2, ["kidney_left"]), (labels == 9, [])):
        layer = Layer(np.asfortranarray(labels * kept), whole.layers[0].structures)
        part = replace(whole, layers=(layer,))
        write_surface(part, tmp_path / "surface.glb")
        check_surface(tmp_path / "surface.glb", part)
        document, data = glb(tmp_path / "surface.glb")
        assert [mesh["name"] for mesh in document.get("meshes", [])] == names
        assert bool(data) is bool(names)


def test_equal_content_has_equal_bytes(tmp_path: Path) -> None:
    segmentation = case_folders.segmentation_of(case_folders.dicom_scan())
    for name in ("a.glb", "b.glb"):
        write_surface(segmentation, tmp_path / name)
    assert (tmp_path / "a.glb").read_bytes() == (tmp_path / "b.glb").read_bytes()


def test_two_models_have_a_file_each(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan(tilt=17.0)
    models = [case_folders.segmentation_of(scan), case_folders.overlapping(scan)]
    content = CaseContent(case_folders.case_with(also=("surface",)), scan, models)
    assert SURFACE.expected(content) == {"organs-surface.glb", "regions-surface.glb"}
    SURFACE.write(tmp_path, content)
    SURFACE.read_back(tmp_path, content)


def test_without_its_package_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    writers.check_packages(Outputs(also=("surface",)))
    monkeypatch.setattr(writers, "find_spec", lambda _: None)
    writers.check_packages(Outputs(also=("masks",)))
    with pytest.raises(ScanError, match=r"pip install 'scanloom\[surface\]'") as caught:
        writers.check_packages(Outputs(also=("masks", "surface")))
    assert caught.value.reason is Reason.NOT_INSTALLED


# --- faults that the read-back finds --------------------------------------------------------------


def changed(path: Path, change: Callable[[dict[str, Any], np.ndarray], None]) -> None:
    """Change the JSON and the binary words of a file in place."""
    document, data = glb(path)
    words = np.frombuffer(data, "<f4").copy()
    change(document, words)
    text = json.dumps(document).encode()
    text += b" " * (-len(text) % 4)
    parts = struct.pack("<II", len(text), 0x4E4F534A) + text
    parts += struct.pack("<II", words.nbytes, 0x004E4942) + words.tobytes()
    path.write_bytes(struct.pack("<III", 0x46546C67, 2, 12 + len(parts)) + parts)


def points_of(document: dict[str, Any], words: np.ndarray, mesh: int) -> np.ndarray:
    view = document["bufferViews"][3 * mesh]
    start = view["byteOffset"] // 4
    return words[start : start + view["byteLength"] // 4].reshape(-1, 3)


def triangles_of(document: dict[str, Any], words: np.ndarray, mesh: int) -> np.ndarray:
    view = document["bufferViews"][3 * mesh + 2]
    start = view["byteOffset"] // 4
    return words.view("<u4")[start : start + view["byteLength"] // 4].reshape(-1, 3)


def _turned_inside_out(document: dict[str, Any], words: np.ndarray) -> None:
    triangles = triangles_of(document, words, 0)
    triangles[:] = triangles[:, ::-1].copy()


def _opened(document: dict[str, Any], words: np.ndarray) -> None:
    triangles_of(document, words, 0)[5] = triangles_of(document, words, 0)[6]


def _moved(document: dict[str, Any], words: np.ndarray) -> None:
    points_of(document, words, 0)[:, 0] += 1.0


def _mirrored(document: dict[str, Any], words: np.ndarray) -> None:
    middle = points_of(document, words, 0)[:, 0].mean()
    for mesh in range(3):
        points, triangles = points_of(document, words, mesh), triangles_of(document, words, mesh)
        points[:, 0] = 2 * middle - points[:, 0]
        triangles[:] = triangles[:, ::-1].copy()


def _grown(document: dict[str, Any], words: np.ndarray) -> None:
    points = points_of(document, words, 0)
    points += (points - points.mean(axis=0)) * 0.006


def _far(document: dict[str, Any], words: np.ndarray) -> None:
    points_of(document, words, 0)[3] += 500


def _exchanged(document: dict[str, Any], words: np.ndarray) -> None:
    document["nodes"][1]["mesh"], document["nodes"][2]["mesh"] = 1, 0


def _unknown(document: dict[str, Any], words: np.ndarray) -> None:
    points_of(document, words, 0)[3] = np.nan


def _renamed(document: dict[str, Any], words: np.ndarray) -> None:
    document["nodes"][1]["name"] = "Spleen"


def _recoloured(document: dict[str, Any], words: np.ndarray) -> None:
    document["materials"][0]["pbrMetallicRoughness"]["baseColorFactor"][0] = 0.9


def _recoded(document: dict[str, Any], words: np.ndarray) -> None:
    document["nodes"][2]["extras"]["type"][1] = "1"


def _missing(document: dict[str, Any], words: np.ndarray) -> None:
    del document["nodes"][3]
    document["nodes"][0]["children"].pop()


def _hidden(document: dict[str, Any], words: np.ndarray) -> None:
    document["nodes"][0]["children"].pop()


def _in_lps(document: dict[str, Any], words: np.ndarray) -> None:
    document["nodes"][0]["matrix"][0] *= -1


def _boxed(document: dict[str, Any], words: np.ndarray) -> None:
    document["accessors"][0]["max"][1] += 1.0


def _shortened(document: dict[str, Any], words: np.ndarray) -> None:
    document["accessors"][2]["count"] -= 3


def _lit_from_inside(document: dict[str, Any], words: np.ndarray) -> None:
    start = document["bufferViews"][1]["byteOffset"] // 4
    words[start : start + document["bufferViews"][1]["byteLength"] // 4] *= -1


FAULTS = {
    "encloses different voxels": [_turned_inside_out, _moved],
    "encloses different voxels|a different box": [_mirrored],  # a ball, and its neighbours
    "has a different volume": [_grown],
    "is not closed|an edge twice": [_opened],
    "leaves the scan": [_far],
    "a different name": [_exchanged, _renamed],
    "vertices that are not there": [_unknown],
    "a different colour": [_recoloured],
    "a different code": [_recoded],
    "different structures": [_missing],
    "structures in a different space": [_hidden],
    "the surface has a different space": [_in_lps],
    "a different box": [_boxed],
    "an array of another form": [_shortened],
    "different normals": [_lit_from_inside],
}


@pytest.mark.parametrize(
    ("change", "message"), [(c, message) for message, changes in FAULTS.items() for c in changes]
)
def test_read_back_refuses(
    change: Callable[[dict[str, Any], np.ndarray], None], message: str, tmp_path: Path
) -> None:
    grid = grid_of((40, 36, 32), ISOTROPIC, "LPS")
    labels = np.zeros(grid.shape, np.uint8)
    labels[ball(grid.shape, 14.0, ISOTROPIC)] = 1
    labels[2:5, 3:9, 4:16] = 2
    labels[30:36, 28:33, 4:16] = 3
    layer = Layer(np.asfortranarray(labels), case_folders.STRUCTURES)
    segmentation = Segmentation("organs", (layer,), grid)
    path = tmp_path / "surface.glb"
    write_surface(segmentation, path)
    changed(path, lambda *_: None)
    check_surface(path, segmentation)
    changed(path, change)
    with pytest.raises(ScanError, match=message) as caught:
        check_surface(path, segmentation)
    assert caught.value.reason is Reason.WRITE_MISMATCH


def test_read_back_refuses_what_can_not_be_decoded(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    content = CaseContent(
        case_folders.case_with(also=("surface",)), scan, [case_folders.segmentation_of(scan)]
    )
    SURFACE.write(tmp_path, content)
    path = tmp_path / "surface.glb"
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:100],
        whole[:-100],
        b"x" + whole[1:],
        whole[:40] + b"{" + whole[41:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(ScanError) as caught:
            SURFACE.read_back(tmp_path, content)
        assert caught.value.reason is Reason.WRITE_MISMATCH
