const COLOURS = {rra: "var(--orange)", waa: "var(--violet)", "waa-c": "var(--violet)", "waa-m": "var(--pink)", chunked: "var(--blue)", orca: "var(--green)", static: "var(--grey)", slack: "var(--teal)"};
const KINDS = {encode: "var(--orange)", decode: "var(--blue)", "encode and decode": "var(--violet)"};
const FIELDS = ["model", "cluster", "devices", "workload", "bound", "quantile", "ttft", "tpot", "objective", "engine", "price", "current"];
const NUMBERS = {devices: "devices", bound: "latency_bound_s", quantile: "quantile", ttft: "ttft_s", tpot: "tpot_s", price: "price"};
const FLAGS = {model: "--model", cluster: "--cluster", devices: "--devices", workload: "--workload", bound: "--latency-bound", quantile: "--quantile", ttft: "--ttft", tpot: "--tpot", objective: "--objective", engine: "--engine", price: "--price"};
const DEFAULTS = {quantile: "0.99", objective: "arrivals"};
const WAIT_MS = 40;
const TOKEN = {"X-Token": new URLSearchParams(location.search).get("token") || ""};
let trace = null, answering = null, waiting = null, shown = {}, range = [0.1, 100];

const seconds = (value) => value === null || value === undefined ? "-" : `${number(value)} s`;
const valueOf = (name) => byId(name).value.trim();

function question() {
  const asked = {};
  for (const name of FIELDS) {
    const value = valueOf(name);
    if (value === "") continue;
    asked[NUMBERS[name] || name] = name in NUMBERS ? Number(value) : value;
  }
  if (trace !== null) asked.workload = trace;
  return asked;
}

function command() {
  const quoted = (text) => /^[\w.,:=\/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
  const parts = FIELDS.filter((name) => name in FLAGS && valueOf(name) !== "" && DEFAULTS[name] !== valueOf(name))
    .map((name) => `${FLAGS[name]} ${quoted(name === "workload" && trace !== null ? byId("trace").files[0]?.name || trace.name : valueOf(name))}`);
  const current = valueOf("current");
  return current === "" || valueOf("devices") !== "" ? `xgpt plan ${parts.join(" ")}` : `xgpt compare ${parts.join(" ")} --current ${quoted(current)} -o current.json`;
}

function ask() {
  clearTimeout(waiting);
  waiting = setTimeout(answer, WAIT_MS);
}

async function answer() {
  if (answering !== null) answering.abort();
  const own = answering = new AbortController();
  byId("command").textContent = command();
  byId("state").textContent = "Planning.";
  byId("download").disabled = true;
  document.body.dataset.state = "asking";
  location.replace(`#${new URLSearchParams(FIELDS.map((name) => [name, valueOf(name)]).filter(([, value]) => value !== ""))}`);
  const asked = performance.now();
  try {
    const response = await fetch(here("ask"), {method: "POST", headers: {...TOKEN, "Content-Type": "application/json"}, body: JSON.stringify(question()), signal: own.signal});
    if (!response.ok) throw new Error((await response.json()).error);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {value, done} = await reader.read();
      if (done || own !== answering) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line) show(JSON.parse(line), performance.now() - asked);
    }
  } catch (error) {
    if (error.name !== "AbortError") trouble(`No answer: ${error.message}.`);
  }
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = text === "";
  if (text !== "") byId("schedule").textContent = "";
}

const PARTS = {plans, looser, timeline, current: now, "trade-off": tradeOff, infeasible, error: (part) => trouble(part.reason), end};

function show(part, took_ms) {
  if (part.part === "plans" && !part.settled) document.body.dataset.firstMs = Math.round(took_ms);
  PARTS[part.part](part);
}

function end() {
  document.body.dataset.state = "settled";
  if (byId("state").textContent === "Planning.") byId("state").textContent = "";
}

