// Curves: which there are, and how Plotly draws them once they come into view.
slime.charts = (() => {
  const { h, number } = slime;
  const settings = { x: "step", smooth: 0, stage: "" };
  const drawn = new Set(); // plots
  let library = null;

  const load = () => (library ??= (async () => {
    const script = document.createElement("script");
    script.textContent = new TextDecoder().decode(await slime.block("plotly"));
    document.head.append(script);
    return window.Plotly;
  })());

  // A line: label, metric of the steps, band: "std" or [low, high] metrics. A chart without any figure is left out.
  const CHARTS = [
    ["Reward", [
      { title: "Reward", why: "Mean over the samples that trained; the band is one standard deviation.", wide: true,
        lines: [{ label: "mean", metric: "reward/mean", band: "std" }] },
      { title: "Reward, lowest and highest", lines: [{ label: "max", metric: "reward/max" }, { label: "min", metric: "reward/min" }],
        why: "Of the samples of each step." },
      { title: "Reward before shaping", lines: [{ label: "mean", metric: "raw_reward/mean" }], why: "Before the punishment of overlong responses." },
      { title: "Reward terms", match: /^reward\/(.+)\/mean$/, why: "Mean of each term that the reward function returned." },
      { title: "Reward by task", match: /^task\/(.+)\/reward$/, why: "Mean reward of each task." },
      { title: "Reward by role", match: /^role\/(.+)\/reward$/, why: "Mean reward of each player or agent." },
      { title: "Reward by adapter", match: /^([\w-]+)\/reward\/mean$/, why: "Mean reward of the samples of each adapter." },
      { title: "Groups of equal reward", lines: [{ label: "share", metric: "reward/equal_groups" }], zero: true,
        why: "Share of groups whose samples all have one reward: they teach nothing." },
      { title: "Advantage", lines: [{ label: "mean size", metric: "advantages/abs_mean", band: null }], why: "Mean of |advantage| over trained tokens." },
    ]],
    ["Responses", [
      { title: "Response length", lines: [{ label: "mean", metric: "response_len/mean", band: ["response_len/min", "response_len/max"] }], zero: true,
        why: "Tokens; the band reaches from the shortest to the longest." },
      { title: "Prompt length", lines: [{ label: "mean", metric: "prompt_len/mean", band: ["prompt_len/min", "prompt_len/max"] }], why: "Tokens." },
      { title: "Truncated and failed", lines: [{ label: "truncated", metric: "truncated_ratio" }, { label: "failed", metric: "failed_ratio" }], zero: true,
        why: "Share of samples that met the length limit, and of those whose candidate broke." },
    ]],
    ["Policy", [
      { title: "Entropy", lines: [{ label: "entropy", metric: "entropy" }], zero: true, why: "Of the next-token distribution, in nats a trained token." },
      { title: "KL", match: /^(kl_loss|ppo_kl|opd_reverse_kl|kl|kl_reward.*)$/, why: "kl_loss: to the reference; ppo_kl: of this step's policy to the one that was scored." },
      { title: "Clipped tokens", match: /^((?:dual_|value_)?clip_fraction|ratio_overflow|.*clip.*fraction.*)$/, zero: true, why: "Share of trained tokens whose ratio was clipped." },
      { title: "Loss", lines: [{ label: "loss", metric: "loss" }, { label: "value loss", metric: "value_loss" }], why: "Mean over the optimizer steps of the step." },
      { title: "Gradient norm", lines: [{ label: "norm", metric: "grad_norm" }, { label: "critic", metric: "critic_grad_norm" }], zero: true, why: "Before clipping." },
      { title: "Loss by adapter", match: /^([\w-]+)\/loss$/, why: "Each adapter has steps of its own." },
      { title: "Entropy by adapter", match: /^([\w-]+)\/entropy$/, zero: true, why: "In nats a trained token." },
      { title: "Gradient norm by adapter", match: /^([\w-]+)\/grad_norm$/, zero: true, why: "Before clipping." },
      { title: "Load of experts", lines: [{ label: "violation", metric: "moe/load_max_violation" }, { label: "worst layer", metric: "moe/load_max_violation/worst_layer" }, { label: "dead experts", metric: "moe/dead_experts" }], zero: true,
        why: "Largest load over the mean load of a layer, minus 1; and the share of experts without a token." },
      { title: "Learning rate", lines: [{ label: "lr", metric: "lr" }, { label: "critic", metric: "critic_lr" }], zero: true, why: "Of the optimizer." },
    ]],
    ["Trainer and engine", [
      { title: "Log-prob gap", lines: [{ label: "mean", metric: "train_rollout_logprob_abs_diff" }, { label: "max", metric: "train_rollout_logprob_abs_diff/max" }], zero: true,
        why: "|trainer − engine| of the log-probs of trained tokens, before the step. It should stay small." },
      { title: "Corrections", match: /^((?:tis|mis|icepop|opsm)[/_].*)$/, why: "Importance corrections between trainer and engine." },
      { title: "Log-prob check after sync", match: /^canary\/(.+)$/, why: "The engine's log-probs against the trainer's, after weights were sent." },
      { title: "Staleness", lines: [{ label: "mean", metric: "staleness/mean", band: ["staleness/min", "staleness/max"] }], zero: true,
        why: "Versions between the weights in training and the oldest that made a token of the group." },
    ]],
    ["Samples", [
      { title: "Dropped, by reason", match: /^dropped\/(.+)$/, kind: "bars", why: "Samples dropped since the step before." },
      { title: "Ledger", match: /^ledger\/(.+)$/, why: "issued = trained + dropped + pending, since the start." },
      { title: "Stale samples", match: /^stale\/(.+)$/, why: "What the stale policy did." },
    ]],
    ["Speed and memory", [
      { title: "Tokens a second", lines: [{ label: "response tokens", metric: "derived/tokens_per_second" }], zero: true, why: "Response tokens of a step by the seconds of the whole step." },
      { title: "Seconds a step", kind: "parts", why: "By part, stacked; see Timeline." },
      { title: "Waiting", match: /^async\/(engine_idle|trainer_wait)_seconds$/, zero: true, why: "Seconds in which the engine had nothing to do, and in which the trainer waited for groups." },
      { title: "Memory", match: /^memory\/(.+)$/, zero: true, why: "GiB, at the end of the step: the driver's resident memory, and what is in use of the device." },
      { title: "Colocation", match: /^swap\/(.+)_seconds$/, zero: true, why: "Seconds of handing a device over." },
    ]],
  ];

  const linesOf = (chart, runs) => {
    if (chart.lines) return chart.lines;
    const names = new Set(runs.flatMap((run) => Object.keys(run.steps.metrics)));
    return [...names].filter((name) => chart.match.test(name)).sort()
      .map((name) => ({ label: (name.match(chart.match)[1] || name).replace(/^clip_fraction$/, "clipped"), metric: name }));
  };
  const column = (run, name) => run.steps.metrics[name];
  const hasFigures = (values) => values && values.some((value) => value !== null);

  const smoothed = (values) => {
    if (!settings.smooth) return values;
    let mean = null, weight = 0; // exponential, with the start corrected as Adam does
    return values.map((value) => {
      if (value === null) return null;
      mean = settings.smooth * (mean ?? 0) + (1 - settings.smooth) * value;
      weight = settings.smooth * weight + (1 - settings.smooth);
      return mean / weight;
    });
  };
  const LIMIT = 1500; // points of a line; longer ones become means of as many steps as needed
  const thin = (x, columns) => {
    const width = Math.ceil(x.length / LIMIT);
    if (width <= 1) return [x, ...columns];
    const mean = (values) => {
      const means = [];
      for (let i = 0; i < values.length; i += width) {
        const part = values.slice(i, i + width).filter((value) => value !== null);
        means.push(part.length ? part.reduce((a, b) => a + b) / part.length : null);
      }
      return means;
    };
    return [x.filter((_, i) => i % width === 0), ...columns.map(mean)];
  };
  const faded = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");

  const layoutOf = (runs, extra) => {
    const text = slime.cssValue("--soft"), line = slime.cssValue("--line");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { size: 11, color: text }, exponentformat: "e" };
    const layout = {
      margin: { l: 50, r: 8, t: 8, b: 26 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: "inherit", color: text, size: 11 }, hovermode: "x unified", dragmode: "zoom", shapes: [], annotations: [],
      hoverlabel: { bgcolor: slime.cssValue("--card"), bordercolor: line, font: { size: 12, color: slime.cssValue("--text") } },
      xaxis: { ...axis, showgrid: false }, yaxis: { ...axis, ...(extra || {}) },
    };
    const [run] = runs, chosen = run?.stages.find(({ name }) => name === settings.stage);
    if (chosen) layout.xaxis.range = [run.at(chosen.first), run.at(chosen.last)];
    if (runs.length === 1 && run.stages.length > 1)
      for (const stage of run.stages.slice(1)) {
        const at = run.x[run.steps.version.indexOf(stage.first)];
        layout.shapes.push({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: slime.cssValue("--faint"), width: 1, dash: "dot" } });
        layout.annotations.push({ x: at, yref: "paper", y: 1, text: stage.name, showarrow: false, xanchor: "left", xshift: 3, yanchor: "top", font: { size: 10, color: slime.cssValue("--faint") } });
      }
    return layout;
  };
  const options = { displayModeBar: false, responsive: true, doubleClick: "reset" };

  const traces = (lines, runs, many) => {
    const result = [];
    lines.forEach((line, place) => runs.forEach((run, number_) => {
      const values = line.values ? line.values(run) : column(run, line.metric);
      if (!hasFigures(values)) return;
      const colour = many ? run.colour : slime.COLOURS[place % slime.COLOURS.length];
      const dash = many && place ? ["dot", "dash", "dashdot"][(place - 1) % 3] : "solid";
      const xs = line.x ? line.x(run) : run.x;
      let low = null, high = null;
      if (line.interval) [low, high] = line.interval(run);
      else if (line.band === "std") {
        const spread = column(run, "reward/std");
        const [least, most] = [column(run, "reward/min"), column(run, "reward/max")];
        if (spread) [low, high] = [-1, 1].map((sign) => values.map((v, i) => v === null || spread[i] === null ? null : Math.min(most[i], Math.max(least[i], v + sign * spread[i]))));
      } else if (line.band) [low, high] = line.band.map((name) => column(run, name));
      const [x, y, below, above] = thin(xs, [values, low || [], high || []]);
      if (low?.length && high?.length) {
        const hidden = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", type: "scatter" };
        result.push({ ...hidden, y: smoothed(below) }, { ...hidden, y: smoothed(above), fill: "tonexty", fillcolor: faded(colour, 0.13) });
      }
      const name = many ? (lines.length > 1 ? run.name + " " + line.label : run.name) : line.label;
      const points = x.length <= 40 ? "lines+markers" : "lines";
      if (settings.smooth) result.push({ x, y, mode: "lines", type: "scatter", line: { color: faded(colour, 0.25), width: 1 }, hoverinfo: "skip" });
      result.push({ x, y: smoothed(y), name: slime.plain(name), mode: points, type: "scatter", line: { color: colour, width: 1.8, dash }, marker: { size: 4 }, hovertemplate: "%{y:.5~g}" });
    }));
    return result;
  };

  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && entry.target.redraw && !entry.target.current) {
      entry.target.current = true;
      entry.target.redraw();
    }
  }, { rootMargin: "200px" });

  // A figure of the page: `draw()` returns [traces, layout]; it is called when the figure is seen, and again after changes.
  const figure = ({ title, why, legend, draw, tall, click }) => {
    const plot = h("div", { className: "plot" + (tall ? " tall" : ""), role: "img", "aria-label": title + ". " + (why || "") });
    const reason = h("p", { className: "why", hidden: true }, why || "");
    const element = h("figure", { className: "card" },
      h("figcaption", null, h("b", null, title), h("span", { className: "legend" }, (legend || []).map(([label, colour]) => h("span", null, h("i", { style: "background:" + colour }), label))),
        why && h("button", { className: "about", type: "button", title: why, "aria-label": "What is " + title + "?", onclick: () => { reason.hidden = !reason.hidden; } }, "i")),
      reason, plot);
    plot.redraw = async () => {
      const Plotly = await load();
      sweep();
      const [data, layout] = await draw();
      if (!plot.isConnected) return;
      await Plotly.react(plot, data, layout, options);
      if (click && !plot.clicking) { plot.clicking = true; plot.on("plotly_click", click); }
    };
    drawn.add(plot);
    observer.observe(plot);
    return element;
  };
  // Plots that left the page give back what Plotly keeps of them.
  const sweep = () => {
    for (const plot of [...drawn].filter((each) => !each.isConnected)) {
      drawn.delete(plot);
      observer.unobserve(plot);
      if (plot.data) window.Plotly.purge(plot);
    }
  };
  const redraw = () => {
    sweep();
    for (const plot of drawn) {
      plot.current = false;
      observer.unobserve(plot); observer.observe(plot);
    }
  };

  const chart = (definition, runs) => {
    if (definition.kind === "parts") return slime.timeline.perStep(runs, definition);
    const many = runs.length > 1;
    const lines = linesOf(definition, runs).filter((line) => runs.some((run) => hasFigures(line.values ? line.values(run) : column(run, line.metric))));
    if (!lines.length || lines.every((line) => runs.every((run) => (line.values ? line.values(run) : column(run, line.metric) || []).every((v) => !v) && definition.kind === "bars"))) return null;
    const legend = lines.length > 1 && !many ? lines.map((line, place) => [line.label, slime.COLOURS[place % slime.COLOURS.length]]) : [];
    return figure({
      title: definition.title, why: definition.why, legend,
      draw: () => {
        const layout = layoutOf(runs, definition.zero ? { rangemode: "tozero" } : {});
        if (definition.kind !== "bars") return [traces(lines, runs, many), layout];
        layout.barmode = "stack";
        const bars = lines.flatMap((line, place) => runs.map((run) => {
          const [x, y] = thin(run.x, [column(run, line.metric) || []]);
          return { type: "bar", x, y, offsetgroup: run.path, name: slime.plain(many ? run.name + " " + line.label : line.label), marker: { color: many ? run.colour : slime.COLOURS[place % slime.COLOURS.length] } };
        }));
        return [bars, { ...layout, bargap: 0 }];
      },
    });
  };

  // Evaluations: a chart a set, with the intervals that the run computed.
  const evaluations = (runs) => {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.evaluations)))];
    return names.map((name) => {
      const part = (run, metric) => run.evaluations[name]?.metrics[metric] || [];
      const labels = [["reward/mean", "mean"], ["reward/best", "best of a prompt"], ["pass@1", "pass@1"]]
        .filter(([metric]) => runs.some((run) => hasFigures(part(run, metric))))
        .filter(([metric]) => metric === "reward/mean" || runs.some((run) => part(run, metric).some((v, i) => v !== part(run, "reward/mean")[i])));
      const lines = labels.map(([metric, label], place) => ({
        label, values: (run) => part(run, metric), x: (run) => (run.evaluations[name]?.version || []).map(run.at),
        interval: place ? null : (run) => [part(run, metric + "/low"), part(run, metric + "/high")],
      }));
      return figure({
        title: "Evaluation: " + name, why: "Held-out reward; the band is the 95 % interval of the mean, by bootstrap over prompts.",
        legend: lines.length > 1 && runs.length === 1 ? lines.map((line, place) => [line.label, slime.COLOURS[place]]) : [],
        draw: () => [traces(lines, runs, runs.length > 1), layoutOf(runs)],
      });
    });
  };

  const others = (runs) => {
    const used = new Set();
    for (const [, charts] of CHARTS) for (const definition of charts) if (definition.kind !== "parts")
      for (const line of linesOf(definition, runs)) { used.add(line.metric); (Array.isArray(line.band) ? line.band : []).forEach((name) => used.add(name)); }
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.steps.metrics)))].filter((name) => !used.has(name) && name !== "reward/std").sort();
    const box = h("div", { className: "grid" });
    const show = (words) => {
      const chosen = names.filter((name) => words.split(/\s+/).every((word) => name.includes(word)));
      box.replaceChildren(...chosen.slice(0, 60).map((name) => chart({ title: name, lines: [{ label: name, metric: name }] }, runs)).filter(Boolean));
    };
    const search = h("input", { type: "search", placeholder: "name of a metric", "aria-label": "Find a metric", oninput: () => show(search.value.trim()) });
    const details = h("details", null, h("summary", null, `All other metrics (${names.length})`), h("div", { className: "controls", style: "margin-bottom:12px" }, search), box);
    details.addEventListener("toggle", () => { if (details.open && !box.firstChild) show(""); });
    return names.length ? details : null;
  };

  const overview = (runs) => {
    const smooth = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth, "aria-label": "Smoothing",
      oninput: () => { settings.smooth = Number(smooth.value); redraw(); } });
    const controls = h("div", { className: "controls" },
      h("label", null, "smoothing", smooth),
      h("span", { className: "field" }, "horizontal", slime.pick([["step", "step"], ["time", "minutes"]], settings.x, (value) => {
        settings.x = value; runs.forEach(place); redraw();
      })),
      runs.length === 1 && runs[0].stages.length > 1 && h("span", { className: "field" }, "stage", slime.pick([["", "all"], ...runs[0].stages.map(({ name }) => [name, name])], settings.stage, (value) => { settings.stage = value; redraw(); })),
      runs.length > 1 && h("span", { className: "legend", style: "display:flex;gap:14px;flex-wrap:wrap" }, runs.map((run) => h("span", null, h("span", { className: "swatch", style: "background:" + run.colour }), run.name))));
    const sections = CHARTS.map(([name, charts]) => {
      const figures = charts.map((definition) => chart(definition, runs)).filter(Boolean);
      if (name === "Reward") figures.splice(1, 0, ...evaluations(runs));
      if (name === "Trainer and engine" && slime.samples) figures.push(...slime.samples.histograms(runs));
      return figures.length ? [h("h2", null, name), h("div", { className: "grid" }, figures)] : null;
    });
    return h("div", null, controls, sections, h("h2", null, "More"), others(runs));
  };

  // Horizontal places of a run's steps and versions.
  const place = (run) => {
    const { version } = run.steps;
    run.x = settings.x === "step" ? version : run.clock.map((second) => second / 60);
    run.at = (v) => settings.x === "step" ? v : v === 0 ? 0 : run.x[version.indexOf(v)] ?? null;
  };
  slime.plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;"); // Plotly's labels know a few tags
  return { overview, place, figure, layoutOf, redraw, load, faded };
})();
