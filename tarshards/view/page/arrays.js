// Arrays in numpy's format: as a heat map or picture, and as a histogram.

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
const BARS = 48;
const COLOURS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]; // viridis

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

function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (COLOURS.length - 1);
  const low = Math.min(Math.floor(at), COLOURS.length - 2);
  return COLOURS[low].map((value, part) => Math.round(value + (at - low) * (COLOURS[low + 1][part] - value)));
}

function limits(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (Number.isFinite(value)) {
      least = Math.min(least, value);
      most = Math.max(most, value);
    }
  }
  return [least, most];
}

/** Return an element that shows an array in *bytes*. */
export function showArray(bytes) {
  const found = readNpy(bytes);
  const [least, most] = limits(found.values);
  const about = `${found.type} ${found.shape.join(" x ") || "scalar"}, ${counted(found.total, "element")}`;
  const range = found.values.length ? `, from ${Number(least.toPrecision(6))} to ${Number(most.toPrecision(6))}` : "";
  const first = [...found.values.slice(0, 64)].map((value) => Number(value.toPrecision(6))).join(" ");
  const shown = element("div", { class: "array" }, element("p", {}, about + range));
  const plane = planeOf(found);
  if (plane && least < most) {
    shown.append(heatMap(found, plane, least, most));
    if (plane.planes > 1) {
      let number = 0;
      const label = element("span", {}, ` plane 0 of ${plane.planes} `);
      const turn = (step) => {
        number = (number + step + plane.planes) % plane.planes;
        label.textContent = ` plane ${number} of ${plane.planes} `;
        shown.querySelector("canvas").replaceWith(heatMap(found, { ...plane, number }, least, most));
      };
      shown.append(element("p", {}, button("◀", () => turn(-1), { "aria-label": "plane before" }), label,
        button("▶", () => turn(1), { "aria-label": "next plane" })));
    }
  }
  if (found.values.length > 8 && least < most) shown.append(histogramOf(found.values, least, most));
  shown.append(element("pre", {}, first + (found.values.length > 64 ? " …" : "")));
  return shown;
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
  if (Math.max(width, height) <= 64) canvas.classList.add("tiny");
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      const at = (y * scale * plane.columns + x * scale) * plane.step + plane.number * plane.size;
      const value = values[at];
      const rgb = Number.isFinite(value) ? colour((value - least) / (most - least)) : [255, 0, 255];
      image.data.set([...rgb, 255], (y * width + x) * 4);
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function histogramOf(values, least, most) {
  const counts = new Array(BARS).fill(0);
  for (const value of values) {
    if (Number.isFinite(value)) counts[Math.min(BARS - 1, Math.floor(((value - least) / (most - least)) * BARS))] += 1;
  }
  const highest = Math.max(...counts);
  const canvas = element("canvas", { width: BARS * 6, height: 60, role: "img", "aria-label": "histogram of values" });
  const context = canvas.getContext("2d");
  context.fillStyle = "#3b82c4";
  counts.forEach((count, at) => {
    const height = Math.max(count ? 1 : 0, (60 * count) / highest);
    context.fillRect(at * 6, 60 - height, 5, height);
  });
  return canvas;
}
