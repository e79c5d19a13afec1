"use strict";

watch(({ status }) => {
  document.getElementById("name").textContent = agentName(status.agent);
  document.title = `${agentName(status.agent)} - proxyd`;
  const facts = [
    `${status.version}, pid ${status.pid}, up ${span(status.uptime_ns)}`,
    `${status.outgoing_transfers} transfers going out, ${status.arriving_transfers} arriving`,
  ];
  if (status.certificate) facts.push(`certificate ${status.certificate}`);
  if (status.draining) facts.push(`drains: no new transfer begins, ${status.held_transfers} are held`);
  say(facts.join("; "), status.draining);
  document.getElementById("workers-section").hidden = status.workers.length === 0;
  fill(document.getElementById("workers"),
    [["worker", ""], ["pid", "number"], ["up", "number"], ["trainers", "number"], ["going out", "number"], ["arriving", "number"]],
    status.workers.map((one) => [
      one.agent.name, one.pid || "-", one.pid ? span(one.uptime_ns) : "no answer", one.trainers.length,
      one.outgoing_transfers, one.arriving_transfers,
    ]), "none");
  fill(document.getElementById("coordinators"), [["address", ""], ["session", ""]],
    status.coordinators.map((one) => [one.address, one.connected ? "stands" : "none: fallback rates"]), "none configured");
  fill(document.getElementById("links"),
    [["link", ""], ["rate", "number"], ["from", ""], ["round trip", "number"], ["backlog", "number"], ["waiting", "number"],
      ["granted", "number"], ["in fallback", "number"], ["now", "words"]],
    status.links.map((one) => [
      `${one.link.src_site}->${one.link.dst_site}`, rate(one.rate_bytes_per_s), one.source, span(one.rtt_ns),
      size(one.backlog_bytes), one.waiting_transfers, size(one.granted_bytes), size(one.fallback_bytes),
      one.fallback ? "no coordinator is heard: fallback rate" : `granted by ${one.coordinator}`,
    ]), "nothing was sent to another site yet");
  fill(document.getElementById("peers"), [["agent", ""], ["address", ""], ["connection", ""], ["streams", "number"]],
    status.peers.map((one) => [agentName(one.agent), one.address || "-", one.connected ? "stands" : "none", one.streams]),
    "no other agent is known");
  fill(document.getElementById("trainers"), [["job", ""], ["rank", "number"]],
    status.trainers.map((one) => [one.job, one.rank]), "no trainer is attached");
});
