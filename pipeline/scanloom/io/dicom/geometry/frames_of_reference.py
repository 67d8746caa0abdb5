"""Series in which each slice has a different frame of reference, as some anonymisers leave them.

They replace every UID by a new one, and overlook that slices share this one. Positions are not
comparable across frames of reference; but slices do not form one complete regular stack by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scanloom.core import Flag, Gaps, Reason, ScanError
from scanloom.io.dicom.geometry.slices import Slice, unique_by_shared
from scanloom.io.dicom.geometry.stack import MIN_SLICES, Stack, stack_slices
from scanloom.io.dicom.splitting.volumes import split_volumes


def have_distinct_frames_of_reference(slices: Sequence[Slice]) -> bool:
    """Return whether all slices have a frame of reference, and no two have the same."""
    if len(slices) < MIN_SLICES or len(unique_by_shared(slices)) < len(slices):
        return False
    frames = {slice_.header.frame_of_reference for slice_ in slices}
    return len(frames) == len(slices) and "" not in frames


def stack_across_frames_of_reference(
    slices: Sequence[Slice], phase: int | None, gaps: Gaps
) -> Stack:
    """Return the one stack of slices whose frames of reference all differ.

    Raises
    ------
    ScanError
        FRAME_OF_REFERENCE if they form several stacks, or slices share a position: nothing shows
        which of them belong together. Errors of the stack as in `stack_slices`.
    """
    volumes = split_volumes(
        [replace(s, header=replace(s.header, frame_of_reference="")) for s in slices]
    )
    stack = None
    if len(volumes.groups) == 1 and not volumes.crossing:
        stack = stack_slices(volumes.choose(phase)[0], gaps)
    if stack is None or stack.twins:
        count = len(slices)
        detail = f"{count} slices have {count} frames of reference, and do not form a single stack"
        raise ScanError(Reason.FRAME_OF_REFERENCE, detail)
    return stack.with_flag(Flag.FRAMES_OF_REFERENCE)
