// Arrays in numpy's format: as curves or a heat map, and as a histogram.

import { colourOf, drawCurves, histogramOf, limits, lineColour } from "./charts.js";
import { button, counted, element } from "./dom.js";

const READERS = {
  b1: ["bool", 1, (view, at) => view.getUint8(at)],
  i1: ["int8", 1, (view, at) => view.getInt8(at)],
  u1: ["uint8", 1, (view, at) => view.getUint8(at)],
  i2: ["int16", 2, (view, at, little) => view.getInt16(at, little)],
  u2: ["uint16", 2, (view, at, little) => view.getUint16(at, little)],
  i4: ["int32", 4, (view, at, little) => view.getInt32(at, little)],
  u4: ["uint32", 4, (view, at, little) => view.getUint32(at, little)],
  i8: ["int64", 8, (view, at, little) => Number(view.getBigInt64(at, little))],
  u8: ["uint64", 8, (view, at, little) => Number(view.getBigUint64(at, little))],
  f2: ["float16", 2, (view, at, little) => half(view.getUint16(at, little))],
  f4: ["float32", 4, (view, at, little) => view.getFloat32(at, little)],
  f8: ["float64", 8, (view, at, little) => view.getFloat64(at, little)],
};
const MOST = 1 << 22; // elements that are looked at
const WIDEST = 512; // pixels of a heat map
const SHOWN = [640, 320]; // pixels to which a small one is enlarged
const LEAST_ROWS = 8; // of curves
const MOST_CURVES = 16;

function half(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

/** Return the type, the shape and the offset of the data of an array; throws for other bytes. */
export function readNpyHeader(bytes) {
  const magic = String.fromCharCode(...bytes.slice(0, 6));
  if (magic !== "\u0093NUMPY" || bytes.length < 12) throw new Error("not an array of numpy");
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const begin = bytes[6] > 1 ? 12 : 10;
  const end = begin + (bytes[6] > 1 ? view.getUint32(8, true) : view.getUint16(8, true));
  const text = new TextDecoder("latin1").decode(bytes.slice(begin, end));
  const descr = /'descr':\s*'([<>|=])(\w+)'/.exec(text);
  const shape = /'shape':\s*\(([^)]*)\)/.exec(text);
  if (!descr || !shape) throw new Error("an array of a type that is not shown");
  const reader = READERS[descr[2]];
  return {
    type: reader ? reader[0] : descr[2],
    reader,
    little: descr[1] !== ">",
    isFortran: /'fortran_order':\s*True/.test(text),
    shape: shape[1].split(",").filter((part) => part.trim()).map(Number),
    begin: end,
  };
}

/** Return the elements of an array in C order as far as they are here, at most MOST. */
function readNpy(bytes) {
  const header = readNpyHeader(bytes);
  if (!header.reader) throw new Error(`an array of ${header.type} is not shown`);
  const [, size, read] = header.reader;
  const total = header.shape.reduce((product, length) => product * length, 1);
  const count = Math.min(total, MOST, Math.floor((bytes.length - header.begin) / size));
  const view = new DataView(bytes.buffer, bytes.byteOffset + header.begin);
  const values = new Float64Array(count);
  for (let at = 0; at < count; at += 1) values[at] = read(view, at * size, header.little);
  return { ...header, values, total };
}

/** Return how an array lies in its values as curves over its first axis, null for one that is none. */
export function seriesOf({ shape, isFortran }) {
  const [rows, columns = 1] = shape;
  if (shape.length < 1 || shape.length > 2 || rows < LEAST_ROWS || columns < 1 || columns > MOST_CURVES || rows < 2 * columns) return null;
  return { rows, columns, place: (row, column) => (isFortran ? column * rows + row : row * columns + column) };
}

/** Draw the curves of an array in *bytes* into *canvas*; return whether it has any. */
export function drawArray(canvas, bytes) {
  const { found, series } = curvesIn(bytes);
  if (series) drawCurves(canvas, series, limits(found.values));
  return series !== null;
}

