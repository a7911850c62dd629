// A session on /v1/stream: messages and events are numbered, so that it resumes after a lost connection.

const HEAD = 8;
const ACK_EVERY = 32;
const ACK_MS = 1000;
const FIRST_WAIT_MS = 100;
const LONGEST_WAIT_MS = 3000;
const FULL_WAIT_MS = 5000;
// Browsers do not report a peer that vanished: the server is pinged, and given up after this silence.
const PING_MS = 4000;
const SILENT_MS = 12000;
// Bytes kept while the server is out of reach: half an hour of audio.
const MOST_KEPT = 30 * 60 * 32000;
const OLD_MS = 250; // a message sent so much later than it was recorded is sent with its age
const REMEMBERED = 64;
const REFUSALS = 3; // refusals by a running server, after which it counts as refusing WebSockets
const UNKNOWN = 4404;
const GONE = 4410;
const HOPELESS = new Set([4400, 4403, 4409, 4413]);
const BYTES_PER_S = 32000;

function randomHex(bytes) {
  return Array.from(crypto.getRandomValues(new Uint8Array(bytes)), (each) => each.toString(16).padStart(2, "0")).join("");
}

export class Connection {
  // `dial` is {gamma} or {policy}; `on` has opened, event, state and restarted.
  constructor({ base, dial, on }) {
    this.base = base;
    this.on = on;
    this.dial = dial; // as of the last acknowledged message
    this.waiting = []; // not acknowledged, oldest first; their numbers follow each other
    this.number = 0;
    this.buffered = 0; // bytes of source among them
    this.taken = 0; // acknowledged bytes of source, over all sessions
    this.offsetS = 0; // position in the source where the session began
    this.writtenS = 0; // position in the source that the text has reached
    this.dropped = 0; // seconds of source without text
    this.resumes = 0;
    this.refusals = 0;
    this.ended = false;
    this.over = false;
    this.ready = false;
    this.state = "connecting";
    this.waitMs = FIRST_WAIT_MS;
    this._begin();
    this._wake = () => this.retry();
    addEventListener("online", this._wake);
    this._timer = setInterval(() => this._tick(), ACK_MS);
    this._connect();
  }

  get bufferedS() {
    return this.buffered / BYTES_PER_S;
  }

