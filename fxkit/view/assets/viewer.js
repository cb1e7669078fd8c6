"use strict";
// The viewer of one graph: a canvas that draws what is visible of a scene, with search, colours,
// opening and closing of modules, selection of nodes and paths, and a slider over passes.
const fxViewer = (() => {
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
    ["double click, Enter", "open or close a module"], ["e, E", "open all, close all"], ["c", "copy the code that finds the node"],
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

  function viewer(root) {
    const data = JSON.parse(root.querySelector(".fx-data").textContent);
    const graph = fxScene.read(data);
    const canvas = root.querySelector("canvas"), stage = root.querySelector(".fx-stage");
    const info = root.querySelector(".fx-info"), panel = root.querySelector(".fx-panel");
    const legend = root.querySelector(".fx-legend"), input = root.querySelector("input[type=search]");
    const output = root.querySelector("output"), chooser = root.querySelector("select");
    const context = canvas.getContext("2d");
    const measurer = document.createElement("canvas").getContext("2d");
    const measure = Object.fromEntries(Object.entries(FONTS).map(([name, font]) => {
      const known = new Map();
      return [name, (text) => {
        if (!known.has(text)) { measurer.font = font; known.set(text, measurer.measureText(text).width); }
        return known.get(text);
      }];
    }));
    const steps = data.steps || [];
    const state = {
      open: new Set(data.opened), unfolded: new Set(), colour: data.colour, picked: -1, pickedGroup: -1, second: -1, path: null,
      hits: [], at: -1, pattern: null, step: Math.min(1, steps.length - 1), split: steps.length > 1, ghosts: true,
    };
    let scene = null, palette = {}, hovered = null, camera = { x: 0, y: 0, s: 1 }, frameAsked = false, levels = null;

    // What is shown.

    function layOut() {
      scene = fxScene.build(graph, state, measure);
      scene.lines.forEach((line) => { line.to = line.box >= 0 ? scene.boxes[line.box] : null; });
      recolour();
    }
    const alive = (n, step) => {
      if (!steps.length) return true;
      const died = graph.get("died", n);
      return graph.get("born", n) <= step && (died === null || step < died);
    };
    const lives = data.operand_lives || {};
    function edgeAlive(n, k, step) {
      const life = lives[n] && lives[n][k];
      if (life) return life.some(([from, to]) => from <= step && (to === null || step < to));
      return alive(n, step) && alive(data.operands[n][k], step);
    }
    const boxAlive = (box, step) => !steps.length || box.nodes.some((list) => list.some((n) => alive(n, step)));
    function lineAlive(line, step) {
      if (!steps.length) return true;
      if (!line.edges.length) return alive(line.value, step);
      return someEdge(line, (n, k) => edgeAlive(n, k, step));
    }
    // The edges that a line stands for lie in one list: node, operand, node, operand, ...
    function someEdge(line, test) {
      for (let i = 0; i < line.edges.length; i += 2) if (test(line.edges[i], line.edges[i + 1])) return true;
      return false;
    }

    // Colours.

    function readPalette() {
      const style = getComputedStyle(document.documentElement);
      const value = (name) => style.getPropertyValue(`--${name}`).trim();
      palette = {};
      for (const name of ["page", "panel", "ink", "muted", "line", "edge", "accent", "good", "bad", "mark", "frame"]) palette[name] = value(name);
      for (const name of FAMILIES) palette[name] = [value(`${name}-fill`), value(`${name}-ink`)];
      palette.ramp = [0, 1, 2, 3, 4].map((i) => value(`ramp-${i}`));
    }
    function sumOf(box, column) {
      let total = null;
      for (const list of box.nodes) for (const n of list) {
        const value = graph.get(column, n);
        if (value === null || value === undefined) continue;
        total = column === "error" ? Math.max(total || 0, value) : (total || 0) + value;
      }
      return total;
    }
    const wordOf = (box, column) => {
      const words = new Set(box.nodes.flat().map((n) => graph.get(column, n) || ""));
      return words.size === 1 ? [...words][0] : "several";
    };
    function recolour() {
      const column = state.colour;
      const entries = [];
      levels = new Array(scene.boxes.length);
      if (column === "family") {
        const present = new Set(scene.boxes.map((box) => box.family));
        scene.boxes.forEach((box, i) => { levels[i] = palette[box.family] || palette.other; });
        FAMILIES.filter((f) => present.has(f)).forEach((f) => entries.push([palette[f], FAMILY_WORDS[f]]));
      } else if (isRamp()) {
        const values = scene.boxes.map((box) => sumOf(box, column));
        const most = values.reduce((a, b) => Math.max(a, b || 0), 0) || 1;
        values.forEach((value, i) => {
          levels[i] = value === null ? palette.layout : [palette.ramp[Math.min(4, Math.floor((5 * Math.max(value, 0)) / most))], palette.edge];
        });
        palette.ramp.forEach((fill, i) => entries.push([[fill, palette.edge], `≤ ${number(column, (most * (i + 1)) / 5)}`]));
        if (values.includes(null)) entries.push([palette.layout, "not known"]);
      } else {
        const words = scene.boxes.map((box) => wordOf(box, column));
        const kinds = [...new Set(words)].filter((w) => w && w !== "several").sort();
        const colourOf = (w) => (column === "effect" && EFFECTS[w] ? palette[EFFECTS[w]] : w && w !== "several" ? palette[CYCLE[kinds.indexOf(w) % CYCLE.length]] : palette.input);
        words.forEach((w, i) => { levels[i] = colourOf(w); });
        kinds.slice(0, 14).forEach((w) => entries.push([colourOf(w), column === "effect" ? EFFECT_WORDS[w] || w : w]));
        if (kinds.length > 14) entries.push([palette.input, `and ${kinds.length - 14} more`]);
        if (words.includes("several")) entries.push([palette.input, "several"]);
        if (words.includes("")) entries.push([palette.input, column === "region" ? "in no region" : "none"]);
      }
      if (steps.length) {
        const marks = [[palette.good, "added"], [palette.bad, "removed"], [palette.lookup[1], "changed"]];
        marks.forEach(([ink, words]) => entries.push([[palette.page, ink], words]));
      }
      legend.replaceChildren(...entries.map(([[fill, ink], words]) => {
        const key = element("i");
        key.style.background = fill;
        key.style.borderColor = ink;
        return element("span", {}, key, words);
      }));
      ask();
    }

    // Drawing.

    function ask() {
      if (frameAsked) return;
      frameAsked = true;
      requestAnimationFrame(() => { frameAsked = false; draw(); });
    }
    const halves = () => (steps.length && state.split && state.step > 0 ? [state.step - 1, state.step] : [state.step]);
    const area = () => ({ w: stage.clientWidth, h: stage.clientHeight });
    const paneWidth = () => area().w / halves().length;

    function draw() {
      const { w, h } = area(), ratio = window.devicePixelRatio || 1;
      if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(h * ratio)) {
        canvas.width = Math.round(w * ratio);
        canvas.height = Math.round(h * ratio);
      }
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.fillStyle = palette.page;
      context.fillRect(0, 0, w, h);
      const panes = halves(), width = paneWidth();
      panes.forEach((step, i) => {
        context.save();
        context.beginPath();
        context.rect(i * width, 0, width, h);
        context.clip();
        context.translate(i * width, 0);
        drawPane(step, i, panes.length, width, h);
        context.restore();
      });
      if (panes.length > 1) {
        context.fillStyle = palette.line;
        context.fillRect(width - 1, 0, 2, h);
      }
    }

    function drawPane(step, side, sides, w, h) {
      const { x, y, s } = camera;
      const see = { left: x, top: y, right: x + w / s, bottom: y + h / s };
      const visible = (l, t, r, b) => r >= see.left && l <= see.right && b >= see.top && t <= see.bottom;
      context.save();
      context.scale(s, s);
      context.translate(-x, -y);
      for (const frame of scene.frames) if (visible(frame.x, frame.y, frame.x + frame.w + 8, frame.y + frame.h + 8)) drawFrame(frame);
      drawLines(step, visible, s);
      for (const frame of scene.frames) if (visible(frame.x, frame.y, frame.x + frame.w, frame.y + frame.h)) drawFrameTitle(frame, s, see);
      if (s > 0.12) for (const tag of scene.tags) if (visible(tag.x, tag.y, tag.x + tag.w, tag.y + tag.h)) drawTag(tag, step, s);
      scene.boxes.forEach((box, i) => {
        if (visible(box.x, box.y, box.x + box.w, box.y + box.h)) drawBox(box, i, step, side, sides, s);
      });
      context.restore();
      if (sides > 1) drawPaneTitle(step, side, w);
    }

    function drawPaneTitle(step, side, w) {
      const words = steps.length === 2 ? (side ? "after" : "before") : side ? `after ${steps[step].title}` : `before ${steps[step + 1].title}`;
      context.font = FONTS.frame;
      const width = context.measureText(words).width + 20;
      context.fillStyle = palette.panel;
      context.strokeStyle = palette.line;
      rounded(w / 2 - width / 2, 8, width, 24, 12);
      context.fill();
      context.stroke();
      context.fillStyle = palette.ink;
      context.textAlign = "center";
      context.fillText(words, w / 2, 24.5);
      context.textAlign = "left";
    }
    function rounded(x, y, w, h, r) {
      context.beginPath();
      if (context.roundRect) context.roundRect(x, y, w, h, r);
      else context.rect(x, y, w, h);
    }
    function drawFrame(frame) {
      context.lineWidth = 1.1;
      if (frame.repeats > 1) {
        for (const shift of [8, 4]) {
          rounded(frame.x + shift, frame.y + shift, frame.w, frame.h, 10);
          context.fillStyle = palette.page;
          context.fill();
          context.globalAlpha = 0.55;
          context.strokeStyle = palette.frame;
          context.stroke();
          context.globalAlpha = 1;
        }
      }
      rounded(frame.x, frame.y, frame.w, frame.h, 10);
      context.fillStyle = palette.page;
      context.fill();
      context.globalAlpha = 0.05 + 0.02 * frame.depth;
      context.fillStyle = palette.frame;
      context.fill();
      context.globalAlpha = 0.55;
      const picked = frame.group === state.pickedGroup;
      context.lineWidth = picked ? 3 : 1.1;
      context.strokeStyle = picked ? palette.accent : palette.frame;
      context.stroke();
      context.globalAlpha = 1;
    }
    // A title keeps a readable size when the frame is wide enough for it.
    function drawFrameTitle(frame, s, see) {
      const scale = s < 0.75 ? Math.min(0.75 / s, Math.max(1, (frame.w - 16) / frame.titleWidth)) : 1;
      if (s * scale < 0.3) return;
      const top = s < 0.75 ? frame.y + 16 * scale + 4 : frame.y + 20;
      const sticky = Math.min(Math.max(top, see.top + 16 / s), frame.y + frame.h - 8);
      const left = scale > 1 ? frame.x + 10 : frame.titleX;
      context.save();
      context.translate(left, sticky);
      context.scale(scale, scale);
      context.font = FONTS.frame;
      const words = `▾ ${frame.title}`, width = context.measureText(words).width;
      if (scale > 1 || sticky > top) {
        context.globalAlpha = 0.8;
        context.fillStyle = palette.page;
        context.fillRect(-4, -13, frame.titleWidth - 8, 18);
        context.globalAlpha = 1;
      }
      context.fillStyle = palette.ink;
      context.fillText(words, 0, 0);
      context.font = `12px ${SANS}`;
      context.fillStyle = palette.muted;
      context.fillText(frame.kind, width + 7, 0);
      context.restore();
    }

    function onPath(line) {
      if (!state.path) return false;
      return state.path.has(line.value) && (line.edges.length ? someEdge(line, (n) => state.path.has(n)) : true);
    }
    function isLit(line) {
      if (state.path) return onPath(line);
      const chosen = hovered && hovered.kind === "box" ? hovered.index : state.picked >= 0 ? scene.shownAs[state.picked] : -1;
      return chosen >= 0 && (line.box === chosen || scene.shownAs[line.value] === chosen);
    }
    function drawLines(step, visible, s) {
      const lit = [];
      context.lineWidth = Math.max(1.3, 0.5 / s);
      context.strokeStyle = palette.edge;
      context.globalAlpha = state.path ? 0.25 : s < 0.1 ? 0.4 : 0.85;
      context.beginPath();
      const shown = [];
      for (const line of scene.lines) {
        if (!visible(line.left, line.top, line.right, line.bottom) || !lineAlive(line, step)) continue;
        if (isLit(line)) { lit.push(line); continue; }
        shown.push(line);
        trace(line);
      }
      context.stroke();
      context.globalAlpha = 1;
      if (s > 0.25) arrows(shown, palette.edge);
      if (!lit.length) return;
      context.lineWidth = Math.max(2.4, 1.4 / s);
      context.strokeStyle = palette.accent;
      context.beginPath();
      lit.forEach(trace);
      context.stroke();
      if (s > 0.15) arrows(lit, palette.accent);
    }
    function trace(line) {
      const p = line.points;
      let x = p[0], y = p[1];
      context.moveTo(x, y);
      for (let i = 2; i < p.length; i += 2) {
        const end = p[i + 1] - (line.to && i === p.length - 2 ? Math.min(6, p[i + 1] - y) : 0);
        if (Math.abs(p[i] - x) < 0.05) { if (end > y) context.lineTo(x, end); }
        else context.bezierCurveTo(x, (y + end) / 2, p[i], (y + end) / 2, p[i], end);
        x = p[i]; y = p[i + 1];
      }
    }
    function arrows(lines, colour) {
      context.fillStyle = colour;
      context.beginPath();
      for (const line of lines) {
        if (!line.to) continue;
        const x = line.points[line.points.length - 2], y = line.points[line.points.length - 1];
        context.moveTo(x, y); context.lineTo(x - 3.6, y - 7); context.lineTo(x + 3.6, y - 7);
      }
      context.fill();
    }
    function drawTag(tag, step, s) {
      if (steps.length && !lineAlive(tag, step)) return;
      rounded(tag.x, tag.y, tag.w, tag.h, 9);
      context.fillStyle = palette.page;
      context.fill();
      context.setLineDash([3, 2.5]);
      context.lineWidth = 1;
      context.strokeStyle = palette.edge;
      context.stroke();
      context.setLineDash([]);
      if (s < 0.4) return;
      context.font = FONTS.detail;
      context.fillStyle = palette.muted;
      context.textAlign = "center";
      context.fillText(tag.atSource ? `${tag.text} ↴` : `↳ ${tag.text}`, tag.x + tag.w / 2, tag.y + 12.7);
      context.textAlign = "left";
    }

    // In a comparison: added on the right, removed on the left, changed on both.
    function mark(box, step, side, sides) {
      if (sides < 2) return steps.length && state.step > 0 ? stepMark(box, state.step, true) : null;
      return stepMark(box, side ? step : step + 1, side === 1);
    }
    function stepMark(box, step, isAfter) {
      const nodes = box.nodes.flat();
      if (isAfter && nodes.some((n) => graph.get("born", n) === step)) return palette.good;
      if (!isAfter && nodes.some((n) => graph.get("died", n) === step)) return palette.bad;
      const changed = steps[step].changed || {};
      return nodes.some((n) => n in changed) ? palette.lookup[1] : null;
    }
    function isDim(box) {
      if (state.path) return !box.nodes.some((list) => list.some((n) => state.path.has(n)));
      return Boolean(state.pattern) && !box.hit;
    }
    function drawBox(box, index, step, side, sides, s) {
      const isThere = boxAlive(box, step), [fill, ink] = levels[index];
      const marked = isThere && steps.length ? mark(box, step, side, sides) : null;
      if (!isThere && !state.ghosts) return;
      const chosen = index === (state.picked >= 0 ? scene.shownAs[state.picked] : -1) || (box.group >= 0 && box.group === state.pickedGroup)
        || (state.second >= 0 && index === scene.shownAs[state.second]);
      context.globalAlpha = !isThere ? 0.13 : isDim(box) ? 0.22 : 1;
      if (s < 0.08) {
        context.fillStyle = marked || (box.hit || chosen ? palette.accent : ink);
        context.fillRect(box.x, box.y, box.w, box.h);
        context.globalAlpha = 1;
        return;
      }
      if (box.node < 0) {
        rounded(box.x + 3, box.y + 3, box.w, box.h, 6);
        context.fillStyle = palette.page;
        context.fill();
        context.strokeStyle = ink;
        context.lineWidth = 1;
        context.stroke();
      }
      rounded(box.x, box.y, box.w, box.h, 6);
      context.fillStyle = isThere ? fill : palette.page;
      context.fill();
      context.lineWidth = marked ? 3.2 : chosen || box.hit ? 2.8 : box.node < 0 ? 1.6 : 1.2;
      context.strokeStyle = marked || (chosen ? palette.accent : ink);
      context.stroke();
      if (s >= 0.3) drawWords(box, s);
      context.globalAlpha = 1;
    }
    // On a colour that stands for a number, pale words could not be read.
    const isRamp = () => NUMBERS.includes(state.colour);
    function drawWords(box, s) {
      const pale = isRamp() ? palette.ink : palette.muted;
      const baseline = box.y + (box.detail ? 17 : 18.5);
      const start = box.x + box.w / 2 - box.head / 2;
      context.fillStyle = palette.ink;
      context.font = FONTS.title;
      context.fillText(box.title, start, baseline);
      if (box.note) {
        const at = start + context.measureText(box.title).width + 10;
        context.font = FONTS.note;
        context.fillStyle = pale;
        context.fillText(box.note, at, baseline);
      }
      if (!box.detail || s < 0.4) return;
      context.font = FONTS.detail;
      context.fillStyle = pale;
      context.textAlign = "center";
      context.fillText(box.detail, box.x + box.w / 2, box.y + 31.5);
      context.textAlign = "left";
    }

    // Camera.

    function look(x, y, s) {
      const pane = paneWidth(), least = Math.min(pane / scene.width, area().h / scene.height, 1) * 0.5;
      s = clamp(s, least, 4);
      const w = pane / s, h = area().h / s;
      camera = {
        s,
        x: scene.width < w ? (scene.width - w) / 2 : clamp(x, -w * 0.4, scene.width - w * 0.6),
        y: scene.height < h ? clamp(y, scene.height - h, 0) : clamp(y, -h * 0.4, scene.height - h * 0.6),
      };
      ask();
    }
    function fit() {
      const pane = paneWidth(), { h } = area();
      const s = Math.min(pane / scene.width, h / scene.height, 1.4);
      look((scene.width - pane / s) / 2, Math.min(0, (scene.height - h / s) / 2), s);
    }
    // First view: all of it where it stays readable, else the top.
    function start() {
      const pane = paneWidth(), { h } = area();
      const whole = Math.min(pane / scene.width, h / scene.height);
      if (whole > 0.55) { fit(); return; }
      const s = clamp(pane / scene.width, 0.62, 1);
      const first = scene.boxes.length ? scene.boxes.reduce((a, b) => (b.y < a.y ? b : a)) : null;
      const middle = scene.width * s <= pane || !first ? scene.width / 2 : first.x + first.w / 2;
      look(clamp(middle - pane / s / 2, 0, Math.max(0, scene.width - pane / s)), steps.length > 1 ? -40 / s : 0, s);
    }
    function zoom(factor, px = paneWidth() / 2, py = area().h / 2) {
      const s = camera.s, before = { x: camera.x + px / s, y: camera.y + py / s };
      const pane = paneWidth(), least = Math.min(pane / scene.width, area().h / scene.height, 1) * 0.5;
      const next = clamp(s * factor, least, 4);
      look(before.x - px / next, before.y - py / next, next);
    }
    function centre(thing, s = Math.max(camera.s, 0.8)) {
      look(thing.x + thing.w / 2 - paneWidth() / s / 2, thing.y + thing.h / 2 - area().h / s / 2, s);
    }

    // Modules.

    const groupsAround = (n) => {
      const found = [];
      for (let g = graph.owner[n]; g > 0; g = graph.parent[g]) found.push(g);
      return found;
    };
    // Opens what is around a node; a folded layer is shown by the first of its kind.
    function reveal(n) {
      let changed = false;
      for (const g of groupsAround(n)) {
        const lead = graph.leader[g] >= 0 && !state.unfolded.has(graph.leader[g]) ? graph.leader[g] : g;
        if (!state.open.has(lead)) { state.open.add(lead); changed = true; }
        if (lead !== g) {
          const twin = fxScene.nodesOf(graph, lead)[fxScene.nodesOf(graph, g).indexOf(n)];
          groupsAround(twin).forEach((inner) => { if (!state.open.has(inner)) { state.open.add(inner); changed = true; } });
          break;
        }
      }
      if (changed) relayOut();
      return scene.shownAs[n];
    }
    function anchor(g) {
      const index = scene.frameOfGroup.has(g) ? scene.frameOfGroup.get(g) : -1;
      if (index >= 0) return scene.frames[index];
      return scene.boxOfGroup.has(g) ? scene.boxes[scene.boxOfGroup.get(g)] : null;
    }
    // Lays out anew; what `g` is stays where it is on the screen.
    function relayOut(g = -1) {
      const before = g >= 0 ? anchor(g) : null;
      const old = before && { x: before.x + before.w / 2, y: before.y };
      layOut();
      mapHits();
      const after = g >= 0 ? anchor(g) : null;
      if (old && after) look(camera.x + after.x + after.w / 2 - old.x, camera.y + after.y - old.y, camera.s);
      else look(camera.x, camera.y, camera.s);
    }
    function toggle(g) {
      if (g <= 0) return;
      if (state.open.has(g)) state.open.delete(g);
      else state.open.add(g);
      relayOut(g);
    }
    function toggleFold(g) {
      const lead = graph.leader[g] >= 0 ? graph.leader[g] : g;
      if (!graph.groups[lead].fold) return;
      const all = [lead, ...graph.groups[lead].fold];
      if (state.unfolded.has(lead)) state.unfolded.delete(lead);
      else {
        state.unfolded.add(lead);
        if (state.open.has(lead)) all.forEach((other) => { copyOpen(lead, other); });
      }
      relayOut(lead);
    }
    // Opens in a like layer what is open in the first one.
    function copyOpen(from, to) {
      if (state.open.has(from)) state.open.add(to);
      const inner = (g) => graph.groups[g].items.filter((item) => item < 0).map((item) => ~item);
      const a = inner(from), b = inner(to);
      a.forEach((g, i) => { if (b[i] !== undefined && from !== to) copyOpen(g, b[i]); });
    }
    function openAll(isOpen) {
      state.open = new Set([0]);
      if (isOpen) graph.groups.forEach((_, g) => state.open.add(g));
      layOut();
      mapHits();
      fit();
    }

    // Search.

    function mapHits() {
      scene.boxes.forEach((box) => { box.hit = false; });
      state.hits.forEach((n) => { const at = scene.shownAs[n]; if (at >= 0) scene.boxes[at].hit = true; });
    }
    const wordsOf = (n) => ["name", "operator", "constants", "type", "source", "reads", "region"].map((c) => graph.get(c, n) || "").join(" ")
      + " " + groupsAround(n).map((g) => `${graph.groups[g].path} ${graph.groups[g].kind}`).join(" ");
    function search(text) {
      input.value = text;
      state.pattern = null;
      state.hits = [];
      state.at = -1;
      if (text) {
        try { state.pattern = new RegExp(text, "i"); } catch (error) { output.textContent = "not a pattern"; mapHits(); ask(); return; }
        for (let n = 0; n < graph.count; n++) if (state.pattern.test(wordsOf(n))) state.hits.push(n);
      }
      output.textContent = state.pattern ? `${state.hits.length} found` : "";
      mapHits();
      ask();
    }
    function step(by) {
      if (!state.hits.length) return;
      state.at = (state.at + by + state.hits.length) % state.hits.length;
      output.textContent = `${state.at + 1} of ${state.hits.length}`;
      select(state.hits[state.at], true);
    }

    // Selection.

    function select(n, isFar = false) {
      state.picked = n;
      state.pickedGroup = -1;
      state.second = -1;
      state.path = null;
      if (n >= 0 && isFar) { reveal(n); centre(scene.boxes[scene.shownAs[n]]); }
      describe();
      ask();
    }
    function selectGroup(g) {
      state.picked = -1; state.pickedGroup = g; state.second = -1; state.path = null;
      describe();
      ask();
    }
    function reach(from, next) {
      const seen = new Set([from]), waiting = [from];
      while (waiting.length) for (const n of next(waiting.pop())) if (!seen.has(n)) { seen.add(n); waiting.push(n); }
      return seen;
    }
    // All nodes on ways between two nodes, in whichever direction values flow.
    function selectPath(a, b) {
      const down = (n) => graph.users[n], up = (n) => data.operands[n];
      const between = (first, last) => {
        const after = reach(first, down), before = reach(last, up);
        return new Set([...after].filter((n) => before.has(n)));
      };
      let path = between(a, b);
      if (!path.size) path = between(b, a);
      state.picked = a; state.second = b; state.pickedGroup = -1;
      state.path = path.size ? path : null;
      describe();
      if (!path.size) info.textContent = `no path between ${graph.get("name", a)} and ${graph.get("name", b)}`;
      ask();
    }
    const quoted = (name) => JSON.stringify(name);
    function code() {
      const name = (n) => quoted(graph.get("name", n));
      if (state.path) return `g = fxkit.graph(gm); g.between(g[${name(state.picked)}], g[${name(state.second)}])`;
      if (state.picked >= 0) return `fxkit.graph(gm)[${name(state.picked)}]`;
      if (state.pickedGroup <= 0) return "";
      return `fxkit.graph(gm).find(where=lambda n: f"{n.module_path}.".startswith(${quoted(`${graph.groups[state.pickedGroup].path}.`)}))`;
    }
    function copy() {
      const text = code();
      if (!text) return;
      const area_ = element("textarea", { value: text, className: "fx-offscreen" });
      root.append(area_);
      area_.select();
      let done = false;
      try { done = document.execCommand("copy"); } catch (error) { done = false; }
      area_.remove();
      if (!done && navigator.clipboard) navigator.clipboard.writeText(text).catch(() => {});
      info.textContent = `copied: ${text}`;
    }

    const row = (key, value) => (value ? [element("dt", {}, key), element("dd", {}, value)] : []);
    function link(n) {
      const words = graph.get("name", n), short = graph.get("operator", n).split(".").pop();
      return element("button", { className: "fx-link", onclick: () => select(n, true), title: graph.get("type", n) }, words === short ? words : `${words} `, words === short ? "" : element("small", {}, short));
    }
    function describe() {
      const n = state.picked, g = state.pickedGroup;
      panel.hidden = n < 0 && g < 0;
      root.classList.toggle("fx-with-panel", !panel.hidden);
      if (panel.hidden) { info.textContent = hint; return; }
      panel.replaceChildren(...(n >= 0 ? nodePanel(n) : groupPanel(g)));
      info.textContent = n >= 0 ? summary(n) : graph.groups[g].path;
    }
    function nodePanel(n) {
      const column = (name) => graph.get(name, n);
      const around = groupsAround(n);
      const costs = NUMBERS.filter((c) => graph.has(c)).flatMap((c) => row(COLOURS[c], number(c, column(c))));
      const parts = [
        element("header", {}, element("b", {}, column("name")), element("button", { className: "fx-close", title: "close (Escape)", onclick: () => select(-1) }, "×")),
        element("dl", {}, ...row("operator", column("operator")), ...row("constants", column("constants")), ...row("value", column("type")),
          ...row("stride", column("stride")), ...row("source", column("source")), ...row("reads", column("reads")),
          ...row("effect", EFFECT_WORDS[column("effect")]), ...row("region", column("region")), ...costs),
      ];
      if (around.length) parts.push(element("p", {}, ...around.slice().reverse().map((g) => moduleButton(g))));
      const edited = steps.length ? (steps[state.step].changed || {})[n] : "";
      if (edited) parts.push(element("p", {}, `changed in this step: ${edited}`));
      if (state.path) parts.push(element("p", { className: "fx-muted" }, `${state.path.size} nodes on paths to ${graph.get("name", state.second)}`));
      parts.push(element("p", {}, element("button", { onclick: copy, title: "copy (c)" }, "copy code"), element("code", { className: "fx-find" }, code())));
      for (const [words, list] of [["operands", data.operands[n]], ["users", graph.users[n]]]) {
        const some = list.filter((other) => !steps.length || alive(other, state.step));
        if (some.length) parts.push(element("h4", {}, `${some.length} ${some.length === 1 ? words.slice(0, -1) : words}`), element("p", {}, ...some.slice(0, 60).map(link)));
        if (some.length > 60) parts.push(element("p", { className: "fx-muted" }, `and ${some.length - 60} more`));
      }
      return parts;
    }
    function moduleButton(g) {
      return element("button", { className: "fx-link", title: graph.groups[g].path, onclick: () => selectGroup(g) }, `${graph.groups[g].name} `, element("small", {}, graph.groups[g].kind));
    }
    function groupPanel(g) {
      const group = graph.groups[g], nodes = fxScene.nodesOf(graph, g);
      const total = (c) => nodes.reduce((sum, n) => sum + (graph.get(c, n) || 0), 0);
      const costs = ["seconds", "flops", "bytes"].filter((c) => graph.has(c)).flatMap((c) => row(COLOURS[c], number(c, total(c))));
      const lead = graph.leader[g] >= 0 ? graph.leader[g] : g, buttons = [];
      if (anchor(g)) buttons.push(element("button", { onclick: () => toggle(g), title: "Enter" }, state.open.has(g) ? "close" : "open"));
      if (graph.groups[lead].fold) buttons.push(element("button", { onclick: () => { toggleFold(lead); describe(); } }, state.unfolded.has(lead) ? "draw like layers once" : `draw all ${graph.groups[lead].fold.length + 1} layers`));
      return [
        element("header", {}, element("b", {}, group.path || data.title), element("button", { className: "fx-close", title: "close (Escape)", onclick: () => select(-1) }, "×")),
        element("dl", {}, ...row("class", group.kind), ...row("nodes", String(nodes.length)), ...row("parameters", group.parameters ? fxScene.quantity(group.parameters) : ""), ...costs),
        element("p", {}, ...buttons),
        element("p", {}, element("button", { onclick: copy, title: "copy (c)" }, "copy code"), element("code", { className: "fx-find" }, code())),
      ];
    }
    function summary(n) {
      const column = (name) => graph.get(name, n);
      const users = graph.users[n].length;
      const costs = ["seconds", "flops", "bytes", "error"].filter((c) => graph.has(c) && column(c) !== null && column(c) !== undefined).map((c) => number(c, column(c)));
      return [column("name"), column("operator"), column("constants"), column("type"), column("stride") && `stride ${column("stride")}`, `${users} user${users === 1 ? "" : "s"}`,
        ...costs, column("region") && `region ${column("region")}`, graph.groups[graph.owner[n]].path, column("source")].filter(Boolean).join("  ·  ");
    }
    function hoverWords(box) {
      if (box.node >= 0) return summary(box.node);
      const value = ["seconds", "flops", "bytes"].filter((c) => graph.has(c)).map((c) => number(c, sumOf(box, c)));
      return [graph.groups[box.group].path, box.detail, ...value, "double click to open"].join("  ·  ");
    }

    // Pointer.

    function thingAt(px, py) {
      const x = camera.x + (px % paneWidth()) / camera.s, y = camera.y + py / camera.s;
      for (let i = scene.boxes.length - 1; i >= 0; i--) {
        const b = scene.boxes[i];
        if (x >= b.x && x <= b.x + b.w && y >= b.y && y <= b.y + b.h) return { kind: "box", index: i, box: b };
      }
      for (const tag of scene.tags) if (x >= tag.x && x <= tag.x + tag.w && y >= tag.y && y <= tag.y + tag.h) return { kind: "tag", tag };
      for (let i = scene.frames.length - 1; i >= 0; i--) {
        const f = scene.frames[i];
        if (x >= f.x && x <= f.x + f.w && y >= f.y && y <= f.y + f.h) return { kind: "frame", frame: f };
      }
      return null;
    }
    const place = (e) => { const r = canvas.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
    function click(thing, isSecond) {
      if (!thing) { select(-1); return; }
      if (thing.kind === "frame") { selectGroup(thing.frame.group); return; }
      if (thing.kind === "tag") { select(thing.tag.value, thing.tag.atSource === false); return; }
      if (thing.box.node < 0) { selectGroup(thing.box.group); return; }
      if (isSecond && state.picked >= 0) selectPath(state.picked, thing.box.node);
      else select(thing.box.node);
    }
    let from = null;
    canvas.addEventListener("pointerdown", (e) => {
      from = { x: e.clientX, y: e.clientY, cx: camera.x, cy: camera.y, moved: false };
      canvas.setPointerCapture(e.pointerId);
      root.focus({ preventScroll: true });
    });
    canvas.addEventListener("pointermove", (e) => {
      if (from) {
        const dx = e.clientX - from.x, dy = e.clientY - from.y;
        if (Math.abs(dx) + Math.abs(dy) > 4) from.moved = true;
        if (from.moved) { stage.classList.add("fx-drag"); look(from.cx - dx / camera.s, from.cy - dy / camera.s, camera.s); }
        return;
      }
      const thing = thingAt(...place(e)), was = hovered && hovered.index;
      hovered = thing;
      stage.classList.toggle("fx-over", Boolean(thing) && thing.kind !== "frame");
      if (thing && thing.kind === "box") info.textContent = hoverWords(thing.box);
      else if (thing && thing.kind === "tag") info.textContent = `${summary(thing.tag.value)}  ·  click to go there`;
      else info.textContent = state.picked >= 0 ? summary(state.picked) : hint;
      if ((thing && thing.index) !== was) ask();
    });
    canvas.addEventListener("pointerup", (e) => {
      stage.classList.remove("fx-drag");
      if (from && !from.moved) click(thingAt(...place(e)), e.shiftKey);
      from = null;
    });
    canvas.addEventListener("pointerleave", () => { hovered = null; ask(); });
    canvas.addEventListener("dblclick", (e) => {
      const thing = thingAt(...place(e));
      if (thing && thing.kind === "frame") toggle(thing.frame.group);
      if (thing && thing.kind === "box" && thing.box.node < 0) toggle(thing.box.group);
    });
    canvas.addEventListener("wheel", (e) => {
      const alone = document.body.classList.contains("fx-full");
      if (!alone && !e.ctrlKey && !root.contains(document.activeElement)) return;
      e.preventDefault();
      const [px, py] = place(e);
      zoom(Math.exp(-e.deltaY * 0.0016), px % paneWidth(), py);
    }, { passive: false });

    // Controls.

    const theme = () => {
      const style = document.documentElement;
      const dark = style.dataset.theme ? style.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      style.dataset.theme = dark ? "light" : "dark";
      document.dispatchEvent(new Event("fx-theme"));
    };
    const help = () => {
      const box = root.querySelector(".fx-help");
      box.hidden = !box.hidden;
    };
    const actions = { fit, in: () => zoom(1.35), out: () => zoom(1 / 1.35), open: () => openAll(true), close: () => openAll(false), theme, help };
    root.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => actions[button.dataset.do]()));
    input.addEventListener("input", () => search(input.value));
    input.addEventListener("keydown", (e) => {
      if (e.key === "Enter") { e.preventDefault(); step(e.shiftKey ? -1 : 1); }
      if (e.key === "Escape") { search(""); root.focus(); }
      e.stopPropagation();
    });
    for (const [column, words] of Object.entries(COLOURS)) {
      if (graph.has(column)) chooser.append(element("option", { value: column }, words));
    }
    chooser.value = state.colour;
    function colour(column) {
      if (!graph.has(column)) return;
      state.colour = chooser.value = column;
      recolour();
    }
    chooser.addEventListener("change", () => colour(chooser.value));
    const slider = root.querySelector("input[type=range]"), told = root.querySelector(".fx-step");
    function goStep(to) {
      if (!steps.length) return;
      const panes = halves().length;
      state.step = clamp(to, 0, steps.length - 1);
      slider.value = state.step;
      const now = steps[state.step];
      const rules = Object.entries(now.rules || {}).map(([rule, count]) => `${rule} × ${count}`).join(", ");
      const counts = [[now.added, "added"], [now.removed, "removed"], [now.modified, "changed"]].filter(([c]) => c).map(([c, w]) => `${c} ${w}`).join(", ");
      told.replaceChildren(element("b", {}, steps.length === 2 ? now.title : `${state.step} of ${steps.length - 1}: ${now.title}`), ` ${now.nodes} nodes${counts ? `; ${counts}` : state.step ? "; nothing changed" : ""}${rules ? `; rules: ${rules}` : ""}`);
      if (panes !== halves().length) start();
      describe();
      ask();
    }
    if (slider) {
      slider.addEventListener("input", () => goStep(Number(slider.value)));
      root.querySelector("[data-split]").addEventListener("change", (e) => { state.split = e.target.checked; start(); });
      root.querySelector("[data-ghosts]").addEventListener("change", (e) => { state.ghosts = e.target.checked; ask(); });
    }
    root.addEventListener("keydown", (e) => {
      if (e.ctrlKey || e.metaKey || e.altKey || (e.target !== root && e.target !== canvas && !["Escape", "/"].includes(e.key))) return;
      const by = (area().w * 0.12) / camera.s;
      const keys = {
        "+": actions.in, "=": actions.in, "-": actions.out, "0": fit, "/": () => input.focus(), n: () => step(1), N: () => step(-1),
        ArrowLeft: () => look(camera.x - by, camera.y, camera.s), ArrowRight: () => look(camera.x + by, camera.y, camera.s),
        ArrowUp: () => look(camera.x, camera.y - by, camera.s), ArrowDown: () => look(camera.x, camera.y + by, camera.s),
        Enter: () => { if (state.pickedGroup > 0) toggle(state.pickedGroup); }, e: () => openAll(true), E: () => openAll(false), c: copy, t: theme, "?": help,
        "[": () => goStep(state.step - 1), "]": () => goStep(state.step + 1),
        Escape: () => { root.querySelector(".fx-help").hidden = true; search(""); select(-1); },
      };
      if (keys[e.key]) { e.preventDefault(); keys[e.key](); }
    });
    root.querySelector(".fx-help").replaceChildren(...HELP.filter(([key]) => steps.length || !key.startsWith("[")).flatMap(([key, words]) => [element("dt", {}, key), element("dd", {}, words)]));

    // What other scripts, and the page's address, may ask for.

    const find = (name) => data.columns.name.indexOf(name);
    const groupOf = (path) => graph.groups.findIndex((group) => group.path === path);
    const api = {
      search, step, colour, fit, openAll, goStep, copy,
      select: (name) => select(find(name), true),
      path: (a, b) => selectPath(find(a), find(b)),
      open: (path) => { const g = groupOf(path); if (g > 0 && !state.open.has(g)) toggle(g); },
      close: (path) => { const g = groupOf(path); if (g > 0 && state.open.has(g)) toggle(g); },
      unfold: (path) => { const g = groupOf(path); if (g > 0) toggleFold(g); },
      // Where a node is on the screen, in pixels of the page.
      at: (name) => {
        const box = scene.boxes[scene.shownAs[find(name)]], r = canvas.getBoundingClientRect();
        return box && { x: r.left + (box.x + box.w / 2 - camera.x) * camera.s, y: r.top + (box.y + box.h / 2 - camera.y) * camera.s };
      },
      draw,
      scene: () => scene,
      state: () => ({
        boxes: scene.boxes.length, frames: scene.frames.map((f) => f.title), colour: state.colour, hits: state.hits.map((n) => graph.get("name", n)),
        selected: state.picked >= 0 ? graph.get("name", state.picked) : state.pickedGroup >= 0 ? graph.groups[state.pickedGroup].path : "",
        path: state.path ? [...state.path].map((n) => graph.get("name", n)).sort() : [], code: code(), info: info.textContent, camera: { ...camera },
        step: state.step,
      }),
    };
    root.fxViewer = api;
    const hint = info.textContent;
    readPalette();
    layOut();
    start();
    if (steps.length) goStep(state.step);
    document.addEventListener("fx-theme", () => { readPalette(); recolour(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readPalette(); recolour(); });
    let size = area().w;
    new ResizeObserver(() => {
      if (!area().w) return;
      if (!size) start();
      size = area().w;
      look(camera.x, camera.y, camera.s);
    }).observe(stage);
    if (document.body.classList.contains("fx-full")) follow(api);
    draw();
  }

  // The page's address may say what to show: #open=all&colour=flops&search=relu&select=relu_7&path=a,b&step=2&theme=dark
  function follow(api) {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const say = {
      theme: (v) => { document.documentElement.dataset.theme = v; document.dispatchEvent(new Event("fx-theme")); },
      open: (v) => (v === "all" ? api.openAll(true) : v === "none" ? api.openAll(false) : api.open(v)), unfold: api.unfold,
      colour: api.colour, step: (v) => api.goStep(Number(v)), search: api.search, select: api.select, path: (v) => api.path(...v.split(",")),
    };
    for (const [key, act] of Object.entries(say)) for (const value of wanted.getAll(key)) act(value);
  }

  return { viewer };
})();
document.querySelectorAll(".fx-viewer").forEach((root) => fxViewer.viewer(root));