function curvesIn(bytes) {
  const found = readNpy(bytes);
  const place = found.values.length === found.total ? seriesOf(found) : null;
  const series = place && { ...place, at: (row, column) => found.values[place.place(row, column)] };
  return { found, series };
}

/** Return an element that shows an array in *bytes*; curves follow the *clock*. */
export function showArray(bytes, clock) {
  const { found, series } = curvesIn(bytes);
  const [least, most] = limits(found.values);
  const about = `${found.type} ${found.shape.join(" x ") || "scalar"}, ${counted(found.total, "element")}`;
  const range = found.values.length ? `, from ${Number(least.toPrecision(6))} to ${Number(most.toPrecision(6))}` : "";
  const first = [...found.values.slice(0, 64)].map((value) => Number(value.toPrecision(6))).join(" ");
  const shown = element("div", { class: "array" }, element("p", {}, about + range));
  const plane = series ? null : planeOf(found);
  if (series && least < most) shown.append(curves(series, [least, most], clock));
  if (plane && least < most) shown.append(...planes(found, plane, least, most));
  if (found.values.length > 8 && least < most) shown.append(histogramOf(found.values, least, most));
  shown.append(element("pre", { tabindex: 0 }, first + (found.values.length > 64 ? " …" : "")));
  return shown;
}

function curves(series, range, clock) {
  const canvas = element("canvas", { width: 800, height: 200, role: "img", "aria-label": "curves over the first axis", class: "curves" });
  drawCurves(canvas, series, range);
  const names = Array.from({ length: series.columns }, (_, column) => {
    const sign = element("span", { class: "sign" });
    sign.style.background = lineColour(column);
    return [sign, ` ${column} `];
  });
  return element("div", {}, clock.over(canvas), element("p", { class: "legend", hidden: series.columns < 2 }, ...names.flat()));
}

/** Return the heat map of a plane, and buttons for the others. */
function planes(found, plane, least, most) {
  let map = heatMap(found, plane, least, most);
  if (plane.planes < 2) return [map];
  let number = 0;
  const label = element("span", {}, ` plane 0 of ${plane.planes} `);
  const turn = (step) => {
    number = (number + step + plane.planes) % plane.planes;
    label.textContent = ` plane ${number} of ${plane.planes} `;
    const next = heatMap(found, { ...plane, number }, least, most);
    map.replaceWith(next);
    map = next;
  };
  return [map, element("p", {}, button("◀", () => turn(-1), { "aria-label": "plane before" }), label,
    button("▶", () => turn(1), { "aria-label": "next plane" }))];
}

/** Return how the last two axes of an array lie in its values, null for fewer. */
function planeOf({ shape, isFortran, values }) {
  const axes = shape.length === 3 && shape[2] <= 4 ? [shape[0], shape[1]] : shape.slice(-2);
  if (axes.length < 2 || Math.min(...axes) < 2 || isFortran) return null;
  const [rows, columns] = axes;
  const isLast = shape.length === 3 && shape[2] <= 4; // the channels
  const planes = isLast ? shape[2] : Math.floor(values.length / (rows * columns));
  if (planes < 1) return null;
  return { rows, columns, planes, number: 0, step: isLast ? shape[2] : 1, size: isLast ? 1 : rows * columns };
}

function heatMap({ values }, plane, least, most) {
  const scale = Math.max(1, Math.ceil(Math.max(plane.rows, plane.columns) / WIDEST));
  const [height, width] = [Math.ceil(plane.rows / scale), Math.ceil(plane.columns / scale)];
  const canvas = element("canvas", { width, height, role: "img", "aria-label": "heat map" });
  const factor = Math.floor(Math.min(SHOWN[0] / width, SHOWN[1] / height));
  if (factor > 1) {
    canvas.classList.add("tiny");
    canvas.style.width = `${factor * width}px`;
  }
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      const at = (y * scale * plane.columns + x * scale) * plane.step + plane.number * plane.size;
      const value = values[at];
      const rgb = Number.isFinite(value) ? colourOf((value - least) / (most - least)) : [255, 0, 255];
      image.data.set([...rgb, 255], (y * width + x) * 4);
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
