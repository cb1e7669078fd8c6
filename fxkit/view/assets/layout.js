"use strict";
// Places boxes in layers: ranks, order within a rank, coordinates, routes. The steps are those of
// fxkit/view/drawings/layout.py, so that a module that is opened in the page looks like one that was drawn.
const fxLayout = (() => {
  const GAP_RANKS = 30, TALL = 150, STUB_USES = 4, STUB_SPAN = 3, DUMMIES_PER_BOX = 4;
  const GAP_BOXES = 26, GAP_DUMMY = 13;

  // sizes: [width, height] of each box, in an order in which links run forward.
  // links: {source, target, exit, entry}; entry null spreads the arrivals evenly.
  // top, bottom: how many of the first and the last boxes are pinned to the outer ranks.
  // stubSize(link, uses): [width, height] of the label that stands for long edges.
  function place(sizes, links, top, bottom, stubSize) {
    const count = sizes.length;
    const values = valuesOf(links);
    let ranks = rankBoxes(sizes, links, top, bottom);
    const cut = cutValues(count, links, values, ranks);
    ranks = makeRoom(ranks, links, values, cut);
    const v = { width: [], height: [], rank: [], dummy: [], edges: [] };
    sizes.forEach(([w, h], i) => add(v, w, h, ranks[i], false));
    const entries = firstEntries(sizes, links);
    const stubs = addStubs(v, links, values, entries, cut, stubSize);
    const chains = addDummies(v, links, entries, cut, values.length);
    v.above = neighbours(v, 1);
    v.below = neighbours(v, 0);
    const order = orderRanks(v);
    const x = coordinates(v, order);
    straighten(v, order, x, chains);
    const settled = sortedEntries(sizes, links, entries, chains, x, cut);
    return finish(v, order, x, links, settled, chains, stubs, cut, count);
  }

  // Numbers the values: links of one source and exit carry the same one.
  function valuesOf(links) {
    const known = new Map(), values = [];
    for (const link of links) {
      const key = link.source + "," + link.exit;
      let id = known.get(key);
      if (id === undefined) { id = values.length; known.set(key, id); values.push({ link, uses: [] }); }
      link.key = id;
      values[id].uses.push(link);
    }
    return values;
  }

  function rankBoxes(sizes, links, top, bottom) {
    const count = sizes.length, ranks = new Array(count).fill(0);
    const below = Array.from({ length: count }, () => []);
    const hasSource = new Array(count).fill(false);
    for (const link of links) { below[link.source].push(link.target); hasSource[link.target] = true; }
    for (let box = 0; box < count; box++) {
      ranks[box] = Math.max(ranks[box], top && box >= top ? 1 : 0);
      for (const target of below[box]) ranks[target] = Math.max(ranks[target], ranks[box] + 1);
    }
    for (let box = count - 1; box >= top; box--) {
      if (below[box].length && (sizes[box][1] > TALL || !hasSource[box])) {
        let least = Infinity;
        for (const target of below[box]) least = Math.min(least, ranks[target]);
        ranks[box] = least - 1;
      }
    }
    if (bottom) {
      let last = -1;
      for (let box = 0; box < count - bottom; box++) last = Math.max(last, ranks[box]);
      for (let box = count - bottom; box < count; box++) ranks[box] = last + 1;
    }
    return ranks;
  }

  // Values that are drawn as labels: many uses, far apart; then the longest ones.
  function cutValues(count, links, values, ranks) {
    const cut = new Array(values.length).fill(false), lengths = [];
    let dummies = 0;
    values.forEach(({ link, uses }, id) => {
      const at = uses.map((use) => ranks[use.target]);
      const length = at.reduce((a, b) => Math.max(a, b), 0) - ranks[link.source] - 1;
      if (uses.length >= STUB_USES && length >= STUB_SPAN && new Set(at).size >= STUB_SPAN) cut[id] = true;
      else if (length > 0) { dummies += length; lengths.push([length, id]); }
    });
    const allowed = Math.min(DUMMIES_PER_BOX * count + 200, Math.max(count, 20000));
    lengths.sort((a, b) => b[0] - a[0]);
    for (const [length, id] of lengths) {
      if (dummies <= allowed) break;
      cut[id] = true;
      dummies -= length;
    }
    return cut;
  }

  // An empty rank above each use of a cut value, and below its source, for the labels.
  function makeRoom(ranks, links, values, cut) {
    const slots = new Set();
    for (const link of links) if (cut[link.key]) slots.add(ranks[link.target]);
    values.forEach(({ link }, id) => { if (cut[id]) slots.add(ranks[link.source] + 1); });
    const most = ranks.reduce((a, b) => Math.max(a, b), -1), shifts = [];
    let shift = 0;
    for (let rank = 0; rank <= most; rank++) { if (slots.has(rank)) shift++; shifts.push(shift); }
    return ranks.map((rank) => rank + shifts[rank]);
  }

  function add(v, width, height, rank, dummy) {
    v.width.push(width); v.height.push(height); v.rank.push(rank); v.dummy.push(dummy);
    return v.width.length - 1;
  }
  // Joins two vertices of neighbouring ranks.
  const join = (v, upper, exit, lower, entry) => v.edges.push(upper, lower, exit, entry);

  // The edges of each vertex in flat arrays: those of i lie from start[i] to start[i + 1]; side 0 is
  // what lies below, 1 what lies above. A graph of 20,000 nodes has no room for an object an edge.
  function neighbours(v, side) {
    const size = v.rank.length, { edges } = v, count = edges.length / 4;
    const start = new Int32Array(size + 1);
    for (let e = 0; e < count; e++) start[edges[4 * e + side] + 1]++;
    for (let i = 0; i < size; i++) start[i + 1] += start[i];
    const next = start.slice(0, size), other = new Int32Array(count);
    const own = new Float64Array(count), offset = new Float64Array(count);
    for (let e = 0; e < count; e++) {
      const at = next[edges[4 * e + side]]++;
      other[at] = edges[4 * e + 1 - side];
      own[at] = edges[4 * e + 2 + side];
      offset[at] = edges[4 * e + 3 - side];
    }
    const degree = (i) => start[i + 1] - start[i];
    return { start, other, own, offset, degree };
  }
  function spread(count, width) {
    const step = Math.min(22, Math.max(0, width - 20) / count);
    return Array.from({ length: count }, (_, i) => (i - (count - 1) / 2) * step);
  }

  function firstEntries(sizes, links) {
    const arriving = new Map();
    links.forEach((link, i) => {
      if (link.entry !== null) return;
      if (!arriving.has(link.target)) arriving.set(link.target, []);
      arriving.get(link.target).push(i);
    });
    const entries = links.map((link) => link.entry || 0);
    for (const [target, indices] of arriving) {
      const offsets = spread(indices.length, sizes[target][0]);
      indices.forEach((index, i) => { entries[index] = offsets[i]; });
    }
    return entries;
  }

  function addStubs(v, links, values, entries, cut, stubSize) {
    const made = [];
    links.forEach((link, i) => {
      if (!cut[link.key]) return;
      const [w, h] = stubSize(link, 0);
      const vertex = add(v, w, h, v.rank[link.target] - 1, false);
      join(v, vertex, 0, link.target, entries[i]);
      made.push({ vertex, link, index: i, uses: 0 });
    });
    values.forEach(({ link, uses }, id) => {
      if (!cut[id]) return;
      const [w, h] = stubSize(link, uses.length);
      const vertex = add(v, w, h, v.rank[link.source] + 1, false);
      join(v, link.source, link.exit, vertex, 0);
      made.push({ vertex, link, index: -1, uses: uses.length });
    });
    return made;
  }

  function addDummies(v, links, entries, cut, valueCount) {
    const chains = Array.from({ length: valueCount }, () => []);
    links.forEach((link, i) => {
      if (cut[link.key]) return;
      const chain = chains[link.key], start = v.rank[link.source];
      for (let rank = start + 1 + chain.length; rank < v.rank[link.target]; rank++) {
        const vertex = add(v, 2, 0, rank, true);
        if (chain.length) join(v, chain[chain.length - 1], 0, vertex, 0);
        else join(v, link.source, link.exit, vertex, 0);
        chain.push(vertex);
      }
      const steps = v.rank[link.target] - start - 1;
      if (steps > 0) join(v, chain[steps - 1], 0, link.target, entries[i]);
      else join(v, link.source, link.exit, link.target, entries[i]);
    });
    return chains;
  }

  function orderRanks(v) {
    const size = v.rank.length, order = [];
    for (const vertex of depthFirst(v)) {
      while (order.length <= v.rank[vertex]) order.push([]);
      order[v.rank[vertex]].push(vertex);
    }
    const sweeps = size < 3000 ? 8 : size < 30000 ? 4 : 2;
    const position = new Float64Array(size), keys = new Float64Array(size);
    for (const row of order) row.forEach((vertex, i) => { position[vertex] = i; });
    const isCounted = size < 30000;
    let best = order.map((row) => row.slice()), least = isCounted ? crossings(v, order, position) : 1;
    for (let sweep = 0; sweep < sweeps && least; sweep++) {
      const down = sweep % 2 === 0, near = down ? v.above : v.below;
      const rows = down ? order.slice(1) : order.slice(0, -1).reverse();
      for (const row of rows) byBarycentre(v, row, near, position, keys);
      const now = isCounted ? crossings(v, order, position) : 0;
      if (!isCounted) best = order;
      else if (now < least) { best = order.map((row) => row.slice()); least = now; }
    }
    return best;
  }

  function byBarycentre(v, row, near, position, keys) {
    for (const vertex of row) {
      let total = 0;
      const first = near.start[vertex], last = near.start[vertex + 1];
      for (let e = first; e < last; e++) total += position[near.other[e]] + near.offset[e] / (v.width[near.other[e]] + 1);
      keys[vertex] = last > first ? total / (last - first) : position[vertex];
    }
    row.sort((a, b) => keys[a] - keys[b]);
    for (let i = 0; i < row.length; i++) position[row[i]] = i;
  }

  function depthFirst(v) {
    const seen = new Uint8Array(v.rank.length), visited = [], { start, other } = v.below;
    const roots = v.rank.map((_, i) => i).sort((a, b) => v.rank[a] - v.rank[b] || a - b);
    for (const root of roots) {
      const stack = [root];
      while (stack.length) {
        const vertex = stack.pop();
        if (seen[vertex]) continue;
        seen[vertex] = 1;
        visited.push(vertex);
        for (let e = start[vertex + 1] - 1; e >= start[vertex]; e--) stack.push(other[e]);
      }
    }
    return visited;
  }

  // Counts the crossings between neighbouring ranks with a tree of partial sums. Where an edge ends
  // is a number: the position of the box times a width that no box has, and where on the box.
  function crossings(v, order, position) {
    const WIDE = 1e7, { start, other, offset } = v.below;
    let total = 0;
    for (const row of order) for (let i = 0; i < row.length; i++) position[row[i]] = i;
    for (const row of order) {
      let count = 0;
      for (const vertex of row) count += start[vertex + 1] - start[vertex];
      if (count < 2) continue;
      const ends = new Float64Array(count);
      let at = 0;
      for (const vertex of row) {
        for (let e = start[vertex]; e < start[vertex + 1]; e++) ends[at++] = position[other[e]] * WIDE + offset[e];
      }
      const sorted = ends.slice().sort(), tree = new Int32Array(count + 1);
      let seen = 0, from = 0;
      for (const vertex of row) {
        const to = from + start[vertex + 1] - start[vertex];
        for (let i = from; i < to; i++) {
          let upTo = 0;
          for (let t = lastAt(sorted, ends[i]); t > 0; t -= t & -t) upTo += tree[t];
          total += seen - upTo;
        }
        for (let i = from; i < to; i++, seen++) for (let t = lastAt(sorted, ends[i]); t <= count; t += t & -t) tree[t]++;
        from = to;
      }
    }
    return total;
  }
  // How many of the sorted values are at most this one.
  function lastAt(sorted, value) {
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] <= value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  const distance = (v, a, b) =>
    (v.width[a] + v.width[b]) / 2 + (v.dummy[a] || v.dummy[b] ? GAP_DUMMY : GAP_BOXES);

  function coordinates(v, order) {
    const size = v.rank.length, x = new Float64Array(size), gaps = [];
    for (const row of order) {
      const here = row.slice(1).map((vertex, i) => distance(v, row[i], vertex));
      gaps.push(here);
      let left = -here.reduce((a, b) => a + b, 0) / 2;
      row.forEach((vertex, i) => { x[vertex] = left; left += here[i] || 0; });
    }
    const sweeps = size < 3000 ? 14 : size < 30000 ? 6 : 3;
    for (let sweep = 0; sweep < sweeps; sweep++) {
      const final = sweep >= sweeps - 2, down = sweep % 2 === 0;
      for (let i = 0; i < order.length; i++) {
        const r = down ? i : order.length - 1 - i;
        settle(v, order[r], gaps[r], x, final || down, final || !down);
      }
    }
    return x;
  }

  function settle(v, row, gaps, x, up, down) {
    const wanted = new Float64Array(row.length), weights = new Float64Array(row.length);
    for (let i = 0; i < row.length; i++) {
      const vertex = row[i], own = v.dummy[vertex] ? 4 : 1;
      let total = 0, mass = 0;
      for (let side = 0; side < 2; side++) {
        if (!(side ? down : up)) continue;
        const near = side ? v.below : v.above, back = side ? v.above : v.below;
        const last = near.start[vertex + 1], degree = near.degree(vertex);
        for (let e = near.start[vertex]; e < last; e++) {
          const other = near.other[e];
          const weight = (own + (v.dummy[other] ? 3 : 0)) / Math.max(degree, back.degree(other));
          total += weight * (x[other] + near.offset[e] - near.own[e]);
          mass += weight;
        }
      }
      wanted[i] = mass ? total / mass : x[vertex];
      weights[i] = mass || 0.05;
    }
    pool(wanted, weights, gaps);
    for (let i = 0; i < row.length; i++) x[row[i]] = wanted[i];
  }

  // Least squares under minimum distances, by pooling adjacent violators; in place.
  function pool(wanted, weights, gaps) {
    if (!gaps.length) return;
    const count = wanted.length, totals = new Float64Array(count), masses = new Float64Array(count);
    const members = new Int32Array(count);
    let shift = 0, last = -1;
    for (let i = 0; i < count; i++) {
      if (i) shift += gaps[i - 1];
      last++;
      totals[last] = weights[i] * (wanted[i] - shift); masses[last] = weights[i]; members[last] = 1;
      while (last > 0 && totals[last - 1] * masses[last] > totals[last] * masses[last - 1]) {
        totals[last - 1] += totals[last]; masses[last - 1] += masses[last]; members[last - 1] += members[last];
        last--;
      }
    }
    shift = 0;
    for (let block = 0, i = 0; block <= last; block++) {
      for (let k = 0; k < members[block]; k++, i++) {
        if (i) shift += gaps[i - 1];
        wanted[i] = totals[block] / masses[block] + shift;
      }
    }
  }

  // Puts what forms a line on one vertical, as far as the neighbours leave room. Lines are the
  // dummies of one value, and boxes of which each has the next one as its only user.
  function straighten(v, order, x, chains) {
    const at = new Int32Array(v.rank.length), none = { length: 0 };
    for (const row of order) for (let i = 0; i < row.length; i++) at[row[i]] = i;
    const left = (vertex) => {
      const i = at[vertex], before = i ? order[v.rank[vertex]][i - 1] : -1;
      return before < 0 ? -Infinity : x[before] + distance(v, before, vertex);
    };
    const right = (vertex) => {
      const row = order[v.rank[vertex]], i = at[vertex] + 1;
      return i < row.length ? x[row[i]] - distance(v, vertex, row[i]) : Infinity;
    };
    const move = (line, shifts, first, last, low, high) => {
      if (low > high) return;
      const wanted = new Float64Array(last - first);
      for (let i = first; i < last; i++) wanted[i - first] = x[line[i]] - (shifts[i] || 0);
      const base = Math.min(Math.max(wanted.sort()[wanted.length >> 1], low), high);
      for (let i = first; i < last; i++) x[line[i]] = base + (shifts[i] || 0);
    };
    // Cuts a line into pieces for which a common vertical exists.
    const settleLine = (line, shifts) => {
      let first = 0, low = -Infinity, high = Infinity;
      for (let i = 0; i < line.length; i++) {
        const least = left(line[i]) - (shifts[i] || 0), most = right(line[i]) - (shifts[i] || 0);
        if (i > first && Math.max(low, least) > Math.min(high, most)) {
          move(line, shifts, first, i, low, high);
          first = i; low = -Infinity; high = Infinity;
        }
        low = Math.max(low, least); high = Math.min(high, most);
      }
      if (line.length > first) move(line, shifts, first, line.length, low, high);
    };
    const runs = runsOf(v);
    for (const run of runs) settleLine(run.line, run.shifts);
    for (const chain of chains) settleLine(chain, none);
    for (const run of runs) settleLine(run.line, run.shifts);
  }

  function runsOf(v) {
    const { above, below } = v, runs = [];
    const follows = v.rank.map((_, i) => above.degree(i) === 1 && below.degree(above.other[above.start[i]]) === 1);
    for (let first = 0; first < follows.length; first++) {
      if (follows[first] || below.degree(first) !== 1 || !follows[below.other[below.start[first]]]) continue;
      const line = [first], shifts = [0];
      for (let vertex = first, shift = 0; below.degree(vertex) === 1 && follows[below.other[below.start[vertex]]];) {
        const e = below.start[vertex];
        shift += below.own[e] - below.offset[e];
        vertex = below.other[e];
        line.push(vertex);
        shifts.push(shift);
      }
      runs.push({ line, shifts });
    }
    return runs;
  }

  function sortedEntries(sizes, links, entries, chains, x, cut) {
    const arriving = new Map();
    links.forEach((link, i) => {
      if (link.entry !== null) return;
      const chain = chains[link.key];
      let origin = chain.length ? x[chain[chain.length - 1]] : x[link.source] + link.exit;
      if (cut[link.key]) origin = x[link.target] + entries[i];
      if (!arriving.has(link.target)) arriving.set(link.target, []);
      arriving.get(link.target).push([origin, i]);
    });
    const result = entries.slice();
    for (const [target, origins] of arriving) {
      const offsets = spread(origins.length, sizes[target][0]);
      origins.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
      origins.forEach(([, index], i) => { result[index] = offsets[i]; });
    }
    return result;
  }

  function finish(v, order, x, links, entries, chains, stubs, cut, count) {
    const tops = [], heights = [], { below } = v;
    let y = 0;
    for (const row of order) {
      let tall = 0, reach = 0;
      for (const vertex of row) {
        tall = Math.max(tall, v.height[vertex]);
        for (let e = below.start[vertex]; e < below.start[vertex + 1]; e++) {
          reach = Math.max(reach, Math.abs(x[below.other[e]] + below.offset[e] - x[vertex] - below.own[e]));
        }
      }
      tops.push(y); heights.push(tall);
      y += tall + GAP_RANKS + Math.min(36, reach * 0.06);
    }
    let left = Infinity, width = 0;
    for (let i = 0; i < x.length; i++) left = Math.min(left, x[i] - v.width[i] / 2);
    const at = (i) => tops[v.rank[i]] + (heights[v.rank[i]] - v.height[i]) / 2;
    for (let i = 0; i < x.length; i++) { x[i] -= left; width = Math.max(width, x[i] + v.width[i] / 2); }
    const leave = (points, i, exit) => points.push(x[i] + exit, at(i) + v.height[i], x[i] + exit, tops[v.rank[i]] + heights[v.rank[i]]);
    const arrive = (points, i, entry) => points.push(x[i] + entry, tops[v.rank[i]], x[i] + entry, at(i));
    const routes = links.map((link, i) => {
      if (cut[link.key]) return null;
      const points = [], chain = chains[link.key], steps = v.rank[link.target] - v.rank[link.source] - 1;
      leave(points, link.source, link.exit);
      for (let k = 0; k < steps; k++) {
        const vertex = chain[k], rank = v.rank[vertex];
        points.push(x[vertex], tops[rank], x[vertex], tops[rank] + heights[rank]);
      }
      arrive(points, link.target, entries[i]);
      return points;
    });
    const labels = stubs.map(({ vertex, link, index, uses }) => {
      const route = [];
      leave(route, index < 0 ? link.source : vertex, index < 0 ? link.exit : 0);
      arrive(route, index < 0 ? vertex : link.target, index < 0 ? 0 : entries[index]);
      return { link, uses, index, x: x[vertex], y: at(vertex), route };
    });
    const ys = Array.from({ length: count }, (_, i) => at(i));
    const height = tops.length ? tops[tops.length - 1] + heights[heights.length - 1] : 0;
    return { x, y: ys, width, height, routes, stubs: labels };
  }

  return { place };
})();
