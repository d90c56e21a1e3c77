const WIDTH = 480, HEIGHT = 150, LEFT = 52, BOTTOM = 18;

function axes(id, label, low, high, top) {
  const svg = picture(id, label, WIDTH, HEIGHT);
  const x = (value) => LEFT + (WIDTH - LEFT - 4) * (value - low) / (high - low || 1);
  const y = (value) => 6 + (HEIGHT - BOTTOM - 6) * (1 - value / (top || 1));
  for (const share of [0, 0.5, 1]) {
    shape(svg, "line", {x1: LEFT, x2: WIDTH - 4, y1: y(share * top), y2: y(share * top), class: "grid"});
    shape(svg, "text", {x: LEFT - 5, y: y(share * top) + 4, "text-anchor": "end"}, number(share * top));
  }
  return {svg, x, y};
}

function lines(id, label, samples, key, marks, scale = 1) {
  const known = samples.filter((sample) => sample[key] !== null);
  const values = known.map((sample) => scale * sample[key]);
  const shown = marks.filter((mark) => mark.value !== null && mark.value !== undefined);
  const most = Math.max(0, ...values, ...shown.map((mark) => mark.value)), top = (scale === 100 ? Math.min(100, 1.1 * most) : 1.1 * most) || 1;
  const first = samples.length ? samples[0].at_s : 0, last = samples.length ? samples[samples.length - 1].at_s : 1;
  const {svg, x, y} = axes(id, label, first, last, top);
  for (const mark of shown)
    shape(svg, "line", {x1: LEFT, x2: WIDTH - 4, y1: y(mark.value), y2: y(mark.value), stroke: mark.colour, "stroke-dasharray": "5 4"});
  const points = known.map((sample, i) => `${x(sample.at_s)},${y(values[i])}`).join(" ");
  shape(svg, "polyline", {points, fill: "none", stroke: "var(--blue)", "stroke-width": 1.8});
  shape(svg, "text", {x: WIDTH - 4, y: HEIGHT - 4, "text-anchor": "end"}, `${Math.round((last - first) / 60)} min`);
}

function histogram(id, label, bins) {
  const top = 1.1 * Math.max(1e-9, ...bins.planned, ...(bins.observed || []));
  const {svg, x, y} = axes(id, label, 0, bins.edges[bins.edges.length - 1], top);
  bins.planned.forEach((share, i) =>
    shape(svg, "rect", {x: x(bins.edges[i]), width: x(bins.edges[i + 1]) - x(bins.edges[i]), y: y(share), height: y(0) - y(share), fill: "var(--pale)"}));
  if (bins.observed) {
    const points = bins.observed.flatMap((share, i) => [`${x(bins.edges[i])},${y(share)}`, `${x(bins.edges[i + 1])},${y(share)}`]);
    shape(svg, "polyline", {points: points.join(" "), fill: "none", stroke: "var(--orange)", "stroke-width": 1.8});
  }
  shape(svg, "text", {x: WIDTH - 4, y: HEIGHT - 4, "text-anchor": "end"}, `${Math.round(bins.edges[bins.edges.length - 1])} tokens`);
}

// What a plan for one device has one of.
const isOne = (key, value) => value === 1 && ["ep_degree", "microbatches"].includes(key);
const settingsOf = (policy) => Object.entries(policy).filter(([key, value]) => typeof value === "number" && !key.startsWith("tp_") && !isOne(key, value)).map(([key, value]) => `${key} ${value}`).join(", ");

// Step times are measured over planned ones; a pause is the time in which no request is served.
const causeOf = (decision) => decision.cause === "asked" ? "" : `${decision.cause}: ${decision.cause_detail}. `;
const reasonOf = (decision) => decision.action === "failed" ? `${decision.cause}: ${decision.reason}; failed after ${number(decision.planning_s)} s` : `${causeOf(decision)}${decision.reason}; steps take ${number(decision.slowdown)} times as long as in the profile`
  + (decision.pause_s ? `; the change pauses requests for ${number(decision.pause_s)} s` : "") + `; planned in ${number(decision.planning_s)} s`;
const inWords = (decision) => `${decision.action}: ${decision.reason}`;

// Decisions that keep the plan one after the other share a row: the latest one's, with their number.
function folded(list) {
  const groups = [];
  for (const decision of list) {
    const last = groups[groups.length - 1];
    if (last && last.action === "keep" && decision.action === "keep") groups[groups.length - 1] = {...decision, times: last.times + 1};
    else groups.push({...decision, times: 1});
  }
  return groups;
}

const planOf = (outcome) => outcome ? `${outcome.policy.kind}: ${settingsOf(outcome.policy)}` : "-";

function decisions(list) {
  byId("last").textContent = list.length ? `Last, at ${list[list.length - 1].at}: ${inWords(list[list.length - 1])}` : "";
  rows("decisions", folded(list).reverse().map((decision) => [
    decision.at, decision.times > 1 ? `${decision.action} (${decision.times} times)` : decision.action,
    planOf(decision.running), decision.best === null ? "none" : planOf(decision.best), decision.action === "failed" ? "-" : `${(100 * decision.gain).toFixed(1)}%`, reasonOf(decision)]));
}

