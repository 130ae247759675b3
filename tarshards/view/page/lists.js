// The shards with the map of their damage, and what a ledger left out.

import { counted, element, fill, inBytes, line } from "./dom.js";
import { linkTo } from "./route.js";

const PAGE = 200;
const LEGEND = [["whole", "members"], ["gap", "gap: no valid members"], ["error", "error"], ["warning", "warning"]];

/** Fill *host* with the list of shards; *shard*, the number of one, is checked. */
export async function showShards(host, source, { begin = 0, check }) {
  const found = await source.ask("shards", { begin, count: PAGE });
  const rows = found.rows.map((shard) => element("tr", {},
    element("td", {}, element("a", { href: linkTo({ shard: shard.number }) }, line(shard.name))),
    element("td", {}, shard.samples === undefined ? "not indexed yet" : shard.samples.toLocaleString("en")),
    element("td", {}, shard.size === undefined ? "" : inBytes(shard.size)),
    element("td", {}, element("a", { href: linkTo({ show: "shards", begin, check: shard.number }) }, "check"))));
  const map = element("div", { "aria-live": "polite" });
  const next = begin + PAGE < found.total ? element("a", { href: linkTo({ show: "shards", begin: begin + PAGE }) }, "more shards") : null;
  fill(host, element("nav", {}, element("a", { href: linkTo({}) }, "back")), element("h2", {}, counted(found.total, "shard")), map,
    element("table", {}, element("thead", {}, element("tr", {}, ...["shard", "samples", "size", ""].map((name) => element("th", {}, name)))),
      element("tbody", {}, ...rows)), next);
  if (check === undefined) return;
  map.replaceChildren("checking …");
  try {
    const { name } = found.rows.find((shard) => shard.number === check) ?? {};
    map.replaceChildren(damageMap(name ?? `shard ${check}`, await source.ask("damage", { shard: check })));
  } catch (error) {
    map.replaceChildren(element("p", { class: "error" }, line(error.message)));
  }
}

/** Return a bar that is as long as the shard *name*, with its gaps and findings at their offsets, and the list of these. */
function damageMap(name, { size, gaps, findings, whole, lost }) {
  const bar = element("div", { class: "damage", role: "img", "aria-label": `${counted(gaps.length, "gap")} in ${inBytes(size)}` });
  const mark = (begin, end, kind, title) => {
    const mark = element("span", { class: kind, title });
    mark.style.left = `min(calc(100% - 3px), ${(100 * begin) / Math.max(size, 1)}%)`;
    mark.style.width = `max(3px, ${(100 * (end - begin)) / Math.max(size, 1)}%)`;
    bar.append(mark);
  };
  for (const { offset, severity, reason } of findings) if (offset !== null) mark(offset, offset, severity, `${offset}: ${line(reason)}`);
  for (const gap of gaps) mark(gap.begin, gap.end, "gap", `${gap.begin} to ${gap.end}: ${line(gap.reason)}`);
  const items = findings.map((finding) => element("li", { class: finding.severity },
    element("span", { class: `sign ${finding.severity}` }, finding.severity), ` ${finding.kind}: `, finding.offset === null ? "" : `offset ${finding.offset.toLocaleString("en")}: `,
    finding.key ? element("a", { href: linkTo({ key: finding.key }) }, line(finding.key)) : "", ` ${line(finding.reason)}`));
  return element("section", { class: "field", "aria-label": "damage" },
    element("p", {}, `${line(name)}, ${inBytes(size)}: ${counted(whole, "whole sample")}, ${counted(lost, "lost sample")}, ${counted(gaps.length, "gap")}`), bar,
    element("p", { class: "legend" }, ...LEGEND.flatMap(([kind, text]) => [element("span", { class: `sign ${kind}` }), ` ${text} `])),
    items.length ? element("ul", {}, ...items) : element("p", {}, "nothing was found"));
}

/** Fill *host* with what a ledger left out. */
export async function showLedger(host, source) {
  const { entries, total } = await source.ask("ledger");
  const rows = entries.map((entry) => element("tr", {},
    element("td", {}, line(entry.shard ?? "")), element("td", {}, entry.offset === null || entry.offset === undefined ? "" : String(entry.offset)),
    element("td", {}, entry.key ? element("a", { href: linkTo({ key: entry.key }) }, line(entry.key)) : ""),
    element("td", {}, line(entry.field ?? "")), element("td", {}, line(entry.reason ?? ""))));
  host.replaceChildren(element("nav", {}, element("a", { href: linkTo({}) }, "back")), element("h2", {}, `${counted(total, "entry")} of the ledger`),
    element("table", {}, element("thead", {}, element("tr", {}, ...["shard", "offset", "key", "field", "reason"].map((name) => element("th", {}, name)))),
      element("tbody", {}, ...rows)));
}
