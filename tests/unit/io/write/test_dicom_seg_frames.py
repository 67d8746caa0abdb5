"""Frames of a DICOM SEG are those that NumPy packs, whatever their size, numbers and order."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from scanloom.core import ScanError
from scanloom.io.write.dicom_seg import Pixels, SegFrame, binary_frames


def packed(frames: list[SegFrame]) -> bytes:
    """Return all masks, packed at once and padded to an even length (PS3.5 8.1.1)."""
    masks = np.stack([frame.planes[frame.slice] == frame.number for frame in frames])
    data = np.packbits(masks.ravel(), bitorder="little").tobytes()
    return data + bytes(len(data) % 2)


def joined(pixels: Pixels) -> bytes:
    return b"".join(bytes(chunk) for chunk in pixels.chunks())


def random_labels(shape: tuple[int, ...], numbers: list[int], dtype: type) -> NDArray[Any]:
    """Return labels (K, J, I) in the order in which label maps are in memory."""
    random = np.random.default_rng(len(numbers))
    return random.choice(np.array([0, *numbers], dtype), shape)


@settings(max_examples=60)
@given(data=st.data())
def test_frames_are_the_masks_packed(data: st.DataObject) -> None:
    size = data.draw(st.tuples(*(st.integers(1, n) for n in (19, 9, 9))))
    most = data.draw(st.sampled_from([1, 3, 25, 255, 4000]))
    numbers = sorted(data.draw(st.sets(st.integers(1, most), min_size=1, max_size=9)))
    dtype = np.uint8 if most < 256 else np.uint16
    layers = [random_labels(size, numbers[n::2], dtype) for n in range(2)]
    every = [
        SegFrame(layers[n % 2], number, n + 1, k)
        for n, number in enumerate(numbers)
        for k in range(size[0])
    ]
    frames = [frame for frame in every if data.draw(st.booleans())] or every[:1]
    if data.draw(st.booleans()):
        frames.reverse()

    pixels = binary_frames(frames)

    assert joined(pixels) == packed(frames)
    assert pixels.length == len(packed(frames))


@pytest.mark.parametrize("shape", [(20, 16, 24), (20, 5, 7), (3, 3, 8)])
def test_frames_are_made_twice_alike(shape: tuple[int, int, int]) -> None:
    """They are hashed first and written later."""
    labels = random_labels(shape, [1, 2, 7, 25], np.uint8)
    numbers = itertools.product([1, 2, 7, 25], range(shape[0]))
    pixels = binary_frames([SegFrame(labels, number, number, k) for number, k in numbers])

    assert joined(pixels) == joined(pixels)


def test_a_number_beyond_all_labels_has_an_empty_frame() -> None:
    labels = np.zeros((2, 8, 8), np.uint8)

    assert joined(binary_frames([SegFrame(labels, 9, 1, 0)])) == bytes(8)


def test_more_frames_than_an_element_holds_are_refused() -> None:
    """Of 32 KiB each: the length of PixelData has 32 bits."""
    planes = np.zeros((1, 512, 512), np.uint8)

    with pytest.raises(ScanError, match="labelmap") as caught:
        binary_frames([SegFrame(planes, 1, 1, 0)] * (1 << 17))

    assert caught.value.code == "TOO_LARGE"
