// Lines, histograms and colours of values, and a mark that follows what is played.

import { element } from "./dom.js";

const BARS = 48;
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const LINES = ["#3b82c4", "#d9730d", "#3a9a4b", "#c43d4b", "#8a63c9", "#8c6d46", "#c955a4", "#7f7f88", "#8f9f1f", "#1fa3b5"];

/** Return the red, green and blue of a share between 0 and 1. */
export function colourOf(share) {
  const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[low].map((value, part) => Math.round(value + (at - low) * (VIRIDIS[low + 1][part] - value)));
}

/** Return the colour of a line by its number. */
export function lineColour(number) {
  return LINES[number % LINES.length];
}

/** Return the least and the most finite value. */
export function limits(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (Number.isFinite(value)) {
      least = Math.min(least, value);
      most = Math.max(most, value);
    }
  }
  return [least, most];
}

/** Draw lines over their rows: *series* has *rows* values for each of *columns*, which *at(row, column)* returns. */
export function drawCurves(canvas, { rows, columns, at }, [least, most]) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  const y = (value) => 2 + (1 - (value - least) / (most - least || 1)) * (height - 4);
  context.lineWidth = Math.max(1, width / 500);
  for (let column = 0; column < columns; column += 1) {
    context.strokeStyle = lineColour(column);
    context.beginPath();
    let isOpen = false; // whether the line goes on: it has a gap where a value is not finite
    const to = (x, value) => {
      if (Number.isFinite(value)) context[isOpen ? "lineTo" : "moveTo"](x, y(value));
      isOpen = Number.isFinite(value);
    };
    for (let x = 0, row = 0; row < rows; x += 1) {
      const end = Math.max(row + 1, Math.floor(((x + 1) * rows) / width));
      const values = Array.from({ length: Math.min(end, rows) - row }, (_, number) => at(row + number, column));
      const place = rows > width ? x : (row * width) / Math.max(rows - 1, 1);
      if (values.length === 1) to(place, values[0]);
      else for (const value of limits(values)) to(place, value);
      row = end;
    }
    context.stroke();
  }
}

export function histogramOf(values, least, most) {
  const counts = new Array(BARS).fill(0);
  for (const value of values) {
    if (Number.isFinite(value)) counts[Math.min(BARS - 1, Math.floor(((value - least) / (most - least)) * BARS))] += 1;
  }
  const highest = Math.max(...counts);
  const canvas = element("canvas", { width: BARS * 6, height: 60, role: "img", "aria-label": "histogram of values" });
  const context = canvas.getContext("2d");
  context.fillStyle = LINES[0];
  counts.forEach((count, at) => {
    const height = Math.max(count ? 1 : 0, (60 * count) / highest);
    context.fillRect(at * 6, 60 - height, 5, height);
  });
  return canvas;
}

/** What the sound or video of a sample is at, as a share of its length, for what is drawn over the same time. */
export class Clock {
  #listeners = [];
  #player = null;

  /** Follow a player; a video before a sound. */
  follow(player) {
    if (this.#player?.tagName === "VIDEO" && player.tagName !== "VIDEO") return;
    this.#player = player;
    const tell = () => {
      if (this.#player === player && player.duration > 0) this.#listeners.forEach((listen) => listen(player.currentTime / player.duration));
    };
    for (const event of ["timeupdate", "seeking", "loadedmetadata"]) player.addEventListener(event, tell);
  }

  /** Return *canvas*, which is drawn over time from left to right, with a mark at the time; a click moves there. */
  over(canvas) {
    const mark = element("span", { class: "now", hidden: true });
    this.#listeners.push((share) => {
      mark.hidden = false;
      mark.style.left = `${100 * share}%`;
    });
    return element("div", { class: "timed", click: (event) => {
      if (this.#player?.duration > 0) this.#player.currentTime = (event.offsetX / canvas.clientWidth) * this.#player.duration;
    } }, canvas, mark);
  }
}
