// In the audio thread: posts mono samples in order; `first` is the index of the first one.

const BATCH = 1024;

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.on = false;
    this.over = false;
    this.batch = new Float32Array(BATCH);
    this.size = 0;
    this.port.onmessage = ({ data }) => {
      if (data === "start") this.on = true;
      if (data === "flush") {
        this._send();
        this.over = true;
        this.port.postMessage({ done: true });
      }
    };
  }

  process([channels]) {
    if (this.over) return false;
    if (!this.on) return true;
    const length = channels[0]?.length ?? 128; // not connected, or silent
    for (let i = 0; i < length; i += 1) {
      let sum = 0;
      for (const channel of channels) sum += channel[i];
      this.batch[this.size] = channels.length ? sum / channels.length : 0;
      this.size += 1;
      if (this.size === BATCH) this._send(currentFrame + i + 1 - BATCH);
    }
    return true;
  }

  _send(first) {
    if (this.size) this.port.postMessage({ samples: this.batch.slice(0, this.size), first });
    this.size = 0;
  }
}

registerProcessor("zendaya-capture", Capture);
