"""Limits on the size of a volume and of the files that hold it."""

from __future__ import annotations

VOXEL_LIMIT = 4 << 30
"""Bytes of decoded voxels that a volume may have, unless the caller passes another limit."""

FILE_LIMIT = 8
"""Largest size of a compressed file of several volumes, in multiples of the limit of one volume:
to reach the last volume, all before it are inflated."""

SKIP_LIMIT = 1 << 30
"""Bytes before the first voxel: header extensions are a few kB."""

DEFLATE_LIMIT = 1032
"""Largest compression ratio of Deflate: a file that would need more was truncated or damaged."""
