// What a card shows of a sample besides text: a picture, a frame of a video, the spectrogram of a sound, or curves.

import { drawArray, readNpyHeader, seriesOf } from "./arrays.js";
import { element, fromBase64, inBytes, line } from "./dom.js";
import { decodeSound, drawSpectrum } from "./sounds.js";
import { kindOf } from "./values.js";
import { drawFrame } from "./videos.js";

const SIZE = [320, 200]; // pixels of what is drawn, at most
const HELD = 300; // drawings
const AT_ONCE = 2; // drawn, so that connections remain for what else is asked for
const LARGEST_SOUND = 1 << 22; // bytes
const LARGEST_ARRAY = 1 << 20;
const PART = /(^|[._-])(mask|masks|seg|segmentation|label|labels|depth|alpha|annotation|annotations)([._-]|$)/i; // of a picture
const DRAWINGS = { video: drawVideo, audio: drawAudio, array: drawCurvesOf };

/** Return the field of a row that is shown as more than text: the first of the *chosen* ones, or the best of all. */
export function visualOf(row, chosen, source) {
  const fields = chosen.length ? chosen.map((name) => row.fields.find((field) => field.name === name)).filter(Boolean) : row.fields;
  const ranked = fields.map((field) => [rankOf(field, source), field]).filter(([rank]) => rank !== null);
  if (!chosen.length) ranked.sort(([one], [other]) => one - other);
  return ranked[0]?.[1] ?? null;
}

function rankOf(field, source) {
  if (field.error || !field.size || !(field.picture || source.offers.has("bytes"))) return null;
  const kind = kindOf(field.name);
  if (kind === "array") return isSmallSeries(field) ? 4 : null;
  if (kind === "image" && PART.test(field.name)) return 2;
  return { video: 0, image: 1, audio: 3 }[kind] ?? null;
}

function isSmallSeries(field) {
  try {
    return field.size <= LARGEST_ARRAY && seriesOf(readNpyHeader(fromBase64(field.head))) !== null;
  } catch {
    return false;
  }
}

const drawn = new Map(); // drawings by the sample and field
const waiting = [];
let drawing = 0;

/** Return an element that shows a field of a row; *pixels* are those of a picture's longer side. */
export function showVisual(row, field, source, pixels) {
  return kindOf(field.name) === "image" ? pictureOf(row, field, source, pixels) : drawingOf(row, field, source);
}

/** Return a small picture, or why there is none. */
function pictureOf(row, field, source, pixels) {
  const failed = (reason) => image.replaceWith(element("p", { class: "error" }, line(reason)));
  const image = element("img", {
    alt: line(field.name), loading: "lazy", decoding: "async",
    load: () => image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) <= 48),
    error: async () => failed(await source.failure(row, field).catch((error) => error.message)),
  });
  source.pictureUrl(row, field, pixels).then((url) => { image.src = url; }, (error) => failed(error.message));
  return element("div", { class: "visual" }, image);
}

function drawingOf(row, field, source) {
  const kind = kindOf(field.name);
  const name = `${source.name ?? ""} ${row.number} ${field.name}`;
  const host = element("div", { class: kind === "video" ? "visual" : "visual wide" });
  const put = ({ canvas, note }) => {
    canvas.setAttribute("aria-label", `${line(field.name)} ${note}`);
    host.replaceChildren(canvas, kind === "array" ? "" : element("span", { class: "note" }, note));
    if (kind === "audio") host.append(playButton(row, field, source));
  };
  if (drawn.has(name)) {
    put(drawn.get(name));
    return host;
  }
  host.textContent = "…";
  waiting.push({ host, draw: async () => {
    const canvas = element("canvas", { width: SIZE[0], height: SIZE[1], role: "img" });
    try {
      const found = { canvas, note: await DRAWINGS[kind](canvas, row, field, source) };
      drawn.set(name, found);
      while (drawn.size > HELD) drawn.delete(drawn.keys().next().value);
      put(found);
    } catch (error) {
      host.replaceChildren(element("span", {}, `${kind}, ${inBytes(field.size)}: ${line(error.message)}`));
      if (kind === "audio") host.append(playButton(row, field, source));
    }
  } });
  setTimeout(next); // once the card is on the page
  return host;
}

/** Draw what waits; cards that have left the page are forgotten. */
function next() {
  while (drawing < AT_ONCE && waiting.length) {
    const { host, draw } = waiting.shift();
    if (!host.isConnected) continue;
    drawing += 1;
    draw().finally(() => {
      drawing -= 1;
      next();
    });
  }
}

async function drawVideo(canvas, row, field, source) {
  const seconds = await drawFrame(canvas, await source.mediaUrl(row, field, true));
  return `▶ ${seconds.toFixed(1)} s`;
}

async function drawAudio(canvas, row, field, source) {
  if (field.size > LARGEST_SOUND) throw new Error("too long to be drawn here");
  const sound = await decodeSound(await source.bytes(row, field, 0, field.size));
  drawSpectrum(canvas, sound.getChannelData(0));
  return `${sound.duration.toFixed(1)} s`;
}

async function drawCurvesOf(canvas, row, field, source) {
  drawArray(canvas, await source.bytes(row, field, 0, field.size));
  return "curves";
}

let playing = null; // the player of the sound that is heard, and its button

/** Return a button that plays a sound; only one is heard at a time. */
function playButton(row, field, source) {
  const label = (isOn) => {
    start.textContent = isOn ? "■" : "▶";
    start.setAttribute("aria-label", `${isOn ? "stop" : "play"} ${line(field.name)}`);
  };
  const start = element("button", { type: "button", class: "play", tabindex: -1, click: async (event) => {
    event.stopPropagation(); // it does not open the sample
    const isMine = playing?.start === start;
    playing?.stop();
    if (isMine) return;
    const player = new Audio(await source.mediaUrl(row, field));
    const stop = () => {
      player.pause();
      player.removeAttribute("src");
      playing = null;
      label(false);
    };
    playing = { start, stop };
    player.addEventListener("ended", stop);
    label(true);
    player.play().catch(() => { stop(); });
  } });
  label(false);
  return start;
}