function plans(part) {
  shown = {...shown, ...part};
  trouble("");
  byId("nearest").hidden = true;
  const best = part.rows[0], arrivals = valueOf("objective") === "arrivals";
  byId("schedule").textContent = part.schedule;
  byId("said").replaceChildren(...(part.said || []).map(sentence));
  byId("said").hidden = byId("told").hidden = !part.said;
  byId("closed").hidden = !!part.said;
  byId("bounded").hidden = !part.bounded;
  if (part.bounded) byId("bounded-image").src = part.bounded;
  byId("told").replaceChildren(...(part.cards || []).map(({label, value}) => {
    const card = Object.assign(document.createElement("div"), {className: "card"});
    card.append(...[["value", value], ["label", label]].map(([className, textContent]) => Object.assign(document.createElement("div"), {className, textContent})));
    return card;
  }));
  byId("rate").textContent = number(best.rate_per_s);
  byId("rate-label").textContent = `arrivals a second at most${best.rate_per_s === null ? "" : part.settled ? ", simulated" : ", closed form"}`;
  byId("throughput").textContent = number(best.throughput_rps);
  byId("latency").textContent = seconds(best.latency_s);
  byId("first").textContent = seconds(best.ttft_s);
  byId("cost").textContent = number(best.cost);
  byId("placement").textContent = part.placement;
  byId("state").textContent = part.settled ? "Simulated: plan.json has these figures." : "Closed forms; simulated figures follow.";
  byId("looser-of").textContent = arrivals ? "arrivals/s" : "req/s";
  rows("policies", part.rows.map((row) => [row.policy, number(row.rate_per_s), number(row.throughput_rps), number(row.latency_s), number(row.ttft_s), number(1000 * row.tpot_s), row.settings]));
  byId("words").replaceChildren(...[...(part.words || []), ...part.warnings.map((text) => `warning: ${text}`)].map((text) => Object.assign(document.createElement("li"), {textContent: text})));
  memory(part.memory);
  if (shown.lines) tradeOff(shown);
  byId("download").disabled = !part.settled;
}

function sentence(text) {
  const line = document.createElement(text.startsWith("  ") ? "code" : "p");
  if (line.tagName === "P") line.textContent = text;
  else for (const word of text.trim().split(" ")) line.append(Object.assign(document.createElement("span"), {textContent: word}), " ");
  return line;
}

function infeasible(part) {
  trouble(part.reason);
  byId("said").hidden = byId("told").hidden = byId("bounded").hidden = true;
  for (const id of ["rate", "throughput", "latency", "first", "cost"]) byId(id).textContent = "-";
  for (const id of ["policies", "looser"]) rows(id, []);
  byId("words").replaceChildren();
  byId("placement").textContent = "";
  shown.rows = undefined;
  const nearest = byId("nearest");
  const field = Object.keys(NUMBERS).find((name) => NUMBERS[name] === part.binding);
  nearest.hidden = part.nearest_bound_s === null || field === undefined;
  nearest.textContent = `Set the bound to ${number(part.nearest_bound_s, 4)} s`;
  nearest.onclick = () => {
    const rounded = Number(part.nearest_bound_s.toPrecision(4));
    byId(field).value = rounded < part.nearest_bound_s ? Number((1.0005 * part.nearest_bound_s).toPrecision(4)) : rounded;
    placeSlider();
    ask();
  };
}

function tradeOff(part) {
  shown.lines = part.lines;
  const width = 900, height = 330, left = 60, bottom = 40, right = 110;
  const svg = picture("trade-off", "highest throughput of each policy against its latency", width, height);
  if (!part.lines.length) return;
  const all = part.lines.flatMap((line) => line.points), latencies = all.map((point) => point[0]);
  const bound = Number(valueOf("bound")) || null;
  const low = Math.min(...latencies) / 1.3, high = Math.max(...latencies) * 1.3, top = 1.08 * Math.max(...all.map((point) => point[1]));
  range = [low, high];
  placeSlider();
  const x = (value) => left + (width - left - right) * Math.log(value / low) / Math.log(high / low);
  const y = (value) => 8 + (height - bottom - 8) * (1 - value / top);
  const decade = 10 ** Math.floor(Math.log10(top / 4)), step = decade * [1, 2, 5, 10].find((each) => each * decade >= top / 5);
  for (let value = 0; value <= top; value += step) {
    shape(svg, "line", {class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value)});
    shape(svg, "text", {x: left - 6, y: y(value) + 4, "text-anchor": "end"}, number(value));
  }
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const digit of [1, 2, 5]) {
      const value = digit * 10 ** power;
      if (value < low || value > high) continue;
      shape(svg, "line", {class: "grid", x1: x(value), x2: x(value), y1: y(0), y2: y(top)});
      shape(svg, "text", {x: x(value), y: height - bottom + 16, "text-anchor": "middle"}, number(value));
    }
  shape(svg, "text", {x: width - right, y: height - 6, "text-anchor": "end"}, "latency, s");
  shape(svg, "text", {x: left, y: height - 6}, "requests/s, saturated");
  part.lines.forEach((line, i) => {
    const colour = COLOURS[line.name] || "var(--ink)";
    const path = line.points.map(([latency, rate], j) => (j ? `H${x(latency)}V${y(rate)}` : `M${x(latency)},${y(rate)}`)).join("") + `H${x(high)}`;
    shape(svg, "path", {d: path, fill: "none", stroke: colour, "stroke-width": 2});
    shape(svg, "rect", {x: width - right + 10, y: 16 + 20 * i, width: 14, height: 4, fill: colour});
    shape(svg, "text", {x: width - right + 30, y: 22 + 20 * i}, line.name);
  });
  if (bound !== null && bound > low && bound < high)
    shape(svg, "line", {class: "bound", x1: x(bound), x2: x(bound), y1: y(0), y2: y(top)});
  const best = shown.rows && shown.rows[0];
  if (best) shape(svg, "circle", {class: "chosen", cx: x(Math.max(low, best.latency_s)), cy: y(best.throughput_rps), r: 5});
  svg.onclick = (event) => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    if (at > left && at < width - right) setBound(Number((low * (high / low) ** ((at - left) / (width - left - right))).toPrecision(3)));
  };
}

