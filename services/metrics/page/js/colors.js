// Colours of the style sheet as canvases need them; read again when the theme changes.

const NAMES = ["prefill", "encode", "decode", "kv_wait", "idle", "text", "faint", "line", "panel", "accent", "thin", "warning"];

let cache = null;

/** {name: [css, [r, g, b]]} as they are now. */
export function colors() {
  if (cache) return cache;
  const probe = document.getElementById("probe");
  cache = {};
  for (const name of NAMES) {
    probe.style.color = `var(--${name.replace("_", "-")})`;
    const css = getComputedStyle(probe).color;
    cache[name] = { css, rgb: css.match(/[\d.]+/g).slice(0, 3).map(Number) };
  }
  return cache;
}

/** Follow the page's switch and the system's setting; `changed` is called after each change. */
export function followTheme(view, changed) {
  const apply = () => {
    document.documentElement.dataset.theme = view.theme;
    cache = null;
    changed();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
  return apply;
}

/** Whether the page is dark now. */
export function isDark(view) {
  return view.theme ? view.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** A pattern of slanted lines: time that nothing is known of. */
export function hatch(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colors().line.css;
  pen.lineWidth = 1.2;
  for (const shift of [-8, 0, 8]) {
    pen.moveTo(shift, 8);
    pen.lineTo(shift + 8, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}
