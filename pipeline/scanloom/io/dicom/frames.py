"""Series of which each slice has a frame of reference of its own, as some anonymisers leave them.

They replace every UID by a new one and forget that slices share this one. Positions mean nothing
across frames of reference; but slices that make one whole regular stack do not do so by chance.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from scanloom.core import Flag, Gaps, Reason, ScanError
from scanloom.io.dicom.phases import split_volumes
from scanloom.io.dicom.slices import Slice, one_of_each
from scanloom.io.dicom.stack import MIN_SLICES, Stack, stack_slices


def have_own_frames(slices: Sequence[Slice]) -> bool:
    """Whether no two slices have the same frame of reference, and none lacks it."""
    if len(slices) < MIN_SLICES or len(one_of_each(slices)) < len(slices):
        return False
    frames = {one.header.frame_of_reference for one in slices}
    return len(frames) == len(slices) and "" not in frames


def stack_without_frames(slices: Sequence[Slice], phase: int | None, gaps: Gaps) -> Stack:
    """Return the one stack that slices make whose frames of reference all differ.

    Raises
    ------
    ScanError
        FRAME_OF_REFERENCE if they make several, or slices share a place: which of them belong
        together could not be told. What is wrong with the stack.
    """
    volumes = split_volumes([_without_frame(one) for one in slices])
    stack = None
    if len(volumes.groups) == 1 and not volumes.crossing:
        stack = stack_slices(volumes.choose(phase)[0], gaps)
    if stack is None or stack.twins:
        count = len(slices)
        detail = f"{count} slices have {count} frames of reference, and make no single stack"
        raise ScanError(Reason.FRAME_OF_REFERENCE, detail)
    return stack.with_flag(Flag.FRAMES_OF_REFERENCE)


def _without_frame(one: Slice) -> Slice:
    header = copy.copy(one.header)
    header.__dict__["frame_of_reference"] = ""
    return replace(one, header=header)