async function wouldDecide() {
  byId("would").disabled = true;
  byId("decision").textContent = "Planning.";
  try {
    const answer = await fetch(here("plan/decision"), {cache: "no-store"});
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    const decision = await answer.json();
    byId("decision").textContent = decision === null ? "Nothing has been observed yet." : inWords(decision);
  } catch (error) {
    byId("decision").textContent = `No answer: ${error.message}.`;
  }
  byId("would").disabled = false;
}
byId("would").onclick = wouldDecide;

function show(live) {
  const {plan, now, samples, lengths, observation} = live;
  byId("settings").textContent = `${plan.policy}: ${settingsOf(plan.settings)}` + (live.is_redeploying ? " (another plan is being deployed)" : "");
  byId("throughput").textContent = number(now.throughput_rps);
  byId("tokens").textContent = number(now.output_tokens_per_s);
  // The bound is compared with the time that it limits: from arrival, or from admission.
  const latencyKey = plan.counts_from === "arrival" ? "whole_p99_s" : "latency_p99_s";
  const bounded = (id, value, bound) => {
    byId(id).textContent = value === null ? "-" : `${number(value)} s`;
    byId(id).className = bound !== null && value > bound ? "value bad" : "value";
  };
  const theBound = (bound) => bound === null ? "" : `; bound: ${number(bound)} s for ${number(100 * plan.quantile)}% of requests`;
  bounded("latency", now[latencyKey], plan.latency_bound_s);
  bounded("first", now.first_p99_s, plan.ttft_bound_s);
  const under = plan.planned_under_s === null ? "" : `; planned under ${number(plan.planned_under_s)} s`;
  byId("latency-label").textContent = `latency p99, ${plan.counts_from} to last token${theBound(plan.latency_bound_s)}${under}`;
  byId("first-label").textContent = `time to first token p99, waiting included${theBound(plan.ttft_bound_s)}`;
  byId("latency-caption").textContent = `Latency p99 from ${plan.counts_from}, s; red: the bound.`;
  byId("kept").textContent = now.share_kept === null ? "-" : `${(100 * now.share_kept).toFixed(1)}%`;
  byId("kept").className = now.share_kept !== null && now.share_kept < plan.quantile ? "value bad" : "value";
  byId("causes").textContent = live.causes.join(" ");
  byId("causes").hidden = !live.causes.length;
  byId("batch").textContent = `${now.running} (${now.waiting})`;
  byId("kv").textContent = `${(100 * now.kv_share).toFixed(1)}%`;
  byId("ratio").textContent = number(now.step_ratio);
  lines("throughput-chart", "throughput over time", samples, "throughput_rps", [{value: plan.arrival_rate_per_s ?? plan.throughput_rps, colour: "var(--quiet)"}]);
  lines("latency-chart", "latency over time", samples, latencyKey, [{value: plan.latency_bound_s, colour: "var(--bad)"}]);
  lines("first-chart", "time to first token over time", samples, "first_p99_s", [{value: plan.ttft_bound_s, colour: "var(--bad)"}]);
  lines("kept-chart", "share of requests that kept their bounds over time", samples, "share_kept", [{value: 100 * plan.quantile, colour: "var(--bad)"}], 100);
  lines("batch-chart", "running requests over time", samples, "running", [{value: plan.decode_batch, colour: "var(--quiet)"}]);
  lines("waiting-chart", "waiting requests over time", samples, "waiting", []);
  lines("kv-chart", "K/V memory over time", samples, "kv_share", [], 100);
  histogram("input-chart", "input lengths", lengths.input);
  histogram("output-chart", "output lengths", lengths.output);
  if (observation)
    byId("distance").textContent = `${observation.num_requests} requests observed, ${observation.num_finished} of them ended; Wasserstein distance from the planned lengths: inputs ${number(observation.input_distance)}, outputs ${number(observation.output_distance)} tokens${observation.arrival_rate_per_s === null ? "" : `; ${number(observation.arrival_rate_per_s)} requests arrive a second`}.`;
  const none = live.decisions.length ? "" : "None yet: neither lengths nor step times have clearly changed.";
  byId("replans").className = live.failures ? "bad" : "quiet";
  byId("replans").textContent = !live.replans ? "Re-planning is off." : live.failures ? `The last ${live.failures === 1 ? "judgement" : `${live.failures} judgements`} of the plan failed: ${live.decisions[live.decisions.length - 1].reason}.` : live.judging_since ? `Something has changed: re-planning has been at work since ${live.judging_since}.` : none;
  byId("asking").hidden = !live.replans;
  decisions(live.decisions);
  goodput("keys", "by-key", live.keys);
  goodput("classes", "by-class", live.classes);
}

function goodput(section, table, of) {
  const entries = Object.entries(of);
  byId(section).hidden = !entries.length;
  rows(table, entries.map(([name, {kept, broken}]) => [name || "all", kept + broken, `${(100 * kept / (kept + broken)).toFixed(1)}%`]));
}

async function poll() {
  const trouble = byId("trouble");
  try {
    const answer = await fetch(here("live"), {cache: "no-store"});
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    show(await answer.json());
    trouble.hidden = true;
    document.body.dataset.state = "live";
  } catch (error) {
    trouble.textContent = `No new data: ${error.message}.`;
    trouble.hidden = false;
    document.body.dataset.state = "trouble";
  }
  setTimeout(poll, 2000);
}
poll();
