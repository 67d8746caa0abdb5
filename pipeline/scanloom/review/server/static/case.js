// The page of a case: three planes, structures, doubts, and the verdict.
import { HOME, SILENT, addressOf, enter, get, pageOf, pixels, resultOf } from "./api.js";
import { Correction } from "./correct.js";
import { byId, element, say } from "./dom.js";
import { Pointer } from "./pointer.js";
import { Store } from "./slices.js";
import { Verdict } from "./verdict.js";
import { PLANES, Viewer, middleOf, slicesOf } from "./viewer.js";

const WITHOUT_CASE = "npl?";
const FIELDS = "textarea, select, dialog, input:not([type=checkbox], [type=range])";
const OF_SLIDER = /^(Arrow|Page|Home|End)/;

const slicesBy = (event) => (event.shiftKey ? 10 : 1);
const currentId = () => decodeURIComponent(location.pathname.split("/").pop());

class CasePage {
  constructor() {
    const failed = (error, id) => this.failed(error, id);
    this.store = new Store();
    this.verdict = new Verdict({
      saved: (id) => this.verdictSaved(id),
      describeAnew: (id) => this.describeAnew(id),
      failed,
      isWriting: () => this.correction.isWriting, // the verdict would be on the result before
    });
    this.viewer = new Viewer(this.store, this.verdict, failed);
    this.correction = new Correction(this.viewer, {
      saved: (id, revision) => this.correctionSaved(id, revision),
      failed,
    });
    this.viewer.pointer = new Pointer(this.viewer, this.correction);
    /** Descriptions of cases, here or on their way, by id. @type {Map<string, Promise<Case>>} */
    this.descriptions = new Map();
    this.shownId = null;
    /** The cases beside the one that is shown. @type {Promise<{before: string[], after: string[]}>} */
    this.beside = Promise.resolve({ before: [], after: [] });
    this.steps = Promise.resolve(); // one after another: each starts from the case of the step before
    this.turn = 0; // counts cases that were opened: answers for an earlier one are dropped
    this.doubt = -1; // the last doubt that was jumped to
    this.keys = keysOf(this);
    this.listen();
  }

  listen() {
    byId("back").href = HOME + location.search;
    byId("next").addEventListener("click", () => this.step(1));
    byId("previous").addEventListener("click", () => this.step(-1));
    byId("keys").addEventListener("click", () => byId("help").showModal());
    byId("close").addEventListener("click", () => byId("help").close());
    byId("preview").addEventListener("toggle", () => this.showPreview());
    document.addEventListener("keydown", (event) => this.key(event));
    addEventListener("popstate", () => this.open(currentId()));
    addEventListener("beforeunload", (event) => {
      if (this.correction.unsaved || this.verdict.unsaved) event.preventDefault();
    });
  }

  async start() {
    try {
      this.verdict.showTags((await enter()).tags);
      await this.open(currentId());
    } catch (error) {
      this.failed(error);
    }
  }

  // Say why something failed; show the result that there is now if it was replaced.
  async failed(error, id = this.shownId) {
    if (id !== this.shownId) {
      this.forget(id);
      say(`${id}: ${error.reason ? error.message : SILENT}`, true);
      return;
    }
    let more = "";
    const { about } = this.viewer;
    if (["STALE", "CORRECTED"].includes(error.reason) && about) {
      this.forget(about.id);
      await this.open(about.id);
      more = byId("status").textContent;
    }
    const text = error.reason ? error.message[0].toUpperCase() + error.message.slice(1) : SILENT;
    say(`${text} ${more}`.trim(), true);
  }

  // Cases

  describe(id) {
    if (!this.descriptions.has(id)) {
      const ready = get(addressOf(id));
      ready.catch(() => this.descriptions.delete(id));
      this.descriptions.set(id, ready);
    }
    return this.descriptions.get(id);
  }

  // Describe a case as it is now: perhaps another window decided on it.
  describeAnew(id) {
    this.descriptions.delete(id);
    return this.describe(id);
  }

  // Fetch a case anew when it is opened next.
  forget(id) {
    this.descriptions.delete(id);
    this.store.forget(`${id}/`);
  }

  // Fetch a case ahead; return whether the server has room for it beside the cases that are shown.
  async prefetch(id) {
    if (!this.descriptions.has(id)) {
      const description = await get(`${addressOf(id)}?ahead=1`);
      if (!description) return false;
      if (!this.descriptions.has(id)) this.descriptions.set(id, Promise.resolve(description));
    }
    const about = await this.describe(id);
    const { image, labels } = slicesOf(about, this.store);
    for (const name of PLANES) {
      const index = middleOf(about)[about.planes[name].normal];
      for (const source of [image, ...labels].filter(Boolean)) await source[name].fetch(index);
    }
    return true;
  }

