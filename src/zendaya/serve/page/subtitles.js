// Subtitles as zendaya.runtime.subtitles makes them: at most two lines of 42 characters, in order, without overlap.

const WIDTH = 42;
const MIN_S = 1.0;
const MAX_S = 7.0;
const PAUSE_S = 1.0;
const BEHIND_S = 2.0;
const CATCH_UP_S = 0.25;
const WORD_S = 0.4;
const LETTER_S = 0.08;
const FULL = 24;
const SENTENCE = /[.!?…。！？]["'”’»)\]]*$/u;
const CLAUSE = /[,;:–—]["'”’»)\]]*$/u;

const lengthOf = (text) => [...text].length;

function wrap(words) {
  const text = words.join(" ");
  if (lengthOf(text) <= WIDTH) return [text];
  let best = null;
  for (let count = 1; count < words.length; count += 1) {
    const upper = words.slice(0, count).join(" ");
    const lower = words.slice(count).join(" ");
    if (Math.max(lengthOf(upper), lengthOf(lower)) <= WIDTH) {
      const cost = Math.abs(lengthOf(upper) - lengthOf(lower)) - (SENTENCE.test(upper) || CLAUSE.test(upper) ? 12 : 0);
      if (best === null || cost < best.cost) best = { cost, lines: [upper, lower] };
    }
  }
  return best?.lines ?? null;
}

class Cues {
  constructor() {
    this.done = [];
    this.open = "";
    this.openStartS = 0;
    this.nowS = 0;
    this.words = [];
    this.endS = 0;
  }

  add(text, spokenS) {
    for (const letter of text) {
      if (/\s/u.test(letter)) this.endWord();
      else if (!/[\p{Cc}\p{Cs}]/u.test(letter)) {
        if (!this.open) this.openStartS = this.nowS;
        this.open += letter;
      }
    }
    this.nowS = Math.max(this.nowS, spokenS);
  }

  close() {
    this.endWord();
    while (this.words.length) this.take(this.words.length);
  }

  endWord() {
    const whole = [...this.open];
    if (!whole.length) return;
    this.open = "";
    const startS = Math.max(this.openStartS, this.nowS - WORD_S - LETTER_S * whole.length);
    for (let first = 0; first < whole.length; first += WIDTH) {
      const word = { text: whole.slice(first, first + WIDTH).join(""), startS, endS: this.nowS };
      if (this.words.length && word.startS - this.words.at(-1).endS >= PAUSE_S) this.take(this.words.length);
      while (this.words.length && !this.fits(word)) this.take(this.bestBreak());
      this.words.push(word);
    }
    const text = this.words.map((each) => each.text).join(" ");
    if (SENTENCE.test(text) && lengthOf(text) >= FULL) this.take(this.words.length);
  }

  fits(word) {
    const words = [...this.words, word];
    return word.endS - words[0].startS <= MAX_S && wrap(words.map((each) => each.text)) !== null;
  }

  bestBreak() {
    for (const pattern of [SENTENCE, CLAUSE]) {
      for (let count = this.words.length; count > 0; count -= 1) {
        const text = this.words.slice(0, count).map((each) => each.text);
        if (pattern.test(text[count - 1]) && lengthOf(text.join(" ")) >= FULL) return count;
      }
    }
    return this.words.length;
  }

  take(count) {
    const words = this.words.splice(0, count);
    const startS = Math.max(words[0].startS, this.endS);
    const behind = startS - words[0].startS > BEHIND_S;
    const endS = Math.max(words.at(-1).endS, startS + (behind ? CATCH_UP_S : MIN_S));
    // In whole milliseconds, so that no rounding makes two cues overlap.
    const startMs = Math.round(startS * 1000);
    const endMs = Math.max(startMs + 1, Math.round(endS * 1000));
    this.endS = endMs / 1000;
    this.done.push({ startMs, endMs, lines: wrap(words.map((each) => each.text)) });
  }
}

// Cues of text events by their `spokenS`.
export function toCues(events) {
  const cues = new Cues();
  for (const event of events) {
    cues.add(event.text, event.spokenS);
    if (event.last) cues.endWord();
  }
  cues.close();
  return cues.done;
}

function time(ms, point) {
  const pad = (value, width = 2) => String(value).padStart(width, "0");
  const seconds = Math.floor(ms / 1000);
  return `${pad(Math.floor(seconds / 3600))}:${pad(Math.floor(seconds / 60) % 60)}:${pad(seconds % 60)}${point}${pad(ms % 1000, 3)}`;
}

export function toVtt(cues) {
  const escape = (line) => line.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const cue = ({ startMs, endMs, lines }) => `${time(startMs, ".")} --> ${time(endMs, ".")}\n${lines.map(escape).join("\n")}\n\n`;
  return `WEBVTT\n\n${cues.map(cue).join("")}`;
}

// SubRip has no escapes: an arrow in the text, which would read as a time, becomes another arrow.
export function toSrt(cues) {
  const cue = ({ startMs, endMs, lines }, index) =>
    `${index + 1}\n${time(startMs, ",")} --> ${time(endMs, ",")}\n${lines.join("\n").replaceAll("-->", "→")}\n\n`;
  return cues.map(cue).join("");
}
