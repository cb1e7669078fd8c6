"use strict";
(() => {
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  // One drawing: pan, zoom, search, highlight. State is the visible part of the drawing, as a viewBox.
  function viewer(root) {
    const canvas = root.querySelector(".fx-canvas");
    const svg = canvas.querySelector("svg");
    if (!svg) return;
    const info = root.querySelector(".fx-info");
    const input = root.querySelector("input");
    const output = root.querySelector("output");
    const full = svg.viewBox.baseVal;
    const whole = { x: 0, y: 0, w: full.width, h: full.height };
    const hint = info.textContent;
    const boxes = [...svg.querySelectorAll(".fx-n")];
    const byName = new Map();
    boxes.forEach((box) => byName.set(box.dataset.n, box));
    const lines = new Map();
    const note = (key, line) => lines.set(key, [...(lines.get(key) || []), line]);
    svg.querySelectorAll("[data-v]").forEach((line) => {
      note("v" + line.dataset.v, line);
      if (line.dataset.t) note("t" + line.dataset.t, line);
    });
    let view = { ...whole };
    let hits = [];
    let at = -1;
    let picked = null;
    svg.removeAttribute("width");
    svg.removeAttribute("height");
    svg.setAttribute("preserveAspectRatio", "xMidYMin meet");

    const size = () => canvas.getBoundingClientRect();
    const show = () => svg.setAttribute("viewBox", `${view.x} ${view.y} ${view.w} ${view.h}`);
    const scale = () => Math.min(size().width / view.w, size().height / view.h);

    function look(x, y, w) {
      const area = size();
      const ratio = area.height / Math.max(area.width, 1);
      w = clamp(w, 120, Math.max(whole.w, whole.h / Math.max(ratio, 0.01)) * 1.4);
      view = { x, y, w, h: w * ratio };
      show();
    }
    function fit() {
      const area = size();
      const w = Math.max(whole.w, (whole.h * area.width) / Math.max(area.height, 1));
      look((whole.w - w) / 2, 0, w);
    }
    function start() {
      const area = size();
      const tall = whole.h > (area.height / area.width) * Math.max(whole.w, area.width);
      if (!tall) { fit(); if (view.w < area.width) look((whole.w - area.width) / 2, 0, area.width); return; }
      const w = Math.max(Math.min(whole.w, area.width * 1.6), area.width);
      const first = boxes.length ? boxes.reduce((a, b) => (top(b) < top(a) ? b : a)) : null;
      const middle = whole.w <= w || !first ? whole.w / 2 : centre(first).x;
      look(whole.w <= w ? (whole.w - w) / 2 : clamp(middle - w / 2, 0, whole.w - w), 0, w);
    }
    const top = (box) => centre(box).y;
    function centre(box) {
      const b = box.getBBox();
      const shift = box.parentNode.transform.baseVal.consolidate();
      return { x: b.x + b.width / 2 + (shift ? shift.matrix.e : 0), y: b.y + b.height / 2 };
    }
    function zoom(factor, px, py) {
      const area = size();
      const s = scale();
      const ox = (px === undefined ? area.width / 2 : px) / s;
      const oy = (py === undefined ? area.height / 2 : py) / s;
      const w = view.w / factor;
      look(view.x + ox - ox / factor, view.y + oy - oy / factor, w);
    }
    function goTo(box) {
      const c = centre(box);
      const w = Math.min(view.w, size().width * 1.3);
      look(c.x - w / 2, c.y - (w * size().height) / size().width / 2, w);
    }
    function light(box) {
      svg.querySelectorAll(".fx-on").forEach((line) => line.classList.remove("fx-on"));
      if (!box) { info.textContent = hint; return; }
      const name = box.dataset.n;
      ["v", "t"].forEach((way) => (lines.get(way + name) || []).forEach((l) => l.classList.add("fx-on")));
      info.textContent = box.querySelector("title").textContent.split("\n").join("  ·  ");
    }
    function search() {
      let pattern = null;
      try { pattern = input.value ? new RegExp(input.value, "i") : null; input.setCustomValidity(""); }
      catch (error) { output.textContent = "not a pattern"; return; }
      hits = pattern ? boxes.filter((box) => pattern.test(box.textContent)) : [];
      boxes.forEach((box) => {
        box.classList.toggle("fx-dim", Boolean(pattern) && !hits.includes(box));
        box.classList.toggle("fx-hit", hits.includes(box));
      });
      at = -1;
      output.textContent = pattern ? `${hits.length} found` : "";
      if (hits.length) step(1);
    }
    function step(by) {
      if (!hits.length) return;
      at = (at + by + hits.length) % hits.length;
      output.textContent = `${at + 1} of ${hits.length}`;
      light(hits[at]);
      goTo(hits[at]);
    }

    let from = null;
    canvas.addEventListener("pointerdown", (e) => {
      from = { x: e.clientX, y: e.clientY, vx: view.x, vy: view.y, moved: false };
      canvas.setPointerCapture(e.pointerId);
      root.focus({ preventScroll: true });
    });
    canvas.addEventListener("pointermove", (e) => {
      if (!from) return;
      const s = scale();
      const dx = e.clientX - from.x, dy = e.clientY - from.y;
      if (Math.abs(dx) + Math.abs(dy) > 4) { from.moved = true; canvas.classList.add("fx-drag"); }
      if (from.moved) look(from.vx - dx / s, from.vy - dy / s, view.w);
    });
    canvas.addEventListener("pointerup", (e) => {
      canvas.classList.remove("fx-drag");
      if (from && !from.moved) {
        const below = document.elementFromPoint(e.clientX, e.clientY);
        picked = below ? below.closest(".fx-n") : null;
        light(picked);
      }
      from = null;
    });
    canvas.addEventListener("wheel", (e) => {
      const alone = document.body.classList.contains("fx-full");
      if (!alone && !e.ctrlKey && !root.contains(document.activeElement)) return;
      e.preventDefault();
      const area = size();
      zoom(Math.exp(-e.deltaY * 0.0016), e.clientX - area.left, e.clientY - area.top);
    }, { passive: false });
    svg.addEventListener("mouseover", (e) => {
      const box = e.target.closest && e.target.closest(".fx-n");
      if (box) light(box); else if (!from) light(picked);
    });
    root.querySelectorAll("button").forEach((button) => button.addEventListener("click", () => {
      ({ fit, in: () => zoom(1.35), out: () => zoom(1 / 1.35) })[button.dataset.do]();
    }));
    input.addEventListener("input", search);
    input.addEventListener("keydown", (e) => {
      if (e.key === "Enter") { e.preventDefault(); step(e.shiftKey ? -1 : 1); }
      if (e.key === "Escape") { input.value = ""; search(); root.focus(); }
      e.stopPropagation();
    });
    root.addEventListener("keydown", (e) => {
      const stepBy = view.w * 0.12;
      const actions = {
        "+": () => zoom(1.35), "=": () => zoom(1.35), "-": () => zoom(1 / 1.35), "0": fit,
        ArrowLeft: () => look(view.x - stepBy, view.y, view.w),
        ArrowRight: () => look(view.x + stepBy, view.y, view.w),
        ArrowUp: () => look(view.x, view.y - stepBy, view.w),
        ArrowDown: () => look(view.x, view.y + stepBy, view.w),
        "/": () => input.focus(), n: () => step(1), N: () => step(-1),
      };
      if (actions[e.key] && !e.ctrlKey && !e.metaKey) { e.preventDefault(); actions[e.key](); }
    });
    new ResizeObserver(() => look(view.x, view.y, view.w)).observe(canvas);
    start();
  }

  function sortable(table) {
    const body = table.tBodies[0];
    const value = (row, i) => {
      const cell = row.cells[i];
      const text = cell.dataset.v === undefined ? cell.textContent.trim() : cell.dataset.v;
      return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
    };
    [...table.tHead.rows[0].cells].forEach((head, i) => {
      head.tabIndex = 0;
      const sort = () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        [...table.tHead.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        [...body.rows].map((row) => [value(row, i), row]).sort(([a], [b]) => {
          const less = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
          return down ? -less : less;
        }).forEach(([, row]) => body.append(row));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
    });
  }

  document.querySelectorAll(".fx-viewer").forEach(viewer);
  document.querySelectorAll(".fx-sortable").forEach(sortable);
  document.querySelectorAll("[data-theme-switch]").forEach((button) => button.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }));
  const links = [...document.querySelectorAll(".fx-report>nav a")];
  if (links.length && "IntersectionObserver" in window) {
    const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
      const link = links.find((a) => a.hash === "#" + entry.target.id);
      if (link && entry.isIntersecting) { links.forEach((a) => a.classList.toggle("fx-here", a === link)); }
    }), { rootMargin: "-10% 0px -80% 0px" });
    document.querySelectorAll(".fx-report section").forEach((section) => seen.observe(section));
  }
})();
