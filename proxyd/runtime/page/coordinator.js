"use strict";

const SHOWN_S = 10;
const PADDING = 32;
const CLASSES = ["pipeline", "sync", "bulk"];
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const cards = new Map();

/* One link: figures, its rates and queue over five minutes, its slots over ten seconds, who waits and why. */
const card = (name) => {
  const root = make("article", undefined, "link");
  root.append(make("h2", name));
  const figures = make("dl", undefined, "figures");
  const plots = make("div");
  const slots = make("canvas", undefined, "slots");
  const key = make("div", undefined, "key");
  for (const one of CLASSES) {
    const item = make("span");
    const mark = make("i");
    mark.style.background = `var(--${one})`;
    item.append(mark, one);
    key.append(item);
  }
  const waiting = make("table");
  const scroll = make("div", undefined, "scroll");
  scroll.append(waiting);
  root.append(figures, make("h3", "Rates and queue, last five minutes"), plots,
    make("h3", `Slots: who was granted the link, last ${SHOWN_S} s`), slots, key, make("h3", "Waiting"), scroll);
  document.getElementById("links").append(root);
  const made = { root, figures, plots, slots, waiting, plot: null };
  const axis = (side, values) => ({
    side, values, scale: side === 1 ? "queue" : "rate", size: 72,
    stroke: () => color("soft"), grid: { stroke: () => color("line"), width: 1, show: side !== 1 }, ticks: { show: false },
  });
  const line = (label, name, scale) => ({
    label, scale, stroke: () => color(name), width: scale === "queue" ? 1 : 2, dash: name === "estimate" ? [6, 4] : undefined,
    points: { show: false },
  });
  made.plot = new uPlot({
    width: root.clientWidth - PADDING, height: 190, legend: { live: false }, cursor: { drag: { x: false, y: false } },
    scales: { x: { time: false }, rate: { range: (_, low, high) => [0, Math.max(1e6, high * 1.1)] }, queue: { range: (_, low, high) => [0, Math.max(0.01, high * 1.2)] } },
    axes: [
      { stroke: () => color("soft"), grid: { show: false }, values: (_, at) => at.map((s) => (s ? `${Math.round(s)} s` : "now")) },
      axis(3, (_, at) => at.map((v) => rate(v / 8))),
      axis(1, (_, at) => at.map((v) => span(v * 1e9))),
    ],
    series: [
      {},
      line("estimate", "estimate", "rate"),
      line("granted", "granted", "rate"),
      line("delivered", "delivered", "rate"),
      line("queue", "queue", "queue"),
    ],
  }, [[], [], [], [], []], plots);
  return made;
};

/* Samples: [ago_ns, pace, granted total, delivered total, queue_ns, outstanding, waiting], oldest first. */
const series = (samples) => {
  const data = [[], [], [], [], []];
  samples.forEach((one, at) => {
    const before = samples[Math.max(0, at - 2)];
    const s = (before[0] - one[0]) / 1e9;
    data[0].push(-one[0] / 1e9);
    data[1].push(one[1] * 8);
    data[2].push(s > 0 ? ((one[2] - before[2]) * 8) / s : null);
    data[3].push(s > 0 ? ((one[3] - before[3]) * 8) / s : null);
    data[4].push(one[4] / 1e9);
  });
  return data;
};

