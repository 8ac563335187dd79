// Where the time went: the parts of every step on the critical path, one after another.
slime.timeline = (() => {
  const { h, seconds, percent } = slime;
  const PARTS = {
    rollout: ["Generation", "#5680e0", "The trainer waits for groups: generation, and rewards beside it."],
    reward: ["Reward", "#a463f2", "From the last generated sample to the last reward: nothing else ran then."],
    score: ["Scoring", "#1fa2b8", "Log-probs of trainer, reference or teacher, and values."],
    train: ["Training", "#e8871e", "Forward, backward, optimizer."],
    sync: ["Weight sync", "#3ca951", "New weights to the engines."],
    evaluate: ["Evaluation", "#d6409f", "Held-out sets, where training waits for them."],
    checkpoint: ["Checkpoint", "#9c6b4e", "Writing, as far as training waits for it."],
    fingerprint: ["Fingerprint", "#c9a500", "The checksum of all weights."],
    other: ["Waiting and other", "#7d8b99", "Between the parts."],
  };
  const facts = (name) => PARTS[name] || [name, "#b0a899", ""];
  const order = (names) => [...names].sort((a, b) => Object.keys(PARTS).indexOf(a) - Object.keys(PARTS).indexOf(b));
  const names = (runs) => order(new Set(runs.flatMap((run) => Object.keys(run.steps.seconds))));

  const perStep = (runs, { title, why }) => {
    const parts = names(runs).filter((name) => runs.some((run) => run.steps.seconds[name]?.some((v) => v)));
    if (!parts.length) return null;
    const [run] = runs;
    return slime.charts.figure({
      title: runs.length > 1 ? title + ", " + run.name : title, why,
      legend: parts.map((name) => [facts(name)[0], facts(name)[1]]),
      draw: () => [parts.map((name) => ({
        x: run.x, y: run.steps.seconds[name] || [], name: slime.plain(facts(name)[0]), stackgroup: "one", mode: "lines", type: "scatter",
        line: { width: 0, color: facts(name)[1] }, fillcolor: slime.charts.faded(facts(name)[1], 0.85), hovertemplate: "%{y:.3~g} s",
      })), slime.charts.layoutOf(runs, { rangemode: "tozero" })],
    });
  };

  const shares = (run) => {
    const sums = names([run]).map((name) => [name, (run.steps.seconds[name] || []).reduce((sum, v) => sum + (v || 0), 0)]).filter(([, sum]) => sum > 0);
    const total = sums.reduce((sum, [, value]) => sum + value, 0), steps = run.steps.version.length;
    const bar = h("div", { className: "shares", role: "img", "aria-label": sums.map(([name, sum]) => facts(name)[0] + " " + percent(sum / total)).join(", ") },
      sums.map(([name, sum]) => h("div", { style: `width:${100 * sum / total}%;background:${facts(name)[1]}`, title: facts(name)[0] + " " + percent(sum / total) }, sum / total > 0.06 ? facts(name)[0] + " " + percent(sum / total) : "")));
    const rows = [...sums].sort((a, b) => b[1] - a[1]).map(([name, sum]) => h("tr", null,
      h("td", null, h("span", { className: "swatch", style: "background:" + facts(name)[1] }), facts(name)[0]),
      h("td", { className: "number" }, percent(sum / total)), h("td", { className: "number" }, seconds(sum)), h("td", { className: "number" }, seconds(sum / steps)),
      h("td", null, facts(name)[2])));
    return [bar, h("table", { className: "rows" }, h("thead", null, h("tr", null, ["part", "share", "in all", "a step", "what it is"].map((text, i) => h("th", { className: i > 0 && i < 4 ? "number" : "" }, text)))), h("tbody", null, rows))];
  };

  // The path itself on a canvas: time from left to right; wheel zooms, dragging moves.
  const views = new Map(); // by a run's path: from and to where it was zoomed, in seconds
  const strip = (run) => {
    const parts = names([run]), total = run.clock[run.clock.length - 1] || 1;
    const canvas = h("canvas", { className: "strip", tabindex: 0, role: "img", "aria-label": "Critical path of " + run.name + " over time" });
    let [from, to] = views.get(run.path) || [0, total];
    const segmentsAt = (second) => {
      let low = 0, high = run.clock.length - 1;
      while (low < high) { const middle = (low + high) >> 1; if (run.clock[middle] < second) low = middle + 1; else high = middle; }
      let at = run.clock[low] - run.width[low];
      for (const name of parts) { const part = run.steps.seconds[name]?.[low] || 0; if (second < at + part) return [low, name, part]; at += part; }
      return [low, parts[parts.length - 1], 0];
    };
    const paint = () => {
      const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
      if (!width) return;
      if (to - from < total) views.set(run.path, [from, to]); else views.delete(run.path);
      canvas.width = width * ratio; canvas.height = height * ratio;
      const context = canvas.getContext("2d");
      context.scale(ratio, ratio);
      const scale = width / (to - from);
      if (run.clock.length * parts.length * (to - from) / total > 3 * width) { // finer than pixels: the share of each column
        for (let x = 0; x < width; x++) { const [, name] = segmentsAt(from + (x + 0.5) / scale); context.fillStyle = facts(name)[1]; context.fillRect(x, 0, 1, height - 16); }
      } else run.clock.forEach((end, i) => {
        let at = end - run.width[i];
        if (end < from || at > to) return;
        for (const name of parts) {
          const part = run.steps.seconds[name]?.[i] || 0;
          context.fillStyle = facts(name)[1];
          context.fillRect((at - from) * scale, 0, Math.max(part * scale - 0.3, 0.4), height - 16);
          at += part;
        }
      });
      context.fillStyle = slime.cssValue("--soft"); context.font = "11px sans-serif";
      for (let i = 0; i <= 6; i++) {
        context.textAlign = i === 0 ? "left" : i === 6 ? "right" : "center";
        context.fillText(seconds(from + (to - from) * i / 6), width * i / 6, height - 3);
      }
    };
    const zoom = (centre, factor) => {
      const width = Math.min(total, Math.max((to - from) * factor, total / 1e5));
      from = Math.max(0, Math.min(total - width, centre - (centre - from) * width / (to - from)));
      to = from + width; paint();
    };
    const second = (event) => from + (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth * (to - from);
    canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(second(event), event.deltaY > 0 ? 1.25 : 0.8); }, { passive: false });
    let dragging = null;
    canvas.addEventListener("pointerdown", (event) => { dragging = second(event); canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { dragging = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (dragging !== null) { const move = dragging - second(event), width = to - from; from = Math.max(0, Math.min(total - width, from + move)); to = from + width; paint(); return; }
      const [i, name, part] = segmentsAt(second(event));
      slime.tip.show(`step ${run.steps.version[i]} (${run.steps.stage[i]})\n${facts(name)[0]} ${seconds(part)} of ${seconds(run.width[i])}`, event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerleave", slime.tip.hide);
    canvas.addEventListener("keydown", (event) => {
      const width = to - from;
      if (event.key === "+" || event.key === "=") zoom((from + to) / 2, 0.7);
      else if (event.key === "-") zoom((from + to) / 2, 1.4);
      else if (event.key === "ArrowLeft" || event.key === "ArrowRight") { from = Math.max(0, Math.min(total - width, from + (event.key === "ArrowLeft" ? -0.2 : 0.2) * width)); to = from + width; paint(); }
      else return;
      event.preventDefault(); event.stopPropagation();
    });
    new ResizeObserver(paint).observe(canvas);
    canvas.addEventListener("theme", paint);
    return canvas;
  };

  const show = (runs) => h("div", null, runs.map((run) => {
    if (!run.steps.version.length) return h("div", { className: "empty" }, run.name + ": no step is finished yet");
    const restarts = run.restarts.map((row) => h("p", { className: "notice" }, `restart ${row.number} of ${row.of}, from version ${row.version}: ${row.cause}`));
    return [
      h("h2", null, run.name, h("small", null, `${run.steps.version.length} steps in ${seconds(run.clock[run.clock.length - 1])}`)),
      h("div", { className: "card" }, shares(run)),
      h("h2", null, "Critical path", h("small", null, "time from left to right; wheel or + − zooms, drag or arrows move")),
      h("div", { className: "card" }, strip(run)), restarts,
      h("h2", null, "Seconds a step"), h("div", { className: "grid", style: "grid-template-columns:1fr" }, perStep([run], { title: "Parts of each step", why: "Stacked seconds." })),
    ];
  }));
  return { show, perStep, names };
})();
