// The dial: seconds along the model's frontier, where it has one; below it, γ as a slider.

export const MOST_GAMMA = 1.5;
const STRIDE_S = 0.32; // read English per text token of Whisper: LibriSpeech dev-clean
const K_S = { low: 0.5, high: 8, step: 0.5, first: 3 };

export class Dial {
  constructor(root, { id, name, gamma, onturn }) {
    this.root = root;
    this.kind = "gamma";
    this.gamma = gamma;
    this.kS = K_S.first;
    this.onturn = onturn;
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
    this.promise = find(".promise");
    this.ends = [find(".end-low"), find(".end-high")];
    this.select = find(".policy");
    this.select.onchange = () => {
      this.kind = this.select.value; // of the second stream
      this._fit();
      this._turned();
    };
    this.knob.oninput = () => this._turned();
    this._fit();
    this._show();
  }

  // The request to the server.
  get wish() {
    if (this.kind === "lag") return { lag_s: this.frontier[this.place].at_s };
    if (this.kind === "gamma") return { gamma: this.gamma };
    return { policy: `wait-k=${Math.round(this.kS * this.tokensPerS)},stride=${(STRIDE_S * this.tokensPerS).toFixed(2)}` };
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
    this._show();
    this.onturn(this.wish);
  }

  _fit() {
    const gamma = this.kind !== "wait-k";
    Object.assign(this.knob, gamma ? { min: 0, max: MOST_GAMMA, step: 0.05 } : { min: K_S.low, max: K_S.high, step: K_S.step });
    this.knob.value = gamma ? this.gamma : this.kS;
    this.label.textContent = this.name;
    [this.ends[0].textContent, this.ends[1].textContent] = gamma ? ["0: reads all first", "1.5: reads least"] : ["0.5 s", "8 s"];
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
    if (this.kind === "lag") {
      this.promise.textContent = "Turn it to choose γ instead of seconds.";
      this.knob.setAttribute("aria-valuetext", "not chosen: the dial is in seconds");
    } else {
      this.promise.textContent = this.kind === "gamma" ? "" : "wait-k: always the same distance behind the source.";
      this.knob.setAttribute("aria-valuetext", this.words);
    }
  }
}
