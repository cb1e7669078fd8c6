"use strict";
// Tells of what is selected: the panel beside the drawing, the line below it, the code to copy.
// `act` holds what the panel's buttons do.
const fxPanel = (v, act) => {
  const { COLOURS, EFFECT_WORDS, NUMBERS, element, number } = fxWords;
  const { data, graph, root, info, panel, state, steps, hint } = v;
  const { alive, anchor, groupsAround, select, selectGroup, sumOf, toggle, toggleFold } = act;

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
      element("dl", {}, ...row("class", group.kind), ...row("nodes", fxScene.sizeOf(graph, nodes).toLocaleString("en")), ...row("parameters", group.parameters ? fxScene.quantity(group.parameters) : ""), ...costs),
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

  return { code, copy, describe, hoverWords, summary };
};
