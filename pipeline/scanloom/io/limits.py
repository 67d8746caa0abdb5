"""Limits on the size of a volume and of the files that hold it."""

from __future__ import annotations

VOXEL_LIMIT_BYTES = 4 << 30
"""Largest size of the decoded voxels of a volume, unless the caller passes another limit."""

FILE_LIMIT_VOLUMES = 8
"""Largest size of a compressed file of several volumes, in multiples of the limit of one volume:
to reach the last volume, all before it are inflated."""

SKIP_LIMIT_BYTES = 1 << 30
"""Largest offset of the first voxel: header extensions are a few kB."""

MAX_DEFLATE_RATIO = 1032
"""Largest compression ratio of Deflate: a file that would need more is truncated or damaged."""
