// One plane on a canvas of the slice's own pixels; the style sheet scales it to its proportions.

// The grey of each int16 pixel, as of `GrayWindow.gray`: 0 to 255, rounded.
export function greys(window, [slope, intercept]) {
  const table = new Uint8Array(65536);
  for (let pixel = -32768; pixel < 32768; pixel++) {
    const value = Math.min(Math.max(slope * pixel + intercept, window.low), window.high);
    const grey = Math.floor((value - window.low) / (window.high - window.low) * 255 + 0.5);
    table[pixel & 0xffff] = window.inverted ? 255 - grey : grey;
  }
  return table;
}

// Red, green, blue and opacity (0 to 1) of each label.
export function colours(layers, off, opacity) {
  return layers.map((layer) => {
    const highest = Math.max(0, ...layer.labels.map((label) => label.value));
    const table = new Float32Array(4 * (highest + 1));
    for (const label of layer.labels) {
      const rgb = parseInt(label.color.slice(1), 16);
      table.set([rgb >> 16, (rgb >> 8) & 255, rgb & 255, off.has(`${layer.index}:${label.value}`) ? 0 : opacity], 4 * label.value);
    }
    return table;
  });
}

// Paint a slice: pixels in grey, labels over them as fill or outline.
export function paint(out, image, table, labels, palettes, width, outline) {
  for (let n = 0; n < out.length; n += 4) {
    const grey = image ? table[image[n >> 2] & 0xffff] : 0;
    out[n] = out[n + 1] = out[n + 2] = grey;
    out[n + 3] = 255;
  }
  labels.forEach((slice, layer) => {
    if (!slice) return;
    const palette = palettes[layer], last = slice.length - 1;
    for (let n = 0; n <= last; n++) {
      const label = slice[n];
      if (!label || 4 * label + 3 >= palette.length) continue;
      let opacity = palette[4 * label + 3];
      if (!opacity) continue;
      if (outline) {
        const x = n % width;
        const inside = x > 0 && x < width - 1 && n >= width && n <= last - width && slice[n - 1] === label &&
          slice[n + 1] === label && slice[n - width] === label && slice[n + width] === label;
        if (inside) continue;
        opacity = 1;
      }
      for (let c = 0; c < 3; c++) {
        out[4 * n + c] = Math.round(out[4 * n + c] * (1 - opacity) + palette[4 * label + c] * opacity);
      }
    }
  });
}

export class Plane {
  constructor(figure, name, about) {
    Object.assign(this, { figure, name, about, zoom: 1, pan: [0, 0] });
    this.canvas = figure.querySelector("canvas");
    this.canvas.width = about.width;
    this.canvas.height = about.height;
    this.context = this.canvas.getContext("2d", { alpha: false, willReadFrequently: true });
    this.picture = this.context.createImageData(about.width, about.height);
    this.caption = figure.querySelector("figcaption");
    this.lines = [...figure.querySelectorAll(".line")];
    for (const side of ["left", "right", "top", "bottom"]) figure.querySelector(`.letter.${side}`).textContent = about.letters[side];
    new ResizeObserver(() => this.place()).observe(figure);
  }

  draw(image, table, labels, palettes, outline) {
    paint(this.picture.data, image, table, labels, palettes, this.about.width, outline);
    this.context.putImageData(this.picture, 0, 0);
  }

  // The room for the picture, and the picture's size in it, with square millimetres, in CSS pixels.
  measure() {
    const box = this.figure.getBoundingClientRect(), room = [box.width, box.height - this.caption.offsetHeight];
    const mm = [this.about.width * this.about.pixel_mm[0], this.about.height * this.about.pixel_mm[1]];
    const scale = Math.min(room[0] / mm[0], room[1] / mm[1]) * this.zoom;
    return { room, size: mm.map((length) => Math.max(1, length * scale)) };
  }

  // Fit the canvas into its figure, then zoom and pan.
  place() {
    const { room, size: [width, height] } = this.measure();
    this.pan = [width, height].map((length, axis) => {
      const most = Math.abs(length - room[axis]) / 2;
      return Math.min(most, Math.max(-most, this.pan[axis]));
    });
    this.left = (room[0] - width) / 2 + this.pan[0];
    this.top = (room[1] - height) / 2 + this.pan[1];
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px`, left: `${this.left}px`, top: `${this.top}px` });
    this.step = [width / this.about.width, height / this.about.height];
    this.drawCross();
  }

  // Where the crosshair is, in CSS pixels of the figure.
  crossing() { return this.at.map((n, axis) => (n + 0.5) * this.step[axis] + (axis ? this.top : this.left)); }

  // Put the crosshair on a pixel, and bring it into view.
  cross(at) {
    this.at = at;
    if (!this.step) return;
    const { room } = this.measure(), outside = this.crossing().map((n, axis) => n < 0 || n > room[axis]);
    if (outside[0] || outside[1]) {
      this.pan = this.crossing().map((n, axis) => this.pan[axis] + (outside[axis] ? room[axis] / 2 - n : 0));
      this.place();
    } else this.drawCross();
  }

  drawCross() {
    if (!this.at) return;
    const [x, y] = this.crossing();
    Object.assign(this.lines[0].style, { left: `${x}px`, top: "0", width: "1px", height: "100%" });
    Object.assign(this.lines[1].style, { left: "0", top: `${y}px`, width: "100%", height: "1px" });
  }

  // The pixel under a pointer, clipped to the slice.
  pixel(event) {
    const box = this.figure.getBoundingClientRect();
    const at = [event.clientX - box.left - this.left, event.clientY - box.top - this.top];
    const size = [this.about.width, this.about.height];
    return at.map((n, axis) => Math.min(size[axis] - 1, Math.max(0, Math.floor(n / this.step[axis]))));
  }

  // Zoom, and keep the place under a point of the figure: the crosshair if none is given.
  setZoom(zoom, anchor = this.crossing()) {
    const before = this.measure().size, corner = [this.left, this.top];
    const part = anchor.map((n, axis) => (n - corner[axis]) / before[axis]);
    this.zoom = Math.min(16, Math.max(1, zoom));
    const { room, size } = this.measure();
    this.pan = this.zoom === 1 ? [0, 0] : size.map((length, axis) => anchor[axis] - part[axis] * length - (room[axis] - length) / 2);
    this.place();
  }
}
