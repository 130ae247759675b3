// Elements of the page, and values as text. What samples hold only ever becomes text nodes: nothing here parses HTML.

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]/gu;

/** Return an element; functions among its attributes listen to events, and children are nodes or text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Return text in which characters that have no shape, or that move others, are escaped; line breaks stay. */
export function visible(text) {
  return String(text).replace(UNSEEN, (found) => {
    const code = found.codePointAt(0);
    if (code >= 0xdc80 && code <= 0xdcff) return `\\x${(code - 0xdc00).toString(16)}`;
    return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** Return text as one line. */
export function line(text) {
  return visible(text).replace(/[\n\t]/g, (found) => (found === "\n" ? "\\n" : "\\t"));
}

export function shorten(text, length) {
  return text.length > length ? `${text.slice(0, length)}…` : text;
}

export function counted(number, unit) {
  return `${number.toLocaleString("en")} ${number === 1 ? unit : `${unit.replace(/y$/, "ie")}s`}`;
}

export function inBytes(size) {
  if (size < 1000) return `${size} B`;
  const power = Math.min(Math.floor(Math.log10(size) / 3), 4);
  return `${(size / 1000 ** power).toPrecision(3)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

/** Put children into an element instead of those that it has; null is none. */
export function fill(host, ...children) {
  host.replaceChildren(...children.filter((child) => child !== null));
}

export function button(text, press, attributes = {}) {
  return element("button", { type: "button", click: press, ...attributes }, text);
}

/** Return the bytes of base64. */
export function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** Let the browser save bytes as a file. */
export function save(name, parts, type = "text/plain") {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  saveUrl(name, url);
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Let the browser save what is at an address of this page. */
export function saveUrl(name, url) {
  element("a", { href: url, download: name }).click();
}

/** Return a button that does something which may fail, and says for a moment that it is *done*, or why not. */
export function doing(text, done, act, attributes = {}) {
  const made = button(text, async () => {
    try {
      await act();
      made.textContent = done;
    } catch (error) {
      made.textContent = line(error.message);
    }
    setTimeout(() => { made.textContent = text; }, 2000);
  }, attributes);
  return made;
}

/** Put text into the clipboard, also on a page without https, where browsers have no API for it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    if (!isCopied) throw new Error("the browser does not allow it");
  }
}
