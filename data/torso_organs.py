"""Paint a torso, from the outside to the inside; what comes later lies over what came before."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from torso_anatomy import Array, Capsule, M, Mask, Slab, Torso, smooth


@dataclass(frozen=True)
class Layers:
    """How deep points lie, along the line to the body's axis, in mm."""

    skin: Array  # below the skin's surface
    wall: Array  # below the outside of the wall of muscle
    cavity: Array  # below the inside of that wall
    turn: Array  # angle from the back, 0 to pi in front
    slab: Slab

    def near(self, part: Slab) -> Layers:
        """Return the layers of a part of the slab."""
        offsets = [
            int(np.searchsorted(t, p[0])) for t, p in zip(self.slab.ticks, part.ticks, strict=True)
        ]
        cut = tuple(slice(o, o + n) for o, n in zip(offsets, part.x.shape, strict=True))
        return Layers(self.skin[cut], self.wall[cut], self.cavity[cut], self.turn[cut], part)


def paint_torso(body: Torso, slab: Slab) -> None:
    """Paint all of it."""
    paint_table(slab)
    slab = slab.near((-172, -120, -999), (172, 120, 999))
    layers = measure(body, slab)
    paint_outline(layers)
    paint_back(layers)
    paint_ribs(layers)
    right, left = diaphragm(slab)
    paint_lungs(layers, right, left)
    paint_heart(slab)
    paint_airways(slab)
    paint_liver(layers, right, left)
    paint_stomach(layers, left)
    paint_kidneys(slab)
    paint_colon(layers)
    paint_small_bowel(body, layers)
    paint_pancreas(slab)
    paint_great_vessels(slab)
    paint_spine(slab)
    paint_lung_vessels(body, slab)


def paint_table(slab: Slab) -> None:
    """Paint a curved plate under the patient, on the straight grid: it does not deform."""
    x, y = slab.ticks[0][:, None], slab.ticks[1][None, :]
    top = 113.0 - 22.0 * (x / 200.0) ** 2
    inside = (np.abs(x) < 195) & (y > top) & (y < 134 - 8 * (x / 200) ** 4)
    shell = inside & ((y < top + 2.2) | (y > 131.8 - 8 * (x / 200) ** 4) | (np.abs(x) > 193))
    slab.material[inside] = M.FOAM
    slab.material[shell] = M.TABLE


def measure(body: Torso, slab: Slab) -> Layers:
    """Return how deep each point lies."""
    x, y, z = slab.x, slab.y, slab.z
    chest, hip = smooth((z + 40) / 150), smooth((-z - 70) / 90)
    a = 150 + 13 * chest + 9 * hip
    b = np.where(y > 0, 107 + 3 * chest, 103 + 4 * chest - 3 * hip)
    p = np.where(y > 0, 2.75, 2.25)
    radius = np.hypot(x, y) + 1e-9
    level = ((np.abs(x) / a) ** p + (np.abs(y) / b) ** p) ** (1 / p) + 1e-9
    skin = radius / level - radius
    turn = np.arctan2(np.abs(x), y)
    flank, front = np.sin(turn) ** 2, smooth((turn - 1.9) / 1.0)
    fat = body.fat * (8.5 + (4 + 9 * (1 - chest)) * flank + (5 + 8 * (1 - chest)) * front)
    dip = 5.0 * np.exp(-((x / 14) ** 2)) * (y > 0)  # the furrow over the spinous processes
    skin = skin - dip
    muscle = 13.0 + 15 * smooth((1.0 - turn) / 0.8) + 3.5 * np.exp(-(((turn - 2.75) / 0.3) ** 2))
    return Layers(skin, skin - fat, skin - fat - muscle, turn, slab)


