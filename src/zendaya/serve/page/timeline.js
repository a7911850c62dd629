// One time axis: the source as it arrives, how far each stream has read, and each word when it was written.

import { RATE } from "./sources.js";

const BIN = RATE / 50; // samples per bar of the source
const LEAST_S = 12;
const PX_PER_S = 38; // fewer pixels per second, and the axis scrolls
const FRAME_MS = 50;
const EDGE = 12;
const ROW = 16;

export class Timeline {
  constructor(canvas, { onpoint }) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.onpoint = onpoint;
    this.clear();
    new ResizeObserver(() => this.redraw()).observe(canvas);
    canvas.onpointermove = (event) => this._point(event);
    canvas.onpointerleave = () => this._leave();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
  }

  clear() {
    this.bars = [];
    this.open = { peak: 0, count: 0 };
    this.nowS = 0;
    this.live = false; // whether the source goes on
    this.lanes = [];
    this.shown = null;
    this.boxes = [];
    this.redraw();
  }

  // Adds s16le samples of the source.
  add(samples) {
    for (const sample of samples) {
      this.open.peak = Math.max(this.open.peak, Math.abs(sample));
      this.open.count += 1;
      if (this.open.count === BIN) {
        this.bars.push(this.open.peak / 32768);
        this.open = { peak: 0, count: 0 };
      }
    }
    this.nowS += samples.length / RATE;
    this.redraw();
  }

  recolour() {
    this.colours = null;
    this.redraw();
  }

  // Points out a word of a lane; null for none.
  show(lane, word) {
    this.shown = word ? { lane, word } : null;
    this.redraw();
  }

  redraw() {
    if (this.asked) return;
    this.asked = true;
    const wait = Math.max(0, FRAME_MS - (performance.now() - (this.drawnMs ?? 0)));
    setTimeout(() => requestAnimationFrame(() => {
      this.asked = false;
      this.drawnMs = performance.now();
      this._draw();
    }), wait);
  }

  _read() {
    const probe = document.createElement("span");
    this.canvas.after(probe);
    const colours = {};
    for (const name of ["ink", "quiet", "hair", "wave", "a", "a-soft", "b", "b-soft", "sheet"]) {
      probe.style.color = `var(--${name})`;
      colours[name] = getComputedStyle(probe).color;
    }
    colours.font = getComputedStyle(probe).fontFamily;
    probe.remove();
    return colours;
  }

  _view(width) {
    const most = Math.max(LEAST_S, width / PX_PER_S);
    const ends = this.lanes.flatMap((lane) => lane.transcript.words.slice(-1).map((word) => word.event.emissionS + 1.5));
    const endS = Math.max(this.nowS * 1.04, ...ends, 0);
    const span = Math.min(most, Math.max(LEAST_S, endS));
    let from = Math.max(0, endS - span);
    const word = this.shown?.word.event;
    if (word && (word.windowStartS < from || word.emissionS > from + span)) {
      from = Math.max(0, Math.min(word.windowStartS - 0.5, endS - span));
    }
    return { from, to: from + span };
  }

  _draw() {
    const { canvas, pen } = this;
    const box = canvas.getBoundingClientRect();
    if (!box.width) return;
    const scale = devicePixelRatio || 1;
    const [width, height] = [Math.round(box.width), Math.round(box.height)];
    if (canvas.width !== width * scale || canvas.height !== height * scale) {
      [canvas.width, canvas.height] = [width * scale, height * scale];
    }
    this.colours ??= this._read();
    const colours = this.colours;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `12px ${colours.font}`;
    pen.textBaseline = "middle";
    const { from, to } = this._view(width);
    const x = (second) => EDGE + ((second - from) / (to - from)) * (width - 2 * EDGE);
    const lanes = this.lanes.length || 1;
    const wave = { top: 14, bottom: 66 };
    const foot = height - 20;
    const rows = Math.max(3, Math.floor((foot - wave.bottom) * (lanes > 1 ? 0.52 : 0.46) / ROW / lanes));
    const texts = foot - rows * ROW * lanes - (lanes - 1) * 6 - 6;
    const stairs = { top: wave.bottom + 12, bottom: texts - 12 };
    const y = (second) => stairs.bottom - (Math.max(0, second - from) / (to - from)) * (stairs.bottom - stairs.top);

    this._ticks(x, from, to, foot);
    this._windows(x, from, to, wave.top, texts - 6);
    this._allowed(x, y, wave, stairs);
    this._wave(x, from, to, wave);
    this._arrived(x, y, from, to);
    for (const lane of this.lanes) this._stairs(lane, x, y, from, to, stairs);
    this.boxes = [];
    this.lanes.forEach((lane, index) => this._words(lane, x, y, from, to, texts + index * (rows * ROW + 6), rows));
    this._now(x, to, wave.top, foot);
  }

  _ticks(x, from, to, foot) {
    const { pen, colours } = this;
    const step = to - from > 40 ? 5 : 2;
    pen.fillStyle = colours.quiet;
    pen.strokeStyle = colours.hair;
    pen.lineWidth = 1;
    pen.textAlign = "center";
    pen.beginPath();
    pen.moveTo(EDGE, foot + 0.5);
    pen.lineTo(x(to), foot + 0.5);
    for (let second = Math.ceil(from / step) * step; second <= to; second += step) {
      pen.moveTo(Math.round(x(second)) + 0.5, foot);
      pen.lineTo(Math.round(x(second)) + 0.5, foot + 4);
      if (x(second) > EDGE + 4 && x(second) < x(to) - 14) pen.fillText(`${second} s`, x(second), foot + 12);
    }
    pen.stroke();
  }

  _windows(x, from, to, top, bottom) {
    const { pen, colours } = this;
    const starts = this.lanes.flatMap((lane) => lane.transcript.windowStarts);
    pen.strokeStyle = colours.hair;
    pen.setLineDash([2, 4]);
    pen.beginPath();
    for (const start of starts) {
      if (start <= from || start > to) continue;
      pen.moveTo(Math.round(x(start)) + 0.5, top);
      pen.lineTo(Math.round(x(start)) + 0.5, bottom);
    }
    pen.stroke();
    pen.setLineDash([]);
  }

  // The source that the pointed-out word was allowed to read.
  _allowed(x, y, wave, stairs) {
    if (!this.shown) return;
    const { pen, colours } = this;
    const { lane, word: { event } } = this.shown;
    const [left, right] = [Math.max(EDGE, x(event.windowStartS)), x(event.readS)];
    pen.fillStyle = colours[`${lane.id}-soft`];
    pen.fillRect(left, wave.top - 6, right - left, wave.bottom - wave.top + 10);
    pen.strokeStyle = colours[lane.id];
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(right, wave.top - 6);
    pen.lineTo(right, wave.bottom + 4);
    pen.setLineDash([3, 3]);
    pen.lineTo(right, y(event.readS));
    pen.lineTo(x(event.emissionS), y(event.readS));
    pen.lineTo(x(event.emissionS), stairs.bottom + 8);
    pen.stroke();
    pen.setLineDash([]);
  }

  _wave(x, from, to, wave) {
    const { pen, colours } = this;
    const middle = (wave.top + wave.bottom) / 2;
    const half = (wave.bottom - wave.top) / 2;
    const binS = BIN / RATE;
    // At most one bar per two pixels.
    const every = Math.max(1, Math.round((2 / (x(1) - x(0))) / binS));
    const first = Math.max(0, Math.floor(from / binS / every) * every);
    pen.strokeStyle = colours.wave;
    pen.lineWidth = Math.max(1, (x(binS * every) - x(0)) * 0.6);
    pen.beginPath();
    for (let at = first; at < this.bars.length && at * binS < to; at += every) {
      let peak = 0;
      for (let k = at; k < Math.min(at + every, this.bars.length); k += 1) peak = Math.max(peak, this.bars[k]);
      const reach = Math.max(0.6, Math.min(1, Math.sqrt(peak)) * half);
      pen.moveTo(x((at + every / 2) * binS), middle - reach);
      pen.lineTo(x((at + every / 2) * binS), middle + reach);
    }
    pen.stroke();
  }

  _arrived(x, y, from, to) {
    const { pen, colours } = this;
    const end = Math.min(this.nowS, to);
    if (end <= from) return;
    pen.strokeStyle = colours.wave;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x(from), y(from));
    pen.lineTo(x(end), y(end));
    const lastS = Math.max(end, ...this.lanes.map((lane) => lane.transcript.events.at(-1)?.emissionS ?? 0));
    pen.lineTo(x(Math.min(to, lastS)), y(end)); // nothing arrives after the end
    pen.stroke();
  }

  _stairs(lane, x, y, from, to, stairs) {
    const { pen, colours } = this;
    const events = lane.transcript.events;
    // From the last step before the view.
    let at = events.length;
    while (at > 0 && events[at - 1].emissionS >= from) at -= 1;
    let level = at > 0 ? events[at - 1].readS : from;
    const path = [[x(Math.max(from, at > 0 ? from : lane.beganS)), y(level)]];
    for (; at < events.length && events[at].emissionS <= to; at += 1) {
      path.push([x(events[at].emissionS), y(level)]);
      level = Math.max(level, events[at].readS);
      path.push([x(events[at].emissionS), y(level)]);
    }
    path.push([x(Math.min(to, Math.max(this.nowS, events.at(-1)?.emissionS ?? 0))), y(level)]);
    pen.beginPath();
    path.forEach(([px, py], index) => (index ? pen.lineTo(px, py) : pen.moveTo(px, py)));
    pen.strokeStyle = colours[lane.id];
    pen.lineWidth = 2;
    pen.lineJoin = "round";
    pen.stroke();
    if (this.lanes.length > 1) return;
    pen.lineTo(path.at(-1)[0], stairs.bottom);
    pen.lineTo(path[0][0], stairs.bottom);
    pen.fillStyle = colours[`${lane.id}-soft`];
    pen.globalAlpha = 0.5;
    pen.fill();
    pen.globalAlpha = 1;
  }

  _words(lane, x, y, from, to, top, rows) {
    const { pen, colours } = this;
    const words = lane.transcript.words;
    let at = words.length;
    while (at > 0 && words[at - 1].event.emissionS >= from) at -= 1;
    const free = new Array(rows).fill(-Infinity);
    pen.textAlign = "left";
    for (; at < words.length && words[at].event.emissionS <= to; at += 1) {
      const word = words[at];
      const moment = x(word.event.emissionS);
      pen.fillStyle = colours[lane.id];
      pen.beginPath();
      pen.arc(moment, y(word.event.readS), 2.5, 0, 7);
      pen.fill();
      // In the first free row, or the one that is free soonest.
      let row = free.findIndex((end) => end <= moment);
      if (row < 0) row = free.indexOf(Math.min(...free));
      const left = Math.max(moment, free[row]);
      const text = word.text.trim();
      const wide = pen.measureText(text).width;
      free[row] = left + wide + 7;
      if (left > x(to) + EDGE) continue;
      const middle = top + row * ROW + ROW / 2;
      const shown = this.shown?.word === word && this.shown.lane === lane;
      if (shown) {
        pen.fillStyle = colours[`${lane.id}-soft`];
        pen.fillRect(left - 3, middle - ROW / 2, wide + 6, ROW);
      }
      pen.fillStyle = shown || this.lanes.length > 1 ? colours[lane.id] : colours.ink;
      pen.fillText(text, left, middle + 0.5);
      this.boxes.push({ lane, word, left: left - 3, right: left + wide + 4, top: middle - ROW / 2, bottom: middle + ROW / 2 });
      this.boxes.push({ lane, word, left: moment - 4, right: moment + 4, top: y(word.event.readS) - 4, bottom: y(word.event.readS) + 4 });
    }
  }

  _now(x, to, top, foot) {
    if (!this.live || !this.nowS || this.nowS > to) return;
    const { pen, colours } = this;
    pen.strokeStyle = colours.quiet;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(Math.round(x(this.nowS)) + 0.5, top - 8);
    pen.lineTo(Math.round(x(this.nowS)) + 0.5, foot);
    pen.stroke();
  }

  _point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const hit = this.boxes.find((each) => px >= each.left && px <= each.right && py >= each.top && py <= each.bottom);
    if (hit) this.onpoint(hit.lane, hit.word);
    else this._leave();
  }

  _leave() {
    if (this.shown) this.onpoint(null, null);
  }
}
