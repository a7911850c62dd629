// The page: a source, one or two streams of it, and their captions.

import { Lane } from "./lane.js";
import { Media, Microphone, Sample } from "./sources.js";
import { Timeline } from "./timeline.js";

const BASE = new URL("../", import.meta.url);
const ROWS = 100; // of the table
const TABLE_MS = 1000;
const KEPT_SENTENCES = 12;
const get = (id) => document.getElementById(id);

const state = { source: null, running: false, sourceS: 0, wanted: null };
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
  if (!(await isAllowed())) {
    state.running = false;
    state.wanted = source;
    askForKey();
    return;
  }
  state.source = source;
  state.sourceS = 0;
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
    if (source.stopped) return; // stopped before it began
    for (const lane of active()) lane.connection.close();
    await finish();
    say(sourceError(error), "failed");
  }
}

function sourceError(error) {
  if (!isSecureContext) return "Browsers allow the microphone only over https, or at 127.0.0.1";
  if (error.name === "NotAllowedError") return "The microphone is blocked: allow it for this page, or choose a file";
  if (error.name === "NotFoundError") return "No microphone found: connect one, or choose a file";
  return error.message;
}

function onChunk(samples) {
  state.sourceS += samples.length / 16000;
  timeline.add(samples);
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

// Ends the run once all sessions have written all text.
function settle() {
  if (state.source || active().some((lane) => lane.busy)) return;
  state.running = false;
  timeline.redraw();
  describe();
  show();
}

const on = { chunk: onChunk, ended: () => finish() };
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

// A media element belongs to one audio graph for good: the next source needs a new one.
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
  if (two && !lanes.b) lanes.b = makeLane("b", "Second", 1);
  lanes.b.root.hidden = !two;
  lanes.a.setName(two ? "First dial γ" : "Dial γ");
  if (two && state.running && state.source) lanes.b.begin(BASE, state.sourceS);
  if (!two) lanes.b.connection?.close();
  timeline.lanes = active();
  timeline.redraw();
};

// The connection.

const STATUS = {
  connecting: "Connecting", open: "Connected", lost: "Connection lost, reconnecting", full: "The server is full, retrying",
  refused: "The server refuses WebSockets: does a proxy in front of it forward them?",
  key: "The server needs a key", finished: "Finished", closed: "Stopped",
};

function linked(lane, what, detail) {
  // Of two streams, the state of the worse one.
  const states = active().map((each) => each.connection?.state);
  const worst = ["failed", "key", "refused", "full", "lost", "connecting", "open"].find((each) => states.includes(each)) ?? what;
  say(worst === "failed" ? `Refused by the server: ${detail}` : STATUS[worst], worst);
  if (worst === "key") askForKey();
  if (what === "failed" && state.source) finish();
  if (lane.connection?.over) settle();
  buffered();
}

function restarted(lane, droppedS) {
  const lost = `The server has lost the session: ${droppedS.toFixed(1)} s are lost`;
  if (!lane.connection.over) say(droppedS ? `${lost}, continuing in a new one` : "Continuing in a new session", "lost");
  else if (droppedS) say(`${STATUS.finished}. ${lost}`, "finished");
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

// Whether the server accepts us: it knows a browser by a cookie, given for the key. Without an answer, connecting is still worth a try.
async function isAllowed(headers = {}) {
  const answer = await fetch(new URL("readyz", BASE), { cache: "no-store", headers }).catch(() => null);
  return answer?.status !== 401;
}

function askForKey() {
  say(STATUS.key, "key");
  get("key-form").hidden = false;
  get("key").focus();
}

get("key-form").onsubmit = async (event) => {
  event.preventDefault();
  const key = get("key").value.trim();
  get("key").value = "";
  if (!(await isAllowed({ Authorization: `Basic ${btoa(`page:${key}`)}` }))) {
    say("Wrong key", "failed");
    return;
  }
  get("key-form").hidden = true;
  for (const lane of active()) lane.connection?.retry();
  const source = state.wanted;
  state.wanted = null;
  if (source) begin(source);
};

// Captions and figures.

const HOW = "Point at a word, or move to one with the arrow keys, to see what it was allowed to read.";
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
  const { windowTokens: width } = lane.transcript;
  const lagS = event.policyLagS + event.computeLagS;
  const schedule = word.schedule.replace("gamma=", "γ = ");
  const name = document.createElement("strong");
  name.textContent = `“${word.text.trim()}”`;
  const late = event.effectiveHorizon < event.horizon ? `, ${event.effectiveHorizon} of them arrived` : "";
  detail.replaceChildren(
    name,
    ` was allowed to read up to ${event.readS.toFixed(2)} s of the source: horizon ${event.horizon} of ${width}${late}, ` +
      `step ${event.step + event.skippedSteps} of about ${event.predictedSteps} in window ${event.windowIndex + 1}, ${schedule}. ` +
      `That source arrived at ${event.arrivalS.toFixed(2)} s, and the word was written at ${event.emissionS.toFixed(2)} s, ` +
      `${lagS.toFixed(1)} s after it was spoken (policy ${event.policyLagS.toFixed(2)}, compute ${event.computeLagS.toFixed(2)}).`,
  );
}

// For screen readers: whole sentences of the first stream, and a table.
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
  const mean = lag ? `, the last ${lag.words} of them ${(lag.policyS + lag.computeS).toFixed(1)} s after they were spoken` : "";
  get("time").setAttribute(
    "aria-label",
    `The source, the horizon and the words on one time axis: ${state.sourceS.toFixed(0)} s of source, ${words} words written${mean}. ` +
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

// The model.

async function greet() {
  const answer = await fetch(new URL("v1/models", BASE)).catch(() => null);
  if (!answer?.ok) return;
  const [model] = (await answer.json()).data;
  get("model").textContent = model.id;
  if (!model.sources.includes("audio")) {
    say("This model takes no audio: use a client for its features or pictures", "failed");
    for (const id of ["mic", "open", "sample"]) get(id).disabled = true;
  }
  lanes.a.dial.setFrontier(model.frontier, model.measured_on, model.setting);
}
greet();
point(null, null);
addEventListener("beforeunload", (event) => {
  if (active().some((lane) => lane.busy)) event.preventDefault();
});