const draw = (canvas, slots) => {
  const agents = [...new Set(slots.map((one) => one.agent))].sort();
  const row = 20;
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth - PADDING;
  const height = Math.max(1, agents.length) * row + 20;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const left = Math.min(150, Math.max(40, ...agents.map((one) => pen.measureText(one).width + 10)));
  const x = (agoNs) => left + (width - left) * (1 - agoNs / (SHOWN_S * 1e9));
  agents.forEach((agent, at) => {
    pen.fillStyle = color("soft");
    pen.fillText(agent, 0, at * row + row / 2, left - 6);
    pen.fillStyle = color("line");
    pen.fillRect(left, at * row + row - 1, width - left, 1);
  });
  for (const slot of slots) {
    const from = Math.max(left, x(slot.begin_ago_ns));
    const to = Math.min(width, x(Math.max(0, slot.end_ago_ns)));
    if (to < left || from > width) continue;
    pen.fillStyle = color(CLASSES.includes(slot.traffic) ? slot.traffic : "soft");
    pen.fillRect(from, agents.indexOf(slot.agent) * row + 3, Math.max(1, to - from), row - 7);
  }
  pen.fillStyle = color("soft");
  if (!agents.length) pen.fillText("nothing was granted", left, row / 2);
  for (let s = 0; s <= SHOWN_S; s += 2) {
    pen.textAlign = s ? "center" : "right";
    pen.fillText(s ? `${s} s` : "now", x(s * 1e9), height - 8);
  }
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${slots.length} slots of ${agents.length} agents: ${agents.join(", ")}`);
};

const showLink = (link, samples, slots) => {
  const name = `${link.link.src_site}->${link.link.dst_site}`;
  if (!cards.has(name)) cards.set(name, card(name));
  const made = cards.get(name);
  const now = samples.length > 2 ? series(samples) : null;
  /* Over some seconds: one second's estimate and another one's bytes are no share. */
  const mean = (at) => now[at].slice(-SHOWN_S).reduce((sum, one) => sum + (one || 0), 0) / Math.min(SHOWN_S, now[at].length);
  const facts = [
    [`estimate (${link.source})`, rate(link.pace_bytes_per_s)],
    [`delivered, mean of ${SHOWN_S} s`, now ? rate(mean(3) / 8) : "-"],
    ["of the estimate", now && mean(1) ? `${Math.round((100 * mean(3)) / mean(1))} %` : "-"],
    ["queue", span(link.queue_ns)],
    ["round trip", span(link.rtt_ns)],
    ["window", `${size(link.outstanding_bytes)} of ${size(link.window_bytes)}`],
    ["waiting", `${link.waiting_transfers} (${size(link.waiting_bytes)})`],
    ["sent again", `${link.totals.retransmits}`],
    ["in fallback", size(link.totals.fallback_bytes)],
  ];
  if (link.limit_bytes_per_s) facts.push(["limit by policy", rate(link.limit_bytes_per_s)]);
  if (link.observe) facts.push(["mode", "observed only"]);
  made.figures.replaceChildren(...facts.map(([title, value]) => {
    const one = make("div");
    one.append(make("dt", title), make("dd", value));
    return one;
  }));
  if (now) {
    made.plot.setSize({ width: made.root.clientWidth - PADDING, height: 190 });
    made.plot.setData(now);
  }
  draw(made.slots, slots);
  fill(made.waiting, [["agent", ""], ["to", ""], ["job", ""], ["class", ""], ["waits", "number"], ["granted", "number"], ["why", "words"]],
    link.waiting.slice(0, 8).map((one) => [
      agentName(one.agent), agentName(one.destination), one.job, one.traffic, span(one.waited_ns),
      `${size(one.granted_bytes)} of ${size(one.wanted_bytes)}`, one.reason,
    ]), "nobody");
};

watch((data) => {
  if (data.standby) {
    say(data.standby, true);
    return;
  }
  const { status, samples, slots } = data;
  document.getElementById("name").textContent = status.coordinator;
  document.title = `${status.coordinator} - proxyd`;
  const facts = [`${status.version}, epoch ${status.epoch}, up ${span(status.uptime_ns)}`, `owns ${status.owns.join(", ")}`,
    `${status.agents.length} agents, ${status.endpoints.length} trainers`];
  if (status.certificate) facts.push(`certificate ${status.certificate}`);
  if (status.draining) facts.push(`drains: no new transfer begins, ${status.held_transfers} are held`);
  say(facts.join("; "), status.draining || !status.agents.length);
  const names = status.links.map((link) => `${link.link.src_site}->${link.link.dst_site}`);
  for (const [name, made] of cards) {
    if (!names.includes(name)) { made.plot.destroy(); made.root.remove(); cards.delete(name); }
  }
  status.links.forEach((link, at) => showLink(link, samples[names[at]] || [], slots.filter((one) => one.link === names[at])));
  fill(document.getElementById("agents"),
    [["agent", ""], ["data address", ""], ["trainers", "number"], ["transfers", "number"], ["heard", "number"]],
    status.agents.map((one) => [agentName(one.agent), one.data_address, one.endpoints, one.transfers, `${span(one.heard_ago_ns)} ago`]),
    "no agent has a session");
  fill(document.getElementById("jobs"),
    [["job", ""], ["link", ""], ["weight", "number"], ["floor", "number"], ["cap", "number"], ["granted", "number"], ["waiting", "number"]],
    status.links.flatMap((link, at) => link.jobs.map((job) => [
      job.name, names[at], job.weight, job.floor_bytes_per_s ? rate(job.floor_bytes_per_s) : "-",
      job.cap_bytes_per_s ? rate(job.cap_bytes_per_s) + (job.held_back ? " (used up)" : "") : "-", size(job.granted_bytes), job.waiting_transfers,
    ])), "none yet");
});
