// The page: a source, one stream or two of the same source, and what came of them.

import { Lane } from "./lane.js";
import { Media, Microphone, Sample } from "./sources.js";
import { Timeline } from "./timeline.js";

const BASE = new URL("../", import.meta.url);
const ROWS = 100; // of the table
const TABLE_MS = 1000;
const KEPT_SENTENCES = 12;
const get = (id) => document.getElementById(id);

const state = { source: null, running: false, heardS: 0, wanted: null };
const timeline = new Timeline(get("time"), { onpoint: point });
const lanes = { a: makeLane("a", "Dial γ", 0.5), b: null };

function makeLane(id, name, gamma) {
  const root = get("lane").content.firstElementChild.cloneNode(true);
  get("lanes").append(root);
  return new Lane(root, {
    id, name, gamma,
    on: { point, save, sentence, state: linked, turned: () => timeline.redraw(), changed, restarted },
  });
}

const active = () => [lanes.a, lanes.b].filter((lane) => lane && !lane.root.hidden);

// The source.

async function begin(source) {
  if (state.running) return;
  state.running = true;
  if (!(await mayCome())) {
    state.running = false;
    state.wanted = source;
    wantKey();
    return;
  }
  state.source = source;
  state.heardS = 0;
  timeline.clear();
  timeline.lanes = active();
  timeline.live = true;
  get("spoken").replaceChildren();
  point(null, null);
  show();
  source.mute(!get("sound").checked);
  for (const lane of active()) lane.begin(BASE, 0);
  try {
    await source.start();
    if (state.source !== source) return;
    get("video").hidden = !source.hasPicture;
    get("playing").textContent = source.name;
  } catch (error) {
    if (source.stopped) return; // before it had begun: what it was waiting for is not to be had any more
    for (const lane of active()) lane.connection.close();
    await finish();
    say(refusal(error), "failed");
  }
}

function refusal(error) {
  if (!isSecureContext) return "A browser lets pages listen only over https, or at this machine's own address (127.0.0.1)";
  if (error.name === "NotAllowedError") return "The microphone was not allowed: allow it for this page, or choose a file";
  if (error.name === "NotFoundError") return "No microphone was found: connect one, or choose a file";
  return error.message;
}

function heard(samples) {
  state.heardS += samples.length / 16000;
  timeline.hear(samples);
  for (const lane of active()) {
    lane.sourceDropped = state.source.dropped;
    if (lane.busy) lane.connection.source(samples);
  }
}

async function finish() {
  if (!state.source) return;
  const source = state.source;
  await source.stop();
  get("video").hidden = true;
  timeline.live = false;
  for (const lane of active()) lane.connection?.end();
  if (state.source === source) state.source = null;
  settle();
}

// All sessions have written out what they heard.
function settle() {
  if (state.source || active().some((lane) => lane.busy)) return;
  state.running = false;
  timeline.redraw();
  describe();
  show();
}

const on = { chunk: heard, ended: () => finish() };
get("mic").onclick = () => begin(new Microphone(on));
get("open").onclick = () => get("file").click();
get("file").onchange = () => {
  const [file] = get("file").files;
  get("file").value = "";
  if (file) begin(new Media(file, freshVideo(), on));
};
get("sample").onclick = () => begin(new Sample(new URL("page/sample.wav", BASE), on));
get("stop").onclick = () => finish();
get("sound").onchange = () => state.source?.mute(!get("sound").checked);

// An element that an audio graph has taken cannot be given to another.
function freshVideo() {
  const old = get("video");
  const fresh = old.cloneNode(false);
  old.replaceWith(fresh);
  return fresh;
}

function show() {
  const focused = get("choose").contains(document.activeElement) || get("running").contains(document.activeElement);
  get("choose").hidden = state.running;
  get("running").hidden = !state.running;
  if (focused) (state.running ? get("stop") : get("mic")).focus();
  if (!state.running) get("playing").textContent = "";
}

// Two streams.

get("compare").onchange = () => {
  const two = get("compare").checked;
  get("main").dataset.mode = two ? "compare" : "single";
  if (two && !lanes.b) {
    lanes.b = makeLane("b", "Second", 1);
    lanes.b.dial.setMeasured(lanes.a.dial.measured);
  }
  lanes.b.root.hidden = !two;
  lanes.a.setName(two ? "First dial γ" : "Dial γ");
  if (two && state.running && state.source) lanes.b.begin(BASE, state.heardS);
  if (!two) lanes.b.connection?.close();
  timeline.lanes = active();
  timeline.redraw();
};

// The link.

const SAID = {
  connecting: "Connecting", open: "Connected", lost: "Connection lost, trying again", full: "The server is full, trying again",
  refused: "The server takes no live connections: does a proxy before it pass WebSockets on?",
  key: "The server wants a key", finished: "Finished", closed: "Stopped",
};

function linked(lane, what, detail) {
  // Of two streams the one that is worse off.
  const states = active().map((each) => each.connection?.state);
  const worst = ["failed", "key", "refused", "full", "lost", "connecting", "open"].find((each) => states.includes(each)) ?? what;
  say(worst === "failed" ? `The server refused: ${detail}` : SAID[worst], worst);
  if (worst === "key") wantKey();
  if (what === "failed" && state.source) finish();
  if (lane.connection?.over) settle();
  buffered();
}

function restarted(lane, droppedS) {
  const lost = `The server had forgotten the session: ${droppedS.toFixed(1)} s were lost`;
  if (!lane.connection.over) say(droppedS ? `${lost}, a new one goes on` : "A new session goes on", "lost");
  else if (droppedS) say(`${SAID.finished}. ${lost}`, "finished");
  lane.measure();
}