def paint_outline(layers: Layers) -> None:
    """Paint skin, fat under it, the wall of muscle, and fat inside."""
    slab = layers.slab
    slab.paint(layers.skin > 0, M.SKIN)
    slab.paint(layers.skin > 1.9, M.FAT)
    wall = (layers.wall > 0) & (layers.cavity < 0)
    lamella = (np.abs(layers.wall - 4.3) < 0.45) | (np.abs(layers.wall - 8.6) < 0.4)
    flank = (layers.turn > 1.05) & (layers.turn < 2.5) & (slab.z < -20)
    linea_alba = (np.abs(slab.x) < 3) & (slab.y < 0) & (slab.z < 0)
    slab.paint(wall & ~(lamella & flank) & ~linea_alba, M.MUSCLE)


def paint_back(layers: Layers) -> None:
    """Paint the muscles beside the spine, with fat between them."""
    slab = layers.slab
    near = layers.skin > 9
    for side in (-1, 1):
        erector = slab.rod((side * 34.0, 70.0), (29.0, 19.0))
        slab.over((erector < 1.13) & near, M.FAT, M.MUSCLE)
        slab.over((erector < 1.0) & near, M.MUSCLE, M.FAT)
        cleft = np.abs(slab.x - side * (30 + 0.25 * (slab.y - 70))) < 0.6
        slab.over((erector < 0.95) & cleft & (slab.z < 40), M.FAT, M.MUSCLE)
        low = smooth((-slab.z - 28) / 70)
        psoas = slab.rod((side * (31 + 9 * low), 38.0), (1, 1)) / (3 + 18 * low)
        slab.over((psoas < 1) & (low > 0), M.MUSCLE, M.FAT)
        lumborum = slab.rod((side * 68.0, 54.0), (15.0, 9.0))
        slab.over((lumborum < 1) & (slab.z < -52), M.MUSCLE, M.FAT)


def bone(slab: Slab, depth: Array, shell: float = 1.3) -> None:
    """Paint bone where `depth` (mm below its surface) is positive, hard outside."""
    slab.paint(depth > 0, M.CORTICAL)
    slab.paint(depth > shell, M.CANCELLOUS)


def paint_ribs(layers: Layers) -> None:
    """Paint ribs that fall towards the front, their cartilage and the breastbone."""
    slab, turn = layers.slab, layers.turn
    for n in range(12):
        back = 232.0 - 26.0 * n
        if not back - 125 < slab.ticks[2].mean() < back + 12:
            continue
        reach = 2.25 if n < 7 else 2.25 - 0.27 * (n - 6)
        fall = 118 * (1 - np.cos(np.minimum(turn, 2.5))) / 2
        rise = 34 * np.clip(turn - 2.3, 0, None) if n >= 4 else 0.0
        up = (slab.z - back + fall - rise) / 6.3
        r = np.hypot((layers.cavity + 5.2) / 3.9, up * 0.92)
        ahead = turn - 0.34
        inside = (r < 1) & (ahead > 0)
        slab.paint(inside & (turn > reach) & (turn < 2.95) & (n < 9), M.CARTILAGE)
        depth = np.where(inside & (turn < reach), (1 - r) * 4.4, -1.0)
        bone(slab, depth, 1.15)
    sternum = np.minimum(5.5 - np.abs(layers.cavity + 6.5), 17 - np.abs(slab.x))
    bone(slab, np.where((slab.y < 0) & (slab.z > 22), sternum, -1.0), 1.0)


def diaphragm(slab: Slab) -> tuple[Array, Array]:
    """Return the height of the right and of the left dome at each point."""
    x, y = slab.x, slab.y
    right = 20 - 0.0100 * ((x + 68) ** 2 + 1.15 * (y + 14) ** 2)
    left = 6 - 0.0105 * ((x - 72) ** 2 + 1.15 * (y + 6) ** 2)
    middle = -3 - 0.0085 * ((x - 16) ** 2 + 1.1 * (y + 34) ** 2)  # under the heart
    return np.maximum(right, middle), np.maximum(left, middle)


