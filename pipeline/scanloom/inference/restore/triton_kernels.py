"""Triton kernels of the way back: which classes can win where, and the decision among those.

Imported by `restore_cuda` only, where Triton is. A source voxel reads the network voxel below it
and the one above along each axis. Blocks of `BLOCK`^3 network voxels, their upper faces included,
hold all eight; what can't win (or can't reach the threshold) in a block is never read for the
voxels in it. Sums and comparisons are float32, whatever type the scores have.

Scores are (planes P, classes C, rows B, columns D), labels (slices S, rows J, columns I); `step_x`
is how far apart neighbours along x lie in memory. Numbers are no constants of the compiled code
(`do_not_specialize`, the arguments before them): scans of all shapes run the same.
"""

# Triton takes annotations for its own, and allows them for constants only:
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-not-found,import-untyped"

import triton
import triton.language as tl

BITS = tl.constexpr(31)
"""Classes a word of survivors holds: those of int32 but the sign."""


@triton.jit
def _either(one, other):
    """Return the classes in either of two words."""
    return one | other


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
    """Return the smallest and the largest value of each class in each block: (CLASSES, BLOCKS).

    `size` and `step` are those of P, C, B, D; `x` (BLOCKS) blocks of one row of blocks, whose
    place along planes and rows the program's number tells.
    """
    lane = tl.minimum(tl.arange(0, CLASSES), size[1] - 1).to(tl.int64) * step[1]
    inside = tl.minimum(x[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], size[3] - 1)
    face = tl.minimum(x * BLOCK + BLOCK, size[3] - 1)
    near = scores + lane[:, None, None] + (inside.to(tl.int64) * step[3])[None, :, :]
    far = scores + lane[:, None] + (face.to(tl.int64) * step[3])[None, :]
    zero = tl.zeros((), tl.int64)  # places in memory outgrow 32 bits
    first_p, first_b = zero + tl.program_id(0) * BLOCK, zero + tl.program_id(1) * BLOCK
    low = tl.full((CLASSES, BLOCKS, BLOCK), float("inf"), tl.float32)
    high = tl.full((CLASSES, BLOCKS, BLOCK), float("-inf"), tl.float32)
    for n in range(BLOCK + 1):
        plane = tl.minimum(first_p + n, size[0] - 1) * step[0]
        for m in tl.static_range(BLOCK + 1):  # unrolled: loads that don't wait for one another
            row = tl.minimum(first_b + m, size[2] - 1) * step[2]
            values = tl.load(near + plane + row).to(tl.float32)
            beyond = tl.load(far + plane + row).to(tl.float32)[:, :, None]
            low = tl.minimum(low, tl.minimum(values, beyond))
            high = tl.maximum(high, tl.maximum(values, beyond))
    return tl.min(low, 2), tl.max(high, 2)


@triton.jit
def _store_words(words, kept, x, across, CLASSES: tl.constexpr, WORDS: tl.constexpr):
    """Store which classes of (CLASSES, BLOCKS) are kept, `BITS` classes a word: (.., WORDS)."""
    c = tl.arange(0, CLASSES)
    row = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    for w in tl.static_range(WORDS):
        bit = c - w * BITS
        here = (bit >= 0) & (bit < BITS)
        value = tl.where(here, 1, 0) << tl.where(here, bit, 0)
        word = tl.sum(tl.where(kept, value[:, None], 0), 0)
        tl.store(words + (row * across + x) * WORDS + w, word, mask=x < across)


