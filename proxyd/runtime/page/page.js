"use strict";
/* What both daemons' pages share: values in words, tables, and asking the daemon once a second. */

const unit = (value, base, names) => {
  let at = 0;
  while (value >= base && at < names.length - 1) { value /= base; at += 1; }
  return `${value >= 100 || at === 0 ? Math.round(value) : value.toPrecision(3)} ${names[at]}`;
};
const rate = (bytesPerS) => unit(bytesPerS * 8, 1000, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]);
const size = (bytes) => unit(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const span = (ns) => {
  const s = ns / 1e9;
  if (s < 1e-3) return `${Math.round(s * 1e6)} us`;
  if (s < 1) return `${(s * 1e3).toPrecision(3)} ms`;
  if (s < 90) return `${s.toPrecision(3)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} d`;
};
const agentName = (agent) => `${agent.site}/${agent.name}`;

/* Text only, never markup: names come from trainers. */
const make = (tag, text, cls) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (cls) element.className = cls;
  return element;
};

/* heads: [["title", "number" | "words" | ""]]; rows: lists of texts. */
const fill = (table, heads, rows, none) => {
  table.replaceChildren();
  if (!rows.length) { table.append(make("caption", none, "empty")); return; }
  const head = table.createTHead().insertRow();
  for (const [title, cls] of heads) head.append(make("th", title, cls));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((text, at) => line.append(make("td", text, heads[at][1])));
  }
};

const say = (text, bad) => {
  const facts = document.getElementById("facts");
  facts.textContent = text;
  facts.className = bad ? "bad" : "";
};

/* show(data) is called for each answer; what was shown last stays when the daemon doesn't answer, and the page says so. */
const watch = (show) => {
  let heard = Date.now();
  const ask = async () => {
    try {
      const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
      show(await answer.json());
      heard = Date.now();
    } catch (error) {
      say(`No answer for ${span((Date.now() - heard) * 1e6)}: ${error.message}. What stands below is old.`, true);
    }
    setTimeout(ask, document.hidden ? 5000 : 1000);
  };
  ask();
};
