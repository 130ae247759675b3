// Images of a sample, with masks and boxes of other fields over them.

import { button, element, line } from "./dom.js";
import { decodeText, kindOf } from "./values.js";

const BOXES = ["boxes", "bboxes", "bbox", "box", "annotations", "objects", "detections"];
const READ = 1 << 22; // bytes of a JSON field that are searched for boxes
const options = { exif: false }; // of all images
const COLOURS = ["#e6194b", "#3cb44b", "#ffe119", "#4363d8", "#f58231", "#911eb4", "#42d4f4", "#f032e6"];

/** Return an image, with switches for its orientation, and for the masks and boxes that the sample has. */
export async function showImage(sample, field, source) {
  const image = element("img", { alt: line(field.name), class: options.exif ? "exif" : "" });
  const frame = element("div", { class: "picture" }, image);
  const note = element("span", {});
  const switches = element("p", { class: "switches" }, note);
  const shown = element("div", {}, frame, switches);
  image.addEventListener("load", () => {
    note.textContent = `${image.naturalWidth}x${image.naturalHeight}`;
    image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) <= 64);
  });
  image.addEventListener("error", async () => {
    frame.replaceChildren(element("p", { class: "error" }, line(await source.failure(sample, field))));
  });
  image.src = await source.pictureUrl(sample, field, false);
  switches.append(toggle("EXIF orientation", options.exif, (isOn) => {
    options.exif = isOn;
    image.classList.toggle("exif", isOn);
  }));
  for (const other of sample.fields) {
    if (other !== field && kindOf(other.name) === "image") switches.append(maskSwitch(sample, other, source, frame));
  }
  for (const other of sample.fields) {
    if (kindOf(other.name) !== "json" || other.size > READ || other.name.endsWith(".gz")) continue;
    const boxes = await boxesIn(sample, other, source);
    if (boxes.length) switches.append(boxSwitch(boxes, other, image, frame));
  }
  return shown;
}

function toggle(text, isOn, change) {
  const box = element("input", { type: "checkbox", change: () => change(box.checked) });
  box.checked = isOn;
  return element("label", {}, box, ` ${text} `);
}

function maskSwitch(sample, field, source, frame) {
  const canvas = element("canvas", { class: "mask", role: "img", "aria-label": line(field.name), hidden: true });
  frame.append(canvas);
  return toggle(`${line(field.name)} over it`, false, async (isOn) => {
    canvas.hidden = !isOn;
    if (!isOn || canvas.dataset.drawn) return;
    const mask = new Image();
    mask.src = await source.pictureUrl(sample, field, false);
    await mask.decode();
    drawMask(canvas, mask);
    canvas.dataset.drawn = "1";
  });
}

/** Draw a mask without its black; each grey, the number of a class, gets a colour, and colours stay. */
function drawMask(canvas, mask) {
  [canvas.width, canvas.height] = [mask.naturalWidth, mask.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(mask, 0, 0);
  const image = context.getImageData(0, 0, canvas.width, canvas.height);
  const palette = COLOURS.map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  for (let at = 0; at < image.data.length; at += 4) {
    const [red, green, blue] = image.data.subarray(at, at + 3);
    if (!red && !green && !blue) image.data[at + 3] = 0;
    else if (red === green && green === blue) image.data.set(palette[red === 255 ? 0 : red % palette.length], at);
  }
  context.putImageData(image, 0, 0);
}

/** Return the boxes in a JSON field: lists of four numbers, or objects with one under a usual name. */
async function boxesIn(sample, field, source) {
  try {
    return found(JSON.parse(decodeText(await source.bytes(sample, field, 0, READ))), 0);
  } catch {
    return [];
  }
}

function found(value, depth) {
  if (depth > 3 || value === null || typeof value !== "object") return [];
  for (const name of BOXES) {
    const given = value[name];
    if (isBox(given)) return [labelled(given, value)];
    if (Array.isArray(given)) {
      const boxes = given.flatMap((each) => (isBox(each) ? [labelled(each, {})] : found(each, depth + 1)));
      if (boxes.length) return boxes;
    }
  }
  return [];
}

function isBox(value) {
  return Array.isArray(value) && value.length === 4 && value.every(Number.isFinite);
}

function labelled(numbers, { label, category, category_id, class: name }) {
  const text = label ?? category ?? category_id ?? name ?? "";
  return { numbers, label: typeof text === "object" ? "" : String(text) };
}

function boxSwitch(boxes, field, image, frame) {
  const canvas = element("canvas", { class: "boxes", role: "img", "aria-label": `boxes of ${line(field.name)}` });
  frame.append(canvas);
  let [isOn, isCorners] = [true, false];
  const draw = () => {
    canvas.hidden = !isOn;
    shape.textContent = isCorners ? "x y x y" : "x y width height";
    canvas.width = image.naturalWidth;
    canvas.height = image.naturalHeight;
    const context = canvas.getContext("2d");
    context.lineWidth = Math.max(1, image.naturalWidth / 250);
    context.font = `${Math.max(10, image.naturalWidth / 30)}px sans-serif`;
    boxes.slice(0, 500).forEach(({ numbers: [left, top, third, fourth], label }, number) => {
      const size = isCorners ? [third - left, fourth - top] : [third, fourth];
      context.strokeStyle = context.fillStyle = COLOURS[number % COLOURS.length];
      context.strokeRect(left, top, ...size);
      context.fillText(line(label), left + 2, top - 3);
    });
  };
  image.addEventListener("load", () => {
    guess();
    draw();
  });
  const shape = button("", () => {
    isCorners = !isCorners;
    draw();
  });
  const guess = () => { // a corner with a width and a height, as in COCO, unless such a box leaves the image
    isCorners = boxes.some(({ numbers: [left, top, width, height] }) =>
      left + width > image.naturalWidth + 1 || top + height > image.naturalHeight + 1);
  };
  const label = toggle(`boxes of ${line(field.name)}`, true, (value) => { isOn = value; draw(); });
  if (image.complete && image.naturalWidth) {
    guess();
    draw();
  }
  return element("span", {}, label, shape);
}