@triton.jit(do_not_specialize=range(11))
def survivors(
    scores,
    words,
    size_p,
    size_c,
    size_b,
    size_d,
    step_p,
    step_c,
    step_b,
    step_d,
    across,
    BLOCK: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Note for each block which classes can have the largest value somewhere in it.

    A linear mix is convex: whoever wins reaches the largest of all classes' smallest values.
    `words` is (blocks along planes, along rows, `across`, WORDS).
    """
    x = tl.program_id(2) * BLOCKS + tl.arange(0, BLOCKS)
    size, step = (size_p, size_c, size_b, size_d), (step_p, step_c, step_b, step_d)
    low, high = _bounds(scores, size, step, x, BLOCK, CLASSES, BLOCKS)
    named = (tl.arange(0, CLASSES) < size_c)[:, None]
    bar = tl.max(tl.where(named, low, float("-inf")), 0)
    left = (high >= bar[None, :]) | (high != high)  # a value that is no number decides nothing
    _store_words(words, named & left, x, across, CLASSES, WORDS)


@triton.jit(do_not_specialize=range(12))
def undecided(
    scores,
    words,
    size_p,
    size_c,
    size_b,
    size_d,
    step_p,
    step_c,
    step_b,
    step_d,
    across,
    value,
    BLOCK: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Note for each block which classes reach `value` somewhere in it; then which not all over.

    `words` is (2, blocks along planes, along rows, `across`, WORDS).
    """
    x = tl.program_id(2) * BLOCKS + tl.arange(0, BLOCKS)
    size, step = (size_p, size_c, size_b, size_d), (step_p, step_c, step_b, step_d)
    low, high = _bounds(scores, size, step, x, BLOCK, CLASSES, BLOCKS)
    named = (tl.arange(0, CLASSES) < size_c)[:, None]
    _store_words(words, named & (high >= value), x, across, CLASSES, WORDS)
    half = tl.num_programs(0) * tl.num_programs(1) * across * WORDS
    _store_words(words + half, named & (low < value), x, across, CLASSES, WORDS)


@triton.jit
def _taps(index, weight, at, size):
    """Return which two network voxels the source voxels `at` read, and the weight of the second."""
    below = tl.load(index + at)
    return below.to(tl.int64), tl.minimum(below + 1, size - 1).to(tl.int64), tl.load(weight + at)


@triton.jit
def _words_at(words, below, blocks, w, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Return the classes kept in any of the blocks that a tile reads.

    `below` are the lower voxels along planes, rows and columns; `blocks` how many there are along
    the last two.
    """
    row = (below[0] // BLOCK * blocks[0] + below[1] // BLOCK)[:, None]
    at = (row * blocks[1] + (below[2] // BLOCK)[None, :]) * WORDS + w
    return tl.reduce(tl.ravel(tl.load(words + at)), 0, _either)


@triton.jit
def _mixed(scores, step, c, along, rows, columns):
    """Interpolate a class for a tile: between planes, then columns, then rows.

    `along`, `rows` and `columns` are (below, above, weight).
    """
    base = scores + (tl.zeros((), tl.int64) + c) * step[1]
    below, above, t = base + along[0] * step[0], base + along[1] * step[0], along[2]
    b0, b1, u = (rows[0] * step[2])[:, None], (rows[1] * step[2])[:, None], rows[2][:, None]
    d0, d1 = (columns[0] * step[3])[None, :], (columns[1] * step[3])[None, :]
    v = columns[2][None, :]
    s00 = _between(below + b0 + d0, above + b0 + d0, t)
    s01 = _between(below + b0 + d1, above + b0 + d1, t)
    s10 = _between(below + b1 + d0, above + b1 + d0, t)
    s11 = _between(below + b1 + d1, above + b1 + d1, t)
    first, second = s00 + v * (s01 - s00), s10 + v * (s11 - s10)
    return first + u * (second - first)


@triton.jit
def _between(one, other, weight):
    """Return the mix of what stands at two places."""
    first = tl.load(one).to(tl.float32)
    return first + weight * (tl.load(other).to(tl.float32) - first)


@triton.jit
def _store_tile(out, labels, s, j, i, size, step):
    """Store a tile of a slice; `size` is that of rows and columns, `step` of S, J and I."""
    zero = tl.zeros((), tl.int64)
    place = (zero + s) * step[0] + (j.to(tl.int64) * step[1])[:, None]
    there = (j < size[0])[:, None] & (i < size[1])[None, :]
    tl.store(out + place + (i.to(tl.int64) * step[2])[None, :], labels, mask=there)


@triton.jit(do_not_specialize=range(23))
def argmax_tile(
    scores,
    words,
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
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Label a tile of one source slice by the first largest score.

    `index` and `weight` are taps; `line` how many entries lie between those of two slices.
    """
    s = tl.program_id(2)
    j = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    along = _taps(index_s, weight_s, s, size_p)
    rows = _taps(index_j, weight_j, s * line_j + tl.minimum(j, size_j - 1), size_b)
    columns = _taps(index_i, weight_i, s * line_i + tl.minimum(i, size_i - 1), size_d)
    below, step = (along[0], rows[0], columns[0]), (step_p, step_c, step_b, step_d)
    blocks = (tl.cdiv(size_b, BLOCK), tl.cdiv(size_d, BLOCK))
    seen, several, word = 0, 0, 0  # several: not 0 where more than one class is left
    for w in tl.static_range(WORDS):
        word = _words_at(words, below, blocks, w, BLOCK, WORDS)
        several = several | (word & (word - 1)) | tl.where(word != 0, seen, 0)
        seen = seen | word
    best = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    labels = tl.zeros((ROWS, COLUMNS), tl.int32)
    for w in range(WORDS):
        if WORDS > 1:  # else it is the one at hand
            word = _words_at(words, below, blocks, w, BLOCK, WORDS)
        for bit in range(BITS):
            if (word >> bit) & 1 != 0:
                c = w * BITS + bit
                if several == 0:
                    labels = tl.zeros((ROWS, COLUMNS), tl.int32) + c
                else:
                    score = _mixed(scores, step, c, along, rows, columns)
                    labels = tl.where(score > best, c, labels)
                    best = tl.maximum(best, score)
    _store_tile(out, labels, s, j, i, (size_j, size_i), (step_s, step_j, step_i))


@triton.jit(do_not_specialize=range(26))
def threshold_tile(
    scores,
    words,
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
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Label a tile of one source slice by c + 1 where class `c` reaches `value`, else by 0.

    `half` is how far the second half of `words` lies behind the first.
    """
    s = tl.program_id(2)
    j = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    along = _taps(index_s, weight_s, s, size_p)
    rows = _taps(index_j, weight_j, s * line_j + tl.minimum(j, size_j - 1), size_b)
    columns = _taps(index_i, weight_i, s * line_i + tl.minimum(i, size_i - 1), size_d)
    below, step = (along[0], rows[0], columns[0]), (step_p, step_c, step_b, step_d)
    blocks = (tl.cdiv(size_b, BLOCK), tl.cdiv(size_d, BLOCK))
    w, bit = c // BITS, c % BITS
    reached = (_words_at(words, below, blocks, w, BLOCK, WORDS) >> bit) & 1
    missed = (_words_at(words + half, below, blocks, w, BLOCK, WORDS) >> bit) & 1
    labels = tl.zeros((ROWS, COLUMNS), tl.int32) + reached * (c + 1)
    if reached & missed != 0:
        score = _mixed(scores, step, c, along, rows, columns)
        labels = tl.where(score >= value, c + 1, 0)
    _store_tile(out, labels, s, j, i, (size_j, size_i), (step_s, step_j, step_i))