def mediastinum(slab: Slab) -> Mask:
    """Return where no lung is, between both sides."""
    x, y, z = slab.x, slab.y, slab.z
    heart = slab.ball((22.0, -30.0, 40.0), (65.0, 48.0, 49.0), 0.55) < 1.0
    bed = (slab.rod((24.0, -28.0), (50.0, 40.0)) < 1) & (z < 40)  # no lung between it and the dome
    width = 6 + 20 * np.exp(-(((y + 2) / 34) ** 2)) + 3 * smooth((z - 60) / 40)
    spine = slab.rod((0.0, 46.0), (25.0, 24.0)) < 1
    aorta = slab.rod((21.0, 28.0), (14.5, 14.5)) < 1
    arch = slab.ball((22.0, 8.0, 110.0), (18.0, 40.0, 26.0)) < 1
    return np.asarray(heart | bed | (np.abs(x - 3) < width) | spine | aorta | arch)


def paint_lungs(layers: Layers, right: Array, left: Array) -> None:
    """Paint both lungs, and the muscle that they rest on."""
    slab = layers.slab
    dome = np.where(slab.x < 0, right, left)
    space = (layers.cavity > 0) & ~mediastinum(slab)
    slab.paint(space & (layers.cavity > 1.2) & (slab.z > dome), M.LUNG)
    slab.over(space & (slab.z < dome) & (slab.z > dome - 3.2), M.MUSCLE, M.FAT)


def paint_heart(slab: Slab) -> None:
    """Paint the heart with fat around it: muscle and blood, the apex to the left and forward."""
    part = slab.near((-60, -90, -24), (100, 40, 110))
    outer = part.ball((22.0, -30.0, 40.0), (62.0, 45.0, 46.0), 0.55)
    right, left = diaphragm(part)
    above = part.z > np.maximum(np.maximum(right, left), -4 - 0.08 * part.x)
    part.over((outer < 1.04) & above, M.FAT, M.LUNG, M.MUSCLE)
    part.over((outer < 0.97) & above, M.HEART, M.FAT, M.LUNG)
    for centre, radii, turn in (
        ((44.0, -30.0, 34.0), (27.0, 15.0, 27.0), 0.7),  # left ventricle
        ((12.0, -52.0, 34.0), (32.0, 13.0, 29.0), 0.5),  # right ventricle
        ((-20.0, -26.0, 42.0), (16.0, 20.0, 28.0), 0.2),  # right atrium
        ((14.0, -2.0, 54.0), (27.0, 13.0, 20.0), 0.1),  # left atrium
    ):
        part.over(part.ball(centre, radii, turn) < 1, M.BLOOD, M.HEART)
    groove = np.abs(outer - 0.93) < 0.05
    course = np.abs(part.x - 30 + 0.5 * (part.y + 60)) < 4
    part.over(groove & course & (part.y < -20), M.FAT, M.HEART)


def paint_airways(slab: Slab) -> None:
    """Paint windpipe, main bronchi and gullet."""
    pipes = [
        ((-1.0, 14.0, 180.0), (0.0, 16.0, 92.0), 9.0),
        ((0.0, 16.0, 93.0), (-28.0, 10.0, 74.0), 7.2),
        ((0.0, 16.0, 93.0), (34.0, 12.0, 68.0), 6.2),
        ((-28.0, 10.0, 74.0), (-44.0, 8.0, 56.0), 4.2),
        ((-28.0, 10.0, 74.0), (-50.0, 2.0, 84.0), 3.4),
        ((34.0, 12.0, 68.0), (50.0, 12.0, 52.0), 3.6),
        ((34.0, 12.0, 68.0), (52.0, -2.0, 78.0), 3.2),
    ]
    tubes = [Capsule(np.array(a), np.array(b), r) for a, b, r in pipes]
    for radius, material in ((1.5, M.AIRWAY_WALL), (0.0, M.GAS)):
        for tube in tubes:
            part = _about(slab, tube)
            part.paint(part.tube(tube) < tube.radius + radius, material)
    gullet = slab.rod((6.0 + 0.04 * (60 - slab.z), 26.0 - 0.06 * (60 - slab.z)), (8.0, 6.0))
    above = (slab.z > 2) & (slab.material != M.GAS)
    slab.paint((gullet < 1) & above, M.BOWEL_WALL)
    slab.paint((gullet < 0.36) & above & (slab.z > 70), M.GAS)