function say(text, what) {
  get("link").dataset.state = what;
  if (get("status").textContent !== text) get("status").textContent = text;
}

function buffered() {
  const most = Math.max(0, ...active().map((lane) => (lane.busy ? lane.connection.bufferedS : 0)));
  get("buffered").textContent = active().some((lane) => lane.busy) ? `${most.toFixed(1)} s buffered` : "";
}
setInterval(buffered, 250);

// The server knows a browser by a cookie, which it gives for the key. Nobody who answers may still come.
async function mayCome(headers = {}) {
  const answer = await fetch(new URL("readyz", BASE), { cache: "no-store", headers }).catch(() => null);
  return answer?.status !== 401;
}

function wantKey() {
  say(SAID.key, "key");
  get("key-form").hidden = false;
  get("key").focus();
}

get("key-form").onsubmit = async (event) => {
  event.preventDefault();
  const key = get("key").value.trim();
  get("key").value = "";
  if (!(await mayCome({ Authorization: `Basic ${btoa(`page:${key}`)}` }))) {
    say("That is not the server's key", "failed");
    return;
  }
  get("key-form").hidden = true;
  for (const lane of active()) lane.connection?.retry();
  const source = state.wanted;
  state.wanted = null;
  if (source) begin(source);
};

// What came of it.

const HOW = "Point at a word, or move to one with the arrow keys, to see what it had been allowed to read.";
let tableMs = 0;
function changed() {
  timeline.redraw();
  if (get("as-table").open && performance.now() - tableMs > TABLE_MS) describe();
}

function point(lane, word) {
  for (const each of active()) each.mark(each === lane ? word : null);
  timeline.show(lane, word);
  const detail = get("detail");
  detail.dataset.empty = String(!word);
  if (!word) {
    detail.textContent = HOW;
    return;
  }
  const { event } = word;
  const { window: width } = lane.transcript;
  const lagS = event.policyLagS + event.computeLagS;
  const schedule = word.schedule.replace("gamma=", "γ = ");
  const name = document.createElement("strong");
  name.textContent = `“${word.text.trim()}”`;
  const late = event.effectiveHorizon < event.horizon ? `, of which ${event.effectiveHorizon} had come` : "";
  detail.replaceChildren(
    name,
    ` had been allowed to read up to ${event.readS.toFixed(2)} s of the source: horizon ${event.horizon} of ${width}${late}, ` +
      `step ${event.step + event.pauses} of about ${event.predictedSteps} in window ${event.window + 1}, ${schedule}. ` +
      `That had arrived at ${event.arrivalS.toFixed(2)} s and it was written at ${event.emissionS.toFixed(2)} s, ` +
      `${lagS.toFixed(1)} s after it was said (policy ${event.policyLagS.toFixed(2)}, compute ${event.computeLagS.toFixed(2)}).`,
  );
}

// For who listens instead of looking: whole sentences of the first stream, and a table.
function sentence(lane, text) {
  if (lane !== lanes.a) return;
  const line = document.createElement("p");
  line.textContent = text;
  const log = get("spoken");
  log.append(line);
  while (log.children.length > KEPT_SENTENCES) log.firstElementChild.remove();
}

function describe() {
  tableMs = performance.now();
  const rows = active().flatMap((lane) =>
    lane.transcript.words.slice(-ROWS).map(({ text, event }) => {
      const row = document.createElement("tr");
      const lagS = event.policyLagS + event.computeLagS;
      const cells = [text.trim(), ...[event.spokenS, event.readS, event.arrivalS, event.emissionS, lagS].map((each) => each.toFixed(2))];
      for (const cell of cells) row.insertCell().textContent = cell;
      return row;
    }),
  );
  get("rows").replaceChildren(...rows);
  const words = lanes.a.transcript.words.length;
  const lag = lanes.a.transcript.lag;
  const mean = lag ? `, the last ${lag.words} of them ${(lag.policyS + lag.computeS).toFixed(1)} s after they were said` : "";
  get("time").setAttribute(
    "aria-label",
    `The source, the horizon and the words on one time axis: ${state.heardS.toFixed(0)} s of source, ${words} words written${mean}. ` +
      "The table below has the figures.",
  );
}
get("as-table").ontoggle = describe;

function save(lane, form) {
  const types = { txt: "text/plain", srt: "application/x-subrip", vtt: "text/vtt", json: "application/json" };
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lane.transcript.save(form)], { type: `${types[form]};charset=utf-8` }));
  link.download = `captions${lane.id === "b" ? "-2" : ""}.${form}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Colours.

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function coloured() {
  get("theme").setAttribute("aria-pressed", String(isDark()));
  timeline.recolour();
}
get("theme").onclick = () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("zendaya-theme", theme);
  } catch {
    // no storage: for this visit only
  }
  coloured();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", coloured);
coloured();

// What is served.

async function greet() {
  const answer = await fetch(new URL("v1/models", BASE)).catch(() => null);
  if (!answer?.ok) return;
  const [model] = (await answer.json()).data;
  get("model").textContent = model.id;
  if (!model.sources.includes("audio")) {
    say("This model takes no sound: use a client for its features or pictures", "failed");
    for (const id of ["mic", "open", "sample"]) get(id).disabled = true;
  }
  const measured = await fetch(new URL("page/measured.json", BASE)).catch(() => null);
  const found = measured?.ok ? await measured.json() : null;
  for (const lane of [lanes.a, lanes.b]) lane?.dial.setMeasured(found);
  if (found) get("measured").textContent = `The curve: ${found.data}; ${found.command}; adapter ${found.adapter}.`;
}
greet();
point(null, null);
addEventListener("beforeunload", (event) => {
  if (active().some((lane) => lane.busy)) event.preventDefault();
});
