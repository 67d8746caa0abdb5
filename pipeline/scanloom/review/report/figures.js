// Pictures of findings: the place of a value among others, and slices of a preview.

/**
 * Values of a structure in all cases, or its reference range.
 * @typedef {object} Distribution
 * @property {string} unit
 * @property {boolean} log Whether values are compared by their logarithm.
 * @property {number} first Lowest value.
 * @property {number} last
 * @property {number[]} usual Ends of the range of usual values.
 * @property {number[]} counts Cases in each of some ranges of equal width.
 * @property {number} [median]
 * @property {string} [source] Of a reference range.
 */

const WIDTH = 240;
const HEIGHT = 30;
const EDGE = 6;
const BASE = 26;

const number = (value) => String(Number(value.toPrecision(3)));

function svg(tag, attributes, ...content) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...content);
  return element;
}

const unitOf = (known) => (known.unit ? ` ${known.unit}` : "");

// The usual values; of numbers without a unit those that can be.
function range(known) {
  const least = known.unit ? known.usual[0] : Math.max(1, Math.ceil(known.usual[0]));
  return [least, known.unit ? known.usual[1] : Math.floor(known.usual[1])];
}

/**
 * @param {Distribution} known
 * @returns {string}
 */
export function describe(known) {
  const unit = unitOf(known);
  const [low, high] = range(known);
  if (known.source)
    return `reference range ${number(low)} to ${number(high)}${unit}. ${known.source}`;
  const cases = known.counts.reduce((sum, count) => sum + count, 0);
  return `${cases} cases, median ${number(known.median)}, usually ${number(low)} to ${number(high)}${unit}`;
}

/**
 * Draw the usual range as a band, the other cases as bars, a value as a dot.
 * @param {Distribution} known
 * @param {number} value
 * @returns {SVGElement}
 */
export function strip(known, value) {
  const scale = known.log ? (x) => Math.log(Math.max(x, 1e-6)) : (x) => x;
  const [low, high] = range(known);
  let ends = [Math.min(known.first, low, value), Math.max(known.last, high, value)].map(scale);
  if (known.source) {
    const room = 0.15 * (ends[1] - ends[0]);
    ends = [ends[0] - room, ends[1] + room];
  }
  const span = ends[1] - ends[0] || 1;
  const x = (t) => EDGE + ((t - ends[0]) / span) * (WIDTH - 2 * EDGE);
  const most = Math.max(1, ...known.counts);
  const first = scale(known.first);
  const step = (scale(known.last) - first) / known.counts.length;
  const width = Math.max(1.5, x(ends[0] + step) - EDGE - 0.5);
  const bars = known.counts
    .map((count, n) => {
      if (!count) return "";
      const height = (3 + 19 * Math.sqrt(count / most)).toFixed(1);
      return `M${x(first + n * step).toFixed(1)} ${BASE}v${-height}h${width.toFixed(1)}v${height}z`;
    })
    .join("");
  const text = `${number(value)}${unitOf(known)}; ${describe(known)}`;
  const isUsual = known.usual[0] <= value && value <= known.usual[1];
  return svg(
    "svg",
    {
      class: "strip",
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      width: WIDTH,
      height: HEIGHT,
      role: "img",
      "aria-label": text,
    },
    svg("title", {}, text),
    svg("rect", {
      class: "usual",
      x: x(scale(low)),
      y: 2,
      width: Math.max(1, x(scale(high)) - x(scale(low))),
      height: BASE - 2,
    }),
    svg("path", { class: "bars", d: bars }),
    svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: BASE, y2: BASE }),
    svg("circle", {
      class: isUsual ? "dot" : "dot unusual",
      cx: x(scale(value)),
      cy: BASE - 5,
      r: 4.5,
    }),
  );
}

/**
 * Show a slice of a preview with the structures outlined.
 * @param {string} source Address of the preview.
 * @param {number[]} page Width and height of the preview.
 * @param {{area: number[], outlines: number[][]}} shown
 * @param {string} label
 * @returns {SVGElement}
 */
export function slice(source, page, shown, label) {
  const [x, y, width, height] = shown.area;
  return svg(
    "svg",
    { class: "slice", viewBox: `${x} ${y} ${width} ${height}`, role: "img", "aria-label": label },
    svg("image", { href: source, width: page[0], height: page[1] }),
    ...shown.outlines.map(([left, top, w, h]) =>
      svg("rect", { x: left, y: top, width: w, height: h }),
    ),
  );
}