def _about(slab: Slab, tube: Capsule) -> Slab:
    """Return the part of a slab that a tube with its wall can reach."""
    reach = tube.radius + 3.5
    low, high = np.minimum(tube.start, tube.end) - reach, np.maximum(tube.start, tube.end) + reach
    return slab.near(tuple(low), tuple(high))


def paint_liver(layers: Layers, right: Array, left: Array) -> None:
    """Paint liver, its veins and the gallbladder, under the right dome."""
    slab = layers.slab
    under = np.where(slab.x < 20, slab.z < right - 3.2, slab.z < left - 3.2)
    big = slab.ball((-70.0, -8.0, -42.0), (66.0, 88.0, 74.0))
    small = slab.ball((4.0, -44.0, -24.0), (68.0, 38.0, 34.0), -0.15)
    room = under & (layers.cavity > 2.0) & (slab.rod((0.0, 40.0), (44.0, 40.0)) > 1)
    bare = slab.ball((-58.0, 56.0, -82.0), (38.0, 34.0, 64.0)) > 1  # the right kidney's bed
    liver = room & bare & ((big < 1) | (small < 1))
    slab.over(liver, M.LIVER, M.FAT)
    veins = [
        ((-16.0, 8.0, -2.0), (-88.0, 22.0, -34.0), 5.0),
        ((-16.0, 8.0, -2.0), (-56.0, -30.0, -26.0), 4.5),
        ((-16.0, 8.0, -2.0), (4.0, -44.0, -22.0), 4.0),
        ((-26.0, -14.0, -52.0), (-70.0, -4.0, -58.0), 6.0),
        ((-70.0, -4.0, -58.0), (-100.0, 14.0, -70.0), 4.0),
        ((-70.0, -4.0, -58.0), (-92.0, -36.0, -48.0), 3.5),
    ]
    for a, b, r in veins:
        tube = Capsule(np.array(a), np.array(b), r)
        part = _about(slab, tube)
        part.over(part.tube(tube) < r, M.BLOOD, M.LIVER)
    bladder = slab.around((-46.0, -48.0, -84.0), 36)
    q = bladder.ball((-46.0, -48.0, -84.0), (15.0, 17.0, 28.0), 0.4)
    bladder.over(q < 1.1, M.BOWEL_WALL, M.FAT, M.LIVER)
    bladder.over(q < 0.98, M.BILE, M.BOWEL_WALL)


def paint_stomach(layers: Layers, left: Array) -> None:
    """Paint stomach, with gas above its fluid (the patient lies on the back), and spleen."""
    slab = layers.slab
    under = (slab.z < left - 3.2) & (layers.cavity > 2.0)
    fundus = slab.ball((56.0, -20.0, -30.0), (35.0, 42.0, 36.0), 0.5)
    antrum = slab.ball((26.0, -44.0, -62.0), (46.0, 21.0, 20.0), -0.25)
    q = np.minimum(fundus, antrum)
    slab.over((q < 1) & under, M.BOWEL_WALL, M.FAT)
    inside = (q < 0.9) & (slab.material == M.BOWEL_WALL) & under & (slab.z < left - 7)
    slab.paint(inside, M.BOWEL_FLUID)
    slab.paint(inside & (slab.y < -36), M.GAS)
    spleen = slab.ball((97.0, 36.0, -34.0), (27.0, 52.0, 50.0), 0.35)
    hollow = slab.ball((62.0, 24.0, -50.0), (33.0, 50.0, 56.0)) > 1
    slab.over((spleen < 1) & hollow & under, M.SPLEEN, M.FAT)


