"""Real scans are read as independent programs read them: expected.json, dcm2niix, SimpleITK."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sysconfig
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK
from nibabel.orientations import io_orientation, ornt_transform

import scanloom
from scanloom.core import Flag, ScanError, Volume
from scanloom.io.index.series import find_series
from scanloom.io.read import read_scan
from support.real_scans import scans

pytestmark = pytest.mark.reference

STACKS = [
    "ct/crlm1004_abdomen_dicom/dicom",
    "ct/totalseg_example_dicom/dicom",
    "ct/sts002_thigh/dicom_ct",
    "mr/d2n_hitachi/dicom",
    "mr/d2n_philips/dicom",
    "mr/sts002_thigh_t1/dicom_mr",
    "enhanced/legacy_converted_ct_23x38x3/image",
    "enhanced/legacy_converted_ct_24x38x3/image",
    *(f"compressed_series/d2n_{c}" for c in ("j2k_a", "j2k_b", "jpeg_lossless", "jpegls", "rle")),
    *(
        f"compressed_series/sts002_{c}"
        for c in ("deflated", "htj2k", "jpeg_lossless_sv1", "jpegls", "rle")
    ),
]
NIFTI = [
    "ct/totalseg_example/example_ct.nii.gz",
    "ct/totalseg_example/example_ct_sm.nii.gz",
    "ct/totalseg_pulmonary/ct_cropped.nii.gz",
    "mr/totalseg_mr/example_mr_sm.nii.gz",
]
VOLUMES = {
    "mr/ge_epi/dicom": ("Ref_dcm2niix/*.nii.gz", 1.0),
    # Its reference holds Philips' own floats: MANIFEST.md says by which factor
    "mr/philips_epi_oblique/dicom": ("Ref_dcm2niix/*.nii.gz", 0.0055279),
    "enhanced/siemens_xa10_epi/dicom": ("Ref_dcm2niix/*.nii.gz", 1.0),
    "enhanced/philips_pcasl_real/dicom": ("Ref_dcm2niix/*_enh_real.nii.gz", 1.0),
    "enhanced/siemens_multiframe_t1/dicom": ("Ref_dicom2nifti/*.nii.gz", 1.0),
    "enhanced/philips_enhanced_fmri/dicom": ("Ref_dicom2nifti/*.nii.gz", 1.0),
    "enhanced/hyperfine_mr/dicom": ("Ref_dicom2nifti/*.nii.gz", 1.0),
    "mosaic/siemens_trio_ax/dicom": ("Ref_dcm2niix/*.nii.gz", 1.0),
    "mosaic/siemens_trio_sag/dicom": ("Ref_dcm2niix/*.nii.gz", 1.0),
    "mosaic/siemens_skyra_0003/dicom": ("Ref_dcm2niix/*.nii.gz", 1.0),
}
"""Multi-frame, mosaic and 4D series; the file of their repository; how its values are scaled."""
REFUSED = {
    "ct/ge_head_tilt_dicom/dicom": "SPACING_CHANGES",
    "ct/sts002_thigh/dicom_rtstruct": "NOT_AN_IMAGE",
    "enhanced/enhanced_ct_fragmented": "TOO_FEW_SLICES",
    "enhanced/legacy_converted_ct_23x38x3/seg": "NOT_AN_IMAGE",
    "malformed/series/single_slice": "TOO_FEW_SLICES",
    "malformed/series/slicecount_2": "TOO_FEW_SLICES",
    "mosaic/siemens_trio_ax/dicom": "PHASES",
    "mr/ge_epi/dicom": "PHASES",
    "mr/philips_epi_oblique/dicom": "PHASES",
    "mr/philips_survey_3plane/dicom": "PHASES",
    "mr/siemens_multiecho_qt2/dicom": "PHASES",
    "malformed/nifti/analyze75.hdr": "RESCALE",
    "malformed/nifti/cifti_dconn.nii": "NOT_AN_IMAGE",
    "malformed/nifti/hdr_without_img.hdr": "NOT_FOUND",
    "malformed/nifti/nan_in_sform_LPS.nii.gz": "BAD_GEOMETRY",
    "malformed/nifti/not-nifti.nii": "DAMAGED",
    "malformed/nifti/truncated_gzip_LPS.nii.gz": "TRUNCATED",
    "malformed/nifti/truncated_payload_LPS.nii.gz": "TRUNCATED",
    "malformed/nifti/zero_sform_LPS.nii.gz": "BAD_GEOMETRY",
    "orientation/nifti_misc/complex64.nii.gz": "PIXEL_TYPE",
    "orientation/nifti_misc/ct_perfusion_rgb.nii.gz": "PIXEL_TYPE",
    "orientation/nifti_misc/vector_5d.nii.gz": "PIXEL_TYPE",
    "orientation/nifti_misc/functional_4d.nii": "FOUR_D",
    "orientation/nifti_misc/2d_slice.nii.gz": "TOO_FEW_SLICES",
    "orientation/nifti_misc/no_qform_no_sform.nii.gz": "ORIENTATION_UNKNOWN",
    "nrrd_mha/itksnap/X300.mha": "TOO_FEW_SLICES",
}
EQUAL_TO_NIBABEL = [
    "air_nifti2_pair.hdr.gz",
    "air_pair.hdr.gz",
    "anatomical_bigendian_int16.nii",
    "big_endian_float.nii.gz",
    "ras_pair.hdr",
    "reoriented_anat_moved_bigendian_float.nii",
    "shear_gantry_tilt.nii.gz",
    "derived_qform_mirrors_sform.nii.gz",
    "t2_oblique_chunk.nii.gz",
    "with_header_extension.nii.gz",
]
ITK = [
    "dcmqi/liver_seg.nrrd",
    "derived_oblique/t2_oblique_chunk.mha",
    "derived_oblique/t2_oblique_chunk.mhd",
    "derived_oblique/t2_oblique_chunk.nhdr",
    "derived_oblique/t2_oblique_chunk.nrrd",
    "itkelastix/CT_3D_lung_fixed_mask.mha",
    "niivue/FLAIR.nrrd",
    "niivue/mha.mha",
]


def expected_of(folder: Path) -> list[dict]:
    """Return the entries of expected.json for the series in a folder."""
    for parent in (folder, folder.parent):
        if (parent / "expected.json").exists():
            series = json.loads((parent / "expected.json").read_text())["series"]
            name = str(folder.relative_to(parent))
            return [s for s in series if s.get("folder", ".") == name]
    raise AssertionError(f"no expected.json for {folder}")


def sha256(volume: Volume, dtype: str) -> str:
    """Hash voxels in the order k, j, i."""
    return hashlib.sha256(np.ascontiguousarray(volume.array.T.astype(dtype)).tobytes()).hexdigest()


@pytest.mark.parametrize("name", STACKS)
def test_dicom_is_what_expected_json_says(name):
    [entry] = expected_of(scans(name))
    volume = scanloom.load_volume(scans(name))
    affine = np.array(entry["volume"]["affine_ijk_to_RAS"])
    np.testing.assert_allclose(volume.grid.affine, affine, atol=1e-3)
    assert sha256(volume, "<f4") == entry["volume"]["sha256"]


def test_series_in_a_messy_tree_are_what_expected_json_says():
    tree = scans("mixed/messy_tree")
    listed = json.loads(scans("mixed/messy_tree.expected.json").read_text())["series"]
    listed = {s["series_uid"]: s for s in listed if s.get("uniform") and s["n_files"] > 2}
    indexed = {s.series_uid: s for s in find_series(tree)}
    assert len(listed) >= 3
    for uid, series in listed.items():
        volume = read_scan(indexed[uid]).volume
        assert sha256(volume, "<f4") == series["volume"]["sha256"]
        doubled = series["n_files"] > series["n_distinct_sop"]
        assert (Flag.DUPLICATES_DROPPED in volume.flags) == doubled


def turned_like(image: nibabel.Nifti1Image, volume: Volume) -> nibabel.Nifti1Image:
    """Return the image with its axes flipped and permuted as those of the volume are."""
    theirs, ours = (io_orientation(m) for m in (image.affine, volume.grid.affine))
    return image.as_reoriented(ornt_transform(theirs, ours))


@pytest.mark.parametrize("name", STACKS[:6])
def test_dicom_equals_dcm2niix(name, tmp_path):
    program = Path(sysconfig.get_path("scripts")) / "dcm2niix"
    if not program.exists():
        pytest.skip("dcm2niix is not installed")
    command = [program, "-z", "n", "-b", "n", "-f", "out", "-o", tmp_path, scans(name)]
    subprocess.run(command, check=True, capture_output=True)
    volume = scanloom.load_volume(scans(name))
    image = turned_like(nibabel.load(tmp_path / "out.nii"), volume)
    np.testing.assert_array_equal(volume.array, np.asanyarray(image.dataobj))
    np.testing.assert_allclose(volume.grid.affine, image.affine, atol=1e-3)


@pytest.mark.parametrize("name", VOLUMES)
def test_each_volume_of_a_series_is_that_of_its_reference(name):
    pattern, factor = VOLUMES[name]
    [reference] = scans(name).parent.glob(pattern)
    whole = nibabel.load(reference)
    if whole.ndim == 4:
        with pytest.raises(ScanError, match="PHASES"):
            scanloom.load_volume(scans(name))
    for phase in range(whole.shape[3] if whole.ndim == 4 else 1):
        volume = scanloom.load_volume(scans(name), phase=phase)
        image = whole.slicer[..., phase] if whole.ndim == 4 else whole
        image = turned_like(image, volume)
        values = np.asanyarray(image.dataobj) * factor
        np.testing.assert_allclose(volume.array, values, rtol=1e-4 if factor != 1 else 1e-6)
        np.testing.assert_allclose(volume.grid.affine, image.affine, atol=1e-3)
    with pytest.raises(ScanError):
        scanloom.load_volume(scans(name), phase=phase + 1)


@pytest.mark.parametrize("size", ["23x38x3", "24x38x3"])
def test_legacy_converted_frames_are_the_slices_they_were_made_of(size):
    folder = scans(f"enhanced/legacy_converted_ct_{size}")
    ours, theirs = (scanloom.load_volume(folder / name) for name in ("multiframe", "image"))
    np.testing.assert_array_equal(ours.array, theirs.array)
    assert ours.grid.matches(theirs.grid)
    assert ours.unit == theirs.unit == "a.u."  # RescaleType is US in both


def test_a_tilted_scan_is_what_expected_json_says(tmp_path):
    """The regular part of a head scan: 18.5 degrees, tagged, kept as shear."""
    folder = scans("ct/ge_head_tilt_dicom/dicom")
    for number in range(7, 15):
        (tmp_path / f"{number:02d}.dcm").symlink_to(folder / f"{number:02d}.dcm")
    reported = json.loads((folder.parent / "expected.json").read_text())
    stated = reported["uniform_part_07_14"]["volume"]
    volume = scanloom.load_volume(tmp_path)
    np.testing.assert_allclose(volume.grid.affine, stated["affine_ijk_to_RAS"], atol=1e-3)
    assert sha256(volume, "<f4") == stated["sha256"]
    assert volume.grid.sheared
    assert Flag.ATTRIBUTES_CONTRADICT not in volume.flags


@pytest.mark.parametrize("name", NIFTI)
def test_nifti_equals_simpleitk(name):
    volume, image = scanloom.load_volume(scans(name)), SimpleITK.ReadImage(str(scans(name)))
    np.testing.assert_array_equal(volume.array.T, SimpleITK.GetArrayViewFromImage(image))
    assert volume.array.dtype == SimpleITK.GetArrayViewFromImage(image).dtype
    for index in [(0, 0, 0), *(np.diag(np.array(volume.grid.shape) - 1))]:
        ras = np.array(image.TransformIndexToPhysicalPoint([int(n) for n in index])) * (-1, -1, 1)
        np.testing.assert_allclose(volume.grid.world(index), ras, atol=1e-3)


@pytest.mark.parametrize("name", EQUAL_TO_NIBABEL)
def test_odd_nifti_equals_nibabel(name):
    path = scans(f"orientation/nifti_misc/{name}")
    volume, image = scanloom.load_volume(path), nibabel.load(path)
    values = np.asanyarray(image.dataobj).reshape(volume.grid.shape)
    np.testing.assert_allclose(volume.array, values, rtol=1e-6)
    np.testing.assert_allclose(volume.grid.affine, image.affine, atol=1e-3)


def test_one_head_in_48_orders_is_one_head():
    paths = sorted(scans("orientation/nifti_space").glob("*.nii.gz"))
    assert len(paths) == 48
    heads = set()
    for path in paths:
        volume = scanloom.load_volume(path)
        assert volume.grid.axis_codes == path.name[:3]
        image = nibabel.Nifti1Image(np.asarray(volume.array), volume.grid.affine)
        canonical = nibabel.as_closest_canonical(image)
        heads.add(np.ascontiguousarray(canonical.dataobj).tobytes())
    assert len(heads) == 1


@pytest.mark.parametrize("name", ITK)
def test_nrrd_and_metaimage_are_what_expected_json_says(name):
    path = scans(f"nrrd_mha/{name}")
    stated = json.loads((path.parent / "expected.json").read_text())[path.name]
    volume = scanloom.load_volume(path)
    direction = np.array(stated["direction_LPS"]).reshape(3, 3) * stated["spacing"]
    np.testing.assert_allclose(
        volume.grid.affine[:3],
        np.diag([-1, -1, 1]) @ np.c_[direction, stated["origin_LPS"]],
        atol=1e-3,
    )
    assert sha256(volume, volume.array.dtype.str) == stated["sha256_kji"]


@pytest.mark.parametrize("name", REFUSED)
def test_files_without_a_volume_are_refused_by_code(name):
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(scans(name))
    assert caught.value.code == REFUSED[name]


def test_files_decode_to_the_samples_that_other_decoders_give():
    """Every grey single-frame file that was compressed without loss."""
    from scanloom.io.dicom.header.header import Header, read_headers
    from scanloom.io.dicom.pixels.voxels import read_stored_frame

    exact = 0
    for listing in sorted(scans("transfer_syntaxes").glob("*/expected.json")):
        for name, stated in json.loads(listing.read_text())["files"].items():
            grey = stated.get("samples") == 1 and stated.get("frames") == 1
            if not grey or stated["lossy"]:
                continue
            [header] = read_headers([listing.parent / name])
            assert isinstance(header, Header)
            pixels = read_stored_frame(header)
            assert hashlib.sha256(pixels.tobytes()).hexdigest() == stated["sha256_le_array"], name
            exact += 1
    assert exact > 25


def test_nothing_in_the_malformed_folder_crashes():
    """Each is one file, so no volume: refused by a code; no other error, no warning."""
    for path in sorted(scans("malformed/dicom").iterdir()):
        with pytest.raises(ScanError):
            scanloom.load_volume(path)
