"use strict";
// Words, numbers and elements that the viewer is made of.
const fxWords = (() => {
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const FAMILIES = ["input", "contraction", "reduction", "pointwise", "layout", "lookup", "kernel", "opaque", "other"];
  const CYCLE = ["contraction", "pointwise", "reduction", "lookup", "kernel", "other", "opaque"];
  const EFFECTS = { pure: "layout", alias: "contraction", writes: "kernel", random: "reduction", mode: "lookup", check: "pointwise", unknown: "opaque" };
  const FAMILY_WORDS = {
    input: "inputs, outputs", contraction: "matrix products, convolutions, attention", reduction: "reductions, softmax, norms",
    pointwise: "element by element", layout: "views and copies", lookup: "lookups, constants", kernel: "compiled kernels",
    opaque: "unknown calls", other: "others, closed modules",
  };
  const EFFECT_WORDS = {
    pure: "computes a value only", alias: "result may share memory", writes: "writes an operand", random: "draws random numbers",
    mode: "changes a mode", check: "may raise", unknown: "unknown: may do anything",
  };
  const COLOURS = {
    family: "kind of operator", seconds: "time", flops: "FLOPs", bytes: "bytes", dtype: "dtype", effect: "effect",
    region: "region", error: "error", value: "given numbers",
  };
  const NUMBERS = ["seconds", "flops", "bytes", "error", "value"];
  const UNITS = { flops: "FLOP", bytes: "B" };
  const MONO = 'ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace';
  const SANS = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"Liberation Sans",sans-serif';
  const FONTS = { title: `600 12px ${MONO}`, note: `12px ${MONO}`, detail: `10.5px ${MONO}`, frame: `600 12.5px ${SANS}` };
  const HELP = [
    ["drag, arrow keys", "move"], ["wheel, + and −", "zoom"], ["0", "show all"], ["/", "search by regular expression"],
    ["n, N", "next, previous find"], ["click", "select a node"], ["shift + click", "select the paths to a second node"],
    ["double click, Enter", "open or close a module"], ["e, E", "open all, close all"], ["d, D", "open, close one level"], ["c", "copy the code that finds the node"],
    ["Tab, in the panel", "go to operands and users"], ["[ and ]", "earlier, later pass"], ["t", "light or dark"], ["Escape", "select nothing"],
  ];

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "?";
    for (const [limit, factor, unit] of [[1e-6, 1e9, "ns"], [1e-3, 1e6, "µs"], [1, 1e3, "ms"]]) {
      if (Math.abs(seconds) < limit * 0.9995) return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
    }
    return `${Number(seconds.toPrecision(3))} s`;
  }
  const number = (column, value) => {
    if (value === null || value === undefined) return "not known";
    if (column === "seconds") return duration(value);
    if (column === "error") return Number(value).toExponential(2);
    return fxScene.quantity(value, UNITS[column] || "");
  };
  function element(tag, props = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(props)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (key in made && key !== "list") made[key] = value;
      else made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }

  return { clamp, FAMILIES, CYCLE, EFFECTS, FAMILY_WORDS, EFFECT_WORDS, COLOURS, NUMBERS, UNITS, MONO, SANS, FONTS, HELP, duration, number, element };
})();