  source(bytes) {
    if (this.buffered + bytes.byteLength > MOST_KEPT) {
      this.dropped += bytes.byteLength / BYTES_PER_S;
      return;
    }
    const data = new Uint8Array(HEAD + bytes.byteLength);
    data.set(new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength), HEAD);
    this.buffered += bytes.byteLength;
    this._post({ data, size: bytes.byteLength });
  }

  turn(dial) {
    // Of changes that were not sent yet, only the last counts.
    const last = this.waiting.at(-1);
    if (last?.message?.type === "turn" && last.number > this.sent) last.message = { type: "turn", ...dial };
    else this._post({ message: { type: "turn", ...dial }, size: 0 });
  }

  end() {
    if (!this.ended && !this.over) {
      this.ended = true;
      this._post({ message: { type: "end" }, size: 0 });
    }
  }

  // End the session, finished or not.
  close() {
    this._finish("closed");
  }

  _begin() {
    this.name = randomHex(16);
    this.token = randomHex(24);
    this.opened = null;
    this.received = 0;
    this.acknowledged = 0;
    this.forgotten = []; // sizes of the last acknowledged messages: one may be refused later
    this.sent = 0; // number of the last message sent on this connection
  }

  _say(state, detail = "") {
    this.state = state;
    this.on.state(state, detail);
  }

  _finish(state, detail = "") {
    if (this.over) return;
    this.over = true;
    removeEventListener("online", this._wake);
    clearInterval(this._timer);
    clearTimeout(this._again);
    const socket = this._drop();
    if (socket && socket.readyState <= 1) socket.close(1000);
    this._say(state, detail);
  }

  _drop() {
    const socket = this.socket;
    this.socket = null;
    this.ready = false; // until the server has said which messages it has
    if (socket) socket.onopen = socket.onmessage = socket.onclose = null;
    return socket;
  }

  _connect() {
    if (this.over || this.socket) return;
    const address = new URL(`v1/stream?session=${this.name}`, this.base);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    let greeted = false;
    const socket = new WebSocket(address, ["zendaya"]);
    this.socket = socket;
    this.receivedMs = performance.now();
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      greeted = true;
      this._tell(
        this.opened
          ? { type: "resume", session: this.name, token: this.token, received: this.received }
          : { type: "open", session: this.name, token: this.token, source: "audio", live: true, received: this.received, ...this.dial },
      );
    };
    socket.onmessage = ({ data }) => {
      this.receivedMs = performance.now();
      this._take(JSON.parse(data));
    };
    socket.onclose = ({ code, reason }) => this._lost(code, reason, greeted);
  }

  _tell(message) {
    if (this.socket?.readyState === 1) this.socket.send(JSON.stringify(message));
  }

  _take(message) {
    if (message.type === "opened") {
      if (this.opened) this.resumes += 1;
      this.opened = message;
      this.ready = true;
      this.waitMs = FIRST_WAIT_MS;
      this.refusals = 0;
      this.sent = 0;
      this.wasOld = false;
      this._forget(message.received);
      this._say("open");
      this.on.opened(message);
      this._pump();
    } else if (message.type === "ack") {
      this._forget(message.received);
      this._pump();
    } else if (message.type === "error") {
      this.problem = message.message;
    } else if (message.seq === this.received + 1) {
      this.received += 1;
      // A word may have read far beyond where it was spoken: the text of what lies between is still to come.
      if (message.type === "text") this.writtenS = this.offsetS + (message.last ? message.read_s : message.spoken_s);
      const last = message.type === "finished" || message.type === "failed";
      if (last || this.received - this.acknowledged >= ACK_EVERY) this._acknowledge();
      if (message.type === "refused") this.dropped += this._sizeOf(message.of) / BYTES_PER_S;
      if (last) this._last(message);
      else this.on.event(message, this.offsetS);
    }
  }

  // Handles the last event of a session; if the server has ended it too early, a new session goes on.
  _last(message) {
    if (message.type === "failed") this._finish("failed", message.message);
    else if (this.ended && message.reason === "end") {
      this.on.event(message, this.offsetS);
      this._finish("finished");
    } else this._restart(0);
  }

  _restart(droppedS) {
    this._drop()?.close(1000);
    this.dropped += droppedS;
    this.offsetS = this.taken / BYTES_PER_S;
    this._begin();
    this.number = 0;
    for (const each of this.waiting) this._give(each);
    // If the source has ended and the server had all of it, no other session is needed.
    if (this.ended && !this.buffered) this._finish("finished");
    else this._later("lost");
    this.on.restarted(droppedS);
  }

  _acknowledge() {
    this.acknowledged = this.received;
    this._tell({ type: "ack", received: this.received });
  }

  _lost(code, reason, greeted) {
    this._drop();
    if (this.over) return;
    if (code === UNKNOWN || code === GONE) {
      // Source that the server had, without its text, is lost with the session.
      this._restart(Math.max(0, this.taken / BYTES_PER_S - Math.max(this.writtenS, this.offsetS)));
    } else if (HOPELESS.has(code)) this._finish("failed", this.problem || reason);
    else if (greeted) this._later("lost");
    else this._ask();
  }

  // A refused WebSocket has no reason; an ordinary request has.
  async _ask() {
    let status = 0;
    try {
      status = (await fetch(new URL("readyz", this.base), { cache: "no-store", signal: AbortSignal.timeout(SILENT_MS) })).status;
    } catch {
      // no answer
    }
    if (this.over || this.socket) return; // connected meanwhile
    if (status === 401) this._say("key");
    else if (status === 503) this._later("full", FULL_WAIT_MS);
    else if (status === 403) this._finish("failed", "connections from this address are not allowed");
    else {
      this.refusals = status === 200 ? this.refusals + 1 : 0;
      this._later(this.refusals < REFUSALS ? "lost" : "refused");
    }
  }

  _later(state, waitMs = this.waitMs) {
    clearTimeout(this._again);
    this.waitMs = Math.min(2 * this.waitMs, LONGEST_WAIT_MS);
    this._say(state);
    this._again = setTimeout(() => this._connect(), waitMs * (0.75 + 0.5 * Math.random()));
  }

  // Connect now instead of waiting.
  retry() {
    clearTimeout(this._again);
    this._connect();
  }

  _tick() {
    if (!this.socket) return;
    const silentMs = performance.now() - this.receivedMs;
    if (silentMs > SILENT_MS) {
      this._drop()?.close();
      this._later("lost");
    } else if (this.ready && this.socket.readyState === 1) {
      if (silentMs > PING_MS) this._tell({ type: "ping", id: "page" });
      if (this.received > this.acknowledged) this._acknowledge();
      this._pump();
    }
  }

  _post(item) {
    if (this.over) return;
    this._give(item);
    item.postedMs = performance.now();
    this.waiting.push(item);
    this._pump();
  }

  _give(item) {
    this.number += 1;
    item.number = this.number;
    if (item.data) new DataView(item.data.buffer).setBigUint64(0, BigInt(this.number), true);
  }

  _sizeOf(number) {
    return (this.waiting.find((each) => each.number === number) ?? this.forgotten.find((each) => each.number === number))?.size ?? 0;
  }

  // Sends waiting messages, no more than the server lets wait.
  _pump() {
    if (!this.ready || this.socket?.readyState !== 1 || !this.waiting.length) return;
    const most = this.opened.max_unread - this.opened.max_message;
    let unread = 0;
    for (const each of this.waiting) {
      unread += each.size;
      if (each.number <= this.sent) continue;
      if (unread > most && unread > each.size) return;
      const agoMs = performance.now() - each.postedMs;
      if (this.wasOld || agoMs > OLD_MS) {
        this.wasOld = agoMs > OLD_MS;
        this._tell({ type: "at", ago_s: this.wasOld ? agoMs / 1000 : 0 });
      }
      this.socket.send(each.data ?? JSON.stringify({ ...each.message, seq: each.number }));
      this.sent = each.number;
    }
  }

  _forget(received) {
    while (this.waiting.length && this.waiting[0].number <= received) {
      const item = this.waiting.shift();
      this.forgotten.push({ number: item.number, size: item.size });
      if (this.forgotten.length > REMEMBERED) this.forgotten.shift();
      this.buffered -= item.size;
      this.taken += item.size;
      if (item.message?.type === "turn") {
        const { type, ...dial } = item.message;
        this.dial = dial;
      }
    }
  }
}
