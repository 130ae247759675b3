// The text of the query box: terms such as has:jpg, and a condition or a part of the key; it stands for a query.

/** The terms, by their words: the entry of the query, and what the completion says of them. */
export const TERMS = {
  key: ["match", "part of the key"],
  has: ["field", "samples with this field"],
  order: ["order", "key, size, size:FIELD or a column; - for descending"],
  same: ["duplicates", "samples that occur more than once: key or content"],
  size: ["sizes", "FIELD:LEAST-MOST, in bytes"],
  shard: ["shard", "the number of a shard"],
};
const TERM = new RegExp(`(${Object.keys(TERMS).join("|")}):("(?:[^"\\\\]|\\\\.)*"|[^\\s"]\\S*)(?=\\s|$)`, "y");
const PIECE = /\s+|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s"']+|["']/y;
const CONDITION = /[=<>()[\]]|^(not|has)\s|\s(and|or|in|is|not|if)\s/;
const FUNCTIONS = ["len(", "has("];
const MOST = 50; // completions

/** Return the entries of the query that a text stands for. */
export function parseQuery(text) {
  const entries = {};
  let rest = "";
  for (let at = 0; at < text.length;) {
    TERM.lastIndex = PIECE.lastIndex = at;
    const term = at === 0 || /\s/.test(text[at - 1]) ? TERM.exec(text) : null;
    if (term) entries[TERMS[term[1]][0]] = unquoted(term[2]);
    const found = term ?? PIECE.exec(text);
    if (!term) rest += found[0];
    at += found[0].length;
  }
  rest = rest.trim();
  if (rest && CONDITION.test(rest)) entries.where = rest;
  else if (rest) entries.match = unquoted(rest);
  return entries;
}

/** Return the text that stands for a query. */
export function formatQuery(query) {
  const words = [];
  if (query.where) words.push(parseQuery(query.where).where === query.where ? query.where : `(${query.where})`);
  for (const [word, [name]] of Object.entries(TERMS)) {
    const value = query[name];
    if (!value) continue;
    const isPlain = name === "match" && !words.length && !value.startsWith("#") && parseQuery(value).match === value;
    words.push(isPlain ? value : `${word}:${/[\s"\\]/.test(value) ? JSON.stringify(value) : value}`);
  }
  return words.join(" ");
}

function unquoted(text) {
  if (!text.startsWith('"')) return text;
  try {
    return String(JSON.parse(text));
  } catch {
    return text;
  }
}

/** Return what may follow at *caret* in a text, as [what replaces the text from *begin* on, what it is].
 *
 * *names* has the fields and the columns of the samples, and *takes* says which entries of a query the page answers.
 */
export function complete(text, caret, { fields, columns }, takes) {
  const before = text.slice(0, caret);
  const term = new RegExp(`(?:^|\\s)(${Object.keys(TERMS).join("|")}):(\\S*)$`).exec(before);
  if (term) return { begin: caret - term[2].length, options: chosen(term[2], valuesOf(term[1], fields, columns)) };
  const quotes = before.replace(/\\./g, "").match(/["']/g) ?? [];
  const word = /[\w.-]*$/.exec(before)[0];
  const begin = caret - word.length;
  if (quotes.length % 2) return { begin, options: [] };
  const terms = begin === 0 || /\s/.test(text[begin - 1]) ? Object.entries(TERMS).filter(([, [name]]) => takes(name)) : [];
  const names = takes("where") ? [...columns.map((name) => [name, "column"]), ...fields.map((name) => [inCondition(name), "field"]),
    ["key", "the key, in a condition"], ...FUNCTIONS.map((name) => [name, "function"])] : [];
  const options = [terms.map(([name, [, about]]) => [`${name}:`, about]), names];
  return { begin, options: chosen(word, (before.trim() === word ? options : options.reverse()).flat()) };
}

function valuesOf(word, fields, columns) {
  if (word === "has") return fields.map((name) => [name, "field"]);
  if (word === "same") return [["key", "equal keys"], ["content", "equal fields, by their checksums"]];
  if (word === "size") return fields.map((name) => [`${name}:0-1000`, "bytes of the field"]);
  if (word !== "order") return [];
  const orders = [["key", "by key"], ["size", "by size"], ...columns.map((name) => [name, "column"]),
    ...fields.map((name) => [`size:${name}`, "bytes of the field"])];
  return orders.flatMap(([name, about]) => [[name, about], [`-${name}`, `${about}, descending`]]);
}

/** Return the options that begin with *word*, then those that have it elsewhere. */
function chosen(word, options) {
  const wanted = word.toLowerCase();
  const rank = ([name]) => (name.toLowerCase().startsWith(wanted) ? 0 : name.toLowerCase().includes(wanted) ? 1 : 2);
  const found = options.filter((option) => rank(option) < 2 && option[0] !== word);
  return found.sort((one, other) => rank(one) - rank(other)).slice(0, MOST);
}

/** Return the name of a field as conditions have it. */
function inCondition(field) {
  return /^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$/.test(field) ? field : `fields[${JSON.stringify(field)}]`;
}
