// Sources: a microphone, a file that is played, or the sample. Each gives s16le samples at 16 kHz as they arrive.

import { Resampler, toPcm } from "./resample.js";

export const RATE = 16000;
const CHUNK = 1280; // samples per message: 80 ms
const DRAIN_MS = 1000; // longest wait for the audio thread

// Collects samples at 16 kHz into messages.
class Chunks {
  constructor(give) {
    this.give = give;
    this.held = new Float32Array(0);
  }

  add(samples) {
    const all = new Float32Array(this.held.length + samples.length);
    all.set(this.held);
    all.set(samples, this.held.length);
    let at = 0;
    for (; at + CHUNK <= all.length; at += CHUNK) this.give(toPcm(all.subarray(at, at + CHUNK)));
    this.held = all.slice(at);
  }

  finish() {
    if (this.held.length) this.give(toPcm(this.held));
    this.held = new Float32Array(0);
  }
}

// The sound of an audio graph.
class Listener {
  constructor(on) {
    this.on = on;
    this.dropped = 0;
    this.stopped = null;
  }

  async _listen(context, node) {
    this.context = context;
    await context.audioWorklet.addModule(new URL("capture.js", import.meta.url));
    this.capture = new AudioWorkletNode(context, "zendaya-capture", { numberOfInputs: 1, numberOfOutputs: 1 });
    const silent = new GainNode(context, { gain: 0 }); // an unconnected node would not run
    node.connect(this.capture).connect(silent).connect(context.destination);
    const resampler = new Resampler(context.sampleRate, RATE);
    const chunks = new Chunks(this.on.chunk);
    let next = null;
    this.drained = new Promise((resolve) => {
      this.capture.port.onmessage = ({ data }) => {
        if (data.done) {
          chunks.add(resampler.finish());
          chunks.finish();
          resolve();
          return;
        }
        if (next !== null && data.first !== undefined) this.dropped += (data.first - next) / context.sampleRate;
        next = data.first === undefined ? null : data.first + data.samples.length;
        chunks.add(resampler.read(data.samples));
      };
    });
    await context.resume();
  }

  // Stops recording; resolves once all samples were delivered.
  stop() {
    this.stopped ??= this._stop();
    return this.stopped;
  }

  async _stop() {
    if (this.capture) {
      this.capture.port.postMessage("flush");
      await Promise.race([this.drained, new Promise((resolve) => setTimeout(resolve, DRAIN_MS))]);
    }
    this._release();
    await this.context?.close();
  }
}

export class Microphone extends Listener {
  name = "Microphone";

  async start() {
    const wish = { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: true };
    this.stream = await navigator.mediaDevices.getUserMedia({ audio: wish });
    if (this.stopped) return this._release(); // stopped while the browser asked the user
    this.stream.getAudioTracks()[0].onended = () => this.on.ended();
    const context = new AudioContext({ latencyHint: "interactive" });
    await this._listen(context, context.createMediaStreamSource(this.stream));
    this.capture.port.postMessage("start");
  }

  mute() {}

  _release() {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
  }
}

// A recording or video that the browser plays: its sound is what is sent.
export class Media extends Listener {
  constructor(file, element, on) {
    super(on);
    this.file = file;
    this.element = element;
    this.name = file.name;
  }

  async start() {
    this.url = URL.createObjectURL(this.file);
    const element = this.element;
    element.src = this.url;
    await new Promise((resolve, reject) => {
      element.onloadedmetadata = resolve;
      element.onerror = () => reject(new Error(`${this.file.name}: this browser cannot play it: choose another file`));
    });
    if (this.stopped) return;
    this.hasPicture = element.videoWidth > 0;
    const context = new AudioContext();
    const node = context.createMediaElementSource(element);
    this.gain = new GainNode(context, { gain: this.muted ? 0 : 1 });
    node.connect(this.gain).connect(context.destination);
    await this._listen(context, node);
    this.capture.port.postMessage("start");
    element.onended = () => this.on.ended();
    element.onerror = () => this.on.ended();
    if (!this.stopped) await element.play();
  }

  mute(muted) {
    this.muted = muted;
    if (this.gain) this.gain.gain.value = muted ? 0 : 1;
  }

  _release() {
    this.element.onerror = this.element.onended = null;
    this.element.pause();
    this.element.removeAttribute("src");
    this.element.load();
    URL.revokeObjectURL(this.url);
  }
}

// The server's sample, at its own speed.
export class Sample {
  name = "Sample";
  dropped = 0;
  stopped = null;

  constructor(url, on) {
    this.url = url;
    this.on = on;
  }

  async start() {
    const answer = await fetch(this.url);
    if (!answer.ok) throw new Error("The server has no sample: install the extra demo, or choose a file");
    // Decoded at its own rate: no resampling.
    const buffer = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await answer.arrayBuffer());
    if (this.stopped) return;
    const samples = buffer.getChannelData(0);
    this.context = new AudioContext();
    this.gain = new GainNode(this.context, { gain: this.muted ? 0 : 1 });
    this.player = new AudioBufferSourceNode(this.context, { buffer });
    this.player.connect(this.gain).connect(this.context.destination);
    this.chunks = new Chunks(this.on.chunk);
    const beganMs = performance.now();
    this.player.start();
    let at = 0;
    this.timer = setInterval(() => {
      const now = Math.min(samples.length, Math.floor(((performance.now() - beganMs) / 1000) * RATE));
      this.chunks.add(samples.subarray(at, now));
      at = now;
      if (at === samples.length) this.on.ended();
    }, 20);
  }

  mute(muted) {
    this.muted = muted;
    if (this.gain) this.gain.gain.value = muted ? 0 : 1;
  }

  stop() {
    this.stopped ??= this._stop();
    return this.stopped;
  }

  async _stop() {
    clearInterval(this.timer);
    this.chunks?.finish();
    await this.context?.close();
  }
}
