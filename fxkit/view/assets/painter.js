"use strict";
// Draws what is visible of a scene, in the colours that were asked for. `v` is the viewer's state:
// data, graph, canvas, stage, legend, state and steps stay; scene, palette, camera, hovered and levels
// change.
const fxPainter = (v) => {
  const { CYCLE, EFFECTS, EFFECT_WORDS, FAMILIES, FAMILY_WORDS, FONTS, NUMBERS, SANS, element, number } = fxWords;
  const { data, graph, canvas, stage, legend, state, steps } = v;
  const context = canvas.getContext("2d");
  const MAP = { w: 150, h: 150 };
  let frameAsked = false;

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
    v.palette = {};
    for (const name of ["page", "panel", "ink", "muted", "line", "edge", "accent", "good", "bad", "mark", "frame"]) v.palette[name] = value(name);
    for (const name of FAMILIES) v.palette[name] = [value(`${name}-fill`), value(`${name}-ink`)];
    v.palette.ramp = [0, 1, 2, 3, 4].map((i) => value(`ramp-${i}`));
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
    v.levels = new Array(v.scene.boxes.length);
    if (column === "family") {
      const present = new Set(v.scene.boxes.map((box) => box.family));
      v.scene.boxes.forEach((box, i) => { v.levels[i] = v.palette[box.family] || v.palette.other; });
      FAMILIES.filter((f) => present.has(f)).forEach((f) => entries.push([v.palette[f], FAMILY_WORDS[f]]));
    } else if (isRamp()) {
      const values = v.scene.boxes.map((box) => sumOf(box, column));
      const most = values.reduce((a, b) => Math.max(a, b || 0), 0) || 1;
      values.forEach((value, i) => {
        v.levels[i] = value === null ? v.palette.layout : [v.palette.ramp[Math.min(4, Math.floor((5 * Math.max(value, 0)) / most))], v.palette.edge];
      });
      v.palette.ramp.forEach((fill, i) => entries.push([[fill, v.palette.edge], `≤ ${number(column, (most * (i + 1)) / 5)}`]));
      if (values.includes(null)) entries.push([v.palette.layout, "not known"]);
    } else {
      const words = v.scene.boxes.map((box) => wordOf(box, column));
      const kinds = [...new Set(words)].filter((w) => w && w !== "several").sort(new Intl.Collator("en", { numeric: true }).compare);
      const colourOf = (w) => (column === "effect" && EFFECTS[w] ? v.palette[EFFECTS[w]] : w && w !== "several" ? v.palette[CYCLE[kinds.indexOf(w) % CYCLE.length]] : v.palette.input);
      words.forEach((w, i) => { v.levels[i] = colourOf(w); });
      kinds.slice(0, 14).forEach((w) => entries.push([colourOf(w), column === "effect" ? EFFECT_WORDS[w] || w : w]));
      if (kinds.length > 14) entries.push([v.palette.input, `and ${kinds.length - 14} more`]);
      if (words.includes("several")) entries.push([v.palette.input, "several"]);
      if (words.includes("")) entries.push([v.palette.input, column === "region" ? "in no region" : "none"]);
    }
    if (steps.length) {
      const marks = [[v.palette.good, "added"], [v.palette.bad, "removed"], [v.palette.lookup[1], "changed"]];
      marks.forEach(([ink, words]) => entries.push([[v.palette.page, ink], words]));
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
    context.fillStyle = v.palette.page;
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
    if (panes.length === 1) drawMap(w, h);
    if (panes.length > 1) {
      context.fillStyle = v.palette.line;
      context.fillRect(width - 1, 0, 2, h);
    }
  }

  // A map of the whole in a corner, where only a part is in view; null where all of it is.
  function mapPlace() {
    const { w, h } = area(), { width, height } = v.scene;
    const isWhole = v.camera.s <= Math.min(w / width, h / height) * 1.05;
    if (isWhole || halves().length > 1 || w < 480) return null;
    const s = Math.min(MAP.w / width, MAP.h / height);
    const size = { w: Math.max(8, width * s), h: Math.max(8, height * s) };
    return { s, ...size, x: w - size.w - 14, y: h - size.h - 14 };
  }
  // The place of the scene that a point of the map stands for; null outside of it.
  function mapAt(px, py) {
    const map = mapPlace();
    if (!map || px < map.x || py < map.y || px > map.x + map.w || py > map.y + map.h) return null;
    return { x: (px - map.x) / map.s, y: (py - map.y) / map.s };
  }
  function drawMap(w, h) {
    const map = mapPlace();
    if (!map) return;
    context.save();
    context.translate(map.x, map.y);
    context.globalAlpha = 0.92;
    context.fillStyle = v.palette.panel;
    context.strokeStyle = v.palette.line;
    context.lineWidth = 1;
    rounded(-6, -6, map.w + 12, map.h + 12, 6);
    context.fill();
    context.stroke();
    context.globalAlpha = 1;
    v.scene.boxes.forEach((box, i) => {
      const [fill, ink] = v.levels[i];
      context.fillStyle = box.hit ? v.palette.accent : isRamp() ? fill : ink;
      context.fillRect(box.x * map.s, box.y * map.s, Math.max(1.5, box.w * map.s), Math.max(1, box.h * map.s));
    });
    context.strokeStyle = v.palette.accent;
    context.lineWidth = 1.5;
    const { x, y, s } = v.camera;
    const left = Math.max(0, x * map.s), top = Math.max(0, y * map.s);
    context.strokeRect(left, top, Math.min(map.w, (x + w / s) * map.s) - left, Math.min(map.h, (y + h / s) * map.s) - top);
    context.restore();
  }

  function drawPane(step, side, sides, w, h) {
    const { x, y, s } = v.camera;
    const see = { left: x, top: y, right: x + w / s, bottom: y + h / s };
    const visible = (l, t, r, b) => r >= see.left && l <= see.right && b >= see.top && t <= see.bottom;
    context.save();
    context.scale(s, s);
    context.translate(-x, -y);
    for (const frame of v.scene.frames) if (visible(frame.x, frame.y, frame.x + frame.w + 8, frame.y + frame.h + 8)) drawFrame(frame);
    drawLines(step, visible, s);
    const pinned = [], above = [];
    for (const frame of v.scene.frames) {
      if (!visible(frame.x, frame.y, frame.x + frame.w, frame.y + frame.h)) continue;
      const title = frameTitle(frame, s, see, sides > 1 ? see.top + 34 / s : see.top, pinned);
      if (title && title.isPinned) above.push(title);
      else if (title) drawFrameTitle(title);
    }
    if (s > 0.12) for (const tag of v.scene.tags) if (visible(tag.x, tag.y, tag.x + tag.w, tag.y + tag.h)) drawTag(tag, step, s);
    v.scene.boxes.forEach((box, i) => {
      if (visible(box.x, box.y, box.x + box.w, box.y + box.h)) drawBox(box, i, step, side, sides, s);
    });
    above.forEach(drawFrameTitle);
    context.restore();
    if (sides > 1) drawPaneTitle(step, side, w);
  }

  function drawPaneTitle(step, side, w) {
    const words = steps.length === 2 ? (side ? "after" : "before") : side ? `after ${steps[step].title}` : `before ${steps[step + 1].title}`;
    context.font = FONTS.frame;
    const width = context.measureText(words).width + 20;
    context.fillStyle = v.palette.panel;
    context.strokeStyle = v.palette.line;
    rounded(w / 2 - width / 2, 8, width, 24, 12);
    context.fill();
    context.stroke();
    context.fillStyle = v.palette.ink;
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
        context.fillStyle = v.palette.page;
        context.fill();
        context.globalAlpha = 0.55;
        context.strokeStyle = v.palette.frame;
        context.stroke();
        context.globalAlpha = 1;
      }
    }
    rounded(frame.x, frame.y, frame.w, frame.h, 10);
    context.fillStyle = v.palette.page;
    context.fill();
    context.globalAlpha = tint(frame);
    context.fillStyle = v.palette.frame;
    context.fill();
    context.globalAlpha = 0.55;
    const picked = frame.group === state.pickedGroup;
    context.lineWidth = picked ? 3 : 1.1;
    context.strokeStyle = picked ? v.palette.accent : v.palette.frame;
    context.stroke();
    context.globalAlpha = 1;
  }
  const tint = (frame) => 0.05 + 0.02 * frame.depth;
  // A title keeps a readable size when the frame is wide enough for it. Where the frame's top is out of
  // view it is pinned to the upper edge, below those of the frames around it and over all boxes.
  function frameTitle(frame, s, see, upper, pinned) {
    const room = Math.max(1, (frame.w - 16) / frame.titleWidth), most = frame.depth ? 1.7 : 6;
    const scale = s < 0.75 ? Math.min(0.75 / s, room, most) : 1;
    if (s * scale < 0.3) return null;
    const top = s < 0.75 ? frame.y + 16 * scale + 4 : frame.y + 20;
    const above = pinned.filter((other) => other.left < frame.x + frame.w && frame.x < other.right);
    const edge = above.reduce((most, other) => Math.max(most, other.bottom), upper) + 16 * Math.max(scale, 1 / s);
    const sticky = Math.min(Math.max(top, edge), frame.y + frame.h - 8);
    if (sticky > top) pinned.push({ left: frame.x, right: frame.x + frame.w, bottom: sticky + 4 / s });
    const isPinned = sticky > top;
    const left = isPinned ? Math.max(frame.x, see.left) + 10 : scale > 1 ? frame.x + 10 : frame.titleX;
    return { frame, left, y: sticky, scale, isPinned };
  }
  function drawFrameTitle({ frame, left, y, scale, isPinned }) {
    context.save();
    context.translate(left, y);
    context.scale(scale, scale);
    context.font = FONTS.frame;
    const words = `▾ ${frame.title}`, width = context.measureText(words).width;
    context.font = `12px ${SANS}`;
    const end = width + (frame.kind ? 7 + context.measureText(frame.kind).width : 0);
    if (scale > 1 || isPinned) {
      context.fillStyle = v.palette.page;
      context.fillRect(-4, -12, end + 8, 16);
      context.globalAlpha = tint(frame);
      context.fillStyle = v.palette.frame;
      context.fillRect(-4, -12, end + 8, 16);
      context.globalAlpha = 1;
    }
    context.font = FONTS.frame;
    context.fillStyle = v.palette.ink;
    context.fillText(words, 0, 0);
    context.font = `12px ${SANS}`;
    context.fillStyle = v.palette.muted;
    context.fillText(frame.kind, width + 7, 0);
    context.restore();
  }

  function onPath(line) {
    if (!state.path) return false;
    if (!line.edges.length) return state.path.has(line.value);
    return someEdge(line, (n, k) => state.path.has(n) && state.path.has(data.operands[n][k]));
  }
  function isLit(line) {
    if (state.path) return onPath(line);
    const chosen = v.hovered && v.hovered.kind === "box" ? v.hovered.index : state.picked >= 0 ? v.scene.shownAs[state.picked] : -1;
    return chosen >= 0 && (line.box === chosen || v.scene.shownAs[line.value] === chosen);
  }
  function drawLines(step, visible, s) {
    const lit = [];
    context.lineWidth = Math.max(1.3, 0.5 / s);
    context.strokeStyle = v.palette.edge;
    context.globalAlpha = state.path ? 0.25 : s < 0.1 ? 0.4 : 0.85;
    context.beginPath();
    const shown = [];
    for (const line of v.scene.lines) {
      if (!visible(line.left, line.top, line.right, line.bottom) || !lineAlive(line, step)) continue;
      if (isLit(line)) { lit.push(line); continue; }
      shown.push(line);
      trace(line);
    }
    context.stroke();
    context.globalAlpha = 1;
    if (s > 0.25) arrows(shown, v.palette.edge);
    if (!lit.length) return;
    context.lineWidth = Math.max(2.4, 1.4 / s);
    context.strokeStyle = v.palette.accent;
    context.beginPath();
    lit.forEach(trace);
    context.stroke();
    if (s > 0.15) arrows(lit, v.palette.accent);
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
    context.fillStyle = v.palette.page;
    context.fill();
    context.setLineDash([3, 2.5]);
    context.lineWidth = 1;
    context.strokeStyle = v.palette.edge;
    context.stroke();
    context.setLineDash([]);
    if (s < 0.4) return;
    context.font = FONTS.detail;
    context.fillStyle = v.palette.muted;
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
    if (isAfter && nodes.some((n) => graph.get("born", n) === step)) return v.palette.good;
    if (!isAfter && nodes.some((n) => graph.get("died", n) === step)) return v.palette.bad;
    const changed = steps[step].changed || {};
    return nodes.some((n) => n in changed) ? v.palette.lookup[1] : null;
  }
  const isChanged = (box) => Boolean(stepMark(box, state.step, true) || (state.step > 0 && stepMark(box, state.step, false)));
  function isDim(box) {
    if (state.path) return !box.nodes.some((list) => list.some((n) => state.path.has(n)));
    return Boolean(state.pattern) && !box.hit;
  }
  function drawBox(box, index, step, side, sides, s) {
    const isThere = boxAlive(box, step), [fill, ink] = v.levels[index];
    const marked = isThere && steps.length ? mark(box, step, side, sides) : null;
    if (!isThere && !state.ghosts) return;
    const chosen = index === (state.picked >= 0 ? v.scene.shownAs[state.picked] : -1) || (box.group >= 0 && box.group === state.pickedGroup)
      || (state.second >= 0 && index === v.scene.shownAs[state.second]);
    context.globalAlpha = !isThere ? 0.13 : isDim(box) ? 0.22 : 1;
    if (s < 0.16) {
      context.fillStyle = marked || (box.hit || chosen ? v.palette.accent : isRamp() ? fill : ink);
      context.fillRect(box.x, box.y, box.w, box.h);
      context.globalAlpha = 1;
      return;
    }
    if (box.node < 0) {
      rounded(box.x + 3, box.y + 3, box.w, box.h, 6);
      context.fillStyle = v.palette.page;
      context.fill();
      context.strokeStyle = ink;
      context.lineWidth = 1;
      context.stroke();
    }
    rounded(box.x, box.y, box.w, box.h, 6);
    context.fillStyle = isThere ? fill : v.palette.page;
    context.fill();
    context.lineWidth = marked ? 3.2 : chosen || box.hit ? 2.8 : box.node < 0 ? 1.6 : 1.2;
    context.strokeStyle = marked || (chosen ? v.palette.accent : ink);
    context.stroke();
    if (s >= 0.3) drawWords(box, s);
    context.globalAlpha = 1;
  }
  // On a colour that stands for a number, pale words could not be read.
  const isRamp = () => NUMBERS.includes(state.colour);
  function drawWords(box, s) {
    const pale = isRamp() ? v.palette.ink : v.palette.muted;
    const baseline = box.y + (box.detail ? 17 : 18.5);
    const start = box.x + box.w / 2 - box.head / 2;
    context.fillStyle = v.palette.ink;
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

  return { alive, area, ask, draw, halves, isChanged, mapAt, paneWidth, readPalette, recolour, someEdge, sumOf };
};
