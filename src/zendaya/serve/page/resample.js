// Streaming resampler: a Kaiser-windowed sinc with a look-ahead of 1 ms.

const ZEROS = 16; // zero crossings of the sinc per side, at the lower rate: 1 ms at 16 kHz
const BETA = 8; // of the Kaiser window: 80 dB of stopband attenuation
const CUTOFF = 0.92; // share of half the lower rate
const MOST_PHASES = 512;

function bessel(x) {
  let sum = 1;
  let term = 1;
  for (let k = 1; term > 1e-9 * sum; k += 1) {
    term *= (x / (2 * k)) ** 2;
    sum += term;
  }
  return sum;
}

function gcd(a, b) {
  return b ? gcd(b, a % b) : a;
}

export class Resampler {
  constructor(from, to) {
    this.from = from;
    this.to = to;
    this.made = 0;
    this.held = new Float32Array(0);
    const scale = Math.min(1, to / from);
    this.half = Math.ceil(ZEROS / scale);
    this.first = -this.half; // index of the first held sample; silence before the source
    this.held = new Float32Array(this.half);
    this.phases = Math.min(MOST_PHASES, to / gcd(from, to));
    this.taps = Array.from({ length: this.phases }, (_, phase) => this._taps(phase / this.phases, scale));
  }

  // The output samples that the next input samples complete.
  read(samples) {
    if (this.from === this.to) return samples;
    const held = new Float32Array(this.held.length + samples.length);
    held.set(this.held);
    held.set(samples, this.held.length);
    const end = this.first + held.length;
    const out = [];
    for (;;) {
      const ticks = this.made * this.from;
      const place = Math.floor(ticks / this.to);
      if (place + this.half >= end) break;
      const taps = this.taps[Math.floor(((ticks % this.to) * this.phases) / this.to)];
      const at = place - this.half + 1 - this.first;
      let sum = 0;
      for (let k = 0; k < taps.length; k += 1) sum += taps[k] * held[at + k];
      out.push(sum);
      this.made += 1;
    }
    const next = Math.max(this.first, Math.floor((this.made * this.from) / this.to) - this.half + 1);
    this.held = held.slice(next - this.first);
    this.first = next;
    return Float32Array.from(out);
  }

  // The last output samples.
  finish() {
    return this.from === this.to ? new Float32Array(0) : this.read(new Float32Array(this.half));
  }

  _taps(phase, scale) {
    const taps = new Float32Array(2 * this.half);
    const width = scale * CUTOFF;
    let sum = 0;
    for (let k = 0; k < taps.length; k += 1) {
      const x = k - this.half + 1 - phase;
      const edge = x / this.half;
      if (Math.abs(edge) < 1) {
        const sinc = x === 0 ? 1 : Math.sin(Math.PI * width * x) / (Math.PI * width * x);
        taps[k] = (sinc * bessel(BETA * Math.sqrt(1 - edge * edge))) / bessel(BETA);
      }
      sum += taps[k];
    }
    return taps.map((tap) => tap / sum);
  }
}

export function toPcm(samples) {
  return Int16Array.from(samples, (each) => Math.max(-32768, Math.min(32767, Math.round(each * 32768))));
}
