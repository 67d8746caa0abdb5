"""A DICOM series is stacked into the right volume, or refused with the right reason code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import SimpleITK
from pydicom import DataElement, Dataset, config
from pydicom.uid import (
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLSLossless,
    RLELossless,
)

import scanloom
from scanloom.core import Flag, Reason, ScanError, Volume
from support.write_dicom import (
    MR,
    PLANES,
    Coding,
    Geometry,
    Words,
    add_overlays,
    noise,
    plane,
    uid,
    write_series,
)

CORNERS = [(0, 0, 0), (23, 0, 0), (0, 19, 0), (0, 0, 5), (23, 19, 5), (7, 3, 2)]


def read_by_simpleitk(paths: list[Path]) -> SimpleITK.Image:
    """Read files that are sorted by k already, so that SimpleITK does not sort them."""
    reader = SimpleITK.ImageSeriesReader()
    reader.SetFileNames([str(path) for path in paths])
    return reader.Execute()


def code_of(path: Path) -> str:
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path)
    return caught.value.code


@pytest.mark.parametrize("name", PLANES)
def test_every_plane_has_the_position_it_was_drawn_at(tmp_path, name):
    geometry, stored = plane(name), noise()
    write_series(tmp_path, stored, geometry)

    volume = scanloom.load_volume(tmp_path)

    np.testing.assert_array_equal(volume.array, stored.astype(int) - 1024)
    np.testing.assert_allclose(volume.grid.affine, geometry.affine, atol=1e-6)


@pytest.mark.parametrize("name", PLANES)
def test_voxel_positions_agree_with_simpleitk(tmp_path, name):
    paths = write_series(tmp_path, noise(), plane(name))

    volume, image = scanloom.load_volume(tmp_path), read_by_simpleitk(paths)

    for index in CORNERS:
        ras = np.array(image.TransformIndexToPhysicalPoint(index)) * (-1, -1, 1)
        np.testing.assert_allclose(volume.grid.world(index), ras, atol=1e-4)
        assert volume.array[index] == image.GetPixel(index)


def test_slices_and_headers_ascend_along_row_cross_column(tmp_path):
    from scanloom.io.index.series import find_series
    from scanloom.io.read import read_scan

    geometry = plane("coronal, rows negated")
    write_series(tmp_path, noise(), geometry)

    scan = read_scan(find_series(tmp_path)[0])

    positions = np.array([slice_.position for slice_ in scan.source.slices], dtype=float)
    np.testing.assert_allclose(np.diff(positions @ geometry.normal), geometry.step, atol=1e-6)
    assert "PixelData" not in scan.source.first


@pytest.mark.parametrize("frames", ["1", "0"])  # 0 is not valid; pydicom takes it for 1, too
def test_volume_is_in_fortran_order_and_hounsfield(tmp_path, frames):
    write_series(tmp_path, noise(), edit=every(NumberOfFrames=frames))
    volume = scanloom.load_volume(tmp_path)
    assert volume.array.flags.f_contiguous
    assert (volume.unit, volume.modality, volume.array.dtype) == ("HU", "CT", np.int16)


CODINGS = {
    "8 bit": Coding(8, 8, signed=False, intercept="0"),
    "8 bit signed": Coding(8, 8, signed=True),
    "12 bit": Coding(16, 12, signed=False),
    "12 bit signed": Coding(16, 12, signed=True, intercept="0"),
    "16 bit": Coding(16, 16, signed=False, intercept="0"),
    "16 bit signed": Coding(16, 16, signed=True),
    "16 bit, slope -3": Coding(16, 16, signed=True, slope="-3", intercept="7"),
    "32 bit": Coding(32, 32, signed=False),
    "32 bit signed": Coding(32, 32, signed=True),
    "24 of 32 bit signed": Coding(32, 24, signed=True, intercept="0"),
    "fraction": Coding(16, 16, signed=True, slope="0.37", intercept="-12.5"),
    "implicit": Coding(syntax=ImplicitVRLittleEndian),
    "RLE": Coding(syntax=RLELossless),
    "RLE 12 bit signed": Coding(16, 12, signed=True, syntax=RLELossless),
    "JPEG 2000": Coding(syntax=JPEG2000Lossless),
    "JPEG 2000 12 bit": Coding(16, 12, signed=False, syntax=JPEG2000Lossless),
    "JPEG-LS": Coding(syntax=JPEGLSLossless),
    "JPEG-LS 12 bit": Coding(16, 12, signed=False, syntax=JPEGLSLossless),
}


@pytest.mark.parametrize("name", CODINGS)
def test_values_are_slope_times_stored_plus_intercept(tmp_path, name):
    coding = CODINGS[name]
    low = -(1 << coding.stored - 1) if coding.signed else 0
    ends = np.array([low, low + (1 << coding.stored) - 1])
    stored = np.random.default_rng(1).integers(*ends, (40, 36, 4), dtype=np.int64, endpoint=True)
    stored[0, 0, 0], stored[5, 5, 3] = ends
    write_series(tmp_path, stored, coding=coding)

    array = scanloom.load_volume(tmp_path).array

    expected = stored * float(coding.slope) + float(coding.intercept)
    np.testing.assert_array_equal(array.astype(np.float32), expected.astype(np.float32))
    if float(coding.slope).is_integer() and coding.stored < 32:
        assert array.dtype.kind == "i"
        np.testing.assert_array_equal(array, expected)


def test_rescale_is_per_slice(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.RescaleSlope, ds.RescaleIntercept = f"{1 + k / 4:g}", str(-10 * k)

    stored = noise()
    write_series(tmp_path, stored, edit=edit)
    k = np.arange(stored.shape[2])
    np.testing.assert_allclose(
        scanloom.load_volume(tmp_path).array, stored * (1 + k / 4) - 10 * k, rtol=1e-6
    )


def test_one_slice_beyond_16_bits_makes_the_volume_32_bit(tmp_path):
    stored = noise()
    stored[3, 4, 5] = 32000

    def edit(k: int, ds: Dataset) -> None:
        ds.RescaleIntercept = "800"

    write_series(tmp_path, stored, edit=edit)
    array = scanloom.load_volume(tmp_path).array
    assert array.dtype == np.int32
    np.testing.assert_array_equal(array, stored.astype(int) + 800)


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("signed", [False, True])
def test_unused_bits_may_hold_overlays_that_the_header_describes(tmp_path, signed, described):
    stored = noise() - (1000 if signed else 0)

    def edit(k: int, ds: Dataset) -> None:
        samples = np.frombuffer(ds.PixelData, "<u2") & 0x0FFF
        overlay = np.random.default_rng(k).integers(0, 16, samples.size).astype("<u2") << 12
        ds.PixelData = (samples | overlay).astype("<u2").tobytes()
        ds["PixelData"].VR = "OW"
        if described:
            add_overlays(ds, range(12, 16))

    write_series(tmp_path, stored, coding=Coding(16, 12, signed, intercept="0"), edit=edit)
    if described:
        np.testing.assert_array_equal(scanloom.load_volume(tmp_path).array, stored)
    else:
        with pytest.raises(ScanError, match="samples occupy bits") as caught:
            scanloom.load_volume(tmp_path)
        assert caught.value.code == "DAMAGED"


@pytest.mark.parametrize("high_bit", [11, 13, 15])
@pytest.mark.parametrize("shift", [0, 2, 4])
@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("signed", [False, True])
def test_samples_are_where_the_header_says_or_refused(tmp_path, signed, extended, shift, high_bit):
    """12 stored bits, by `shift` above the low end; HighBit may be wrong."""
    stored = noise() - (1000 if signed else 0)

    def edit(k: int, ds: Dataset) -> None:
        samples = np.frombuffer(ds.PixelData, "<i2")
        samples = (samples if extended else samples & 0x0FFF) << shift
        ds.PixelData, ds.HighBit = samples.astype("<i2").tobytes(), high_bit

    write_series(tmp_path, stored, coding=Coding(16, 12, signed, intercept="-1024"), edit=edit)
    if high_bit == 11 + shift:
        np.testing.assert_array_equal(scanloom.load_volume(tmp_path).array, stored - 1024)
    else:
        with pytest.raises(ScanError, match="BitsStored and HighBit") as caught:
            scanloom.load_volume(tmp_path)
        assert caught.value.code == "DAMAGED"


def test_monochrome1_changes_no_value(tmp_path):
    write_series(tmp_path, noise(), words=Words(more={"PhotometricInterpretation": "MONOCHROME1"}))
    np.testing.assert_array_equal(scanloom.load_volume(tmp_path).array, noise() - 1024)


UNITS: dict[str, tuple[Words, str, tuple[Flag, ...]]] = {
    "CT": (Words(), "HU", ()),
    "CT without type": (Words(more={"RescaleType": ""}), "HU", ()),
    "CT of another type": (Words(more={"RescaleType": "US"}), "a.u.", (Flag.NOT_HOUNSFIELD,)),
    "multi-energy, in HU": (
        Words(more={"MultienergyCTAcquisition": "YES", "RescaleType": "HU"}),
        "HU",
        (),
    ),
    **{
        f"multi-energy, of type {kind!r}": (
            Words(more={"MultienergyCTAcquisition": "YES", "RescaleType": kind}),
            "a.u.",
            (Flag.NOT_HOUNSFIELD,),
        )
        for kind in ("", "HU_MOD", "EDW", "Z_EFF")
    },
    "MR": (Words(modality="MR"), "a.u.", ()),
    "other": (Words(more={"Modality": "OT"}), "unknown", ()),
    "burned in": (Words(more={"BurnedInAnnotation": "YES"}), "HU", (Flag.BURNED_IN,)),
}


@pytest.mark.parametrize("name", UNITS)
def test_unit_and_flags(tmp_path, name):
    attributes, unit, flags = UNITS[name]
    write_series(tmp_path, noise(), words=attributes)
    volume = scanloom.load_volume(tmp_path)
    assert (volume.unit, volume.flags) == (unit, flags)


def test_padding_is_rescaled(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.add_new("PixelPaddingValue", "SS", -2000)

    write_series(tmp_path, noise(), edit=edit)
    assert scanloom.load_volume(tmp_path).padding == -3024


def test_padding_may_be_a_range(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.add_new("PixelPaddingValue", "SS", -2000)
        ds.add_new("PixelPaddingRangeLimit", "SS", -1900)

    write_series(tmp_path, noise(), edit=edit)
    volume = scanloom.load_volume(tmp_path)
    values = np.array([-3025, -3024, -3000, -2924, -2923])
    assert volume.is_padding(values).tolist() == [False, True, True, True, False]


def test_an_interpolated_pixel_beside_a_range_of_padding_is_padding(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.add_new("PixelPaddingValue", "SS", -2000)
        ds.add_new("PixelPaddingRangeLimit", "SS", -1900)

    stored = np.full((24, 20, 6), 40, np.int16)
    stored[:9, :, 2] = -1950
    write_series(tmp_path, stored, edit=edit)[3].unlink()
    filled = scanloom.load_volume(tmp_path, gaps="interpolate").array[:, :, 3]
    np.testing.assert_array_equal(filled[:9], -3024)
    np.testing.assert_array_equal(filled[9:], 40 - 1024)


def test_padding_that_differs_between_slices_is_ignored(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.add_new("PixelPaddingValue", "SS", -2000 - k)

    write_series(tmp_path, noise(), edit=edit)
    assert scanloom.load_volume(tmp_path).padding is None


def test_jitter_is_removed_and_flagged(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        shift = np.random.default_rng(k).uniform(-0.01, 0.01, 3)
        ds.ImagePositionPatient = [
            f"{v:.4f}" for v in np.array(ds.ImagePositionPatient, float) + shift
        ]

    write_series(tmp_path, noise(), edit=edit)
    volume = scanloom.load_volume(tmp_path)
    assert not volume.grid.sheared
    assert volume.flags == (Flag.AFFINE_ROUNDED,)
    np.testing.assert_allclose(volume.grid.affine, Geometry().affine, atol=0.02)


def test_identical_slices_are_used_once_and_flagged(tmp_path):
    paths = write_series(tmp_path, noise())
    (tmp_path / "copy.dcm").write_bytes(paths[2].read_bytes())
    volume = scanloom.load_volume(tmp_path)
    np.testing.assert_array_equal(volume.array, noise() - 1024)
    assert volume.flags == (Flag.DUPLICATES_DROPPED,)


def test_localiser_with_the_series_uid_is_set_aside(tmp_path):
    write_series(tmp_path, noise())

    def edit(k: int, ds: Dataset) -> None:
        ds.ImageType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]

    write_series(tmp_path / "scout", noise((30, 31, 2)), plane("coronal"), edit=edit)
    assert scanloom.load_volume(tmp_path).grid.shape == (24, 20, 6)


Edit = Callable[[int, Dataset], None]


def third(**changes: object) -> Edit:
    """Return an edit of the third slice only."""

    def edit(k: int, ds: Dataset) -> None:
        if k == 2:
            for keyword, value in changes.items():
                setattr(ds, keyword, value)

    return edit


def every(**changes: object) -> Edit:
    def edit(k: int, ds: Dataset) -> None:
        for keyword, value in changes.items():
            setattr(ds, keyword, value)

    return edit


def unplaced(k: int, ds: Dataset) -> None:
    if k == 2:
        del ds.ImagePositionPatient


def nan_position(k: int, ds: Dataset) -> None:
    if k == 2:
        numbers = ["0", "0", "NaN"]
        ds.add(DataElement("ImagePositionPatient", "DS", numbers, validation_mode=config.IGNORE))


def nan_slope(k: int, ds: Dataset) -> None:
    ds.add(DataElement("RescaleSlope", "DS", "NaN", validation_mode=config.IGNORE))


def lookup_table(k: int, ds: Dataset) -> None:
    table = Dataset()
    table.LUTDescriptor, table.ModalityLUTType = [2, 0, 16], "HU"
    ds.ModalityLUTSequence = [table]


def colour(k: int, ds: Dataset) -> None:
    ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.PlanarConfiguration = 3, "RGB", 0
    ds.BitsAllocated = ds.BitsStored = 8
    ds.HighBit, ds.PixelRepresentation = 7, 0
    ds.PixelData = bytes(ds.Rows * ds.Columns * 3)


def shifted(k: int, ds: Dataset) -> None:
    """Shift every second slice sideways by 1 mm."""
    x, y, z = ds.ImagePositionPatient
    ds.ImagePositionPatient = [float(x) + k % 2, y, z]


BAD: dict[str, tuple[Edit, Reason]] = {
    "rows": (third(Rows=10), Reason.SLICE_SIZE),
    "pixel spacing": (third(PixelSpacing=["0.8", "0.71"]), Reason.SLICE_SPACING),
    "no pixel spacing": (every(PixelSpacing=None), Reason.BAD_GEOMETRY),
    "orientation": (
        third(ImageOrientationPatient=["1", "0", "0", "0", "0.999", "0.0447"]),
        Reason.SLICE_ORIENTATION,
    ),
    "crooked directions": (
        every(ImageOrientationPatient=["1", "0", "0", "0.1", "0.995", "0"]),
        Reason.BAD_GEOMETRY,
    ),
    "sideways": (shifted, Reason.BAD_GEOMETRY),
    "frame of reference": (third(FrameOfReferenceUID=uid("other")), Reason.FRAME_OF_REFERENCE),
    "no position": (unplaced, Reason.NO_POSITION),
    "NaN position": (nan_position, Reason.NO_POSITION),
    "slope 0": (every(RescaleSlope="0"), Reason.RESCALE),
    "slope NaN": (nan_slope, Reason.RESCALE),
    "lookup table": (lookup_table, Reason.RESCALE),
    "frames of a class with one": (every(NumberOfFrames="2"), Reason.HEADER_CONTRADICTS),
    "mosaic": (every(ImageType=["ORIGINAL", "PRIMARY", "M", "MOSAIC"]), Reason.MOSAIC),
    "colour": (colour, Reason.COLOR),
    "localisers": (every(ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"]), Reason.LOCALIZER),
    "capture": (every(SOPClassUID="1.2.840.10008.5.1.4.1.1.7"), Reason.SECONDARY_CAPTURE),
    "projection": (every(SOPClassUID="1.2.840.10008.5.1.4.1.1.1.1"), Reason.PROJECTION),
    "segmentation": (every(SOPClassUID="1.2.840.10008.5.1.4.1.1.66.4"), Reason.NOT_AN_IMAGE),
    "bits": (every(BitsAllocated=64, BitsStored=64, HighBit=63), Reason.PIXEL_TYPE),
    "contradicting bits": (every(BitsStored=20), Reason.DAMAGED),
}


@pytest.mark.parametrize("name", BAD)
def test_an_irregular_stack_is_refused_with_its_reason_code(tmp_path, name):
    edit, reason = BAD[name]
    write_series(tmp_path, noise(), edit=edit)
    assert code_of(tmp_path) == reason.code


def test_a_missing_slice_is_a_gap(tmp_path):
    write_series(tmp_path, noise())[3].unlink()
    assert code_of(tmp_path) == "SLICE_GAP"


@pytest.mark.parametrize("cut", [100, 8192, 8192 + 12])
def test_a_file_that_ends_early_is_truncated(tmp_path, cut):
    stored = noise((64, 64, 5))
    path = write_series(tmp_path, stored)[-1]  # an outer slice: the remaining ones are regular
    path.write_bytes(path.read_bytes()[:-cut])
    assert code_of(tmp_path) == "TRUNCATED"


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless, JPEGLSLossless])
@pytest.mark.parametrize("closed", [False, True])
def test_compressed_pixels_that_end_early_are_refused(tmp_path, syntax, closed):
    def edit(k: int, ds: Dataset) -> None:
        if k == 2 and closed:  # a short frame in well-formed items
            from pydicom.encaps import encapsulate, get_frame

            frame = get_frame(ds.PixelData, 0, number_of_frames=1)
            ds.PixelData = encapsulate([frame[: len(frame) // 2]])

    paths = write_series(tmp_path, noise((64, 64, 4)), coding=Coding(syntax=syntax), edit=edit)
    if not closed:
        paths[2].write_bytes(paths[2].read_bytes()[:-1000])
    whole_items = (
        closed and syntax == RLELossless
    )  # RLE has no end marker: its decoder detects the end
    assert code_of(tmp_path) == ("DAMAGED" if whole_items else "TRUNCATED")


def test_a_change_of_spacing_is_not_a_gap(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        depth = 3.0 * k if k < 4 else 9.0 + 4.0 * (k - 3)
        ds.ImagePositionPatient = [0, 0, depth]

    write_series(tmp_path, noise((24, 20, 8)), edit=edit)
    assert code_of(tmp_path) == "SPACING_CHANGES"


@pytest.mark.parametrize("name", PLANES)
@pytest.mark.parametrize("tilt", [0.05, 0.7, -0.7])
def test_tilt_is_kept_as_shear(tmp_path, name, tilt):
    """The step between slices is oblique, tagged or not; no voxel is moved."""
    geometry = plane(name, tilt=tilt)
    write_series(tmp_path, noise(), geometry)
    volume = scanloom.load_volume(tmp_path)
    np.testing.assert_array_equal(volume.array, noise() - 1024)
    np.testing.assert_allclose(volume.grid.affine, geometry.affine, atol=1e-6)
    assert volume.grid.shear_axis == 2


HEADER_VALUES: dict[str, tuple[float, dict[str, str], bool]] = {
    "tilt as it is": (0.7, {"GantryDetectorTilt": "15.64"}, False),
    "tilt with another sign": (0.7, {"GantryDetectorTilt": "-15.64"}, False),
    "another tilt": (0.7, {"GantryDetectorTilt": "10"}, True),
    "no tilt": (0.7, {"GantryDetectorTilt": "0"}, True),
    "a tilt that is none": (0.0, {"GantryDetectorTilt": "10"}, True),
    "no words": (0.7, {}, False),
    "words that are no number": (0.0, {"GantryDetectorTilt": ""}, False),
    "spacing": (0.0, {"SpacingBetweenSlices": "2.5"}, False),
    "spacing with a sign": (0.0, {"SpacingBetweenSlices": "-2.5"}, False),
    "spacing along the table": (0.7, {"SpacingBetweenSlices": "2.596"}, False),
    "another spacing": (0.0, {"SpacingBetweenSlices": "5"}, True),
    "slices thicker than their distance": (0.0, {"SliceThickness": "5"}, False),
}


@pytest.mark.parametrize("name", HEADER_VALUES)
def test_positions_override_contradictory_attributes_with_a_flag(tmp_path, name):
    tilt, more, contradict = HEADER_VALUES[name]
    geometry = Geometry(tilt=tilt)
    write_series(tmp_path, noise(), geometry, words=Words(more=more))
    volume = scanloom.load_volume(tmp_path)
    np.testing.assert_allclose(volume.grid.affine, geometry.affine, atol=1e-6)
    assert (Flag.ATTRIBUTES_CONTRADICT in volume.flags) == contradict


def test_two_slices_are_not_a_volume(tmp_path):
    write_series(tmp_path, noise((24, 20, 2)))
    assert code_of(tmp_path) == "TOO_FEW_SLICES"


def test_slices_at_one_position_are_counted(tmp_path):
    """As after an export that writes the first position into all slices."""
    write_series(tmp_path, noise(), Geometry(step=0.0))
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(tmp_path)
    assert (caught.value.code, caught.value.detail) == ("TOO_FEW_SLICES", "6 slices at 1 position")


def test_phases_are_not_mixed(tmp_path):
    for number in (1, 2):
        attributes = Words(more={"AcquisitionNumber": number})
        write_series(tmp_path / str(number), noise(seed=number), words=attributes)
    assert code_of(tmp_path) == "PHASES"


def test_a_phase_that_lacks_slices_is_still_a_phase(tmp_path):
    for number in (1, 2):
        attributes = Words(more={"AcquisitionNumber": number})
        paths = write_series(tmp_path / str(number), noise(seed=number), words=attributes)
    paths[0].unlink()
    assert code_of(tmp_path) == "PHASES"


def test_phases_that_no_attribute_distinguishes_are_not_mixed(tmp_path):
    for number in (1, 2):
        write_series(tmp_path / str(number), noise(seed=number))
    assert code_of(tmp_path) == "DUPLICATE_SLICES"


def test_slices_that_contradict_each_other_are_refused(tmp_path):
    write_series(tmp_path / "whole", noise())
    paths = write_series(tmp_path / "part", noise(seed=1))
    for path in paths[:2] + paths[3:]:
        path.unlink()
    assert code_of(tmp_path) == "DUPLICATE_SLICES"


def test_an_unknown_transfer_syntax_has_no_decoder(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.4.102"  # MPEG-4
        ds["PixelData"].is_undefined_length = True
        from pydicom.encaps import encapsulate

        ds.PixelData = encapsulate([b"\0" * 100])

    write_series(tmp_path, noise(), edit=edit)
    assert code_of(tmp_path) == "DECODER"


def test_more_pixels_than_the_header_describes_are_refused(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.PixelData = ds.PixelData * 2

    write_series(tmp_path, noise(), edit=edit)
    assert code_of(tmp_path) == "DAMAGED"


def test_mr_without_rescale_has_the_stored_values(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        del ds.RescaleSlope, ds.RescaleIntercept

    write_series(tmp_path, noise(), words=replace(Words(), modality="MR"), edit=edit)
    volume: Volume = scanloom.load_volume(tmp_path)
    np.testing.assert_array_equal(volume.array, noise())
    assert MR.endswith(".4")
    assert volume.unit == "a.u."
