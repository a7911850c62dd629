// The text of one session as words, each with what it was allowed to read and when it was written.

import { toCues, toSrt, toVtt } from "./subtitles.js";

const RECENT = 16; // words over which the lag is averaged

// Whether an event begins the text of a window; a window that overlaps the one before goes on with its text, after step 1.
const beginsText = (before, event) => before.windowIndex !== event.windowIndex && event.step === 1;

export class Transcript {
  constructor() {
    this.model = "";
    this.windowTokens = 0;
    this.tokensPerS = 0;
    this.events = [];
    this.words = [];
    this.turns = [];
    this.windowStarts = [];
    this.schedule = "";
    this.sinceTurn = { steps: 0, read: 0, firstWord: 0 };
  }

  opened(message) {
    this.model = message.model;
    this.windowTokens = message.window_tokens;
    this.tokensPerS = message.tokens_per_s;
    this.schedule ||= message.schedule; // after a reconnect the server repeats the first schedule
  }

  // Adds an event; returns the word that it began or continued, or null.
  add(message, offsetS) {
    if (message.type === "turned") {
      this.schedule = message.schedule;
      this.turns.push({ schedule: message.schedule, arrivalS: offsetS + message.arrival_s });
      this.sinceTurn = { steps: 0, read: 0, firstWord: this.words.length };
      return null;
    }
    if (message.type !== "text") return null;
    const event = {
      text: message.text,
      windowIndex: message.window_index,
      step: message.step,
      skippedSteps: message.skipped_steps,
      predictedSteps: message.predicted_steps,
      horizon: message.horizon,
      effectiveHorizon: message.effective_horizon,
      windowStartS: offsetS + message.window_start / this.tokensPerS,
      spokenS: offsetS + message.spoken_s,
      readS: offsetS + message.read_s,
      arrivalS: offsetS + message.arrival_s,
      emissionS: offsetS + message.emission_s,
      policyLagS: message.policy_lag_s,
      computeLagS: message.compute_lag_s,
      last: message.last,
    };
    const before = this.events.at(-1);
    this.events.push(event);
    if (this.windowStarts.at(-1) !== event.windowStartS) this.windowStarts.push(event.windowStartS);
    this.sinceTurn.steps += 1;
    this.sinceTurn.read += event.effectiveHorizon;
    if (!event.text) return null;
    let word = this.words.at(-1);
    const begins = !word || /^\s/u.test(event.text) || before?.last || beginsText(before, event);
    if (begins) {
      word = { index: this.words.length, text: "", schedule: this.schedule };
      this.words.push(word);
    }
    word.text += event.text;
    // A punctuation mark does not delay its word.
    if (begins || /[\p{L}\p{N}]/u.test(event.text)) word.event = event;
    return { word, begins };
  }

  // Mean lag of the last words since the dial was turned; null if there are none.
  get lag() {
    const words = this.words.slice(Math.max(this.sinceTurn.firstWord, this.words.length - RECENT));
    if (!words.length) return null;
    const mean = (of) => words.reduce((sum, word) => sum + of(word.event), 0) / words.length;
    return { policyS: mean((event) => event.policyLagS), computeS: mean((event) => event.computeLagS), words: words.length };
  }

  // Mean share of the window read per step since the dial was turned; null if there are none.
  get exposure() {
    const { steps, read } = this.sinceTurn;
    return steps ? read / steps / this.windowTokens : null;
  }

  get text() {
    const lines = [];
    for (const [index, event] of this.events.entries()) {
      if (index === 0 || this.events[index - 1].last || beginsText(this.events[index - 1], event)) lines.push("");
      lines[lines.length - 1] += event.text;
    }
    return lines
      .map((line) => line.trim())
      .filter(Boolean)
      .join("\n");
  }

  save(form) {
    if (form === "txt") return `${this.text}\n`;
    if (form === "srt") return toSrt(toCues(this.events));
    if (form === "vtt") return toVtt(toCues(this.events));
    const words = this.words.map(({ text, schedule, event }) => ({
      text: text.trim(),
      schedule,
      spoken_s: event.spokenS,
      read_s: event.readS,
      arrival_s: event.arrivalS,
      emission_s: event.emissionS,
      policy_lag_s: event.policyLagS,
      compute_lag_s: event.computeLagS,
      horizon: event.horizon,
      effective_horizon: event.effectiveHorizon,
      window_index: event.windowIndex,
      step: event.step,
    }));
    const turns = this.turns.map(({ schedule, arrivalS }) => ({ schedule, arrival_s: arrivalS }));
    const whole = { model: this.model, window_tokens: this.windowTokens, tokens_per_s: this.tokensPerS, text: this.text, turns, words };
    return `${JSON.stringify(whole, null, 1)}\n`;
  }
}
