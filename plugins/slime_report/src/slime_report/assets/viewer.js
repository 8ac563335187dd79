// One sample: prompt, response with a colour a token, turns, branches, reward and diagnostics.
slime.viewer = (() => {
  const { h, number } = slime;
  const settings = { view: "tokens", colour: "log_probs" };
  const TOKENS = 3000, CHARACTERS = 20000;
  let shown = null;

  const expand = (runs, count, otherwise) => {
    const values = new Int32Array(count).fill(otherwise);
    let at = 0;
    for (const [value, length] of runs || []) { values.fill(value, at, at + length); at += length; }
    return values;
  };
  // Texts of tokens: bytes are decoded together, so that a character of several tokens appears at its last one.
  const ASCII = /^[\x00-\x7f]*$/;
  const textsOf = (sample, tokens) => {
    const decoder = new TextDecoder("utf-8"), texts = new Array(tokens.length), plain = new Map();
    let open = false;  // whether the decoder may hold bytes of a character
    for (let at = 0; at < tokens.length; at++) {
      const token = tokens[at], piece = sample.words.get(token) || "";
      if (!plain.has(token)) plain.set(token, ASCII.test(piece));
      const ascii = plain.get(token);
      if (ascii && !open) { texts[at] = piece; continue; }
      texts[at] = decoder.decode(Uint8Array.from(piece, (character) => character.charCodeAt(0)), { stream: true });
      open = !ascii;
    }
    return texts;
  };
  // What is derived from a sample once, however often it is drawn: of 100,000 tokens that takes a second.
  const memos = new WeakMap();
  const once = (sample, name, make) => {
    if (!memos.has(sample)) memos.set(sample, new Map());
    const memo = memos.get(sample);
    if (!memo.has(name)) memo.set(name, make(sample));
    return memo.get(name);
  };
  const map2 = (a, b, f) => a && b ? Float32Array.from(a, (value, i) => f(value, b[i])) : null;
  const RED = "214, 64, 69", BLUE = "54, 107, 214", ORANGE = "232, 135, 30", GREEN = "60, 169, 81";
  const sequential = (low, high, colour) => (value) => [colour, 0.62 * Math.max(0, Math.min(1, (value - low) / (high - low || 1)))];
  const diverging = (size, middle = 0) => (value) => [value > middle ? BLUE : RED, 0.62 * Math.min(1, Math.abs(value - middle) / (size || 1))];
  const extent = (values) => { let low = Infinity, high = -Infinity; for (const v of values) if (Number.isFinite(v)) { low = Math.min(low, v); high = Math.max(high, v); } return [low, high]; };
  const biggest = (values, middle = 0) => { let size = 0; for (const v of values) if (Number.isFinite(v)) size = Math.max(size, Math.abs(v - middle)); return size; };

  // Colourings: values a response token, and what colour a value has.
  const colourings = (sample) => {
    const { log_probs, policy, reference, advantages, teacher, values, returns } = sample.columns;
    const ratio = map2(policy, log_probs, (a, b) => Math.exp(a - b)), gap = map2(policy, log_probs, (a, b) => Math.abs(a - b));
    const count = sample.response_length || 0;
    const all = [
      ["log_probs", "engine log-prob", log_probs, (v) => [ORANGE, 0.62 * Math.min(1, -v / 5)], "0", "≤ −5"],
      ["policy", "trainer log-prob", policy, (v) => [ORANGE, 0.62 * Math.min(1, -v / 5)], "0", "≤ −5"],
      ["ratio", "ratio trainer / engine", ratio, (v) => { const s = Math.log(v) / Math.log(2); return [s > 0 ? BLUE : RED, 0.62 * Math.min(1, Math.abs(s))]; }, "½", "2"],
      ["gap", "gap |trainer − engine|", gap, gap && sequential(0, Math.max(extent(gap)[1], 1e-6), RED), "0", gap && number(extent(gap)[1], 2)],
      ["advantages", "advantage", advantages, advantages && diverging(biggest(advantages)), advantages && "−" + number(biggest(advantages), 3), advantages && "+" + number(biggest(advantages), 3)],
      ["reference", "log-prob − reference", map2(policy || log_probs, reference, (a, b) => a - b), diverging(1), "−1", "+1"],
      ["teacher", "log-prob − teacher", map2(policy || log_probs, teacher, (a, b) => a - b), diverging(1), "−1", "+1"],
      ["values", "value", values, values && diverging(biggest(values)), "", values && number(biggest(values), 3)],
      ["returns", "return", returns, returns && diverging(biggest(returns)), "", returns && number(biggest(returns), 3)],
      ["mask", "trained", expand(sample.loss_mask, count, 1), (v) => [GREEN, v ? 0.3 : 0], "masked", "trained"],
      ["versions", "weight version", expand(sample.weight_versions, count, -1), null, "", ""],
    ].filter(([, , figures]) => figures && figures.length);
    for (const item of all) if (item[0] === "versions") {
      const [low, high] = extent(Array.from(item[2]).filter((v) => v >= 0));
      item[3] = (v) => v < 0 ? [BLUE, 0] : [BLUE, high > low ? 0.1 + 0.5 * (v - low) / (high - low) : 0.12];
      item[4] = String(low); item[5] = String(high);
    }
    return all.map(([id, label, figures, colour, low, high]) => ({ id, label, figures, colour, low, high }));
  };

  // Text in blocks that can be long: the start is shown, buttons show more.
  const long = (text, className) => {
    const block = h("div", { className: "text " + (className || ""), dir: "auto" });
    let end = 0;
    const more = h("button", { className: "plain", type: "button", onclick: () => grow(CHARACTERS * 5) });
    const grow = (count) => {
      block.append(document.createTextNode(slime.visible(text.slice(end, end + count))));
      end += count;
      more.textContent = `Show more: ${slime.count(text.length - end)} characters follow`;
      more.hidden = end >= text.length;
    };
    grow(CHARACTERS);
    return [block, more];
  };
  const CALLS = /(<tool_call>[\s\S]*?<\/tool_call>|<function=[\s\S]*?<\/function>|\[TOOL_CALLS\][^\n]*|<\|python_tag\|>[^\n]*|<think>[\s\S]*?(?:<\/think>|$))/;
  const marked = (text) => text.length > CHARACTERS ? long(text) : h("div", { className: "text", dir: "auto" },
    text.split(CALLS).map((part, i) => i % 2 ? h("span", { className: part.startsWith("<think>") ? "thinking" : "call" }, slime.visible(part)) : slime.visible(part)));
  const promptOf = (prompt) => {
    if (typeof prompt === "string") return long(prompt);
    return prompt.map((message) => h("div", { className: "message" }, h("small", null, slime.visible(slime.text(message.role || "?"))),
      long(typeof message.content === "string" ? message.content : slime.text(message.content ?? "")), message.tool_calls && long(slime.text(message.tool_calls), "call")));
  };

  const figuresAt = (sample, colours, texts, i) => {
    const token = sample.tokens[sample.tokens.length - (sample.response_length || 0) + i];
    return [`token ${i} of the response: id ${token} ${slime.visible(JSON.stringify(texts[i]))}`, ...colours.filter(({ id }) => id !== "mask").map(({ label, figures }) => `${label}: ${number(figures[i], 7)}`)].join("\n");
  };
  const heat = (sample, colours, texts) => {
    const chosen = colours.find(({ id }) => id === settings.colour) || colours[0];
    const mask = expand(sample.loss_mask, sample.response_length || 0, 1);
    const box = h("div", { className: "tokens", role: "textbox", "aria-readonly": "true", "aria-multiline": "true", "aria-label": "Response, coloured by " + (chosen ? chosen.label : "nothing"), tabindex: 0 });
    let end = 0;
    const more = h("button", { className: "plain", type: "button", onclick: () => grow() });
    const grow = () => {
      const stop = Math.min(texts.length, end + TOKENS), spans = [];
      for (let i = end; i < stop; i++) {
        const span = document.createElement("span");
        span.textContent = slime.visible(texts[i]).replace(/\n/g, "⏎\n") || "\u200b";
        span.dataset.place = i;
        if (!mask[i]) span.className = "masked";
        if (chosen && Number.isFinite(chosen.figures[i])) { const [rgb, alpha] = chosen.colour(chosen.figures[i]); if (alpha > 0.01) span.style.background = `rgba(${rgb}, ${alpha.toFixed(3)})`; }
        spans.push(span);
      }
      box.append(...spans);
      end = stop;
      more.textContent = `Show more: ${slime.count(texts.length - end)} tokens follow`;
      more.hidden = end >= texts.length;
    };
    grow();
    box.addEventListener("pointermove", (event) => {
      const place = event.target.dataset.place;
      if (place === undefined) slime.tip.hide(); else slime.tip.show(figuresAt(sample, colours, texts, Number(place)), event.clientX, event.clientY);
    });
    box.addEventListener("pointerleave", slime.tip.hide);
    const select = h("select", { "aria-label": "Colour tokens by", onchange: () => { settings.colour = select.value; again(); } }, colours.map(({ id, label }) => h("option", { value: id }, label)));
    if (chosen) select.value = chosen.id;
    const scale = chosen && h("span", { className: "scale" }, h("span", null, chosen.low), h("i", { style: `background:linear-gradient(90deg, ${[0, 0.5, 1].map((share) => scaleColour(chosen, share)).join(", ")})` }), h("span", null, chosen.high));
    return h("div", null, h("div", { className: "controls", style: "margin:0 0 8px" }, h("label", null, "colour", select), scale,
      h("span", { className: "why" }, !sample.columns.advantages ? "advantages: recorded with slime run --plugin report" : sample.columns.policy ? "" : "the trainer scores the policy before a step only where its loss needs it")), box, more);
  };
  const scaleColour = ({ id, colour, figures }, share) => {
    const ends = { log_probs: [0, -5], policy: [0, -5], ratio: [0.5, 2], reference: [-1, 1], teacher: [-1, 1], mask: [0, 1], gap: [0, extent(figures)[1]], versions: extent(figures) }[id] || [-biggest(figures), biggest(figures)];
    const value = id === "ratio" ? Math.exp(Math.log(ends[0]) + share * Math.log(ends[1] / ends[0])) : ends[0] + share * (ends[1] - ends[0]);
    const [rgb, alpha] = colour(value);
    return `rgba(${rgb}, ${alpha})`;
  };
  const rows = (sample, colours, texts) => {
    const body = h("tbody"), more = h("button", { className: "plain", type: "button", onclick: () => grow() });
    const first = sample.tokens.length - texts.length;
    let end = 0;
    const grow = () => {
      for (const stop = Math.min(texts.length, end + 300); end < stop; end++)
        body.append(h("tr", null, h("td", { className: "number" }, String(end)), h("td", { className: "number" }, String(sample.tokens[first + end])), h("td", { className: "mono" }, slime.visible(JSON.stringify(texts[end]))), colours.map(({ figures }) => h("td", { className: "number" }, number(figures[end], 7)))));
      more.textContent = `Show more: ${slime.count(texts.length - end)} tokens follow`;
      more.hidden = end >= texts.length;
    };
    grow();
    return h("div", { className: "scroll" }, h("table", { className: "rows tokens-table" }, h("thead", null, h("tr", null, ["", "id", "text"].map((name) => h("th", null, name)), colours.map(({ label }) => h("th", { className: "number" }, label)))), body), more);
  };
  // Turns: what the model wrote on the left, what came back on the right; a change of the mask ends a turn.
  const turnsOf = (sample, texts) => {
    const count = sample.response_length || 0, mask = expand(sample.loss_mask, count, 1), versions = expand(sample.weight_versions, count, -1), turns = [];
    for (let i = 0; i < count; i++) {
      const own = Boolean(mask[i]) || versions[i] >= 0;
      if (!turns.length || turns[turns.length - 1].own !== own) turns.push({ own, text: "", tokens: 0 });
      const turn = turns[turns.length - 1];
      turn.text += texts[i]; turn.tokens++;
    }
    return turns;
  };
  const turnView = (sample, texts) => {
    const turns = once(sample, "turns", () => turnsOf(sample, texts)), pairs = [];
    for (const turn of turns) if (turn.own || !pairs.length || pairs[pairs.length - 1][1]) pairs.push(turn.own ? [turn, null] : [null, turn]); else pairs[pairs.length - 1][1] = turn;
    const cell = (turn, name) => h("div", { className: turn ? "turn " + name : "turn none" }, turn && h("small", null, `${name}, ${slime.count(turn.tokens)} tokens`), turn && marked(turn.text));
    return h("div", { className: "turns" }, pairs.map(([own, other], i) => h("div", { className: "pair" }, h("small", { className: "count" }, String(i + 1)), cell(own, "model"), cell(other, "environment"))));
  };

  const json = (value, key) => {
    const name = key === undefined ? key : slime.visible(key);
    if (value === null || typeof value !== "object") return h("div", { className: "leaf" }, name !== undefined && h("span", { className: "name" }, name + ": "), h("span", { className: "mono" }, typeof value === "string" && value.length > 2000 ? long(value) : slime.visible(slime.text(value))));
    const entries = Object.entries(value), simple = JSON.stringify(value);
    if (simple.length < 90) return h("div", { className: "leaf" }, name !== undefined && h("span", { className: "name" }, name + ": "), h("span", { className: "mono" }, slime.visible(simple)));
    const details = h("details", null, h("summary", null, `${name ?? ""} ${Array.isArray(value) ? `[${entries.length}]` : `{${entries.length}}`}`));
    details.addEventListener("toggle", () => { if (details.children.length === 1) details.append(h("div", { className: "inner" }, entries.slice(0, 500).map(([inner, item]) => json(item, inner)))); });
    return details;
  };
  const pairs = (entries) => h("table", { className: "rows" }, h("tbody", null, entries.filter(([, value]) => value !== undefined && value !== null && value !== "").map(([name, value]) => h("tr", null, h("td", { className: "key" }, slime.visible(name)), h("td", null, value instanceof Node ? value : slime.visible(slime.text(value)))))));

  // How many different 4-grams there are: pairs get numbers, and pairs of those are counted.
  const different4 = (tokens) => {
    const numbers = new Map(), grams = new Set(), pairs = new Float64Array(Math.max(0, tokens.length - 1));
    for (let i = 0; i < pairs.length; i++) {
      const pair = tokens[i] * 2 ** 24 + tokens[i + 1];
      if (!numbers.has(pair)) numbers.set(pair, numbers.size);
      pairs[i] = numbers.get(pair);
    }
    for (let i = 0; i + 2 < pairs.length; i++) grams.add(pairs[i] * 2 ** 26 + pairs[i + 2]);
    return grams.size;
  };
  const diagnostics = (sample, table, at, colours, texts) => {
    const by = (id) => colours.find((each) => each.id === id)?.figures, engine = by("log_probs"), count = sample.response_length || 0;
    const grams = different4(sample.tokens.subarray(sample.tokens.length - count));
    const lowest = engine && engine.length ? engine.reduce((best, v, i) => v < engine[best] ? i : best, 0) : null;
    const versions = [...new Set(expand(sample.weight_versions, count, -1))].filter((v) => v >= 0);
    const masked = count - expand(sample.loss_mask, count, 1).reduce((a, b) => a + b, 0);
    return pairs([
      ["tokens", `${sample.tokens.length - count} prompt + ${count} response` + (masked ? `, ${masked} of them masked` : "")],
      ["weights", versions.length ? `version ${versions.join(", ")}` + (Number.isNaN(table.staleness[at]) ? "" : `; ${table.staleness[at]} behind the training step`) : null],
      ["mean log-prob", engine && number(engine.reduce((a, b) => a + b, 0) / count)],
      ["least likely token", lowest !== null ? `${JSON.stringify(texts[lowest])} at ${lowest}: ${number(engine[lowest])}` : null],
      ["largest gap", by("gap") && number(extent(by("gap"))[1])],
      ["ratio", by("ratio") && extent(by("ratio")).map((v) => number(v)).join(" … ")],
      ["advantage", by("advantages") && [...new Set(extent(by("advantages")))].map((v) => number(v)).join(" … ")],
      ["repetition", count >= 8 ? slime.percent(1 - grams / (count - 3)) + " of 4-grams were there before" : null],
      ["attempt", table.attempt[at] || null], ["temperature", sample.temperature], ["role", sample.role], ["task", sample.task], ["model", sample.model], ["session", sample.session_id], ["removed", sample.remove_sample],
    ]);
  };
  const reward = (sample) => {
    const data = sample.metadata || {}, terms = data.reward_terms || (sample.reward && typeof sample.reward === "object" ? sample.reward : {});
    const size = Math.max(1e-9, ...Object.values(terms).filter((v) => typeof v === "number").map(Math.abs));
    const term = (value) => typeof value !== "number" ? slime.visible(slime.text(value))
      : h("span", { className: "term" }, h("i", { style: `width:${60 * Math.abs(value) / size}px;background:${value < 0 ? "var(--bad)" : "var(--good)"}` }), number(value));
    return pairs([
      ["reward", typeof sample.reward === "number" ? number(sample.reward, 6) : null], ["before punishment", data.raw_reward],
      ...Object.entries(terms).map(([name, value]) => [name, value === null ? null : term(value)]),
      ["kind", data.reward_kind], ["reason", data.reward_reason], ["label", sample.label === undefined ? null : h("div", null, long(slime.text(sample.label)))], ["extracted answer", data.extracted_answer],
    ]);
  };
  // Samples of one rollout: branches of an agent's session, or several players. Each hangs on the one it shares most with.
  const shared = (a, b) => { let i = 0; const end = Math.min(a.length, b.length); while (i < end && a[i] === b[i]) i++; return i; };
  const branches = (sample, group, table, at) => {
    const others = group.filter((other) => other.rollout === sample.rollout && sample.rollout !== null && other.attempt === sample.attempt);
    const placeOf = ({ id, attempt }) => table.members[table.group[at]].find((i) => table.id[i] === id && table.attempt[i] === attempt);
    if (others.length < 2) return null;
    return [h("h3", null, "Branches", h("small", null, `${others.length} samples of rollout ${sample.rollout}`)), h("div", { className: "branches" }, others.map((other, k) => {
      const parent = others.slice(0, k).reduce((best, each) => { const length = shared(each.tokens, other.tokens); return length > best[1] ? [each, length] : best; }, [null, 0]);
      return h("button", { type: "button", className: "branch" + (other === sample ? " chosen" : ""), style: `margin-left:${parent[1] ? 18 : 0}px`, onclick: () => slime.samples.open(placeOf(other)) },
        h("b", null, slime.visible(other.id)), " ", h("span", { className: "badge" }, slime.visible(other.role || "policy")), parent[0] ? ` shares ${slime.count(parent[1])} of ${slime.count(other.tokens.length)} tokens with ${slime.visible(parent[0].id)}` : ` ${slime.count(other.tokens.length)} tokens`);
    }))];
  };

  const compose = ({ table, at, sample, group, target }) => {
    const count = sample.response_length || 0, fate = table.names.fate[table.fate[at]];
    const colours = once(sample, "colours", colourings), texts = once(sample, "texts", () => textsOf(sample, sample.tokens.subarray(sample.tokens.length - count)));
    const many = once(sample, "turns", () => turnsOf(sample, texts)).length > 1;
    const views = [["tokens", "Tokens"], ["text", "Text"], ["turns", "Turns"], ["table", "Table"]].filter(([id]) => count || id === "text");
    const view = views.some(([id]) => id === settings.view) ? settings.view : "text";
    const body = { tokens: () => heat(sample, colours, texts), text: () => long(sample.response || ""), turns: () => turnView(sample, texts), table: () => rows(sample, colours, texts) }[view]();
    const strip = h("div", { className: "siblings", role: "group", "aria-label": "Samples of the group" }, table.members[table.group[at]].map((i) => h("button", { type: "button", title: slime.visible(table.id[i]) + (table.attempt[i] ? `, attempt ${table.attempt[i]}` : "") + ": reward " + number(table.reward[i]), "aria-current": i === at ? "true" : undefined, style: "--c:" + slime.samples.shade(table.reward[i]), onclick: () => slime.samples.open(i) }, number(table.reward[i], 2))));
    slime.fill(target, 
      h("header", null, h("button", { className: "plain back", type: "button", onclick: () => slime.samples.state.root.classList.remove("detail") }, "← List"), h("h2", null, slime.visible(sample.id)),
        h("span", { className: "badge " + (fate === "trained" ? "good" : fate.startsWith("dropped") ? "bad" : "") }, slime.visible(fate)), h("span", { className: "badge" + (sample.status === "truncated" ? " warn" : "") }, sample.status || ""),
        sample.step !== null && h("span", { className: "badge accent" }, "step " + sample.step)),
      strip,
      sample.damage && h("p", { className: "notice" }, "Its text cannot be read: " + sample.damage),
      h("h3", null, "Prompt"), promptOf(sample.prompt ?? ""),
      sample.pictures.length > 0 && h("div", { className: "pictures" }, sample.pictures.map((one, i) => one.startsWith("data:image/jpeg") ? h("img", { src: one, alt: `picture ${i + 1}` }) : h("p", { className: "notice" }, slime.visible(one)))),
      h("h3", { className: "line" }, "Response", h("small", null, many ? "several turns" : ""), slime.pick(views, view, (value) => { settings.view = value; again(); })), body,
      h("div", { className: "facts" }, h("div", null, h("h3", null, "Reward"), reward(sample)), h("div", null, h("h3", null, "Diagnostics"), once(sample, "diagnostics", () => diagnostics(sample, table, at, colours, texts)))),
      ...(branches(sample, group, table, at) || []),
      ...(sample.metadata && Object.keys(sample.metadata).length ? [h("h3", null, "Metadata"), h("div", { className: "json" }, json(sample.metadata))] : []),
      ...(sample.train_metadata && Object.keys(sample.train_metadata).length ? [h("h3", null, "Train metadata"), h("div", { className: "json" }, json(sample.train_metadata))] : []));
  };
  const again = () => { if (shown) { const top = shown.target.scrollTop; compose(shown); shown.target.scrollTop = top; } };
  const nextColour = () => {
    if (!shown) return;
    const ids = once(shown.sample, "colours", colourings).map(({ id }) => id);
    settings.colour = ids[(ids.indexOf(settings.colour) + 1) % ids.length];
    settings.view = "tokens";
    again();
  };
  const show = async (table, at, target) => {
    const ticket = (show.ticket = {});
    const group = await slime.source.group(table.place, table.group[at]);
    if (show.ticket !== ticket) return;
    slime.tip.hide();
    const sample = group && group.find((each) => each.id === table.id[at] && each.attempt === table.attempt[at]);
    if (!sample) {
      shown = null;
      slime.fill(target, h("header", null, h("h2", null, slime.visible(table.id[at]))), h("p", { className: "notice" }, group === null ? "Text and tokens of this group are not in the file: " + (table.policy || "its payload was pruned, or it was dropped before it was finished") : "The ledger has no text of this sample."),
        pairs([["fate", table.names.fate[table.fate[at]]], ["reward", number(table.reward[at])], ["response", Number.isNaN(table.length[at]) ? null : table.length[at] + " tokens"], ["step", Number.isNaN(table.step[at]) ? null : table.step[at]]]));
      return;
    }
    shown = { table, at, sample, group, target };
    compose(shown);
    target.scrollTop = 0;
  };
  return { show, nextColour };
})();
