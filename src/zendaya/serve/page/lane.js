// One stream on the page: captions, dial, meters and session.

import { Connection } from "./connection.js";
import { Dial } from "./dial.js";
import { Transcript } from "./transcript.js";

const NEAR_PX = 32; // distance at which captions count as scrolled to the end
const LONG = 280; // characters after which a paragraph ends with its sentence
const TURN_MS = 60;
const GAUGE_LAG_S = 10;
const SENTENCE = /[.!?…]["'”’)\]]*$/u;

const seconds = (value) => `${value.toFixed(value < 0.995 ? 2 : 1)} s`;

export class Lane {
  constructor(root, { id, name, gamma, on }) {
    this.root = root;
    this.id = id;
    this.on = on;
    root.dataset.lane = id;
    const find = (selector) => root.querySelector(selector);
    this.captions = find(".captions");
    this.captions.id = `captions-${id}`;
    this.hint = find(".hint");
    this.latest = find(".latest");
    const names = ["lag", "parts", "policy-part", "compute-part", "exposure", "limit", "read-part", "tick", "dropped"];
    this.meters = Object.fromEntries(names.map((each) => [each, find(`.${each}`)]));
    this.saves = [...root.querySelectorAll("[data-form]")];
    for (const button of this.saves) button.onclick = () => this.on.save(this, button.dataset.form);
    this.dial = new Dial(root, { id: `dial-${id}`, name, gamma, onturn: (wish) => this._turn(wish) });
    if (id === "a") this.dial.select.remove(); // the first stream always uses the dial
    this.setName(name);
    this.clear();
    this.latest.onclick = () => {
      this._follow();
      this.captions.focus();
    };
    this.captions.onscroll = () => {
      this.following = this.captions.scrollHeight - this.captions.scrollTop - this.captions.clientHeight < NEAR_PX;
      this.latest.hidden = this.following;
    };
    const wordAt = (event) => this.transcript.words[event.target.closest?.(".word")?.dataset.index];
    this.captions.onpointerover = (event) => this.on.point(this, wordAt(event) ?? null);
    this.captions.onpointerleave = () => this.on.point(this, this._focused());
    this.captions.addEventListener("focusin", (event) => {
      const word = wordAt(event);
      if (word) {
        this.at = word.index;
        event.target.setAttribute("aria-describedby", "detail");
        this.on.point(this, word);
      } else if (this.spans.length) this._focus(this.spans.length - 1);
    });
    this.captions.addEventListener("focusout", ({ relatedTarget }) => {
      if (this.captions.contains(relatedTarget)) return;
      this.at = null;
      if (this.spans.length) this._rove(this.spans.at(-1));
      this.on.point(this, null);
    });
    this.captions.onkeydown = (event) => this._key(event);
  }

  setName(name) {
    this.dial.name = name;
    this.dial.label.textContent = name;
    this.captions.setAttribute("aria-label", this.id === "a" ? "Captions" : "Captions of the second stream");
    for (const button of this.saves) {
      button.setAttribute("aria-label", `Save ${this.id === "a" ? "" : "the second transcript "}as ${button.dataset.form}`);
    }
  }

  clear() {
    this.transcript = new Transcript();
    this.spans = [];
    this.at = null;
    this.paragraph = null;
    this.following = true;
    this.beganS = 0;
    this.sentence = "";
    this.captions.replaceChildren();
    this.captions.tabIndex = 0;
    this.stop = null;
    this.latest.hidden = true;
    this.hint.hidden = false;
    this.sourceDropped = 0;
    this.measure();
  }

  get busy() {
    return Boolean(this.connection) && !this.connection.over;
  }

  // Begins a session at this second of the source.
  begin(base, beganS) {
    this.clear();
    clearTimeout(this._turning); // the session begins with the dial's value of now
    this.beganS = beganS;
    this.hint.textContent = "Listening…";
    const connection = new Connection({
      base,
      dial: this.dial.wish,
      on: {
        opened: (message) => {
          this.transcript.opened(message);
          this.dial.tokensPerS = message.tokens_per_s;
        },
        event: (message, offsetS) => this._event(message, beganS + offsetS),
        state: (state, detail) => this.on.state(this, state, detail),
        restarted: (droppedS) => this.on.restarted(this, droppedS),
      },
    });
    this.connection = connection;
    this.on.state(this, connection.state, "");
  }

  _turn(wish) {
    this.on.turned(this);
    this.measure();
    clearTimeout(this._turning);
    this._turning = setTimeout(() => this.busy && !this.connection.ended && this.connection.turn(wish), TURN_MS);
  }

  _event(message, offsetS) {
    const found = this.transcript.add(message, offsetS);
    if (found) this._write(message.text, found);
    else if (message.type === "text" && message.last) this._endSentence();
    this.measure();
    this.on.changed(this);
  }

  // Text is appended as text, never as HTML, and never changed.
  _write(text, { word, begins }) {
    this.hint.hidden = true;
    if (begins) {
      const full = this.paragraph && this.paragraph.textContent.length > LONG && SENTENCE.test(this.paragraph.textContent.trim());
      if (!this.paragraph || full) {
        this.paragraph = document.createElement("p");
        this.captions.append(this.paragraph);
      } else if (!/^\s/u.test(text)) this.paragraph.append(" ");
      const span = document.createElement("span");
      span.className = "word";
      span.dataset.index = word.index;
      span.tabIndex = -1;
      const space = /^\s*/u.exec(text)[0];
      if (space && this.paragraph.hasChildNodes()) this.paragraph.append(" ");
      span.append(document.createTextNode(text.slice(space.length)));
      this.paragraph.append(span);
      this.spans.push(span);
      if (this.at === null) this._rove(span);
    } else this.spans.at(-1).append(document.createTextNode(text));
    this.sentence += text;
    if (SENTENCE.test(text)) this._endSentence();
    for (const button of this.saves) button.disabled = false;
    if (this.following) this._follow();
    else this.latest.hidden = false;
  }

  _endSentence() {
    if (this.sentence.trim()) this.on.sentence(this, this.sentence.trim());
    this.sentence = "";
  }

  _follow() {
    this.following = true;
    this.latest.hidden = true;
    this.captions.scrollTop = this.captions.scrollHeight;
  }

  measure() {
    const { transcript, meters, dial } = this;
    const lag = transcript.lag;
    meters.lag.textContent = lag ? seconds(lag.policyS + lag.computeS) : "–";
    meters.parts.textContent = lag ? `policy ${lag.policyS.toFixed(2)}, compute ${lag.computeS.toFixed(2)}` : "policy –, compute –";
    const share = (lagS) => `${Math.min(100, (100 * lagS) / GAUGE_LAG_S)}%`;
    meters["policy-part"].style.width = share(lag?.policyS ?? 0);
    meters["compute-part"].style.width = share(lag?.computeS ?? 0);
    const exposure = transcript.exposure;
    meters.exposure.textContent = exposure === null ? "–" : `${(100 * exposure).toFixed(0)} %`;
    meters["read-part"].style.width = `${100 * (exposure ?? 0)}%`;
    const limit = dial.limit;
    meters.limit.textContent = limit === null ? "of the window" : `1/(1+γ) is ${(100 * limit).toFixed(0)} %`;
    meters.tick.style.left = `calc(${100 * (limit ?? 0)}% - 1px)`;
    meters.tick.hidden = limit === null;
    const dropped = this.sourceDropped + (this.connection?.dropped ?? 0);
    meters.dropped.textContent = dropped < 0.0005 ? "0" : dropped.toFixed(1);
    meters.dropped.dataset.some = String(dropped >= 0.0005);
  }

  // One tab stop; the arrow keys move from word to word.
  _key(event) {
    if (!this.spans.length) return;
    const step = { ArrowLeft: -1, ArrowUp: -8, ArrowRight: 1, ArrowDown: 8 }[event.key];
    const now = this.at ?? this.spans.length - 1;
    if (step) this._focus(Math.max(0, Math.min(this.spans.length - 1, now + step)));
    else if (event.key === "Home") this._focus(0);
    else if (event.key === "End") this._focus(this.spans.length - 1);
    else return;
    event.preventDefault();
  }

  _focus(index) {
    this._rove(this.spans[index]);
    this.spans[index].focus();
  }

  _rove(span) {
    this.captions.tabIndex = -1;
    if (this.stop) this.stop.tabIndex = -1;
    this.stop = span;
    span.tabIndex = 0;
  }

  _focused() {
    return this.at !== null && document.activeElement === this.spans[this.at] ? this.transcript.words[this.at] : null;
  }

  mark(word) {
    this._marked?.classList.remove("shown");
    this._marked = word ? this.spans[word.index] : null;
    this._marked?.classList.add("shown");
  }
}
