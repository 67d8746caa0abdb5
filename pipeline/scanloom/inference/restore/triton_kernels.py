"""Triton kernels that restore labels: find the classes that can win in a block, then decide.

Imported by `restore.cuda` only, if Triton is installed. A source voxel depends on the network
voxels below and above it along each axis. A block of `BLOCK`^3 network voxels, with its upper
faces, contains all eight. A class that can't win (or can't reach the threshold) in a block is never
read for the voxels in it. Sums and comparisons are float32 for every type of scores.

Scores are (planes P, classes C, rows B, columns D), labels (slices S, rows J, columns I); `step_x`
is the stride along x in elements. Sizes and strides are not compile-time constants
(`do_not_specialize` covers all arguments before these): scans of all shapes run the same compiled
code. A set of classes is a bit mask of one or several int32 words.
"""

# Triton reads annotations, and allows them for compile-time constants only:
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-not-found,import-untyped"

import triton
import triton.language as tl

CLASSES_PER_WORD = tl.constexpr(31)
"""Classes per word of a bit mask: the bits of int32 without the sign."""


@triton.jit
def _union(first, second):
    """Return the classes in either of two words."""
    return first | second


@triton.jit
def _bounds(
    scores,
    size,
    step,
    x,
    BLOCK: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return the minimum and the maximum of each class in each block: (CLASSES, BLOCKS).

    `size` and `step` are those of P, C, B, D; `x` (BLOCKS) are indices of blocks in one row of
    blocks. The program's ids are the indices of that row along planes and rows.
    """
    classes = tl.minimum(tl.arange(0, CLASSES), size[1] - 1).to(tl.int64) * step[1]
    columns = tl.minimum(x[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], size[3] - 1)
    face = tl.minimum(x * BLOCK + BLOCK, size[3] - 1)
    in_block = scores + classes[:, None, None] + (columns.to(tl.int64) * step[3])[None, :, :]
    on_face = scores + classes[:, None] + (face.to(tl.int64) * step[3])[None, :]
    zero = tl.zeros((), tl.int64)  # offsets in memory exceed 32 bits
    first_p, first_b = zero + tl.program_id(0) * BLOCK, zero + tl.program_id(1) * BLOCK
    low = tl.full((CLASSES, BLOCKS, BLOCK), float("inf"), tl.float32)
    high = tl.full((CLASSES, BLOCKS, BLOCK), float("-inf"), tl.float32)
    for n in range(BLOCK + 1):
        plane = tl.minimum(first_p + n, size[0] - 1) * step[0]
        for m in tl.static_range(BLOCK + 1):  # unrolled: independent loads
            row = tl.minimum(first_b + m, size[2] - 1) * step[2]
            values = tl.load(in_block + plane + row).to(tl.float32)
            face_values = tl.load(on_face + plane + row).to(tl.float32)[:, :, None]
            low = tl.minimum(low, tl.minimum(values, face_values))
            high = tl.maximum(high, tl.maximum(values, face_values))
    return tl.min(low, 2), tl.max(high, 2)


@triton.jit
def _store_masks(masks, selected, x, blocks_d, CLASSES: tl.constexpr, MASK_WORDS: tl.constexpr):
    """Store the selected classes (CLASSES, BLOCKS) as bit masks (.., `blocks_d`, MASK_WORDS)."""
    c = tl.arange(0, CLASSES)
    row = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    for w in tl.static_range(MASK_WORDS):
        bit = c - w * CLASSES_PER_WORD
        in_mask = (bit >= 0) & (bit < CLASSES_PER_WORD)
        value = tl.where(in_mask, 1, 0) << tl.where(in_mask, bit, 0)
        bits = tl.sum(tl.where(selected, value[:, None], 0), 0)
        tl.store(masks + (row * blocks_d + x) * MASK_WORDS + w, bits, mask=x < blocks_d)


@triton.jit(do_not_specialize=range(12))
def mark_classes(
    scores,
    masks,
    size_p,
    size_c,
    size_b,
    size_d,
    step_p,
    step_c,
    step_b,
    step_d,
    blocks_d,
    value,
    BLOCK: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    ARGMAX: tl.constexpr,
):
    """Record for each block the classes whose scores are to be read for the voxels in it.

    With ARGMAX those that can have the largest score somewhere: linear interpolation is convex, so
    that the maximum of such a class reaches the largest of all classes' minima. `masks` is (blocks
    along planes, along rows, `blocks_d` along columns, MASK_WORDS).

    Else those that reach `value` somewhere, and not everywhere. `masks` is (2, ..) of the same:
    first the classes that reach `value` somewhere, then those that are below it somewhere.
    """
    x = tl.program_id(2) * BLOCKS + tl.arange(0, BLOCKS)
    size, step = (size_p, size_c, size_b, size_d), (step_p, step_c, step_b, step_d)
    low, high = _bounds(scores, size, step, x, BLOCK, CLASSES, BLOCKS)
    is_class = (tl.arange(0, CLASSES) < size_c)[:, None]
    if ARGMAX:
        largest_minimum = tl.max(tl.where(is_class, low, float("-inf")), 0)
        remaining = (high >= largest_minimum[None, :]) | (high != high)  # NaN excludes no class
        _store_masks(masks, is_class & remaining, x, blocks_d, CLASSES, MASK_WORDS)
    else:
        _store_masks(masks, is_class & (high >= value), x, blocks_d, CLASSES, MASK_WORDS)
        half = tl.num_programs(0) * tl.num_programs(1) * blocks_d * MASK_WORDS
        _store_masks(masks + half, is_class & (low < value), x, blocks_d, CLASSES, MASK_WORDS)


@triton.jit
def _load_taps(index, weight, elements, size):
    """Return the network voxels below and above some source voxels, and the weight of the upper."""
    below = tl.load(index + elements)
    above = tl.minimum(below + 1, size - 1)
    return below.to(tl.int64), above.to(tl.int64), tl.load(weight + elements)


@triton.jit
def _load_mask(masks, below, blocks, w, BLOCK: tl.constexpr, MASK_WORDS: tl.constexpr):
    """Return word `w` of the classes recorded for any of the blocks that a tile reads.

    `below` are the voxels below along planes, rows and columns; `blocks` are the numbers of blocks
    along rows and columns.
    """
    row = (below[0] // BLOCK * blocks[0] + below[1] // BLOCK)[:, None]
    offsets = (row * blocks[1] + (below[2] // BLOCK)[None, :]) * MASK_WORDS + w
    return tl.reduce(tl.ravel(tl.load(masks + offsets)), 0, _union)


@triton.jit
def _interpolate(scores, step, c, along, rows, columns, HALF: tl.constexpr):
    """Interpolate a class for a tile: between planes, then columns, then rows.

    `along`, `rows` and `columns` are (below, above, weight). HALF rounds to half precision.
    """
    base = scores + (tl.zeros((), tl.int64) + c) * step[1]
    below, above, t = base + along[0] * step[0], base + along[1] * step[0], along[2]
    b0, b1, u = (rows[0] * step[2])[:, None], (rows[1] * step[2])[:, None], rows[2][:, None]
    d0, d1 = (columns[0] * step[3])[None, :], (columns[1] * step[3])[None, :]
    v = columns[2][None, :]
    s00 = _load_mean(below + b0 + d0, above + b0 + d0, t)
    s01 = _load_mean(below + b0 + d1, above + b0 + d1, t)
    s10 = _load_mean(below + b1 + d0, above + b1 + d0, t)
    s11 = _load_mean(below + b1 + d1, above + b1 + d1, t)
    first, second = s00 + v * (s01 - s00), s10 + v * (s11 - s10)
    value = first + u * (second - first)
    return value.to(tl.float16).to(tl.float32) if HALF else value


@triton.jit
def _load_mean(first, second, weight):
    """Return the weighted mean of the scores at two pointers; `weight` is that of the second."""
    value = tl.load(first).to(tl.float32)
    return value + weight * (tl.load(second).to(tl.float32) - value)


@triton.jit
def _store_tile(out, labels, s, j, i, size, step):
    """Store a tile of a slice; `size` is that of rows and columns, `step` are those of S, J, I."""
    zero = tl.zeros((), tl.int64)
    row = (zero + s) * step[0] + (j.to(tl.int64) * step[1])[:, None]
    inside = (j < size[0])[:, None] & (i < size[1])[None, :]
    tl.store(out + row + (i.to(tl.int64) * step[2])[None, :], labels, mask=inside)


@triton.jit(do_not_specialize=range(26))
def label_tile(
    scores,
    masks,
    out,
    index_s,
    weight_s,
    index_j,
    weight_j,
    line_j,
    index_i,
    weight_i,
    line_i,
    size_p,
    size_b,
    size_d,
    step_p,
    step_c,
    step_b,
    step_d,
    size_j,
    size_i,
    step_s,
    step_j,
    step_i,
    c,
    value,
    half,
    BLOCK: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    ARGMAX: tl.constexpr,
):
    """Label a tile of one source slice.

    With ARGMAX by the first largest score, else by c + 1 where class `c` reaches `value`, and by 0
    elsewhere. `masks` are those of `mark_classes`; `half` is the number of elements in either half
    of them. `index` and `weight` are taps; `line` is the number of elements from the taps of one
    slice to those of the next, 0 if all slices share them.
    """
    s = tl.program_id(2)
    j = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    along = _load_taps(index_s, weight_s, s, size_p)
    rows = _load_taps(index_j, weight_j, s * line_j + tl.minimum(j, size_j - 1), size_b)
    columns = _load_taps(index_i, weight_i, s * line_i + tl.minimum(i, size_i - 1), size_d)
    below, step = (along[0], rows[0], columns[0]), (step_p, step_c, step_b, step_d)
    blocks = (tl.cdiv(size_b, BLOCK), tl.cdiv(size_d, BLOCK))
    labels = tl.zeros((ROWS, COLUMNS), tl.int32)
    if ARGMAX:
        # A tile spans several blocks, so that a class remains if it does in any of them
        seen, several, mask = 0, 0, 0  # several: not 0 if more than one class remains
        for w in tl.static_range(MASK_WORDS):
            mask = _load_mask(masks, below, blocks, w, BLOCK, MASK_WORDS)
            several = several | (mask & (mask - 1)) | tl.where(mask != 0, seen, 0)
            seen = seen | mask
        best = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
        for w in range(MASK_WORDS):
            if MASK_WORDS > 1:  # else the mask is already loaded
                mask = _load_mask(masks, below, blocks, w, BLOCK, MASK_WORDS)
            for bit in range(CLASSES_PER_WORD):
                # A branch for the whole tile, not for single voxels: all threads take the same way
                if (mask >> bit) & 1 != 0:
                    n = w * CLASSES_PER_WORD + bit
                    if several == 0:
                        labels = tl.zeros((ROWS, COLUMNS), tl.int32) + n
                    else:
                        score = _interpolate(scores, step, n, along, rows, columns, HALF)
                        # Classes ascend, so that the first of equal scores stays
                        labels = tl.where(score > best, n, labels)
                        best = tl.maximum(best, score)
    else:
        w, bit = c // CLASSES_PER_WORD, c % CLASSES_PER_WORD
        reached = (_load_mask(masks, below, blocks, w, BLOCK, MASK_WORDS) >> bit) & 1
        missed = (_load_mask(masks + half, below, blocks, w, BLOCK, MASK_WORDS) >> bit) & 1
        labels += reached * (c + 1)
        # Only a tile that the class reaches in parts is read; others are decided by their bounds
        if reached & missed != 0:
            score = _interpolate(scores, step, c, along, rows, columns, HALF)
            labels = tl.where(score >= value, c + 1, 0)
    _store_tile(out, labels, s, j, i, (size_j, size_i), (step_s, step_j, step_i))
