// Colour ramps, made in OKLab so that equal steps of attention look equal. Lightness runs one way from end to end, so
// the order survives every kind of colour blindness, and a grey print; hue only helps.

import { make } from "./dom.js";
import { rowLength, rowStart } from "./pictures.js";

const { round, min, max, sqrt, floor } = Math;

const anchors = {
  // [position, lightness, chroma, hue]; dark on paper, light on night
  light: [
    [0, 0.985, 0.004, 100],
    [0.12, 0.95, 0.025, 205],
    [0.35, 0.83, 0.085, 212],
    [0.6, 0.63, 0.13, 238],
    [0.82, 0.43, 0.15, 264],
    [1, 0.24, 0.11, 285],
  ],
  dark: [
    [0, 0.2, 0.01, 275],
    [0.12, 0.32, 0.075, 272],
    [0.35, 0.49, 0.135, 262],
    [0.6, 0.68, 0.13, 232],
    [0.82, 0.86, 0.095, 200],
    [1, 0.985, 0.05, 110],
  ],
};

function oklab(lightness, a, b) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((x) => round(255 * min(1, max(0, x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055))));
}

const rampCache = new Map();

// 256 colours as pixels (0xAABBGGRR), by theme; `vivid` from 0 (grey and pale) to 1 (full colour).
export function ramp(theme, vivid = 1) {
  const level = round(vivid * 16) / 16;
  const name = theme + level;
  if (!rampCache.has(name))
    rampCache.set(
      name,
      Uint32Array.from({ length: 256 }, (_, code) => pixel(anchors[theme], code / 255, level)),
    );
  return rampCache.get(name);
}

function pixel(points, t, vivid) {
  const at = max(
    1,
    points.findIndex(([position]) => position >= t),
  );
  const [p, q] = [points[at - 1], points[at]];
  const x = (t - p[0]) / (q[0] - p[0]);
  const mix = (f) => f(p) + x * (f(q) - f(p));
  const radians = Math.PI / 180;
  const ground = points[0][1];
  const lightness = ground + (mix((c) => c[1]) - ground) * (0.45 + 0.55 * vivid);
  const [red, green, blue] = oklab(
    lightness,
    vivid * mix((c) => c[2] * Math.cos(c[3] * radians)),
    vivid * mix((c) => c[2] * Math.sin(c[3] * radians)),
  );
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

// A colour for the canvas in the current theme: by its name in the style sheet, or as a CSS colour.
const probe = document.body.appendChild(make("span", { hidden: true }));
const cssCache = new Map();
export const colour = (name) => cssColour(`var(--${name})`);
export function cssColour(text) {
  const key = theme() + text;
  if (!cssCache.has(key)) {
    probe.style.color = text;
    cssCache.set(key, getComputedStyle(probe).color);
  }
  return cssCache.get(key);
}

export const pixelToCss = (pixel) => `rgb(${pixel & 255} ${(pixel >> 8) & 255} ${(pixel >> 16) & 255})`;
export const theme = () => document.documentElement.dataset.theme;

// A kind of heads has the colour of its name in the style sheet, in every report.
export const kindColour = (kind) => `var(--kind-${kind.replaceAll(" ", "-")}, var(--kind-mixed))`;

// A picture shrunk to `side` pixels. The fourth root of the mean fourth power is between mean and maximum, so that a
// line one token wide stays visible; and a little more, for so small a picture looks paler than it is. 0 marks pixels
// of masked pairs, 1..255 the others.
export function thumbnail(picture, side, by) {
  const { size, pooled } = picture,
    codes = picture[by],
    gain = by === "max" ? 1 : sqrt(pooled);
  const out = new Uint8Array(side * side);
  const edge = (p) => floor((p * size) / side);
  for (let y = 0; y < side; y++) {
    for (let x = 0; x < side; x++) {
      let sum = 0,
        count = 0;
      const bottom = max(edge(y + 1), edge(y) + 1),
        right = max(edge(x + 1), edge(x) + 1);
      for (let i = edge(y); i < bottom; i++) {
        const start = rowStart(picture, i),
          end = min(right, rowLength(picture, i));
        for (let j = edge(x); j < end; j++, count++) sum += codes[start + j] ** 4;
      }
      if (count) out[y * side + x] = max(1, min(255, 1.3 * gain * (sum / count) ** 0.25));
    }
  }
  return out;
}

// 256 colours for differences: one hue for less, another for more, and the ground of the page between them.
export function signedRamp(theme) {
  const name = `${theme}±`;
  const [ground, warm, cold] = theme === "dark" ? [0.2, 0.8, 0.72] : [0.985, 0.5, 0.45];
  const half = (lightness, chroma, hue) => [
    [0, ground, 0, hue],
    [1, lightness, chroma, hue],
  ];
  if (!rampCache.has(name))
    rampCache.set(
      name,
      Uint32Array.from({ length: 256 }, (_, code) =>
        code < 128
          ? pixel(half(warm, 0.15, 62), (128 - code) / 128, 1)
          : pixel(half(cold, 0.16, 255), (code - 128) / 127, 1),
      ),
    );
  return rampCache.get(name);
}

export function paint(canvas, codes, colours, side) {
  canvas.width = canvas.height = side;
  const image = new ImageData(side, side);
  const pixels = new Uint32Array(image.data.buffer);
  for (let p = 0; p < codes.length; p++) if (codes[p]) pixels[p] = colours[codes[p]];
  canvas.getContext("2d").putImageData(image, 0, 0);
}

export const badge = (kind) => {
  const node = make("span.badge", kind);
  node.style.setProperty("--kind", kindColour(kind));
  return node;
};
