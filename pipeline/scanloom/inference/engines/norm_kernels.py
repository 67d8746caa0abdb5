"""Triton kernels of an instance norm and the activation after it.

Imported by `engines.fused_engine` only, if Triton is installed. A row is one channel of one window,
`size` voxels in memory, and is cut into parts of BLOCKS x BLOCK voxels; the grid is (rows, parts).
One kernel takes the moments of each part, the other merges those of a row and normalises. All sums
are float32, whatever the type of the values.

Sizes divisible by 16 are compiled apart from others, since their rows are aligned. BLOCKS is a
power of two, so that most sizes and numbers of windows run the same compiled code.
"""

# Triton reads annotations, and allows them for compile-time constants only:
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-not-found,import-untyped"

import triton
import triton.language as tl


@triton.jit
def _part(values, size, CHUNK: tl.constexpr):
    """Return a pointer to the first voxel of the program's part, and its number of voxels."""
    start = tl.program_id(1).to(tl.int64) * CHUNK  # offsets in memory exceed 32 bits
    first = values + tl.program_id(0).to(tl.int64) * size + start
    return first, tl.minimum(CHUNK, size - start).to(tl.int32)


@triton.jit(do_not_specialize=["parts"])
def take_moments(values, moments, size, parts, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the mean of each part, and its sum of squared deviations, in `moments` (2, R, P)."""
    first, count = _part(values, size, BLOCKS * BLOCK)
    voxels = tl.arange(0, BLOCK)
    # Deviations from a value near the mean lose no digits to a large mean, and are 0 if all values
    # are equal. The first value alone may be far from it
    near = tl.load(first).to(tl.float32)
    sample = tl.load(first + voxels, mask=voxels < count, other=0.0).to(tl.float32)
    near += tl.sum(tl.where(voxels < count, sample - near, 0.0), 0) / tl.minimum(count, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for n in range(BLOCKS):
        start = n * BLOCK
        inside = start + voxels < count
        block = tl.load(first + start + voxels, mask=inside, other=0.0).to(tl.float32)
        deviation = tl.where(inside, block - near, 0.0)
        total += deviation
        squares += deviation * deviation
    mean = tl.sum(total, 0) / count
    to = moments + tl.program_id(0) * parts + tl.program_id(1)
    tl.store(to, near + mean)
    tl.store(to + tl.num_programs(0) * parts, tl.sum(squares, 0) - count * mean * mean)


@triton.jit(do_not_specialize=["parts", "channels"])
def normalise(
    values,
    out,
    moments,
    weight,
    bias,
    size,
    parts,
    channels,
    slope,
    eps,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise rows by their moments, scale and shift channels, multiply negatives by `slope`.

    `out` may be `values`. PARTS is a power of two, at least `parts`.
    """
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    chunk: tl.constexpr = BLOCKS * BLOCK
    here = part < parts
    means = tl.load(moments + row * parts + part, mask=here, other=0.0)
    squares = tl.load(moments + (tl.num_programs(0) + row) * parts + part, mask=here, other=0.0)
    counts = tl.where(here, tl.minimum(chunk, size - part.to(tl.int64) * chunk), 0).to(tl.float32)
    # Again by deviations, as above
    near = tl.load(moments + row * parts)
    mean = near + tl.sum(counts * (means - near), 0) / size
    means = means - mean
    variance = (tl.sum(squares, 0) + tl.sum(counts * means * means, 0)) / size
    scale = tl.load(weight + row % channels).to(tl.float32) / tl.sqrt(variance + eps)
    shift = tl.load(bias + row % channels).to(tl.float32)
    first, count = _part(values, size, BLOCKS * BLOCK)
    to, _ = _part(out, size, BLOCKS * BLOCK)
    voxels = tl.arange(0, BLOCK)
    for n in range(BLOCKS):
        start = n * BLOCK
        inside = start + voxels < count
        block = tl.load(first + start + voxels, mask=inside, other=0.0).to(tl.float32)
        block = (block - mean) * scale + shift
        block = tl.where(block > 0, block, block * slope)
        tl.store(to + start + voxels, block, mask=inside)
