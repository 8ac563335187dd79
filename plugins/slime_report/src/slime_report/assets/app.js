// The page: runs on top, tabs below, keys.
slime.app = (() => {
  const { h, number, seconds } = slime;
  const main = document.getElementById("main"), tabs = document.getElementById("tabs");
  let runs = [], data = null, current = "", drawn = "";

  const prepare = (run, place) => {
    run.colour = slime.COLOURS[place % slime.COLOURS.length];
    const { metrics, seconds: parts, version } = run.steps;
    run.width = version.map((_, i) => Object.values(parts).reduce((sum, values) => sum + (values[i] || 0), 0));
    let clock = 0;
    run.clock = run.width.map((width) => (clock += width));
    metrics["derived/tokens_per_second"] = (metrics["tokens/response"] || []).map((tokens, i) => tokens === null || !run.width[i] ? null : tokens / run.width[i]);
    slime.charts.place(run);
  };

  const tone = (status) => ({ finished: "good", running: "accent", failed: "bad", crashed: "bad" })[status] || "warn";
  const header = () => {
    const cells = (run) => {
      const metrics = run.steps.metrics, versions = run.steps.version, evaluation = Object.entries(run.evaluations)[0];
      const tokens = metrics["tokens/response"]?.reduce((sum, v) => sum + (v || 0), 0);
      return [
        [runs.length > 1 ? h("span", { className: "swatch", style: "background:" + run.colour }) : null, h("span", { title: run.path }, run.name)],
        h("span", { className: "badge " + tone(run.status), title: run.info.error || "" }, run.status),
        number(slime.last(versions) ?? 0),
        number(slime.last(metrics["reward/mean"] || []), 3),
        evaluation ? `${number(slime.last(evaluation[1].metrics["reward/mean"] || []), 3)}` : "–",
        slime.count(run.states.trained || 0),
        slime.count(Object.entries(run.states).reduce((sum, [name, count]) => sum + (name.startsWith("dropped/") ? count : 0), 0)),
        tokens ? slime.count(Math.round(tokens / (run.clock[run.clock.length - 1] || 1))) : "–",
        seconds(run.clock[run.clock.length - 1] || 0),
        (run.info.started || "").replace("T", " ").slice(0, 16),
      ];
    };
    const names = ["", "status", "steps", "reward", "evaluation", "trained", "dropped", "tokens/s", "time in steps", "started"];
    document.getElementById("runs").replaceChildren(h("table", null,
      h("thead", null, h("tr", null, names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, runs.map((run) => h("tr", null, cells(run).map((cell) => h("td", null, cell)))))));
  };

  const findings = () => runs.flatMap((run) => [
    ...run.notices.map((text) => h("p", { className: "notice" }, (runs.length > 1 ? run.name + ": " : "") + text)),
    ...(run.findings || []).map((finding) => h("section", { className: "finding " + finding.severity },
      h("p", null, h("span", { className: "badge " + ({ note: "accent", critical: "bad" }[finding.severity] || "warn") }, finding.rule), " ", h("b", null, (runs.length > 1 ? run.name + ": " : "") + finding.summary)),
      h("details", null, h("summary", null, finding.stage ? `evidence, stage ${finding.stage}` : "evidence"), finding.evidence.map((line) => h("p", { className: "mono" }, slime.visible(line)))),
      finding.fix && h("p", null, "Change: ", h("code", null, finding.fix)))),
  ]);

  const config = () => {
    const search = h("input", { type: "search", placeholder: "key or value", "aria-label": "Find a key" });
    const body = h("tbody");
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
    const fill = () => {
      const words = search.value.trim().toLowerCase();
      body.replaceChildren(...keys.map((key) => [key, runs.map((run) => run.config[key] === undefined ? "–" : slime.text(run.config[key]))])
        .filter(([key, values]) => !words || (key + " " + values.join(" ")).toLowerCase().includes(words))
        .map(([key, values]) => h("tr", { className: values.some((value) => value !== values[0]) ? "other" : "" }, h("td", { className: "mono" }, key), values.map((value) => h("td", { className: "mono" }, value)))));
    };
    search.addEventListener("input", fill);
    fill();
    const about = (run) => [
      ["run directory", run.path], ["command", (run.info.command || []).join(" ")], ["started", run.info.started], ["host", run.info.host], ["recipe", run.info.recipe],
      ["slime", run.info.slime], ["Python", run.info.python], ...Object.entries(run.machine), ...Object.entries(run.plugins).map(([name, origin]) => ["plugin " + name, origin]),
      ["starts", run.starts.length], ["error", run.info.error],
    ].filter(([, value]) => value !== null && value !== undefined && value !== "");
    return h("div", null, runs.map((run) => [h("h2", null, run.name), h("div", { className: "card" }, h("table", { className: "rows" }, h("tbody", null, about(run).map(([name, value]) => h("tr", null, h("td", { style: "width:160px;color:var(--soft)" }, name), h("td", { className: "mono" }, slime.text(value)))))))]),
      h("h2", null, "Settings", h("small", null, "as the run resolved them; secrets are left out")), h("div", { className: "controls", style: "margin-bottom:10px" }, search),
      h("div", { className: "card" }, h("table", { className: "rows" }, h("thead", null, h("tr", null, h("th", null, "key"), runs.map((run) => h("th", null, run.name)))), body)));
  };

  const differences = () => {
    if (!data.differences.length) return h("div", { className: "empty" }, "The runs have the same settings, plugins and machine.");
    const last = (run, name) => number(slime.last(run.steps.metrics[name] || []));
    const results = ["reward/mean", "response_len/mean", "entropy", "grad_norm", "derived/tokens_per_second"];
    return h("div", null,
      h("h2", null, "Results", h("small", null, "of the last step")),
      h("div", { className: "card" }, h("table", { className: "rows" }, h("thead", null, h("tr", null, h("th", null, "metric"), runs.map((run) => h("th", { className: "number" }, run.name)))),
        h("tbody", null, results.map((name) => h("tr", null, h("td", { className: "mono" }, name), runs.map((run) => h("td", { className: "number" }, last(run, name)))))))),
      h("h2", null, "Differences", h("small", null, "settings, plugins, machine")),
      h("div", { className: "card" }, h("table", { className: "rows" }, h("thead", null, h("tr", null, h("th", null, "key"), runs.map((run) => h("th", null, run.name)))),
        h("tbody", null, data.differences.map((row) => h("tr", null, h("td", { className: "mono" }, row.key), row.values.map((value) => h("td", { className: "mono" }, value === null ? "–" : slime.text(value)))))))));
  };

  const TABS = () => [
    ["overview", "Overview", () => h("div", null, findings(), slime.charts.overview(runs))],
    ["timeline", "Timeline", () => slime.timeline.show(runs)],
    slime.samples && ["samples", "Samples", () => slime.samples.show(runs)],
    runs.length > 1 && ["compare", "Compare", differences],
    ["config", "Settings", config],
  ].filter(Boolean);

  const show = (name, focus) => {
    const tab = TABS().find(([each]) => each === name) || TABS()[0];
    current = tab[0];
    for (const button of tabs.children) button.setAttribute("aria-selected", String(button.dataset.tab === current));
    document.body.dataset.tab = current;
    main.replaceChildren(tab[2]());
    drawn = shape();
    if (location.hash.slice(1).split("/")[0] !== current) history.replaceState(null, "", "#" + current);
    if (focus) main.focus();
  };

  const theme = () => {
    const root = document.documentElement, next = root.dataset.theme === "dark" ? "light" : "dark";
    root.dataset.theme = next;
    try { localStorage.setItem("slime-theme", next); } catch { /* a page from disk may have no storage */ }
    slime.charts.redraw();
    document.querySelectorAll("canvas").forEach((canvas) => canvas.dispatchEvent(new Event("theme")));
  };

  const KEYS = [["1 … 5", "tabs"], ["j / k", "next and previous sample"], ["← / →", "samples of the group"], ["/", "filter"], ["g", "groups or samples"], ["c", "next colouring of tokens"], ["t", "light or dark"], ["Esc", "leave a field, close"], ["?", "this list"]];
  const help = () => {
    const dialog = h("dialog", { "aria-label": "Keys" }, h("h3", { style: "margin-top:0" }, "Keys"), h("table", { className: "rows" }, h("tbody", null, KEYS.map(([key, text]) => h("tr", null, h("td", null, h("kbd", null, key)), h("td", null, text))))), h("p", null, h("button", { className: "plain", onclick: () => dialog.close() }, "Close")));
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog")) return;
    if (event.target.matches("input, select, textarea")) { if (event.key === "Escape") { event.target.blur(); event.preventDefault(); } return; }
    const number_ = Number(event.key);
    if (number_ >= 1 && number_ <= TABS().length) show(TABS()[number_ - 1][0], true);
    else if (event.key === "?") help();
    else if (event.key === "t") theme();
    else if (current === "samples" && slime.samples.key(event)) event.preventDefault();
  });

  const arrange = (overview) => {
    data = overview;
    runs = data.runs;
    runs.forEach(prepare);
    header();
    tabs.replaceChildren(...TABS().map(([name, label]) => h("button", { role: "tab", type: "button", "data-tab": name, "aria-selected": String(name === current), onclick: () => show(name) }, label)));
  };
  // A live page calls this with a new overview: curves grow, what is open stays open.
  const drawable = (metrics) => Object.entries(metrics).map(([name, values]) => [name, values.some((v) => v !== null), values.some(Boolean)]);
  const shape = () => JSON.stringify(runs.map((run) => [drawable(run.steps.metrics), Object.keys(run.evaluations), run.stages.length, run.restarts.length, run.notices, run.findings]));
  const update = (overview) => {
    arrange(overview);
    if (current === "overview" && shape() === drawn) slime.charts.redraw();
    else if (["overview", "timeline", "compare"].includes(current)) { const top = scrollY; show(current); scrollTo(0, top); }
  };

  const start = async () => {
    document.getElementById("tools").append(
      h("button", { className: "icon", type: "button", title: "Keys (?)", "aria-label": "Keys", onclick: help }, "?"),
      h("button", { className: "icon", type: "button", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: theme }, "◐"));
    arrange(await slime.source.overview());
    show(location.hash.slice(1).split("/")[0]);
    addEventListener("hashchange", () => { if (location.hash.slice(1).split("/")[0] !== current) show(location.hash.slice(1).split("/")[0]); });
    document.body.dataset.ready = "true";
    dispatchEvent(new Event("slime-ready"));
  };
  // Data further down is read by name: it is there once the document is.
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", start); else start();
  return { update, show, get runs() { return runs; } };
})();