  async open(id) {
    const turn = ++this.turn;
    const isOver = () => turn !== this.turn;
    say("Opening ...");
    delete document.body.dataset.opened; // hides the case before
    this.shownId = id;
    this.beside = this.near(id);
    this.beside.catch(() => {}); // said when it is needed
    this.viewer.about = null;
    this.verdict.clear(); // a decision that is typed until the case is here is about none
    byId("name").textContent = id;
    document.title = `${id}: scanloom review`;
    try {
      const about = await this.describe(id);
      if (isOver()) return;
      this.show(about);
    } catch (error) {
      if (!isOver()) this.failed(error);
      return;
    }
    const { about } = this.viewer;
    const draft = get(resultOf(about, "draft"));
    draft.catch(() => {}); // said below
    await this.viewer.draw();
    if (isOver()) return;
    const unsaved = await this.correction.resume(draft).catch((error) => error);
    if (isOver()) return;
    document.body.dataset.opened = id;
    if (unsaved instanceof Error) this.failed(unsaved);
    else say([about.image_reason, unsaved].filter(Boolean).join(" "));
    this.viewer.solid.load(this.correction.on);
    if (document.activeElement === document.body) {
      byId(this.viewer.active).focus({ preventScroll: true });
    }
    const { after } = await this.beside.catch(() => ({ after: [] }));
    for (const each of after) {
      if (isOver() || !(await this.prefetch(each).catch(() => true))) return;
    }
  }

  show(about) {
    const { modality, models, sheared } = about;
    this.doubt = -1;
    byId("about").textContent =
      `${modality || "unknown modality"}, ${models.join(", ")}` +
      (sheared ? ", sheared slices as stored" : "");
    this.viewer.show(about);
    this.drawDoubts(about);
    this.verdict.show(about);
    this.correction.show();
    this.viewer.enlarge(this.viewer.active);
    byId("preview").open = !about.image;
    this.showCommands(about);
    this.showPreview();
  }

  drawDoubts(about) {
    const items = about.doubts.map(({ text, point }, n) => {
      if (!point) return element("li", text);
      const button = element("button", text, { type: "button" });
      button.addEventListener("click", () => {
        this.doubt = n;
        this.viewer.jump(point);
      });
      const item = element("li");
      item.append(button);
      return item;
    });
    byId("doubts").replaceChildren(...items);
    byId("no-doubts").hidden = items.length > 0;
  }

  nextDoubt() {
    const doubts = this.viewer.about.doubts.filter((each) => each.point);
    if (!doubts.length) return;
    this.doubt = (this.doubt + 1) % doubts.length;
    say(doubts[this.doubt].text);
    this.viewer.jump(doubts[this.doubt].point);
  }

  // A picture in a page can't send the session: it is fetched, and shown from memory.
  async showPreview() {
    const { about } = this.viewer;
    if (!byId("preview").open || !about) return;
    const picture = byId("preview").querySelector("img");
    let address = "";
    try {
      const content = await pixels(`${addressOf(about.id)}/preview`);
      address = URL.createObjectURL(new Blob([content], { type: "image/png" }));
    } catch (error) {
      if (error.status !== 404) {
        this.failed(error);
        return;
      }
    }
    if (this.viewer.about?.id !== about.id) {
      URL.revokeObjectURL(address);
      return;
    }
    URL.revokeObjectURL(picture.src);
    if (address) picture.src = address;
    else picture.removeAttribute("src");
  }

  // The list

  /** Return the cases beside one in the list, and the next that is open. */
  near(id) {
    return get(`/api/worklist/near/${encodeURIComponent(id)}${location.search}`);
  }

  go(id) {
    history.pushState(null, "", pageOf(id));
    return this.open(id);
  }

  step(direction) {
    this.steps = this.steps.then(() => this.goBeside(direction));
  }

  async goBeside(direction) {
    try {
      // a request that failed is sent again
      const { before, after } = await this.beside.catch(() => this.near(this.shownId));
      const [id] = direction > 0 ? after : before;
      if (id) this.go(id);
      else say(`This is the ${direction > 0 ? "last" : "first"} case of the list.`);
    } catch (error) {
      this.failed(error);
    }
  }

  async verdictSaved(id) {
    this.descriptions.delete(id);
    const { next } = await this.near(id);
    if (this.shownId !== id) return; // the person went on
    if (next) {
      await this.go(next);
      return;
    }
    await this.open(id);
    say("Saved. No case is open any more.");
  }

  async correctionSaved(id, revision) {
    const { at, active } = this.viewer;
    this.forget(id);
    if (this.shownId !== id) {
      say(`The correction of ${id} is saved as revision ${revision}: please decide on it.`);
      return;
    }
    await this.open(id);
    this.viewer.enlarge(active);
    await this.viewer.jump(at);
    say(`Saved as revision ${revision}: please decide on it.`);
  }

  measure() {
    if (this.correction.on) this.correction.toggle();
    this.viewer.measure(!this.viewer.isMeasuring);
  }