def paint_kidneys(slab: Slab) -> None:
    """Paint both kidneys around fat and their basin; the right one lies lower."""
    for side, z in ((-1, -84.0), (1, -70.0)):
        part = slab.around((side * 58.0, 44.0, z), 66)
        lean = 0.14 * (part.z - z)
        shifted = Slab(part.x + side * lean, part.y, part.z, part.material, part.ticks)
        q = shifted.ball((side * 58.0, 44.0, z), (27.0, 23.0, 51.0), side * -0.55)
        hilum = shifted.ball((side * 45.0, 37.0, z), (21.0, 9.0, 24.0), side * -0.55)
        part.over(q < 1, M.KIDNEY, M.FAT, M.MUSCLE)
        part.over((q < 1) & (hilum < 1), M.FAT, M.KIDNEY)
        part.over((q < 1) & (hilum < 0.5), M.BILE, M.FAT)
        vein = Capsule(np.array([side * 44.0, 36.0, z]), np.array([side * 8.0, 16.0, z + 6]), 4.5)
        part = _about(slab, vein)
        part.over(part.tube(vein) < vein.radius, M.BLOOD, M.FAT)


def paint_colon(layers: Layers) -> None:
    """Paint the large bowel's frame: up on the right, across in front, down on the left."""
    slab = layers.slab
    stations = [
        (-84, 4, -190, 23), (-88, 6, -150, 23), (-86, -4, -122, 21), (-74, -30, -110, 18),
        (-42, -50, -112, 17), (0, -54, -106, 17), (44, -50, -94, 17), (78, -34, -84, 16),
        (98, -6, -76, 15), (100, 16, -96, 14), (98, 22, -130, 14), (94, 20, -190, 14),
    ]  # fmt: skip
    for (ax, ay, az, ar), (bx, by, bz, br) in itertools.pairwise(stations):
        tube = Capsule(np.array([ax, ay, az], float), np.array([bx, by, bz], float), max(ar, br))
        part = _about(slab, tube)
        if not part.x.size:
            continue
        free = layers.near(part).cavity > 2
        pouch = 1 + 0.10 * np.sin((part.x + part.y + part.z) / 4.2)
        q = part.tube(tube) / (0.5 * (ar + br) * pouch)
        wall = 1 - 2.2 / (0.5 * (ar + br))
        part.over((q < 1) & free, M.BOWEL_WALL, M.FAT)
        inside = (q < wall) & free & part.of(M.BOWEL_WALL, M.BOWEL_FLUID)
        part.paint(inside, M.BOWEL_FLUID)
        part.paint(inside & (part.y < min(ay, by) - 2 + 2 * np.sin(part.x / 9)), M.GAS)


def paint_small_bowel(body: Torso, layers: Layers) -> None:
    """Paint loops where there is fat; a few hold gas in front."""
    slab = layers.slab
    for n, tube in enumerate(body.bowel):
        part = _about(slab, tube)
        if not part.x.size:
            continue
        r = part.tube(tube)
        free = layers.near(part).cavity > 5
        part.over((r < tube.radius) & free, M.BOWEL_WALL, M.FAT)
        part.over((r < tube.radius - 2.3) & free, M.BOWEL_FLUID, M.BOWEL_WALL)
        if n % 19 == 3:
            bubble = (r < tube.radius - 3) & (part.y < tube.start[1] - 2)
            part.over(bubble, M.GAS, M.BOWEL_FLUID)


def paint_pancreas(slab: Slab) -> None:
    """Paint pancreas and duodenum, before the great vessels."""
    stations = [(-30, -12, -96), (-28, -16, -74), (2, -18, -64), (34, -4, -54), (70, 18, -42)]
    for a, b, r in zip(stations[:-1], stations[1:], (14, 13, 11, 11), strict=True):
        tube = Capsule(np.array(a, float), np.array(b, float), r)
        part = _about(slab, tube)
        lobes = 1 + 0.13 * np.sin(part.x / 2.6) * np.sin(part.z / 3.1 + part.y / 2.4)
        part.over(part.tube(tube) < r * lobes, M.PANCREAS, M.FAT)


