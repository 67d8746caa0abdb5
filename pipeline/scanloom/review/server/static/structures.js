// The list of structures: each with its colour, volume, visibility and verdict.
import { byId, element } from "./dom.js";

export class Structures {
  /**
   * @param {Verdict} verdict
   * @param {(point: number[]) => void} jump
   * @param {() => void} redraw
   */
  constructor(verdict, jump, redraw) {
    this.verdict = verdict;
    this.jump = jump;
    this.redraw = redraw;
    /** Structures that are not drawn, as "<layer>:<label>". @type {Set<string>} */
    this.off = new Set();
    /** The structure that was gone to last: layer and value, as in `off`. */
    this.selected = "";
    byId("all").addEventListener("click", () => this.showAll(true));
    byId("none").addEventListener("click", () => this.showAll(false));
  }

  /** @param {Case} about */
  show(about) {
    this.off = new Set();
    this.selected = "";
    const models = Map.groupBy(about.layers, (layer) => layer.model);
    const boxes = [...models].map(([model, layers]) => {
      const box = element("div");
      if (models.size > 1) box.append(element("h2", model));
      const list = element("ul", "", { class: "structures" });
      list.append(
        ...layers.flatMap((layer) =>
          layer.labels.map((structure) => this.itemOf(layer, structure)),
        ),
      );
      box.append(list);
      return box;
    });
    byId("layers").replaceChildren(...boxes);
  }

  itemOf(layer, structure) {
    const { name, centre } = structure;
    const key = `${layer.index}:${structure.value}`;
    const swatch = element("span", "", { class: "swatch" });
    swatch.style.background = structure.color;
    const tick = element("input", "", { type: "checkbox", "aria-label": `Show ${name}` });
    tick.checked = true;
    tick.dataset.key = key;
    tick.addEventListener("change", () => {
      if (tick.checked) this.off.delete(key);
      else this.off.add(key);
      this.redraw();
    });
    const item = element("li");
    item.append(tick, swatch);
    if (centre === null) {
      item.append(element("span", `${name}: not found`, { class: "name quiet" }));
      return item;
    }
    const button = element("button", name, {
      type: "button",
      class: "name",
      title: `Go to ${name}`,
      "aria-label": `Go to ${name}`,
    });
    button.addEventListener("click", () => {
      this.selected = key;
      this.jump(centre);
    });
    item.append(
      button,
      element("span", volumeOf(structure), { class: "amount" }),
      this.verdict.ofStructure(`${layer.model}/${structure.label}`, name),
    );
    return item;
  }

  showAll(isShown) {
    this.off = new Set();
    for (const tick of byId("layers").querySelectorAll("input[type=checkbox]")) {
      tick.checked = isShown;
      if (!isShown) this.off.add(tick.dataset.key);
    }
    this.redraw();
  }
}

function volumeOf({ volume_ml: ml }) {
  if (ml === null) return "";
  if (ml > 0 && ml < 0.001) return "< 0.001 ml";
  return `${ml < 100 ? ml.toPrecision(3) : Math.round(ml)} ml`;
}
