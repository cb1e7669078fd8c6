"use strict";
// From the data of a graph (schema fxkit.graph) to boxes, frames, lines and labels with coordinates.
// Each open module is laid out by itself and then is one box of its parent's layout, as in
// fxkit/view/drawings/scene.py.
const fxScene = (() => {
  const BOX_PAD = 12, MARGIN = 24, FRAME_PAD = 16, FRAME_HEAD = 30;
  const NAME_LENGTH = 42, NOTE_LENGTH = 26, STUB_TEXT = 30, EXITS = 12;
  const clip = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  const oneLine = (text) => text.replace(/[\u0000-\u001f\u007f]+/g, " ").trim();

  function quantity(value, unit = "") {
    if (value === null || value === undefined) return "?";
    let step = 0, scaled = value;
    const units = ["", "k", "M", "G", "T", "P"];
    while (Math.abs(scaled) >= 999.5 && step < units.length - 1) { scaled /= 1000; step++; }
    const plain = step === 0 && Number.isInteger(scaled);
    const digits = plain ? String(scaled) : Math.abs(scaled) < 99.95 ? String(Number(scaled.toPrecision(3))) : scaled.toFixed(0);
    return `${digits}${unit ? " " : ""}${units[step]}${unit}`;
  }

  // Gives access to the columns, and adds what follows from them: users, dtype, owner groups.
  function read(data) {
    const columns = {};
    for (const [name, stored] of Object.entries(data.columns)) {
      const { values, index } = stored;
      columns[name] = Array.isArray(stored) ? (i) => stored[i] : (i) => values[index[i]];
    }
    const count = data.columns.name.length;
    const users = Array.from({ length: count }, () => []);
    data.operands.forEach((operands, i) => operands.forEach((o) => users[o].push(i)));
    const get = (name, i) => (columns[name] ? columns[name](i) : undefined);
    columns.dtype = (i) => ((get("type", i) || "").match(/\b([a-z]+\d+\w*)\[/) || [])[1] || "";
    const parent = new Int32Array(data.groups.length).fill(-1), owner = new Int32Array(count);
    const leader = new Int32Array(data.groups.length).fill(-1);
    data.groups.forEach((group, g) => {
      for (const item of group.items) {
        if (item >= 0) { owner[item] = g; continue; }
        parent[~item] = g;
        for (const other of data.groups[~item].fold || []) { parent[other] = g; leader[other] = ~item; }
      }
    });
    return { data, count, users, get, has: (name) => name in columns, parent, owner, leader, groups: data.groups };
  }

  // Nodes of an item, in one order for like groups, those of folded layers included.
  function nodesOf(graph, g) {
    graph.cache = graph.cache || new Map();
    if (graph.cache.has(g)) return graph.cache.get(g);
    const found = [];
    for (const item of graph.groups[g].items) {
      if (item >= 0) found.push(item);
      else for (const member of [~item, ...(graph.groups[~item].fold || [])]) for (const n of nodesOf(graph, member)) found.push(n);
    }
    graph.cache.set(g, found);
    return found;
  }

  // Nodes of the graph that these boxes stand for: each with the constants that it reads first.
  const sizeOf = (graph, list) => list.reduce((sum, n) => sum + graph.get("nodes", n), 0);
  const only = (graph, g) =>
    graph.groups[g].items.length === 1 && graph.groups[g].items[0] >= 0 ? graph.groups[g].items[0] : -1;

  function title(graph, g, folded) {
    const group = graph.groups[g];
    if (folded) {
      const last = graph.groups[group.fold[group.fold.length - 1]];
      return `${group.name} … ${last.name} × ${group.fold.length + 1}`;
    }
    return group.call ? `${group.name} (call ${group.call + 1})` : group.name;
  }

  // state: {open: Set of groups, unfolded: Set of groups}; measure: {title, detail, frame}(text) → width.
  function build(graph, state, measure) {
    const scene = {
      boxes: [], frames: [], lines: [], tags: [], width: 0, height: 0,
      shownAs: new Int32Array(graph.count).fill(-1), boxOfGroup: new Map(), frameOfGroup: new Map(),
    };
    const level = makeLevel(graph, state, measure, 0);
    emitLevel(graph, scene, level, measure, MARGIN, MARGIN, -1);
    scene.width = level.width + 2 * MARGIN;
    scene.height = level.height + 2 * MARGIN;
    return scene;
  }

  function shownItems(graph, state, g) {
    const items = [];
    for (const item of graph.groups[g].items) {
      const fold = item < 0 ? graph.groups[~item].fold : undefined;
      if (!fold) items.push({ item, members: [] });
      else if (state.unfolded.has(~item)) for (const member of [~item, ...fold]) items.push({ item: ~member, members: [] });
      else items.push({ item, members: fold });
    }
    return items;
  }

  function makeItem(graph, state, measure, { item, members }) {
    const g = item < 0 ? ~item : -1;
    const lists = item >= 0 ? [[item]] : [g, ...members].map((member) => nodesOf(graph, member));
    const leaf = item >= 0 ? item : members.length ? -1 : only(graph, g);
    const folded = members.length > 0;
    if (g >= 0 && leaf < 0 && state.open.has(g)) return frameItem(graph, state, measure, g, lists, folded);
    const words = itemWords(graph, g, leaf, lists, folded);
    const head = measure.title(words.title) + (words.note ? measure.note(words.note) + 10 : 0);
    const width = Math.max(Math.max(head, measure.detail(words.detail)) + 2 * BOX_PAD, 56);
    const height = words.detail ? 40 : 28;
    const exits = lists[0].length > 1 ? exitsOf(graph, lists[0], width) : null;
    return { g, leaf, lists, folded, width, height, words, isFrame: false, head, exits };
  }

  // Where on the lower side of a closed module each value leaves that is read outside; very many leave
  // as one.
  function exitsOf(graph, list, width) {
    const inside = new Set(list);
    const outside = list.filter((n) => graph.users[n].some((u) => !inside.has(u)));
    if (outside.length > EXITS) return new Map();
    const step = Math.min(26, (width - 24) / Math.max(outside.length, 1));
    return new Map(outside.map((n, i) => [n, (i - (outside.length - 1) / 2) * step]));
  }
  const entryOf = (item, n) => (item.isFrame ? item.left + item.level.inputs.get(n) - item.width / 2 : null);
  function exitOf(item, n) {
    if (item.isFrame) return item.left + item.level.outputs.get(n) - item.width / 2;
    return item.exits ? item.exits.get(n) || 0 : 0;
  }

  function itemWords(graph, g, leaf, lists, folded) {
    const { get } = graph;
    if (leaf < 0) {
      const group = graph.groups[g];
      const nodes = lists.reduce((sum, list) => sum + sizeOf(graph, list), 0);
      const size = group.parameters ? ` · ${quantity(group.parameters)} params` : "";
      const kind = group.kind ? `${group.kind} · ` : "";
      return { title: clip(oneLine(title(graph, g, folded)), NAME_LENGTH), note: "", detail: clip(`${kind}${nodes.toLocaleString("en")} node${nodes === 1 ? "" : "s"}${size}`, NAME_LENGTH), family: "other" };
    }
    const operator = get("operator", leaf), family = get("family", leaf);
    const detail = clip(oneLine(get("type", leaf)), NAME_LENGTH);
    const constants = oneLine(get("constants", leaf));
    if (operator === "input") return { title: clip(oneLine(get("name", leaf)), NAME_LENGTH), note: "", detail, family };
    if (operator === "constant") return { title: clip(constants, NAME_LENGTH), note: "", detail, family };
    const short = operator.slice(operator.lastIndexOf(".") + 1) || operator;
    const note = g >= 0 && family !== "kernel" ? oneLine(title(graph, g, folded)) : constants;
    return { title: clip(oneLine(short), NAME_LENGTH), note: clip(note, NOTE_LENGTH), detail, family };
  }

  function frameItem(graph, state, measure, g, lists, folded) {
    const level = makeLevel(graph, state, measure, g);
    const words = clip(oneLine(title(graph, g, folded)), NAME_LENGTH);
    const kind = graph.groups[g].kind;
    const item = { g, leaf: -1, lists, folded, level, isFrame: true, words: { title: words, kind } };
    item.titleWidth = measure.frame(`▾ ${words}  ${kind}`) + 16;
    item.width = Math.max(level.width, item.titleWidth) + 2 * FRAME_PAD;
    item.left = (item.width - level.width) / 2;
    findRoom(item);
    item.height = level.height + FRAME_HEAD + FRAME_PAD;
    return item;
  }

  // The left end of the title, so that no line runs through it.
  function findRoom(item) {
    const ports = [...item.level.inputs.values()].map((dx) => item.left + dx).sort((a, b) => a - b);
    const edges = [0, ...ports, item.width];
    for (let i = 1; i < edges.length; i++) {
      if (edges[i] - edges[i - 1] >= item.titleWidth + 12) { item.titleLeft = edges[i - 1] + 12; return; }
    }
    const last = edges[edges.length - 2];
    item.width += item.titleWidth + 12 - (item.width - last);
    item.titleLeft = last + 12;
  }

  function makeLevel(graph, state, measure, g) {
    const level = { g, items: shownItems(graph, state, g).map((shown) => makeItem(graph, state, measure, shown)) };
    const { links, top, bottom, entering } = connect(graph, level);
    const pin = [4, 0];
    const sizes = [...top.map(() => pin), ...level.items.map((item) => [item.width, item.height]), ...bottom.map(() => pin)];
    const stubSize = (link, uses) => [measure.detail(stubText(graph, level, link, uses)) + 32, 18];
    level.tops = top.length;
    const placed = fxLayout.place(sizes, links, top.length, bottom.length, stubSize);
    const first = top.length + level.items.length;
    level.inputs = new Map(top.map((value, i) => [value, placed.x[i]]));
    level.outputs = new Map(bottom.map((value, i) => [value, placed.x[first + i]]));
    return Object.assign(level, { links, entering, placed, width: placed.width, height: placed.height });
  }

  const stubText = (graph, level, link, uses) => {
    const item = level.items[link.source - level.tops];
    const isBundle = item && item.exits && !item.exits.size;
    const text = clip(isBundle ? item.words.title : oneLine(graph.get("name", link.value)), STUB_TEXT);
    return uses ? `${text} ×${uses}` : text;
  };

  // The links of a level, with the values at its upper and its lower side.
  function connect(graph, level) {
    const owner = new Map(), standIn = new Map();
    level.items.forEach((item, index) => item.lists.forEach((list) => list.forEach((n, k) => {
      owner.set(n, index);
      if (list !== item.lists[0]) standIn.set(n, item.lists[0][k]);
    })));
    const shown = (n) => { const other = standIn.get(n); return other === undefined ? n : other; };
    const top = new Map(), bottom = new Map(), wanted = [], entering = new Map();
    for (const [n, index] of owner) {
      const operands = graph.data.operands[n], ports = graph.data.operands[shown(n)];
      for (let k = 0; k < operands.length; k++) {
        const value = operands[k], from = owner.get(value);
        if (from === index) continue;
        if (from === undefined) {
          if (!top.has(value)) { top.set(value, top.size); entering.set(value, []); }
          entering.get(value).push(n, k);
        }
        wanted.push(value, index, ports[k], n, k);
      }
      if (level.g > 0 && graph.users[n].some((u) => !owner.has(u)) && !bottom.has(n)) bottom.set(n, bottom.size);
    }
    const links = new Map(), found = [], shift = top.size;
    const put = (source, target, exit, entry, value, n, k) => {
      const key = entry === null && exit === 0 ? source * 4294967296 + target : `${source},${target},${exit},${entry}`;
      let link = links.get(key);
      if (!link) {
        link = { source, target, exit, entry, value, edges: [], key: 0 };
        links.set(key, link);
        if (target > source) found.push(link);
      }
      if (n >= 0) link.edges.push(n, k);
    };
    const leaves = (value) => exitOf(level.items[owner.get(value)], shown(value));
    for (let i = 0; i < wanted.length; i += 5) {
      const value = wanted[i], index = wanted[i + 1], port = wanted[i + 2], n = wanted[i + 3], k = wanted[i + 4];
      const inside = owner.has(value);
      const source = inside ? shift + owner.get(value) : top.get(value);
      put(source, shift + index, inside ? leaves(value) : 0, entryOf(level.items[index], port), value, n, k);
    }
    const below = shift + level.items.length;
    for (const [value, position] of bottom) put(shift + owner.get(value), below + position, leaves(value), 0, value, -1, 0);
    return { links: found, top: [...top.keys()], bottom: [...bottom.keys()], entering };
  }

  function emitLevel(graph, scene, level, measure, x, y, frame) {
    const { placed, tops } = level;
    level.items.forEach((item, i) => {
      const left = x + placed.x[tops + i] - item.width / 2;
      emitItem(graph, scene, item, measure, left, y + placed.y[tops + i], frame);
    });
    const target = (index) => {
      const item = level.items[index - tops];
      return item && !item.isFrame ? scene.shownAs[item.lists[0][0]] : -1;
    };
    level.links.forEach((link, i) => {
      if (placed.routes[i]) addLine(scene, placed.routes[i], link, target(link.target), x, y);
    });
    for (const stub of placed.stubs) {
      const text = stubText(graph, level, stub.link, stub.uses);
      const w = measure.detail(text) + 32;
      const edges = stub.index < 0 ? [] : stub.link.edges;
      scene.tags.push({ x: x + stub.x - w / 2, y: y + stub.y, w, h: 18, text, value: stub.link.value, atSource: stub.index < 0, edges });
      const to = stub.index < 0 ? -1 : target(stub.link.target);
      addLine(scene, stub.route, { value: stub.link.value, edges }, to, x, y);
    }
  }

  function addLine(scene, route, link, box, x, y) {
    let left = Infinity, right = -Infinity;
    for (let i = 0; i < route.length; i += 2) {
      route[i] += x;
      route[i + 1] += y;
      if (route[i] < left) left = route[i];
      if (route[i] > right) right = route[i];
    }
    scene.lines.push({ points: route, value: link.value, edges: link.edges, box, left, right, top: route[1], bottom: route[route.length - 1] });
  }

  function emitItem(graph, scene, item, measure, x, y, frame) {
    if (item.isFrame) { emitFrame(graph, scene, item, measure, x, y, frame); return; }
    const index = scene.boxes.length;
    scene.boxes.push({
      x, y, w: item.width, h: item.height, node: item.leaf, group: item.g, folded: item.folded,
      nodes: item.lists, frame, head: item.head, ...item.words,
    });
    if (item.g >= 0) scene.boxOfGroup.set(item.g, index);
    item.lists.forEach((list) => list.forEach((n) => { scene.shownAs[n] = index; }));
  }

  function emitFrame(graph, scene, item, measure, x, y, frame) {
    const index = scene.frames.length;
    scene.frames.push({
      x, y, w: item.width, h: item.height, group: item.g, folded: item.folded, frame, titleX: x + item.titleLeft,
      titleWidth: item.titleWidth, ...item.words, depth: frame < 0 ? 0 : scene.frames[frame].depth + 1,
      repeats: item.folded ? item.lists.length : 1,
    });
    scene.frameOfGroup.set(item.g, index);
    const port = (value, edges, at, from, to) => addLine(scene, [at, from, at, to], { value, edges }, -1, x, y);
    const { inputs, outputs, entering } = item.level;
    for (const [value, dx] of inputs) port(value, entering.get(value), item.left + dx, 0, FRAME_HEAD);
    for (const [value, dx] of outputs) port(value, [], item.left + dx, item.height - FRAME_PAD, item.height);
    emitLevel(graph, scene, item.level, measure, x + item.left, y + FRAME_HEAD, index);
    for (const list of item.lists.slice(1)) list.forEach((n, k) => { scene.shownAs[n] = scene.shownAs[item.lists[0][k]]; });
  }

  return { read, build, nodesOf, sizeOf, title, quantity, oneLine };
})();
