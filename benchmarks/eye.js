// Put into the page by eye.py: when clicks reach the browser, what was sent to the server, when words were painted.
// Times are performance.now() in milliseconds.
(() => {
  const eye = { clicks: [], sent: new Map(), painted: [], policy: null };
  window.zendayaEye = eye;
  const LOUD = 0.2;
  const listener = `registerProcessor("eye", class extends AudioWorkletProcessor {
    quiet = 0;
    process([channels]) {
      for (const sample of channels[0] ?? []) {
        if (Math.abs(sample) > ${LOUD}) {
          if (this.quiet >= sampleRate) this.port.postMessage(0);
          this.quiet = 0;
        } else this.quiet += 1;
      }
      return true;
    }
  })`;

  // Beside the page's own graph, without its buffers: an onset after a second of quiet is a click.
  async function listen(stream) {
    const context = new AudioContext({ latencyHint: "interactive" });
    await context.audioWorklet.addModule(URL.createObjectURL(new Blob([listener], { type: "text/javascript" })));
    const node = new AudioWorkletNode(context, "eye", { numberOfInputs: 1, numberOfOutputs: 1 });
    node.port.onmessage = () => eye.clicks.push(performance.now());
    const silent = new GainNode(context, { gain: 0 });
    context.createMediaStreamSource(stream).connect(node).connect(silent).connect(context.destination);
    await context.resume();
  }

  const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  navigator.mediaDevices.getUserMedia = async (wish) => {
    const stream = await open(wish);
    listen(stream);
    return stream;
  };

  const send = WebSocket.prototype.send;
  WebSocket.prototype.send = function (data) {
    if (typeof data === "string") {
      const message = JSON.parse(data);
      if (message.type === "open" && eye.policy !== null) {
        for (const name of ["gamma", "policy", "lag_s"]) delete message[name];
        data = JSON.stringify({ ...message, policy: eye.policy });
      }
    } else eye.sent.set(Number(new DataView(data.buffer).getBigUint64(0, true)), data.slice(8));
    return send.call(this, data);
  };

  // A frame is on the screen when the first task after its animation callbacks runs.
  let changed = new Set();
  const after = new MessageChannel();
  const frames = [];
  after.port1.onmessage = () => {
    const nowMs = performance.now();
    for (const [index, text] of frames.shift()) eye.painted.push([index, text, nowMs]);
  };
  function frame() {
    frames.push([...changed].map((word) => [Number(word.dataset.index), word.textContent]));
    changed = new Set();
    after.port2.postMessage(0);
  }
  const watcher = new MutationObserver((mutations) => {
    const before = changed.size;
    for (const { target, addedNodes } of mutations) {
      for (const node of [target, ...addedNodes]) {
        const word = (node.closest ? node : node.parentElement)?.closest(".word");
        if (word) changed.add(word);
      }
    }
    if (changed.size && !before) requestAnimationFrame(frame);
  });
  watcher.observe(document, { subtree: true, childList: true, characterData: true });

  eye.take = () => {
    const parts = [...eye.sent].sort(([one], [other]) => one - other).map(([, data]) => data);
    let text = "";
    for (const part of parts) for (const byte of part) text += String.fromCharCode(byte);
    return { clicks: eye.clicks, painted: eye.painted, samples: btoa(text) };
  };
})();