def paint_great_vessels(slab: Slab) -> None:
    """Paint aorta, lung artery and the great veins."""
    tubes = [
        ((8, -16, 62), (-14, -26, 88), 15.0), ((-14, -26, 88), (-10, -16, 112), 14.5),
        ((-10, -16, 112), (12, 4, 120), 13.5), ((12, 4, 120), (22, 24, 108), 13.0),
        ((22, 24, 108), (20, 28, 40), 12.0), ((20, 28, 40), (8, 16, -30), 11.0),
        ((8, 16, -30), (5, 12, -190), 9.5), ((16, -40, 70), (20, -18, 92), 13.5),
        ((20, -18, 92), (36, 4, 82), 10.0), ((18, -14, 88), (-34, -4, 78), 9.5),
        ((-26, -20, 60), (-26, -18, 180), 9.0), ((-17, 12, 34), (-18, 12, -190), 10.5),
        ((-16, -10, -70), (-26, -14, -52), 6.5), ((40, 6, -54), (-14, -10, -68), 4.5),
        ((6, 6, -66), (6, -24, -150), 3.6), ((-4, -8, 116), (-18, -6, 180), 6.0),
        ((8, 0, 118), (14, 2, 180), 4.5), ((18, 10, 116), (26, 16, 180), 4.5),
    ]  # fmt: skip
    for a, b, r in tubes:
        tube = Capsule(np.array(a, float), np.array(b, float), r)
        part = _about(slab, tube)
        hollow = part.of(M.GAS, M.AIRWAY_WALL, M.LIVER)
        part.paint((part.tube(tube) < r) & ~hollow, M.BLOOD)


def paint_spine(slab: Slab) -> None:
    """Paint vertebrae, discs, the canal, and the processes behind it."""
    slab = slab.near((-48, 5, -999), (48, 130, 999))
    x, z = slab.x, slab.z
    y = slab.y - (44 + 4 * np.cos((z + 60) / 70))
    pitch = 31.0
    phase = (z + 3.0 * pitch + 8 + 0.06 * y) % pitch - pitch / 2  # 0 in the middle of a body
    grow = smooth((60 - z) / 160)
    waist = 1 - 0.05 * np.cos(2 * np.pi * phase / pitch)
    a, b = (17 + 6.5 * grow) * waist, (14.5 + 3 * grow) * waist
    rim = (1 - np.sqrt((x / a) ** 2 + (y / b) ** 2)) * b
    half = pitch / 2 - 4.6
    slab.paint((rim > 0) & (np.abs(phase) >= half), M.DISC)
    bone(slab, np.where(rim > 0, np.minimum(rim, half - np.abs(phase)), -1.0), 1.2)
    canal = np.hypot(x / 10.5, (y - b - 7.5) / 8.5)
    ring = np.hypot(x / 16.5, (y - b - 8.0) / 14.0)
    lamina = np.abs(phase + 3) < 8.5
    arch = np.where(lamina, (1 - ring) * 14, -1.0)
    facet = 8.0 - np.hypot(np.abs(x) - 17, y - b - 13)
    arch = np.maximum(arch, np.where(np.abs(phase + 8) < 10, facet, -1.0))
    down = phase + 3 + 0.45 * (y - b - 20)
    spinous = np.minimum(3.6 - np.abs(x), np.minimum(7.5 - np.abs(down), 36 + 3 * grow - (y - b)))
    arch = np.maximum(arch, np.where(y > b + 14, spinous, -1.0))
    side = np.minimum(5.0 - np.abs(phase - 2), 5.0 - np.abs(y - b - 9 - 0.12 * np.abs(x)))
    side = np.minimum(side, 34 - np.abs(x))
    arch = np.maximum(arch, np.where(np.abs(x) > 12, side, -1.0))
    bone(slab, arch, 1.5)
    slab.paint(canal < 1.0, M.FAT)
    slab.paint(canal < 0.88, M.CORD)


def paint_lung_vessels(body: Torso, slab: Slab) -> None:
    """Paint vessels inside the lungs only."""
    low, high = slab.ticks[2][[0, -1]] + (-16, 16)
    for tube in body.vessels:
        if max(tube.start[2], tube.end[2]) < low or min(tube.start[2], tube.end[2]) > high:
            continue
        part = _about(slab, tube)
        if part.x.size:
            part.over(part.tube(tube) < tube.radius, M.LUNG_VESSEL, M.LUNG)
