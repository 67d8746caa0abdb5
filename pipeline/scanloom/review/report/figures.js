"use strict";
// Pictures of findings: the place of a value among others, and slices of a preview.
const figures = (() => {
  const WIDTH = 240, HEIGHT = 30, EDGE = 6, BASE = 26;
  const number = (value) => String(Number(value.toPrecision(3)));

  function draw(tag, attributes, ...content) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
    element.append(...content);
    return element;
  }

  function range(known) {
    const least = known.unit ? known.usual[0] : Math.max(1, Math.ceil(known.usual[0]));
    return [least, known.unit ? known.usual[1] : Math.floor(known.usual[1])];
  }

  function describe(known) {
    const unit = known.unit ? ` ${known.unit}` : "", [low, high] = range(known);
    if (known.source) return `reference range ${number(low)} to ${number(high)}${unit}. ${known.source}`;
    const cases = known.counts.reduce((sum, count) => sum + count, 0);
    return `${cases} cases, median ${number(known.median)}, usually ${number(low)} to ${number(high)}${unit}`;
  }

  // A strip: the usual range as a band, the other cases as bars, this value as a dot.
  function strip(known, value) {
    const scale = known.log ? (x) => Math.log(Math.max(x, 1e-6)) : (x) => x;
    const [low, high] = range(known);
    let ends = [Math.min(known.first, low, value), Math.max(known.last, high, value)].map(scale);
    if (known.source) ends = [ends[0] - 0.15 * (ends[1] - ends[0]), ends[1] + 0.15 * (ends[1] - ends[0])];
    const span = ends[1] - ends[0] || 1;
    const x = (t) => EDGE + (t - ends[0]) / span * (WIDTH - 2 * EDGE);
    const most = Math.max(1, ...known.counts), first = scale(known.first), step = (scale(known.last) - first) / known.counts.length;
    const bars = known.counts.map((count, n) => {
      if (!count) return "";
      const height = 3 + 19 * Math.sqrt(count / most), width = Math.max(1.5, x(ends[0] + step) - EDGE - 0.5);
      return `M${x(first + n * step).toFixed(1)} ${BASE}v${-height.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}z`;
    }).join("");
    const unit = known.unit ? ` ${known.unit}` : "";
    return draw("svg", {
      class: "strip", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT,
      role: "img", "aria-label": `${number(value)}${unit}; ${describe(known)}`,
    },
    draw("title", {}, `${number(value)}${unit}; ${describe(known)}`),
    draw("rect", { class: "usual", x: x(scale(low)), y: 2, width: Math.max(1, x(scale(high)) - x(scale(low))), height: BASE - 2 }),
    draw("path", { class: "bars", d: bars }),
    draw("line", { class: "axis", x1: 0, x2: WIDTH, y1: BASE, y2: BASE }),
    draw("circle", { class: known.usual[0] <= value && value <= known.usual[1] ? "dot" : "dot unusual", cx: x(scale(value)), cy: BASE - 5, r: 4.5 }));
  }

  // A slice: a part of the preview, with the structures outlined.
  function slice(source, page, shown, label) {
    const [x, y, width, height] = shown.area;
    return draw("svg", { class: "slice", viewBox: `${x} ${y} ${width} ${height}`, role: "img", "aria-label": label },
      draw("image", { href: source, width: page[0], height: page[1] }),
      ...shown.outlines.map(([left, top, w, h]) => draw("rect", { x: left, y: top, width: w, height: h })));
  }

  return { strip, slice, describe };
})();
