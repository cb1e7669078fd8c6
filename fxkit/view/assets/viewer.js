"use strict";
// The viewer of one graph: a canvas that draws what is visible of a scene, with search, colours,
// opening and closing of modules, selection of nodes and paths, and a slider over passes.
const fxViewer = (() => {
  const { COLOURS, FONTS, HELP, clamp, element } = fxWords;

  function viewer(root) {
    const data = JSON.parse(root.querySelector(".fx-data").textContent);
    const graph = fxScene.read(data);
    const canvas = root.querySelector("canvas"), stage = root.querySelector(".fx-stage");
    const info = root.querySelector(".fx-info"), panel = root.querySelector(".fx-panel");
    const legend = root.querySelector(".fx-legend"), input = root.querySelector("input[type=search]");
    const output = root.querySelector("output"), chooser = root.querySelector("select");
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
    const v = {
      data, graph, root, canvas, stage, info, panel, legend, state, steps, hint: info.textContent,
      scene: null, palette: {}, hovered: null, camera: { x: 0, y: 0, s: 1 }, levels: [],
    };
    const { alive, area, ask, draw, halves, isChanged, mapAt, paneWidth, readPalette, recolour, sumOf } = fxPainter(v);

    // What is shown.

    function layOut() {
      v.scene = fxScene.build(graph, state, measure);
      v.scene.lines.forEach((line) => { line.to = line.box >= 0 ? v.scene.boxes[line.box] : null; });
      recolour();
    }
    // Camera.

    function look(x, y, s) {
      const pane = paneWidth(), least = Math.min(pane / v.scene.width, area().h / v.scene.height, 1) * 0.5;
      s = clamp(s, least, 4);
      const w = pane / s, h = area().h / s;
      v.camera = {
        s,
        x: v.scene.width < w ? (v.scene.width - w) / 2 : clamp(x, -w * 0.4, v.scene.width - w * 0.6),
        y: v.scene.height < h ? clamp(y, v.scene.height - h, 0) : clamp(y, -h * 0.4, v.scene.height - h * 0.6),
      };
      ask();
    }
    function fit() {
      const pane = paneWidth(), { h } = area();
      const s = Math.min(pane / v.scene.width, h / v.scene.height, 1.4);
      look((v.scene.width - pane / s) / 2, Math.min(0, (v.scene.height - h / s) / 2), s);
    }
    // First view: all of it where it stays readable. Else as many levels of modules as do, if the
    // drawing may choose; of a comparison the first change; else the top.
    const READABLE = 0.45;
    const wholeScale = () => Math.min(paneWidth() / v.scene.width, area().h / v.scene.height);
    let rested = null;
    function start() {
      firstLook();
      rested = v.camera;
    }
    function firstLook() {
      if (wholeScale() > READABLE) { fit(); return; }
      if (data.overview && area().w) { startWithOverview(); return; }
      const changed = steps.length > 1 ? firstChange() : null;
      if (changed) { centre(withMore(changed, 0.8), 0.8); return; }
      const pane = paneWidth();
      const s = clamp(pane / v.scene.width, 0.62, 1);
      const first = v.scene.boxes.length ? v.scene.boxes.reduce((a, b) => (b.y < a.y ? b : a)) : null;
      const middle = v.scene.width * s <= pane || !first ? v.scene.width / 2 : first.x + first.w / 2;
      look(clamp(middle - pane / s / 2, 0, Math.max(0, v.scene.width - pane / s)), steps.length > 1 ? -40 / s : 0, s);
    }
    function startWithOverview() {
      const opened = new Set(data.opened);
      let best = new Set([0]);
      for (let level = 1; level <= deepest; level++) {
        state.open = new Set([...opened].filter((g) => depthOf(g) < level));
        layOut();
        if (wholeScale() <= READABLE) break;
        best = state.open;
      }
      state.open = best;
      layOut();
      fit();
    }
    function firstChange() {
      const changed = v.scene.boxes.filter((box) => isChanged(box));
      return changed.length ? changed.reduce((a, b) => (b.y < a.y ? b : a)) : null;
    }
    // The changed boxes below a first one that can be seen together with it.
    function withMore(first, s) {
      const w = (paneWidth() / s) * 0.9, h = (area().h / s) * 0.7;
      const seen = { left: first.x, top: first.y, right: first.x + first.w, bottom: first.y + first.h };
      for (const box of v.scene.boxes.filter(isChanged).sort((a, b) => a.y - b.y)) {
        const left = Math.min(seen.left, box.x), right = Math.max(seen.right, box.x + box.w);
        const bottom = Math.max(seen.bottom, box.y + box.h);
        if (right - left > w || bottom - seen.top > h) break;
        Object.assign(seen, { left, right, bottom });
      }
      return { x: seen.left, y: seen.top, w: seen.right - seen.left, h: seen.bottom - seen.top };
    }
    function zoom(factor, px = paneWidth() / 2, py = area().h / 2) {
      const s = v.camera.s, before = { x: v.camera.x + px / s, y: v.camera.y + py / s };
      const pane = paneWidth(), least = Math.min(pane / v.scene.width, area().h / v.scene.height, 1) * 0.5;
      const next = clamp(s * factor, least, 4);
      look(before.x - px / next, before.y - py / next, next);
    }
    function centre(thing, s = Math.max(v.camera.s, 0.8)) {
      look(thing.x + thing.w / 2 - paneWidth() / s / 2, thing.y + thing.h / 2 - area().h / s / 2, s);
    }

    // Modules.

    const depthOf = (g) => { let depth = 0; for (; g > 0; g = graph.parent[g]) depth += 1; return depth; };
    const deepest = graph.groups.reduce((most, _, g) => Math.max(most, depthOf(g)), 0) + 1;
    // How many levels are open: the deepest open group counts.
    const levelsOpen = () => [...state.open].reduce((most, g) => Math.max(most, depthOf(g)), 0) + 1;
    // Opens all modules of so many levels, and closes those below.
    function openLevels(count) {
      const level = clamp(count, 1, deepest);
      state.open = new Set(graph.groups.map((_, g) => g).filter((g) => depthOf(g) < level));
      layOut();
      mapHits();
      fit();
    }
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
      return v.scene.shownAs[n];
    }
    function anchor(g) {
      const index = v.scene.frameOfGroup.has(g) ? v.scene.frameOfGroup.get(g) : -1;
      if (index >= 0) return v.scene.frames[index];
      return v.scene.boxOfGroup.has(g) ? v.scene.boxes[v.scene.boxOfGroup.get(g)] : null;
    }
    // Lays out anew; what `g` is stays where it is on the screen.
    function relayOut(g = -1) {
      const before = g >= 0 ? anchor(g) : null;
      const old = before && { x: before.x + before.w / 2, y: before.y };
      layOut();
      mapHits();
      const after = g >= 0 ? anchor(g) : null;
      if (old && after) look(v.camera.x + after.x + after.w / 2 - old.x, v.camera.y + after.y - old.y, v.camera.s);
      else look(v.camera.x, v.camera.y, v.camera.s);
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
      v.scene.boxes.forEach((box) => { box.hit = false; });
      state.hits.forEach((n) => { const at = v.scene.shownAs[n]; if (at >= 0) v.scene.boxes[at].hit = true; });
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
      if (n >= 0 && isFar) { reveal(n); centre(v.scene.boxes[v.scene.shownAs[n]]); }
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
    const acts = { alive, anchor, groupsAround, select, selectGroup, sumOf, toggle, toggleFold };
    const { code, copy, describe, hoverWords, summary } = fxPanel(v, acts);

    // Pointer.

    function thingAt(px, py) {
      const x = v.camera.x + (px % paneWidth()) / v.camera.s, y = v.camera.y + py / v.camera.s;
      for (let i = v.scene.boxes.length - 1; i >= 0; i--) {
        const b = v.scene.boxes[i];
        if (x >= b.x && x <= b.x + b.w && y >= b.y && y <= b.y + b.h) return { kind: "box", index: i, box: b };
      }
      for (const tag of v.scene.tags) if (x >= tag.x && x <= tag.x + tag.w && y >= tag.y && y <= tag.y + tag.h) return { kind: "tag", tag };
      for (let i = v.scene.frames.length - 1; i >= 0; i--) {
        const f = v.scene.frames[i];
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
      const wanted = mapAt(...place(e));
      if (wanted) { look(wanted.x - paneWidth() / v.camera.s / 2, wanted.y - area().h / v.camera.s / 2, v.camera.s); return; }
      from = { x: e.clientX, y: e.clientY, cx: v.camera.x, cy: v.camera.y, moved: false };
      canvas.setPointerCapture(e.pointerId);
      root.focus({ preventScroll: true });
    });
    canvas.addEventListener("pointermove", (e) => {
      if (from) {
        const dx = e.clientX - from.x, dy = e.clientY - from.y;
        if (Math.abs(dx) + Math.abs(dy) > 4) from.moved = true;
        if (from.moved) { stage.classList.add("fx-drag"); look(from.cx - dx / v.camera.s, from.cy - dy / v.camera.s, v.camera.s); }
        return;
      }
      const thing = thingAt(...place(e)), was = v.hovered && v.hovered.index;
      v.hovered = thing;
      stage.classList.toggle("fx-over", Boolean(thing) && thing.kind !== "frame");
      if (thing && thing.kind === "box") info.textContent = hoverWords(thing.box);
      else if (thing && thing.kind === "tag") info.textContent = `${summary(thing.tag.value)}  ·  click to go there`;
      else info.textContent = state.picked >= 0 ? summary(state.picked) : v.hint;
      if ((thing && thing.index) !== was) ask();
    });
    canvas.addEventListener("pointerup", (e) => {
      stage.classList.remove("fx-drag");
      if (from && !from.moved) click(thingAt(...place(e)), e.shiftKey);
      from = null;
    });
    canvas.addEventListener("pointerleave", () => { v.hovered = null; ask(); });
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
    const actions = { fit, in: () => zoom(1.35), out: () => zoom(1 / 1.35), open: () => openAll(true), close: () => openAll(false), more: () => openLevels(levelsOpen() + 1), less: () => openLevels(levelsOpen() - 1), theme, help };
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
      const counts = [[now.added, "added"], [now.removed, "removed"], [now.replaced, "replaced"], [now.modified, "changed"]].filter(([c]) => c).map(([c, w]) => `${c} ${w}`).join(", ");
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
      const by = (area().w * 0.12) / v.camera.s;
      const keys = {
        "+": actions.in, "=": actions.in, "-": actions.out, "0": fit, "/": () => input.focus(), n: () => step(1), N: () => step(-1),
        ArrowLeft: () => look(v.camera.x - by, v.camera.y, v.camera.s), ArrowRight: () => look(v.camera.x + by, v.camera.y, v.camera.s),
        ArrowUp: () => look(v.camera.x, v.camera.y - by, v.camera.s), ArrowDown: () => look(v.camera.x, v.camera.y + by, v.camera.s),
        Enter: () => { if (state.pickedGroup > 0) toggle(state.pickedGroup); }, e: () => openAll(true), E: () => openAll(false), d: actions.more, D: actions.less, c: copy, t: theme, "?": help,
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
      search, step, colour, fit, openAll, openLevels, goStep, copy,
      select: (name) => select(find(name), true),
      path: (a, b) => selectPath(find(a), find(b)),
      open: (path) => { const g = groupOf(path); if (g > 0 && !state.open.has(g)) toggle(g); },
      close: (path) => { const g = groupOf(path); if (g > 0 && state.open.has(g)) toggle(g); },
      unfold: (path) => { const g = groupOf(path); if (g > 0) toggleFold(g); },
      // Where a node is on the screen, in pixels of the page.
      at: (name) => {
        const box = v.scene.boxes[v.scene.shownAs[find(name)]], r = canvas.getBoundingClientRect();
        return box && { x: r.left + (box.x + box.w / 2 - v.camera.x) * v.camera.s, y: r.top + (box.y + box.h / 2 - v.camera.y) * v.camera.s };
      },
      draw,
      scene: () => v.scene,
      state: () => ({
        boxes: v.scene.boxes.length, frames: v.scene.frames.map((f) => f.title), colour: state.colour, hits: state.hits.map((n) => graph.get("name", n)),
        selected: state.picked >= 0 ? graph.get("name", state.picked) : state.pickedGroup >= 0 ? graph.groups[state.pickedGroup].path : "",
        path: state.path ? [...state.path].map((n) => graph.get("name", n)).sort() : [], code: code(), info: info.textContent, camera: { ...v.camera },
        step: state.step, levels: levelsOpen(),
      }),
    };
    root.fxViewer = api;
    readPalette();
    layOut();
    start();
    if (steps.length) goStep(state.step);
    document.addEventListener("fx-theme", () => { readPalette(); recolour(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readPalette(); recolour(); });
    let size = area().w, whole = `${root.clientWidth} ${root.clientHeight}`;
    new ResizeObserver(() => {
      if (!area().w) return;
      const now = `${root.clientWidth} ${root.clientHeight}`;
      if (!size || (v.camera === rested && now !== whole)) start();
      size = area().w;
      whole = now;
      if (v.camera === rested) { ask(); return; }
      look(v.camera.x, v.camera.y, v.camera.s);
    }).observe(stage);
    if (document.body.classList.contains("fx-full")) follow(api);
    draw();
  }

  // The page's address may say what to show: #open=all&colour=flops&search=relu&select=relu_7&path=a,b&step=2&theme=dark
  function follow(api) {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const say = {
      theme: (v) => { document.documentElement.dataset.theme = v; document.dispatchEvent(new Event("fx-theme")); },
      open: (v) => (v === "all" ? api.openAll(true) : v === "none" ? api.openAll(false) : /^\d+$/.test(v) ? api.openLevels(Number(v)) : api.open(v)), unfold: api.unfold,
      colour: api.colour, step: (v) => api.goStep(Number(v)), search: (v) => { api.search(v); api.step(1); }, select: api.select, path: (v) => api.path(...v.split(",")),
    };
    for (const [key, act] of Object.entries(say)) for (const value of wanted.getAll(key)) act(value);
  }

  return { viewer };
})();
document.querySelectorAll(".fx-viewer").forEach((root) => fxViewer.viewer(root));
