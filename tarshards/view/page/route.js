// The part of the address after #: the filter, the sample or the list that is shown. Every view has a link.

export const QUERY = ["match", "field", "where", "sizes", "shard", "duplicates", "order", "step", "epoch"];

/** Return the entries of the address. */
export function route() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** Return those entries that choose samples. */
export function queryOf(entries) {
  return Object.fromEntries(QUERY.filter((name) => entries[name]).map((name) => [name, entries[name]]));
}

/** Return the link to these entries, without those that are empty. */
export function linkTo(entries) {
  const given = Object.entries(entries).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `#${new URLSearchParams(given)}`;
}

/** Go to these entries. */
export function go(entries) {
  location.hash = linkTo(entries);
}