  // Commands that open the case in other programs, run in the output folder.
  showCommands(about) {
    const folder = about.revision ? `review/revisions/${about.id}/${about.revision}` : about.folder;
    const isStored = about.image === "image";
    const image = isStored ? `${about.folder}/image.nii.gz` : "SCAN";
    const labels = about.layers.map((layer) => `${folder}/${layer.file}`);
    const commands = [
      ...(isStored ? [] : [["Scan", `scanloom where ${about.id} -o .`]]),
      ["ITK-SNAP", `itksnap -g ${image} -s ${labels[0]}`],
      ["3D Slicer", `Slicer --python-code "${slicerCode(image, labels)}"`],
    ];
    byId("commands").replaceChildren(...commands.map(([name, text]) => commandOf(name, text)));
  }

  // Keys

  key(event) {
    const { viewer, correction } = this;
    // German and French keyboards have [ and ] with AltGr, which is Ctrl and Alt to Windows
    const isTyped = event.altKey && "[]".includes(event.key);
    const isModified = (event.ctrlKey || event.metaKey || event.altKey) && !isTyped;
    if (event.target.closest("input[type=range]") && OF_SLIDER.test(event.key)) return;
    const inField = event.target.closest(FIELDS);
    if (inField && event.key !== "Escape") return;
    if (viewer.about && isModified) {
      this.modifiedKey(event);
      return;
    }
    if (correction.polygon && ["Enter", "Escape"].includes(event.key)) {
      event.preventDefault();
      if (event.key === "Enter") correction.closePolygon();
      else correction.drop();
      return;
    }
    const isOnSlice = event.target.closest(".plane:not(#solid)") && !event.target.closest("button");
    if (event.key === "Enter" && correction.on && isOnSlice && viewer.about) {
      event.preventDefault();
      correction.dot(viewer.active);
      return;
    }
    if (event.key === "Escape" && event.target.closest("textarea")) {
      event.target.blur();
      return;
    }
    if (isModified || event.target.closest("textarea, select, dialog")) return;
    const action = this.keys[event.key];
    if (!action || (!viewer.about && !WITHOUT_CASE.includes(event.key))) return;
    event.preventDefault();
    action(event);
  }

  modifiedKey(event) {
    if (event.altKey && ["ArrowUp", "ArrowDown"].includes(event.key)) {
      this.viewer.shift("down", event.key === "ArrowUp" ? -1 : 1);
    } else if (
      (event.ctrlKey || event.metaKey) &&
      this.correction.on &&
      ["z", "y"].includes(event.key)
    ) {
      this.correction.send(event.key === "z" ? "draft/undo" : "draft/redo");
    } else return;
    event.preventDefault();
  }
}

const slicerCode = (image, labels) =>
  [
    `slicer.util.loadVolume('${image}')`,
    ...labels.map((each) => `slicer.util.loadSegmentation('${each}')`),
  ].join("; ");

function commandOf(name, text) {
  const line = element("p", `${name} `, { class: "command" });
  const copy = element("button", "Copy", { type: "button", "aria-label": `Copy: ${name}` });
  copy.addEventListener("click", () => {
    navigator.clipboard.writeText(text);
    say(`Copied, for a terminal in the output folder: ${text}`);
  });
  line.append(copy, element("br"), element("code", text));
  return line;
}

/** @param {CasePage} page */
function keysOf(page) {
  const { viewer, verdict, correction } = page;
  return {
    1: () => viewer.turnTo("axial"),
    2: () => viewer.turnTo("coronal"),
    3: () => viewer.turnTo("sagittal"),
    4: () => viewer.solid.enlarge(),
    "]": () => viewer.changeWindow(1.2, 0),
    "[": () => viewer.changeWindow(1 / 1.2, 0),
    ".": () => viewer.changeWindow(1, 0.05),
    ",": () => viewer.changeWindow(1, -0.05),
    w: () => viewer.nextWindow(),
    ArrowUp: (event) => viewer.shift("normal", -slicesBy(event)),
    ArrowDown: (event) => viewer.shift("normal", slicesBy(event)),
    ArrowLeft: () => viewer.shift("across", -1),
    ArrowRight: () => viewer.shift("across", 1),
    "+": () => viewer.zoom(1.5),
    "-": () => viewer.zoom(1 / 1.5),
    0: () => viewer.home(),
    o: () => viewer.toggleOutline(),
    h: () => viewer.toggleLabels(),
    d: () => page.nextDoubt(),
    b: () => correction.toggle(),
    g: () => correction.on && correction.turnShape(),
    t: () => correction.on && correction.toggleRange(),
    f: () => correction.on && correction.fill(),
    m: () => page.measure(),
    x: () => correction.erase(!correction.isEraser),
    a: () => verdict.choose("accept"),
    e: () => verdict.choose("edit"),
    r: () => verdict.choose("reject"),
    s: () => verdict.save(),
    u: () => verdict.undo(),
    c: () => byId("comment").focus(),
    n: () => page.step(1),
    p: () => page.step(-1),
    l: () => location.assign(byId("back").href),
    "?": () => byId("help").showModal(),
  };
}

await new CasePage().start();
