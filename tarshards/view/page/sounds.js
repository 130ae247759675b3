// Sound: a player, its wave form and its spectrogram.

import { colourOf } from "./charts.js";
import { counted, element, line } from "./dom.js";

const RATE = 16_000; // to which sound is decoded, so that a spectrogram reaches 8 kHz
const LARGEST = 1 << 24; // bytes of sound that are drawn
const LONGEST = 900; // seconds of such sound
const WINDOW = 512; // samples of a column of a spectrogram
const RANGE = 80; // decibels from its darkest to its brightest colour

/** Return the decoded sound in *bytes*. */
export function decodeSound(bytes) {
  return new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes.buffer);
}

/** Return an element that plays a field and shows it; what is drawn follows the *clock*. */
export async function showAudio(sample, field, source, clock) {
  const url = await source.mediaUrl(sample, field);
  const player = element("audio", { controls: true, preload: "metadata", src: url, "aria-label": line(field.name) });
  const wave = element("canvas", { width: 800, height: 96, role: "img", "aria-label": "wave form", class: "wave" });
  const spectrum = element("canvas", { width: 800, height: 128, role: "img", "aria-label": "spectrogram from 0 to 8 kHz", class: "spectrum" });
  const note = element("p", {});
  clock.follow(player);
  player.addEventListener("error", () => { note.textContent = "the browser does not play it"; });
  player.addEventListener("loadedmetadata", async () => {
    note.textContent = `${player.duration.toFixed(2)} s`;
    if (field.size > LARGEST || !(player.duration <= LONGEST)) return;
    try {
      const sound = await decodeSound(await source.bytes(sample, field, 0, field.size));
      drawWave(wave, sound.getChannelData(0));
      drawSpectrum(spectrum, sound.getChannelData(0));
      note.textContent += `, ${counted(sound.numberOfChannels, "channel")}; spectrogram from 0 to ${RATE / 2000} kHz`;
      wave.dataset.drawn = "1";
    } catch (error) {
      note.textContent += `, no wave form: ${line(error.message)}`;
    }
  });
  return element("div", {}, player, clock.over(wave), clock.over(spectrum), note);
}

function drawWave(canvas, samples) {
  const context = canvas.getContext("2d");
  context.fillStyle = "#3b82c4";
  const { width, height } = canvas;
  for (let x = 0; x < width; x += 1) {
    let [least, most] = [0, 0];
    const [begin, end] = [x, x + 1].map((at) => Math.floor((at * samples.length) / width));
    for (let at = begin; at < end; at += Math.max(1, Math.floor((end - begin) / 256))) {
      least = Math.min(least, samples[at]);
      most = Math.max(most, samples[at]);
    }
    context.fillRect(x, ((1 - most) * height) / 2, 1, Math.max(1, ((most - least) * height) / 2));
  }
}

/** Draw the loudness of *samples* by their time, from left to right, and their frequency, from below. */
export function drawSpectrum(canvas, samples) {
  const { width, height } = canvas;
  const bins = WINDOW / 2;
  const powers = new Float32Array(width * bins);
  for (let x = 0; x < width; x += 1) {
    const begin = Math.round((x * Math.max(0, samples.length - WINDOW)) / Math.max(1, width - 1));
    powers.set(powersOf(samples.subarray(begin, begin + WINDOW)), x * bins);
  }
  const loudest = 10 * Math.log10(powers.reduce((most, power) => Math.max(most, power), 1e-12));
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let y = 0; y < height; y += 1) {
    const [low, high] = [height - 1 - y, height - y].map((at) => Math.floor((at * bins) / height));
    for (let x = 0; x < width; x += 1) {
      let power = 0;
      for (let bin = low; bin < Math.max(high, low + 1); bin += 1) power = Math.max(power, powers[x * bins + bin]);
      const share = 1 + (10 * Math.log10(power + 1e-20) - loudest) / RANGE;
      image.data.set([...colourOf(share), 255], (y * width + x) * 4);
    }
  }
  context.putImageData(image, 0, 0);
}

/** Return the powers of the frequencies in a window of samples, by a fast Fourier transform. */
export function powersOf(samples) {
  const [real, imaginary] = [new Float64Array(WINDOW), new Float64Array(WINDOW)];
  for (let at = 0, reversed = 0; at < WINDOW; at += 1) {
    real[reversed] = (samples[at] ?? 0) * (0.5 - 0.5 * Math.cos((2 * Math.PI * at) / WINDOW));
    let bit = WINDOW >> 1;
    for (; reversed & bit; bit >>= 1) reversed ^= bit;
    reversed |= bit;
  }
  for (let size = 2; size <= WINDOW; size *= 2) {
    for (let turn = 0; turn < size / 2; turn += 1) {
      const [cosine, sine] = [Math.cos((-2 * Math.PI * turn) / size), Math.sin((-2 * Math.PI * turn) / size)];
      for (let one = turn; one < WINDOW; one += size) {
        const other = one + size / 2;
        const [a, b] = [real[other] * cosine - imaginary[other] * sine, real[other] * sine + imaginary[other] * cosine];
        [real[other], imaginary[other]] = [real[one] - a, imaginary[one] - b];
        [real[one], imaginary[one]] = [real[one] + a, imaginary[one] + b];
      }
    }
  }
  return Float32Array.from({ length: WINDOW / 2 }, (_, bin) => real[bin] ** 2 + imaginary[bin] ** 2);
}