function timeline(part) {
  const width = 1100, left = 80, bar = 18, height = 30 + (bar + 4) * part.rows.length + 90;
  const svg = picture("timeline", `timeline of ${part.rows.length} stages`, width, height);
  const last = Math.max(...part.bars.map((step) => step[2]), 1e-9), x = (at) => left + (width - left - 10) * at / last;
  Object.entries(KINDS).forEach(([name, colour], i) => {
    shape(svg, "rect", {x: left + 170 * i, y: 4, width: 14, height: 10, fill: colour});
    shape(svg, "text", {x: left + 20 + 170 * i, y: 14}, name);
  });
  part.rows.forEach((name, i) => shape(svg, "text", {x: left - 6, y: 24 + (bar + 4) * i + 13, "text-anchor": "end"}, name));
  for (const [row, start, stop, kind] of part.bars)
    shape(svg, "rect", {class: "step", x: x(start), width: Math.max(0.5, x(stop) - x(start)), y: 24 + (bar + 4) * row, height: bar, fill: KINDS[kind] || "var(--grey)"});
  const base = height - 22, top = Math.max(1, ...part.decoding.map((step) => step[1]));
  const y = (count) => base - 55 * count / top;
  shape(svg, "polyline", {points: part.decoding.flatMap(([at, count], i, all) => [`${x(at)},${y(count)}`, `${x(i + 1 < all.length ? all[i + 1][0] : last)},${y(count)}`]).join(" "), fill: "none", stroke: KINDS.decode, "stroke-width": 1.5});
  shape(svg, "text", {x: left - 6, y: y(top) + 8, "text-anchor": "end"}, number(top));
  shape(svg, "text", {x: left - 6, y: base, "text-anchor": "end"}, "0");
  shape(svg, "text", {x: width - 10, y: height - 4, "text-anchor": "end"}, `${number(last)} s`);
}

function memory(part) {
  const width = 520, left = 70, bar = 16, height = 30 + (bar + 4) * part.kv.length;
  const svg = picture("memory", "memory of each device", width, height);
  const top = 1.05 * Math.max(part.usable, ...part.kv.map((kv, i) => kv + part.rest[i])), x = (gib) => left + (width - left - 60) * gib / top;
  part.kv.forEach((kv, i) => {
    const y = 4 + (bar + 4) * i;
    shape(svg, "text", {x: left - 6, y: y + 12, "text-anchor": "end"}, `device ${i}`);
    shape(svg, "rect", {x: left, width: x(part.rest[i]) - left, y, height: bar, fill: "var(--grey)"});
    shape(svg, "rect", {x: x(part.rest[i]), width: x(kv + part.rest[i]) - x(part.rest[i]), y, height: bar, fill: "var(--blue)"});
    shape(svg, "text", {x: x(kv + part.rest[i]) + 4, y: y + 12}, number(kv + part.rest[i]));
  });
  shape(svg, "line", {class: "bound", x1: x(part.usable), x2: x(part.usable), y1: 0, y2: height - 22});
  shape(svg, "text", {x: left, y: height - 6}, "grey: weights, activations, workspace; blue: keys and values");
}

