// The dial: seconds along the model's frontier, where it has one; below it, γ as a slider in front of the measured curve.

const SVG = "http://www.w3.org/2000/svg";
const THUMB = 10; // half of the slider's thumb, by which the track is inset
const TOP_LAG_S = 6;
const TOP_WER = 20;
export const MOST_GAMMA = 1.5;
const K_S = { low: 0.5, high: 8, step: 0.5, first: 3 };

function draw(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

export function between(points, gamma, field) {
  const at = points.findIndex((point) => point.gamma >= gamma);
  if (at <= 0) return points.at(at === 0 ? 0 : -1)[field];
  const [low, high] = [points[at - 1], points[at]];
  return low[field] + ((high[field] - low[field]) * (gamma - low.gamma)) / (high.gamma - low.gamma);
}

export class Dial {
  constructor(root, { id, name, gamma, onturn }) {
    this.root = root;
    this.kind = "gamma";
    this.gamma = gamma;
    this.kS = K_S.first;
    this.onturn = onturn;
    this.measured = null;
    this.tokensPerS = 50;
    this.frontier = null; // points from fast to accurate
    this.place = 0;
    const find = (selector) => root.querySelector(selector);
    this.seconds = Object.fromEntries(["name", "value", "knob", "promise"].map((each) => [each, find(`.seconds-${each}`)]));
    this.seconds.root = find(".seconds");
    this.seconds.knob.id = this.seconds.name.htmlFor = this.seconds.value.htmlFor = `seconds-${id}`;
    this.seconds.knob.oninput = () => {
      this.place = Number(this.seconds.knob.value);
      this._choose("lag");
    };
    this.details = find(".dial");
    this.knob = find(".curve .knob");
    this.knob.id = id;
    this.label = find(".dial-name");
    this.label.htmlFor = id;
    this.name = name;
    this.value = find(".dial-value");
    this.value.htmlFor = id;
    this.plot = find(".plot");
    this.promise = find(".promise");
    this.ends = [find(".end-low"), find(".end-high")];
    this.select = find(".policy");
    this.select.onchange = () => {
      this.kind = this.select.value; // of the second stream
      this._fit();
      this._turned();
    };
    this.knob.oninput = () => this._turned();
    new ResizeObserver(() => this._plot()).observe(this.plot);
    this._fit();
    this._show();
  }

  // The request to the server.
  get wish() {
    if (this.kind === "lag") return { lag_s: this.frontier[this.place].at_s };
    if (this.kind === "gamma") return { gamma: this.gamma };
    return { policy: `wait-k=${Math.round(this.kS * this.tokensPerS)},stride=${this.measured.stride}` };
  }

  get words() {
    if (this.kind === "lag") return `about ${this.frontier[this.place].lag_s.toFixed(1)} s behind`;
    return this.kind === "gamma" ? `γ = ${this.gamma.toFixed(2)}` : `wait-k, k = ${this.kS.toFixed(1)} s`;
  }

  // Limit of the mean share of the window that is read; null if it has no closed form.
  get limit() {
    return this.kind === "gamma" ? 1 / (1 + this.gamma) : null;
  }

  // The model's frontier, and the setting to begin with; without one the dial is γ.
  setFrontier(frontier, measuredOn, setting) {
    if (!frontier?.length) return;
    this.frontier = frontier;
    this.measuredOn = measuredOn;
    const [given, within] = [frontier.findIndex((point) => point.setting === setting), frontier.findLastIndex((point) => point.at_s <= 1)];
    this.place = given >= 0 ? given : Math.max(0, within);
    this.seconds.knob.max = frontier.length - 1;
    this.seconds.root.hidden = false;
    this.details.querySelector("summary").hidden = false;
    this.details.open = false;
    this._choose("lag");
  }

  _choose(kind) {
    this.kind = kind;
    this.liveS = undefined;
    this._show();
    this.onturn(this.wish);
  }

  setMeasured(measured) {
    this.measured = measured;
    this.select.options[1].disabled = !measured;
    this._plot();
    this._show();
  }

  // The current lag, beside the measured one.
  setLive(lagS) {
    this.liveS = lagS;
    this._mark();
  }

  _fit() {
    const gamma = this.kind !== "wait-k";
    Object.assign(this.knob, gamma ? { min: 0, max: MOST_GAMMA, step: 0.05 } : { min: K_S.low, max: K_S.high, step: K_S.step });
    this.knob.value = gamma ? this.gamma : this.kS;
    this.label.textContent = this.name;
    [this.ends[0].textContent, this.ends[1].textContent] = gamma ? ["0: reads all first", "1.5: reads least"] : ["0.5 s", "8 s"];
    this._plot();
    this._show();
  }

  _turned() {
    if (this.kind === "wait-k") this.kS = Number(this.knob.value);
    else this.gamma = Number(this.knob.value);
    this._choose(this.kind === "wait-k" ? "wait-k" : "gamma");
  }

  _showSeconds() {
    if (!this.frontier) return;
    const { seconds, kind } = this;
    const { lag_s: lagS, lag_p90_s: mostS, wer } = this.frontier[this.place];
    const behind = `About ${lagS.toFixed(1)}\u00a0s behind; 90\u00a0% of words within ${mostS.toFixed(1)}\u00a0s, ${wer.toFixed(1)}\u00a0% wrong`;
    seconds.knob.value = this.place;
    seconds.value.textContent = kind === "lag" ? `${lagS.toFixed(1)} s` : "–";
    seconds.promise.textContent = kind === "lag" ? `${behind}; measured on ${this.measuredOn}.` : "The dial γ is chosen in the details.";
    seconds.knob.setAttribute("aria-valuetext", `about ${lagS.toFixed(1)} seconds behind, ${wer.toFixed(1)} percent of words wrong`);
  }

  _show() {
    this._showSeconds();
    this.value.textContent = { lag: "–", gamma: this.gamma.toFixed(2), "wait-k": `${this.kS.toFixed(1)} s` }[this.kind];
    const points = this.kind === "wait-k" ? null : this.measured?.points;
    this.root.dataset.measured = String(Boolean(points));
    if (this.kind === "lag") {
      this.promise.textContent = "Turn it to choose γ instead of seconds.";
      this.knob.setAttribute("aria-valuetext", "not chosen: the dial is in seconds");
    } else if (points) {
      const [lagS, wer] = ["lag_s", "wer"].map((field) => between(points, this.gamma, field));
      const [lag, wrong] = [lagS.toFixed(1), wer.toFixed(1)];
      const where = points.some((point) => point.gamma === this.gamma) ? "" : " nearby";
      this.promise.textContent = `Measured${where}: words come ${lag}\u00a0s after they were spoken, ${wrong}\u00a0% are wrong.`;
      this.knob.setAttribute("aria-valuetext", `${this.gamma.toFixed(2)}: ${lag} seconds of lag, ${wrong} percent of words wrong`);
    } else {
      this.promise.textContent = this.kind === "gamma" ? "" : "wait-k: always the same distance behind the source.";
      this.knob.setAttribute("aria-valuetext", this.words);
    }
    this._mark();
  }

  _x(gamma) {
    return THUMB + (gamma / MOST_GAMMA) * (this.width - 2 * THUMB);
  }

  _y(share) {
    return this.height - 2 - share * (this.height - 14);
  }

  _plot() {
    this.plot.replaceChildren();
    this.marks = null;
    const points = this.kind === "wait-k" ? null : this.measured?.points;
    const box = this.plot.getBoundingClientRect();
    if (!points || !box.width) return;
    [this.width, this.height] = [box.width, box.height];
    this.plot.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    const place = (point, field, top) => `${this._x(point.gamma).toFixed(1)},${this._y(point[field] / top).toFixed(1)}`;
    const line = (field, top) => points.map((point) => place(point, field, top)).join(" ");
    draw(this.plot, "line", { class: "axis", x1: THUMB, x2: box.width - THUMB, y1: this._y(0), y2: this._y(0) });
    this.needle = draw(this.plot, "line", { class: "needle", y1: 0, y2: box.height });
    draw(this.plot, "polyline", { class: "wer-line", points: line("wer", TOP_WER) });
    draw(this.plot, "polyline", { class: "lag-line", points: line("lag_s", TOP_LAG_S) });
    const [first, last] = [points[0], points.at(-1)];
    const label = (kind, text, x, y, anchor) => draw(this.plot, "text", { class: kind, x, y, "text-anchor": anchor }, text);
    label("lag-name", `lag ${first.lag_s.toFixed(1)} s`, THUMB + 2, this._y(first.lag_s / TOP_LAG_S) - 7, "start");
    label("wer-name", `wrong ${first.wer.toFixed(1)} %`, THUMB + 2, this._y(first.wer / TOP_WER) + 16, "start");
    label("lag-name", `${last.lag_s.toFixed(1)} s`, box.width - THUMB, this._y(last.lag_s / TOP_LAG_S) + 16, "end");
    label("wer-name", `${last.wer.toFixed(1)} %`, box.width - THUMB, this._y(last.wer / TOP_WER) - 5, "end");
    this.marks = {
      wer: draw(this.plot, "circle", { class: "wer-dot", r: 4 }),
      lag: draw(this.plot, "circle", { class: "lag-dot", r: 4.5 }),
      live: draw(this.plot, "circle", { class: "live-dot", r: 5 }),
    };
    const each = points.map((point) => `at ${point.gamma}: ${point.lag_s} s, ${point.wer} %`).join("; ");
    this.plot.setAttribute("aria-label", `Measured along the dial, lag and word errors: ${each}. ${this.measured.data}`);
    this._mark();
  }

  _mark() {
    if (!this.marks) return;
    const { points } = this.measured;
    const x = this._x(this.gamma);
    for (const name of ["x1", "x2"]) this.needle.setAttribute(name, x);
    const put = (mark, share) => {
      mark.setAttribute("cx", x);
      mark.setAttribute("cy", this._y(Math.min(1.05, share)));
    };
    put(this.marks.lag, between(points, this.gamma, "lag_s") / TOP_LAG_S);
    put(this.marks.wer, between(points, this.gamma, "wer") / TOP_WER);
    const live = this.liveS !== undefined && this.kind === "gamma";
    this.marks.live.setAttribute("visibility", live ? "visible" : "hidden");
    if (this.liveS !== undefined) put(this.marks.live, this.liveS / TOP_LAG_S);
  }
}
