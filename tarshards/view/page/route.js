// The part of the address after #: the filter, the sample or the list that is shown. Every view has a link.

export const QUERY = ["match", "field", "where", "sizes", "shard", "duplicates", "order", "step", "epoch"];
const DETAIL = ["show", "begin", "check", "key", "sample", "position"]; // entries that choose a list or a sample
const LOOK = ["view", "shown"]; // how the grid shows samples: each link keeps it

/** Return the entries of the address. */
export function route() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** Return those entries that choose samples; unknown ones too, which *checkQuery* refuses. */
export function queryOf(entries) {
  return Object.fromEntries(Object.entries(entries).filter(([name, value]) => value && !DETAIL.includes(name) && !LOOK.includes(name)));
}

/** Raise an error for a query that a page which *offers* these cannot answer. */
export function checkQuery(query, offers) {
  for (const name of Object.keys(query)) {
    if (!QUERY.includes(name)) throw new Error(`the address has ${name}=, which is none of ${[...QUERY, ...DETAIL, ...LOOK].join(", ")}`);
    if (!takes(name, offers)) throw new Error(`this page has no ${name}=; open the shards with tarview`);
  }
}

/** Return whether a page which *offers* these chooses samples by the entry *name*. */
export function takes(name, offers) {
  return offers.has("queries") || name === "match" || (name === "field" && offers.has("fields"));
}

/** Return the number in an entry, undefined without it; raise an error if it is none. */
export function numberOf(entries, name) {
  const text = entries[name];
  if (text !== undefined && !/^\d{1,15}$/.test(text)) throw new Error(`${name}= is a whole number from 0, not ${text}`);
  return text === undefined ? undefined : Number(text);
}

/** Return the fields that the address chooses to be shown. */
export function shownFields() {
  return (route().shown ?? "").split(",").filter(Boolean).map(decodeURIComponent);
}

/** Return the link to these entries, without those that are empty; it keeps the look, unless it has another. */
export function linkTo(entries) {
  const { view, shown } = route();
  const given = Object.entries({ view, shown, ...entries }).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `#${new URLSearchParams(given)}`;
}

/** Go to these entries. */
export function go(entries) {
  location.hash = linkTo(entries);
}
