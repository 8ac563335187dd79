// The table of samples: filter, sort, and a list that draws only the rows in view.
slime.samples = (() => {
  const { h, number } = slime;
  const ROW = 34, NUMBERS = ["reward", "step", "length", "tokens", "staleness", "version", "attempt", "logprob"];
  const NAMES = ["fate", "status", "task", "role", "model"];
  const tables = new Map();
  let state = null; // what the open tab shows

  // Columns as typed arrays; NaN where there is no number.
  const load = async (run, place) => {
    if (!slime.source.samples) return null;
    if (tables.has(run.path)) return tables.get(run.path);
    const raw = await slime.source.samples(place);
    if (!raw) return null;
    const { columns, names, groups } = raw, count = columns.id.length;
    const numbers = (values) => Float64Array.from(values, (value) => value ?? NaN);
    const table = { run, place, names, groups, count, id: columns.id, group: Int32Array.from(columns.group), rollout: columns.rollout, policy: raw.policy, notices: raw.notices || [], pages: raw.pages, orders: new Map() };
    for (const name of ["reward", "step", "length", "tokens", "version", "attempt"]) table[name] = numbers(columns[name]);
    table.logprob = numbers(columns.log_prob);
    table.staleness = table.step.map((step, i) => step - 1 - table.version[i]);
    for (const name of NAMES) table[name] = Uint16Array.from(columns[name]);
    table.members = Array.from(groups, () => []);
    table.group.forEach((group, i) => table.members[group].push(i));
    const rewards = table.reward.filter((reward) => !Number.isNaN(reward));
    table.low = rewards.reduce((a, b) => Math.min(a, b), Infinity); table.high = rewards.reduce((a, b) => Math.max(a, b), -Infinity);
    table.places = null;
    tables.set(run.path, table);
    return table;
  };
  const forget = () => tables.clear();

  // A query is words: reward>0.5, status:truncated, text:word, or a part of an id.
  const parse = (text, table) => {
    const tests = [], problems = [];
    let search = "";
    for (const word of text.trim().split(/\s+/).filter(Boolean)) {
      const comparison = word.match(/^([a-z_-]+)(<=|>=|!=|<|>|=)(-?[\d.e+-]+)$/i), pair = word.match(/^([a-z]+):(.+)$/i);
      if (comparison) {
        const name = comparison[1].replace(/[-_]/g, "").toLowerCase(), value = Number(comparison[3]), values = table[name];
        if (!NUMBERS.includes(name) || Number.isNaN(value)) { problems.push(`${word}: compare ${NUMBERS.join(", ")}`); continue; }
        tests.push({ "<": (i) => values[i] < value, ">": (i) => values[i] > value, "<=": (i) => values[i] <= value, ">=": (i) => values[i] >= value, "=": (i) => values[i] === value, "!=": (i) => values[i] !== value }[comparison[2]]);
      } else if (pair && NAMES.includes(pair[1].toLowerCase())) {
        const codes = table[pair[1].toLowerCase()], wanted = pair[2].toLowerCase();
        const match = table.names[pair[1].toLowerCase()].map((name) => name.toLowerCase().includes(wanted));
        tests.push((i) => match[codes[i]]);
      } else if (pair && pair[1].toLowerCase() === "text") search = search ? search + " " + pair[2] : pair[2];
      else tests.push((i) => table.id[i].includes(word));
    }
    return { tests, problems, search };
  };

  const order = (table, key) => {
    if (!table.orders.has(key)) {
      const indices = Uint32Array.from({ length: table.count }, (_, i) => i), values = table[key];
      if (key !== "order") { // missing numbers last
        const keys = Float64Array.from(values, (value) => Number.isNaN(value) ? Infinity : value), sorted = keys.slice().sort(), used = new Uint32Array(keys.length);
        keys.forEach((key, i) => { // the place of the first equal key, by bisection: several times as fast as sorting by a function
          let low = 0, high = sorted.length;
          while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < key) low = middle + 1; else high = middle; }
          indices[low + used[low]++] = i;
        });
      }
      table.orders.set(key, indices);
    }
    return table.orders.get(key);
  };
  const groupFigures = (table) => table.figures ??= table.members.map((members) => {
    const rewards = members.map((i) => table.reward[i]).filter((reward) => !Number.isNaN(reward));
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    return {
      mean, std: Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length), step: table.step[members[0]],
      length: members.reduce((sum, i) => sum + table.length[i], 0) / members.length, count: members.length,
    };
  });

  // Places of the table that pass, in order. With groups: numbers of groups that have a passing sample.
  const choose = () => {
    const { table, query, chips } = state, { tests, problems, search } = parse(query, table);
    state.words = search;
    for (const [words, hit] of state.hits) if (hit.note && words !== search) state.hits.delete(words); // not read to the end
    for (const [name, codes] of Object.entries(chips)) if (codes.size) { const column = table[name]; tests.push((i) => codes.has(column[i])); }
    if (search) tests.push(hitsOf(search));
    const pass = (i) => { for (const test of tests) if (!test(i)) return false; return true; };
    let items = [], value = (item) => item; // the number that sorts
    if (state.grouped) {
      const figures = groupFigures(table), key = { reward: "mean", spread: "std" }[state.sort] ?? state.sort;
      for (let group = 0; group < table.groups.length; group++) if (table.members[group].some(pass)) items.push(group);
      if (key !== "order") {
        value = (g) => figures[g][key] ?? NaN;
        const place = (g) => Number.isNaN(value(g)) ? Infinity : value(g);
        items.sort((a, b) => place(a) - place(b) || a - b);
      }
    } else {
      const key = state.sort === "spread" ? "reward" : state.sort;
      if (key !== "order") value = (i) => table[key][i];
      for (const i of order(table, key)) if (pass(i)) items.push(i);
    }
    if (state.descending) { // missing numbers stay last
      const end = items.findLastIndex((item) => !Number.isNaN(value(item))) + 1;
      items = [...items.slice(0, end).reverse(), ...items.slice(end)];
    }
    state.items = items;
    state.problems = problems;
  };

  // Whether a sample has a text. The pages are read for it when typing pauses, and no further once another text is wanted.
  const PAUSE = 250; // milliseconds
  const keyOf = (id, attempt) => attempt + " " + id;
  const hitsOf = (words) => {
    const { table, hits } = state;
    if (!hits.has(words)) {
      const hit = { keys: new Set(), note: "searching texts", problem: "" };
      hits.set(words, hit);
      setTimeout(scan, PAUSE, state, words, hit);
    }
    const { keys } = hits.get(words);
    return (i) => keys.has(keyOf(table.id[i], table.attempt[i]));
  };
  // What was found so far is shown meanwhile.
  const scan = async (own, words, hit) => {
    const wanted = () => state === own && own.hits.get(words) === hit;
    if (!wanted()) return;
    try {
      let shown = performance.now();
      for await (const [samples, share] of slime.source.pages(own.table.place)) {
        if (!wanted()) return;
        for (const sample of samples) if ((sample.response || "").includes(words) || slime.text(sample.prompt || "").includes(words)) hit.keys.add(keyOf(sample.id, sample.attempt));
        if (performance.now() - shown > 250) { shown = performance.now(); hit.note = `searching texts ${Math.round(100 * share)} %`; refresh(); await new Promise((done) => setTimeout(done)); }
      }
      hit.note = "";
    } catch (error) { hit.note = "incomplete"; hit.problem = "texts cannot be searched: " + error.message; }
    if (wanted()) refresh();
  };

  const BLOCKS = "▁▂▃▄▅▆▇█";
  const shade = (reward) => {
    const { low, high } = state.table;
    if (Number.isNaN(reward) || !(high > low)) return "var(--line)";
    const share = (reward - low) / (high - low);
    return `color-mix(in oklab, var(--good) ${Math.round(100 * share)}%, var(--bad))`;
  };
  const bars = (group) => {
    const { table } = state, { low, high } = table;
    return table.members[group].slice(0, 24).map((i) => Number.isNaN(table.reward[i]) ? "·" : BLOCKS[high > low ? Math.round(7 * (table.reward[i] - low) / (high - low)) : 0]).join("");
  };
  const fill = (row, item) => {
    const { table } = state, cells = row.children;
    row.dataset.item = item;
    if (state.grouped) {
      const figures = groupFigures(table)[item];
      cells[0].style.background = shade(figures.mean);
      cells[1].textContent = slime.visible(table.groups[item]);
      cells[2].textContent = bars(item); cells[2].style.color = "var(--soft)";
      cells[3].textContent = `${number(figures.mean, 3)} ± ${number(figures.std, 2)}`;
      cells[4].textContent = Number.isNaN(figures.step) ? "–" : "step " + figures.step;
      row.setAttribute("aria-selected", String(table.group[state.selected] === item));
    } else {
      cells[0].style.background = shade(table.reward[item]);
      cells[1].textContent = slime.visible(table.id[item]);
      const fate = table.names.fate[table.fate[item]], status = table.names.status[table.status[item]];
      cells[2].style.color = ""; cells[2].textContent = fate === "trained" ? (status === "completed" ? "" : status) : fate;
      cells[3].textContent = `${number(table.reward[item], 3)}  ·  ${table.length[item]} tok`;
      cells[4].textContent = Number.isNaN(table.step[item]) ? "–" : "step " + table.step[item];
      row.setAttribute("aria-selected", String(state.selected === item));
    }
  };
  const draw = () => {
    const { list, space, pool, items } = state;
    if (!list.isConnected) return;
    space.style.height = items.length * ROW + "px";
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4), count = Math.ceil(list.clientHeight / ROW) + 8;
    while (pool.length < count) {
      const row = h("div", { className: "sample-row", role: "option", onclick: () => open(Number(row.dataset.item)) }, h("i"), h("b"), h("em"), h("span"), h("small"));
      pool.push(row);
      space.append(row);
    }
    pool.forEach((row, k) => {
      const place = first + k;
      row.hidden = place >= items.length || k >= count;
      if (row.hidden) return;
      row.style.transform = `translateY(${place * ROW}px)`;
      row.setAttribute("aria-posinset", place + 1);
      row.setAttribute("aria-setsize", items.length);
      fill(row, items[place]);
    });
  };
  const refresh = () => {
    choose();
    const { table } = state, hit = state.hits.get(state.words);
    const unit = state.grouped ? "groups" : "samples";
    state.counter.textContent = `${slime.count(state.items.length)} of ${slime.count(state.grouped ? table.groups.length : table.count)} ${unit}` + (hit?.note ? ", " + hit.note : "");
    state.problem.textContent = [...state.problems, hit?.problem].filter(Boolean).join("; ");
    draw();
  };

  const open = (item, keep) => {
    const { table } = state;
    state.selected = state.grouped && !keep ? table.members[item][0] : item;
    state.root.classList.add("detail");
    slime.viewer.show(table, state.selected, state.detail);
    history.replaceState(null, "", `#samples/${state.table.place}/${encodeURIComponent(table.id[state.selected])}/${table.attempt[state.selected]}`);
    draw();
  };
  const into = (place) => {
    const { list } = state, top = place * ROW;
    if (top < list.scrollTop) list.scrollTop = top; else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  };
  const move = (by) => {
    const { items, table } = state;
    if (!items.length) return;
    const at = items.indexOf(state.grouped ? table.group[state.selected] : state.selected);
    const place = Math.max(0, Math.min(items.length - 1, at < 0 ? 0 : at + by));
    into(place);
    open(items[place]);
  };
  const sibling = (by) => {
    const { table } = state;
    if (state.selected === null) return move(1);
    const members = table.members[table.group[state.selected]], at = members.indexOf(state.selected) + by;
    if (members[at] !== undefined) open(members[at], true);
  };
  const key = (event) => {
    if (!state) return false;
    const actions = {
      j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1), ArrowRight: () => sibling(1), ArrowLeft: () => sibling(-1),
      "/": () => state.search.focus(), g: () => state.toggle(), c: () => slime.viewer.nextColour(), Escape: () => state.root.classList.remove("detail"),
      Home: () => move(-Infinity), End: () => move(Infinity), PageDown: () => move(12), PageUp: () => move(-12),
    };
    if (!actions[event.key]) return false;
    actions[event.key]();
    return true;
  };

  const chip = (name, code, label, count) => {
    const button = h("button", { className: "chip", type: "button", "aria-pressed": "false", onclick: () => {
      const codes = (state.chips[name] ??= new Set());
      if (codes.has(code)) codes.delete(code); else codes.add(code);
      button.setAttribute("aria-pressed", String(codes.has(code)));
      state.list.scrollTop = 0; refresh();
    } }, slime.visible(label || "–"), h("small", null, slime.count(count)));
    return button;
  };
  const chips = (table) => NAMES.filter((name) => table.names[name].length > 1).map((name) => {
    const counts = new Uint32Array(table.names[name].length);
    for (const code of table[name]) counts[code]++;
    return h("span", { className: "chips", role: "group", "aria-label": name }, table.names[name].map((label, code) => chip(name, code, label, counts[code])).slice(0, 24));
  });

  const build = (table, runs, root) => {
    const search = h("input", { type: "search", placeholder: "id, reward>0.5, step=3, status:truncated, text:word", "aria-label": "Filter samples", spellcheck: "false",
      oninput: () => { state.query = search.value; state.list.scrollTop = 0; refresh(); },
      onkeydown: (event) => { if (event.key === "Enter" || event.key === "ArrowDown") { search.blur(); move(0); event.preventDefault(); } } });
    const SORTS = [["order", "order"], ["reward", "reward"], ["spread", "spread of group"], ["length", "length"], ["step", "step"], ["staleness", "staleness"], ["logprob", "log-prob"]];
    const sort = h("select", { "aria-label": "Sort by", onchange: () => { state.sort = sort.value; refresh(); } }, SORTS.map(([value, label]) => h("option", { value }, label)));
    const turn = h("button", { className: "icon", type: "button", title: "Turn the order round", "aria-label": "Turn the order round", onclick: () => { state.descending = !state.descending; refresh(); } }, "⇅");
    const toggle = slime.pick([[false, "Samples"], [true, "Groups"]], false, (value) => { state.grouped = value; state.list.scrollTop = 0; refresh(); });
    const chooser = runs.length > 1 && h("select", { "aria-label": "Run", onchange: () => start(runs, Number(chooser.value), root) }, runs.map((run, i) => h("option", { value: i }, run.name)));
    if (chooser) chooser.value = String(table.place);
    const counter = h("span", { className: "counter", role: "status" }), problem = h("span", { className: "problem", role: "alert" });
    const space = h("div", { className: "space" }), list = h("div", { className: "list", role: "listbox", tabindex: 0, "aria-label": "Samples" }, space);
    const detail = h("section", { className: "viewer", "aria-label": "Sample" }, h("div", { className: "empty" }, "Choose a sample: j and k move through the list."));
    slime.fill(root, h("div", { className: "chooser" },
      h("div", { className: "controls" }, chooser, toggle, sort, turn), search, chips(table),
      h("div", { className: "under" }, counter, problem), [table.policy, ...table.notices].filter(Boolean).map((text) => h("p", { className: "why" }, text)), list), detail);
    const pressed = toggle.children;
    state = { table, root, search, list, space, detail, counter, problem, pool: [], items: [], query: "", chips: {}, sort: "order", descending: false, grouped: false, selected: null, hits: new Map(), words: "", problems: [],
      toggle: () => pressed[state.grouped ? 0 : 1].click() };
    let waiting = false;
    list.addEventListener("scroll", () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); } });
    new ResizeObserver(draw).observe(list);
    refresh();
  };
  const start = async (runs, place, root, id, attempt) => {
    const table = await load(runs[place], place);
    if (!table || !table.count) { state = null; root.replaceChildren(h("div", { className: "empty" }, "There are no samples: the run has no ledger, or none were issued yet.")); return; }
    build(table, runs, root);
    const at = id === undefined ? -1 : table.id.findLastIndex((each, i) => each === id && (attempt === undefined || table.attempt[i] === Number(attempt)));
    if (at >= 0) { into(at); open(at); }
  };
  const show = (runs) => {
    if (slime.source.live) forget();
    const [, place, id, attempt] = location.hash.slice(1).split("/");
    const root = h("div", { className: "samples" }, h("div", { className: "empty" }, "Reading samples …"));
    start(runs, Math.min(runs.length - 1, Number(place) || 0), root, id === undefined ? undefined : decodeURIComponent(id), attempt);
    return root;
  };

  // Distributions over the samples that trained, for the overview.
  const histogram = (title, why, name, runs, bins) => slime.charts.figure({
    title, why, draw: async () => {
      const layout = slime.charts.layoutOf([], { rangemode: "tozero" });
      const tables_ = (await Promise.all(runs.map(load))).filter(Boolean);
      const values = tables_.map((table) => Array.from(table[name]).filter((value, i) => !Number.isNaN(value) && table.names.fate[table.fate[i]] === "trained"));
      return [tables_.map((table, i) => ({ type: "histogram", x: values[i], name: slime.plain(table.run.name), opacity: runs.length > 1 ? 0.6 : 0.9, marker: { color: table.run.colour }, ...bins, hovertemplate: "%{y} samples" })),
        { ...layout, barmode: "overlay", bargap: 0.04, hovermode: "closest" }];
    },
  });
  const histograms = (runs) => slime.source.samples && !slime.source.live ? [ // live, the table would be read whole at once
    histogram("Staleness of trained samples", "Versions between the weights in training and the oldest that made a token of the sample; 0 is on-policy.", "staleness", runs, { xbins: { size: 1 } }),
  ] : [];
  return { show, key, load, histograms, forget, shade, open: (i) => open(i, true), get state() { return state; } };
})();