function looser(part) {
  const base = part.rows.length ? part.rows[0].rate_per_s : 1;
  rows("looser", part.rows.map((row) => [number(row.bound_s, 4), row.policy, number(row.rate_per_s), `${(100 * (row.rate_per_s / base - 1)).toFixed(1)}%`]));
}

function now(part) {
  byId("now").hidden = false;
  byId("gain").textContent = part.error || part.gain;
  byId("gain").className = part.error ? "bad" : "lead";
  byId("notes").replaceChildren(...(part.notes || []).map((text) => Object.assign(document.createElement("li"), {textContent: text})));
}

function placeSlider() {
  const bound = Number(valueOf("bound"));
  if (bound > 0) byId("slider").value = Math.round(1000 * Math.log(bound / range[0]) / Math.log(range[1] / range[0]));
}

function setBound(value) {
  byId("bound").value = value;
  placeSlider();
  ask();
}

function pin() {
  if (!shown.rows) return;
  const best = shown.rows[0], kept = location.hash, row = document.createElement("tr");
  const back = Object.assign(document.createElement("button"), {type: "button", textContent: "Show"});
  const away = Object.assign(document.createElement("button"), {type: "button", textContent: "Remove"});
  back.onclick = () => { restore(kept); ask(); };
  away.onclick = () => { row.remove(); byId("pinned").hidden = !byId("pins").children.length; };
  const cells = [shown.title, valueOf("bound"), best.policy, number(best.rate_per_s), number(best.throughput_rps), number(best.latency_s), number(best.cost)];
  for (const text of cells) row.appendChild(document.createElement("td")).textContent = text;
  row.appendChild(document.createElement("td")).append(back, " ", away);
  byId("pins").appendChild(row);
  byId("pinned").hidden = false;
}

function download() {
  const url = URL.createObjectURL(new Blob([shown.plan], {type: "application/json"}));
  Object.assign(document.createElement("a"), {href: url, download: "plan.json"}).click();
  URL.revokeObjectURL(url);
}

async function copy() {
  try {
    await navigator.clipboard.writeText(command());
    byId("state").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(byId("command"));
    byId("state").textContent = "Press Ctrl-C: this browser does not let the page copy.";
  }
}

async function take(file) {
  const response = await fetch(here(`trace?${new URLSearchParams({name: file.name})}`), {method: "POST", headers: {...TOKEN, "Content-Type": "application/json"}, body: file});
  const answered = await response.json();
  const note = byId("dropped");
  note.hidden = false;
  note.className = response.ok ? "quiet" : "bad";
  if (!response.ok) {
    note.textContent = answered.error;
    return;
  }
  trace = answered.workload;
  byId("workload").value = trace.name;
  note.textContent = `${trace.name}: ${number(answered.mean.input)} input and ${number(answered.mean.output)} output tokens on average`;
  ask();
}

function restore(hash) {
  const kept = new URLSearchParams(hash.slice(1));
  for (const name of FIELDS) if (kept.has(name)) byId(name).value = kept.get(name);
}

async function start() {
  restore(location.hash);
  for (const name of FIELDS) byId(name).addEventListener(["model", "cluster", "workload", "engine"].includes(name) ? "change" : "input", () => {
    if (name === "workload") trace = null;
    if (name === "bound") placeSlider();
    if (name === "current" && valueOf("current") === "") byId("now").hidden = true;
    ask();
  });
  byId("slider").addEventListener("input", () => {
    byId("bound").value = Number((range[0] * (range[1] / range[0]) ** (byId("slider").value / 1000)).toPrecision(3));
    ask();
  });
  byId("trace").addEventListener("change", () => byId("trace").files.length && take(byId("trace").files[0]));
  for (const event of ["dragover", "drop"]) byId("question").addEventListener(event, (dragged) => {
    dragged.preventDefault();
    if (event === "drop" && dragged.dataTransfer.files.length) take(dragged.dataTransfer.files[0]);
  });
  byId("question").addEventListener("submit", (event) => event.preventDefault());
  byId("pin").onclick = pin;
  byId("download").onclick = download;
  byId("copy").onclick = copy;
  const names = await (await fetch(here("names"), {headers: TOKEN})).json();
  for (const [kind, list] of Object.entries(names))
    byId(kind).replaceChildren(...list.map((name) => Object.assign(document.createElement("option"), {value: name})));
  ask();
}
start();
