// Video: a player, and one frame.

import { element, line } from "./dom.js";

const LATEST = 1; // seconds into a video from which its frame is taken, at most: the first are often black
const PATIENCE = 10_000; // milliseconds
const BETWEEN = 30; // milliseconds between attempts to draw a frame: some come after the event that announces them

/** Return an element that plays a field; the *clock* follows it. */
export async function showVideo(sample, field, source, clock) {
  const url = await source.mediaUrl(sample, field);
  const note = element("p", {});
  const player = element("video", {
    controls: true, preload: "metadata", src: url, "aria-label": line(field.name),
    loadedmetadata: () => { note.textContent = `${player.videoWidth}x${player.videoHeight}, ${player.duration.toFixed(2)} s`; },
    error: () => { note.textContent = "the browser does not play it"; },
  });
  clock.follow(player);
  return element("div", {}, player, note);
}

/** Draw a frame of the video at *url* into *canvas*, which gets its shape; return its seconds. */
export async function drawFrame(canvas, url) {
  const player = element("video", { muted: true, preload: "metadata", playsinline: true });
  const happens = (event) => new Promise((resolve, reject) => {
    player.addEventListener(event, resolve, { once: true });
    player.addEventListener("error", () => reject(new Error("the browser does not play it")), { once: true });
    setTimeout(() => reject(new Error("no frame of it came")), PATIENCE);
  });
  try {
    const isKnown = happens("loadedmetadata");
    player.src = url;
    await isKnown;
    const isThere = happens("seeked");
    player.currentTime = Math.min(LATEST, player.duration / 10 || 0);
    await isThere;
    const scale = Math.min(1, canvas.width / player.videoWidth, canvas.height / player.videoHeight);
    [canvas.width, canvas.height] = [player.videoWidth * scale, player.videoHeight * scale].map((length) => Math.max(1, Math.round(length)));
    const context = canvas.getContext("2d");
    for (const end = Date.now() + PATIENCE; Date.now() < end; await new Promise((resolve) => setTimeout(resolve, BETWEEN))) {
      context.drawImage(player, 0, 0, canvas.width, canvas.height);
      if (context.getImageData(0, 0, 1, 1).data[3]) return player.duration; // opaque: the frame was there to be drawn
    }
    throw new Error("no frame of it came");
  } finally {
    player.removeAttribute("src"); // so that it takes no connection any more
    player.load();
  }
}
