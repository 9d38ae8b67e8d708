// The timeline of the page. One canvas has the bars; a second canvas above it highlights what the pointer is at.
// All times are ticks, as in the data; `unpack` says how a bar is written there.
"use strict";
(() => {
  const root = document.getElementById("timeline"), plot = root.querySelector(".plot"), tip = root.querySelector(".tip");
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const [under, over] = [...root.querySelectorAll("canvas")].map(canvas => canvas.getContext("2d"));
  const control = name => root.querySelector(`[name=${name}]`);
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const [dark, light, middle] = data.light;
  const OPS = data.ops.length, SHADES = 16, RIGHT = 14, HEAD = 32, AXIS = 26, FONT = "system-ui, sans-serif";
  const MANY = 12;       // ranks, above which a run gets an axis of its own
  const CROWDED = 4000;  // transfers in view, above which none is drawn
  const runs = data.runs.map(prepare), whole = Math.max(...runs.map(run => run.end));
  const tools = {};      // colors and pattern of the present color scheme
  let view = [0, whole], width = 0, left = 60, withTransfers = false, at = null, pointer = null, asked = false;

  // ---- data

  function prepare(run) {
    const slices = run.lengths.flatMap((lengths, microbatch) => {
      let context = 0;
      return lengths.map((length, number) => {
        const shade = Math.round((SHADES - 1) * (lengths.length > 1 ? number / (lengths.length - 1) : (middle - dark) / (light - dark)));
        context += length;
        return { microbatch, number, length, context: context - length, shade, label: lengths.length > 1 ? number : microbatch };
      });
    });
    return { ...run, slices, bars: run.bars.map(unpack), transfers: run.transfers.map(unpack) };
  }

  function unpack(packed) {
    const count = packed.length / 3, start = new Float64Array(count), end = new Float64Array(count);
    const code = new Int32Array(count);
    let longest = 0;
    for (let i = 0, clock = 0; i < count; i++) {
      code[i] = packed[3 * i];
      start[i] = clock + packed[3 * i + 1];
      clock = end[i] = start[i] + packed[3 * i + 2];
      longest = Math.max(longest, packed[3 * i + 2]);
    }
    return { code, start, end, longest, count };
  }

  const opOf = code => code % OPS;
  const stageOf = (run, code) => Math.floor(code / OPS) % run.stages;
  const sliceOf = (run, code) => run.slices[Math.floor(code / OPS / run.stages)];

  function after(lane, time) {  // the first that starts later
    let low = 0, high = lane.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.start[middle] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  function visible(lane) {  // from, to: none outside of these is in view
    return [after(lane, view[0] - lane.longest - 1), after(lane, view[1])];
  }

  // ---- places

  const inner = () => width - left - RIGHT;
  const xOf = time => left + (time - view[0]) / (view[1] - view[0]) * inner();
  const timeOf = x => view[0] + (x - left) / inner() * (view[1] - view[0]);
  const yOf = (run, rank) => run.top + rank * (run.row + run.gap);

  function layout() {
    width = plot.clientWidth;
    under.font = `12px ${FONT}`;
    left = Math.ceil(under.measureText(`rank ${Math.max(...runs.map(run => run.bars.length)) - 1}`).width) + 12;
    let y = 0;
    runs.forEach((run, index) => {
      const ranks = run.bars.length;
      run.row = clamp(Math.floor(480 / ranks), 6, 32);
      run.gap = withTransfers ? clamp(run.row * .6, 7, 18) : clamp(Math.floor(run.row / 6), 1, 5);
      run.top = y + HEAD;
      run.bottom = run.top + ranks * (run.row + run.gap);
      run.axis = ranks > MANY || index === runs.length - 1;
      y = run.bottom + (run.axis ? AXIS : 4);
    });
    const ratio = Math.min(devicePixelRatio || 1, 16000 / y);  // browsers draw nothing on a canvas much larger
    for (const { canvas } of [under, over]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(y * ratio);
      canvas.style.height = `${y}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    Object.assign(tools, { ratio, height: y });
  }

  function colors() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "ink", "faint", "line", "idle", "hatch"]) tools[name] = style.getPropertyValue(`--${name}`).trim();
    tools.css = [], tools.rgb = [];
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    for (const [, hue, saturation] of data.ops) {
      for (let shade = 0; shade < SHADES; shade++) {
        const css = `hsl(${hue}, ${100 * saturation}%, ${100 * (dark + (light - dark) * shade / (SHADES - 1))}%)`;
        tools.css.push(css);
      }
      probe.fillStyle = `hsl(${hue}, ${100 * saturation}%, ${100 * middle}%)`;
      probe.fillRect(0, 0, 1, 1);
      tools.rgb.push(probe.getImageData(0, 0, 1, 1).data);
    }
    const tile = document.createElement("canvas"), pen = tile.getContext("2d");
    tile.width = tile.height = 8;
    pen.fillStyle = tools.idle;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = tools.hatch;
    pen.lineWidth = 1.5;
    for (const x of [-8, 0, 8]) { pen.moveTo(x - 1, 9); pen.lineTo(x + 9, -1); }
    pen.stroke();
    tools.pattern = under.createPattern(tile, "repeat");
  }

  // ---- words

  function unitOf(time) {
    const seconds = Math.abs(time) * data.tick;
    return [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([unit]) => seconds >= unit) || [1e-9, "ns"];
  }

  function clock(time, apart, [unit, name] = unitOf(time)) {  // with the digits that tell `apart` ticks apart
    const places = clamp(Math.ceil(-Math.log10(apart * data.tick / unit) - 1e-9), 0, 9);
    return time === 0 ? "0" : `${(time * data.tick / unit).toFixed(places)} ${name}`;
  }

  function duration(time) {
    const [unit, name] = unitOf(time), value = time * data.tick / unit;
    return `${value >= 100 ? Math.round(value) : Number(value.toPrecision(3))} ${name}`;
  }

  function words({ run, rank, index, transfer }) {
    const lane = (transfer ? run.transfers : run.bars)[rank], code = lane.code[index];
    const stage = stageOf(run, code), slice = sliceOf(run, code), long = Math.max(lane.end[index] - lane.start[index], 1);
    const tokens = `${slice.length} token${slice.length === 1 ? "" : "s"}${slice.context ? ` after ${slice.context}` : ""}`;
    const unit = unitOf(lane.end[index]), times = [lane.start, lane.end].map(t => clock(t[index], long / 10, unit));
    const what = !transfer ? `${data.ops[opOf(code)][0]}: stage ${stage}`
      : opOf(code) === 0 ? `output: from stage ${stage - 1} to stage ${stage}`
      : `gradient: from stage ${stage + 1} to stage ${stage}`;
    return [`${what}, microbatch ${slice.microbatch}, slice ${slice.number} (${tokens}), `, `${times[0]} to ${times[1]}`,
      `${duration(lane.end[index] - lane.start[index])} on rank ${rank}, ${run.name}`];
  }

  // ---- drawing

  function draw() {
    const pen = under;
    pen.clearRect(0, 0, width, tools.height);
    for (const run of runs) {
      heading(pen, run);
      if (run.axis) axis(pen, run);
      inside(pen, () => run.bars.forEach((lane, rank) => row(pen, run, lane, rank)));
    }
    if (withTransfers) runs.forEach(run => inside(pen, () => arrows(pen, run)));
    drawOver();
  }

  function inside(pen, paint) {
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, inner(), tools.height);
    pen.clip();
    paint();
    pen.restore();
  }

  function text(pen, words, x, y, { align = "left", fill = tools.faint, font = "12px" } = {}) {
    pen.font = `${font} ${FONT}`;
    pen.textAlign = align;
    pen.fillStyle = fill;
    pen.fillText(words, x, y);
  }

  function heading(pen, run) {
    const y = run.top - 11, step = duration(run.end), idle = `${(100 * run.idle).toFixed(run.idle < .0995 ? 1 : 0)}% idle`;
    text(pen, run.name, left, y, { fill: tools.ink, font: "600 14px" });
    const named = pen.measureText(run.name).width + 14;
    pen.font = `12px ${FONT}`;
    const fits = words => pen.measureText(words).width < inner() - named;
    text(pen, [`${step} per step, ${idle}`, `${step}, ${idle}`, step].find(fits) || "", width - RIGHT, y, { align: "right" });
    if (withTransfers && crowded(run) && inner() > 600) text(pen, "zoom in to see transfers", left + named, y);
    const every = [1, 2, 4, 8, 16, 32].find(n => n * (run.row + run.gap) >= 15);
    run.bars.forEach((_, rank) => {
      if (rank % every === 0) text(pen, `rank ${rank}`, left - 10, yOf(run, rank) + run.row / 2 + 4, { align: "right" });
    });
  }

  function axis(pen, run) {
    const rough = (view[1] - view[0]) / Math.max(2, inner() / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find(n => n * power >= rough * .999), unit = unitOf(view[1]);
    for (let i = Math.ceil(view[0] / step - 1e-9); i * step <= view[1] * (1 + 1e-9); i++) {
      const x = xOf(i * step), words = clock(i * step, step, unit);
      pen.fillStyle = tools.line;
      pen.fillRect(Math.round(x), run.bottom, 1, 6);
      if (x + 24 < width) text(pen, words, x, run.bottom + 19, { align: i === 0 ? "left" : "center", font: "11px" });
    }
  }

  function row(pen, run, lane, rank) {
    const y = yOf(run, rank), [first, last] = visible(lane), x = xOf(0);
    pen.fillStyle = run.row > 9 ? tools.pattern : tools.idle;
    pen.fillRect(x, y, xOf(run.end) - x, run.row);
    if (last - first > inner() * tools.ratio / 3) strip(pen, run, lane, first, last, y);
    else for (let i = first; i < last; i++) bar(pen, run, lane, i, y);
  }

  function bar(pen, run, lane, i, y, least = .7) {
    const slice = sliceOf(run, lane.code[i]), x = xOf(lane.start[i]), wide = xOf(lane.end[i]) - x;
    pen.fillStyle = tools.css[opOf(lane.code[i]) * SHADES + slice.shade];
    if (wide > 8 && run.row > 12 && pen.roundRect) {
      pen.beginPath();
      pen.roundRect(x, y, wide - .8, run.row, 2.5);
      pen.fill();
    } else pen.fillRect(x, y, Math.max(wide - (wide > 3 ? .8 : 0), least), run.row);
    const label = String(slice.label);
    if (run.row >= 14 && wide > 8 + 7 * label.length) {
      const seen = (Math.max(x, left) + Math.min(x + wide, width - RIGHT)) / 2;
      text(pen, label, seen, y + run.row / 2 + 4, { align: "center", fill: slice.shade < 9 ? "#fff" : "#14202c", font: "11px" });
    }
  }

  function strip(pen, run, lane, first, last, y) {
    // More bars than pixels. Each column shows one op, or none, chosen so that along the row each gets its share of time.
    const wide = Math.round(inner() * tools.ratio), scale = wide / (view[1] - view[0]), share = new Float32Array(OPS * wide);
    for (let i = first; i < last; i++) {
      const from = Math.max((lane.start[i] - view[0]) * scale, 0), to = Math.min((lane.end[i] - view[0]) * scale, wide);
      for (let x = Math.floor(from); x < to; x++) share[x * OPS + opOf(lane.code[i])] += Math.min(to, x + 1) - Math.max(from, x);
    }
    const image = new ImageData(wide, 1), owed = new Float32Array(OPS + 1);  // the last is idle time
    for (let x = 0; x < wide; x++) {
      let most = OPS, idle = 1;
      for (let op = 0; op < OPS; op++) {
        owed[op] += share[x * OPS + op];
        idle -= share[x * OPS + op];
      }
      owed[OPS] += idle;
      for (let op = 0; op < OPS; op++) if (owed[op] > owed[most]) most = op;
      owed[most] -= 1;
      if (most < OPS) image.data.set(tools.rgb[most], 4 * x);
    }
    tools.strip ||= document.createElement("canvas");
    Object.assign(tools.strip, { width: wide, height: 1 });
    tools.strip.getContext("2d").putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(tools.strip, left, y, inner(), run.row);
  }

  function crowded(run) {
    return run.transfers.reduce((sum, lane) => sum + visible(lane)[1] - visible(lane)[0], 0) > CROWDED;
  }

  function ends(run, rank, lane, i) {  // of an arrow, from the edge of one row to the edge of the other
    const forward = opOf(lane.code[i]) === 0, ranks = run.bars.length;
    const from = (stageOf(run, lane.code[i]) + (forward ? -1 : 1) + ranks) % ranks;
    const edge = (one, other) => yOf(run, one) + (other > one ? run.row : 0);
    return [xOf(lane.start[i]), edge(from, rank), xOf(lane.end[i]), edge(rank, from)];
  }

  function arrows(pen, run) {
    if (crowded(run)) return;
    run.transfers.forEach((lane, rank) => {
      for (let [i, last] = visible(lane); i < last; i++) arrow(pen, run, rank, lane, i, 1.2);
    });
  }

  function arrow(pen, run, rank, lane, i, thick) {
    const [x0, y0, x1, y1] = ends(run, rank, lane, i), down = Math.sign(y1 - y0), head = Math.min(4, run.gap * .4);
    pen.strokeStyle = pen.fillStyle = tools.css[opOf(lane.code[i]) * SHADES];
    pen.lineWidth = thick;
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1 - down * head);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x1 - head * .8, y1 - down * head * 1.4);
    pen.lineTo(x1 + head * .8, y1 - down * head * 1.4);
    pen.fill();
  }

  function drawOver() {
    const pen = over;
    pen.clearRect(0, 0, width, tools.height);
    if (pointer && pointer.x >= left && pointer.x <= width - RIGHT) {
      pen.fillStyle = tools.faint;
      runs.forEach(run => pen.fillRect(Math.round(pointer.x), run.top - 4, 1, run.bottom - run.top + 4));
    }
    if (at) inside(pen, () => highlight(pen));
  }

  function highlight(pen) {  // the same slice on all ranks, the others veiled
    const lane = (at.transfer ? at.run.transfers : at.run.bars)[at.rank], mine = sliceOf(at.run, lane.code[at.index]);
    for (const run of runs) {
      pen.globalAlpha = .55;
      pen.fillStyle = tools.paper;
      pen.fillRect(left, run.top, inner(), run.bottom - run.top);
      pen.globalAlpha = 1;
      const same = run.slices.findIndex(s => s.microbatch === mine.microbatch && s.number === mine.number);
      const low = same * run.stages * OPS, high = low + run.stages * OPS;
      run.bars.forEach((bars, rank) => {
        for (let [i, last] = visible(bars); i < last; i++) {
          if (same >= 0 && bars.code[i] >= low && bars.code[i] < high) bar(pen, run, bars, i, yOf(run, rank), 2);
        }
      });
    }
    if (at.transfer) return arrow(pen, at.run, at.rank, lane, at.index, 2.5);
    const x = xOf(lane.start[at.index]), wide = Math.max(xOf(lane.end[at.index]) - x, 2);
    pen.strokeStyle = tools.ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(x - .5, yOf(at.run, at.rank) - .5, wide, at.run.row + 1);
  }

  function redraw() {  // once a frame, however many events there are
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  }

  // ---- what is where

  function find(x, y) {
    const run = runs.find(run => y >= run.top - 2 && y < run.bottom);
    if (!run || x < left || x > width - RIGHT) return null;
    const rank = clamp(Math.floor((y - run.top) / (run.row + run.gap)), 0, run.bars.length - 1);
    const between = y - yOf(run, rank) > run.row;
    if (between && withTransfers && !crowded(run)) return findArrow(run, x, y);
    const lane = run.bars[rank], time = timeOf(x), near = 2 / inner() * (view[1] - view[0]);
    const index = after(lane, time) - 1;
    if (index >= 0 && lane.end[index] + near >= time) return { run, rank, index };
    return index + 1 < lane.count && lane.start[index + 1] - near <= time ? { run, rank, index: index + 1 } : null;
  }

  function findArrow(run, x, y) {
    let best = null, least = 6;
    run.transfers.forEach((lane, rank) => {
      for (let [index, last] = visible(lane); index < last; index++) {
        const [x0, y0, x1, y1] = ends(run, rank, lane, index);
        const part = clamp(((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2 || 1), 0, 1);
        const far = Math.hypot(x - x0 - part * (x1 - x0), y - y0 - part * (y1 - y0));
        if (far < least) { least = far; best = { run, rank, index, transfer: true }; }
      }
    });
    return best;
  }

  function point(found, x, y) {  // x and y within the plot: where the tip goes
    at = found;
    tip.hidden = !found;
    if (found) {
      const [what, ...more] = words(found), place = plot.getBoundingClientRect();
      tip.replaceChildren(what, ...["b", "span"].map((tag, i) => Object.assign(document.createElement(tag), { textContent: more[i] })));
      const { width: wide, height: high } = tip.getBoundingClientRect();
      // Above a run that is low enough, so that all its ranks stay in sight; else below the pointer, or above it.
      const above = found.run.bottom - found.run.top < 120 ? place.top + found.run.top - high - 6 : -1;
      const top = above > 0 ? above : place.top + y + 18 + high < innerHeight ? place.top + y + 18 : place.top + y - high - 14;
      tip.style.left = `${clamp(place.left + x + 14, 8, Math.max(8, document.documentElement.clientWidth - wide - 8))}px`;
      tip.style.top = `${Math.max(4, top)}px`;
    }
    drawOver();
  }

  // ---- moving about

  function show(from, span) {
    span = clamp(span, Math.min(50, whole), whole);
    from = clamp(from, 0, whole - span);
    view = [from, from + span];
    redraw();
  }

  function zoom(factor, time = (view[0] + view[1]) / 2) {
    const span = clamp((view[1] - view[0]) * factor, Math.min(50, whole), whole);
    show(time - (time - view[0]) * span / (view[1] - view[0]), span);
  }

  const pan = pixels => show(view[0] + pixels / inner() * (view[1] - view[0]), view[1] - view[0]);
  const reset = () => show(0, whole);
  const isWhole = () => view[1] - view[0] >= whole;
  const within = event => {
    const place = plot.getBoundingClientRect();
    return { x: event.clientX - place.left, y: event.clientY - place.top };
  };

  let scrolled = -1e9;
  addEventListener("scroll", () => { scrolled = performance.now(); point(null); }, { passive: true });
  plot.addEventListener("wheel", event => {
    // A scroll of the page that comes across the timeline stays one; so does zooming out of what is whole already.
    if (performance.now() - scrolled < 250 || (isWhole() && (event.deltaY > 0 || event.deltaX))) return;
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1, { x } = within(event);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX * unit);
    else zoom(Math.exp(clamp(event.deltaY * unit, -200, 200) * .003), timeOf(x));
    point(null);
  }, { passive: false });

  const held = new Map();  // pointers that are down: one drags, two pinch
  let dragged = false;
  plot.addEventListener("pointerdown", event => {
    if (event.button !== 0) return;
    held.set(event.pointerId, within(event));
    dragged = false;
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", event => {
    const now = within(event), before = held.get(event.pointerId);
    if (!before) {
      pointer = now;
      return point(find(now.x, now.y), now.x, now.y);
    }
    if (held.size === 2) {
      const other = [...held].find(([id]) => id !== event.pointerId)[1];
      zoom(Math.max(Math.abs(before.x - other.x), 10) / Math.max(Math.abs(now.x - other.x), 10), timeOf((now.x + other.x) / 2));
    } else if (dragged || Math.abs(now.x - before.x) > 3) pan(before.x - now.x);
    else return;
    dragged = true;
    pointer = null;
    plot.classList.add("drag");
    held.set(event.pointerId, now);
    point(null);
  });
  function release(event) {
    held.delete(event.pointerId);
    plot.classList.remove("drag");
    const { x, y } = within(event);
    if (event.type === "pointerup" && !dragged) point(find(x, y), x, y);  // a finger has no other way to ask
  }
  plot.addEventListener("pointerup", release);
  plot.addEventListener("pointercancel", release);
  plot.addEventListener("pointerleave", event => {
    pointer = null;
    if (event.pointerType === "mouse") point(null);
  });
  plot.addEventListener("blur", () => point(null));
  plot.addEventListener("dblclick", () => { reset(); point(null); });

  function walk(along, across) {
    if (!at || at.transfer) return select({ run: runs[0], rank: 0, index: 0 });
    if (along) return select({ ...at, index: clamp(at.index + along, 0, at.run.bars[at.rank].count - 1) });
    const rows = runs.flatMap(run => run.bars.map((lane, rank) => ({ run, rank }))).filter(({ run, rank }) => run.bars[rank].count);
    const place = rows.findIndex(({ run, rank }) => run === at.run && rank === at.rank);
    const next = rows[clamp(place + across, 0, rows.length - 1)], time = at.run.bars[at.rank].start[at.index];
    select({ ...next, index: Math.max(0, after(next.run.bars[next.rank], time) - 1) });
  }

  function select(found) {
    const lane = found.run.bars[found.rank], start = lane.start[found.index], end = lane.end[found.index];
    if (!lane.count) return;
    if (start < view[0] || end > view[1]) show((start + end) / 2 - (view[1] - view[0]) / 2, view[1] - view[0]);
    point(found, clamp(xOf((start + end) / 2), left, width), yOf(found.run, found.rank) + found.run.row);
  }

  plot.addEventListener("keydown", event => {
    const middle = at && !at.transfer ? at.run.bars[at.rank].start[at.index] : undefined;
    const keys = {
      ArrowLeft: () => walk(-1, 0), ArrowRight: () => walk(1, 0), ArrowUp: () => walk(0, -1), ArrowDown: () => walk(0, 1),
      "+": () => zoom(.6, middle), "=": () => zoom(.6, middle), "-": () => zoom(1 / .6, middle), Escape: () => { point(null); reset(); },
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  control("in").onclick = () => zoom(.6);
  control("out").onclick = () => zoom(1 / .6);
  control("all").onclick = reset;
  if (control("transfers")) control("transfers").onchange = event => {
    withTransfers = event.target.checked;
    layout();
    point(null);
    draw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colors(); draw(); });
  new ResizeObserver(() => { if (plot.clientWidth !== width) { layout(); draw(); } }).observe(plot);
  colors();
  layout();
  draw();
})();
