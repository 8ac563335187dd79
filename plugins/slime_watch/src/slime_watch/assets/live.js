// A live page: the first data lies in it, what comes later is fetched from the server that sent it.
(() => {
  const FINAL = [401, 403, 410]; // what does not change when asked again: another token, another host, a run that is gone
  const JUDGED = 30000, SEARCHED = 64; // milliseconds between diagnoses, groups that a search reads at once
  const token = new URLSearchParams(location.search).get("token");
  const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  const say = (text) => { document.getElementById("state").textContent = text; };
  const request = async (path) => {
    const response = await fetch(path, { headers: { Authorization: "Bearer " + token }, cache: "no-store" });
    if (!response.ok) throw Object.assign(new Error((await response.text()).trim()), { status: response.status });
    return response;
  };
  const get = async (path) => (await request(path)).json();
  const groups = async (first, count) =>
    slime.readPage(new Uint8Array(await (await request(`/groups?first=${first}&count=${count}`)).arrayBuffer()));

  // Columns of new steps behind those that are there; a metric that one side lacks has null there.
  const extend = (columns, more, before, count) => {
    for (const name of new Set([...Object.keys(columns), ...Object.keys(more)])) {
      columns[name] = [...(columns[name] || Array(before).fill(null)), ...(more[name] || Array(count).fill(null))];
    }
  };
  const merge = (run, { whole, steps, ...facts }) => {
    if (whole) run.steps = steps;
    else {
      const before = run.steps.version.length, count = steps.version.length;
      for (const part of ["metrics", "seconds"]) extend(run.steps[part], steps[part], before, count);
      for (const part of ["version", "stage"]) run.steps[part] = [...run.steps[part], ...steps[part]];
    }
    Object.assign(run, facts);
  };

  const findings = (data) => get("/findings").then((rows) => { data.runs[0].findings = rows; slime.app.update(data); }, () => {});
  const follow = async (data) => {
    for (let cursor = "", judged = Date.now(); ;) {
      try {
        const { cursor: next, run } = await get("/updates?after=" + encodeURIComponent(cursor));
        if (next !== cursor) {
          const judge = cursor && Date.now() - judged > JUDGED;
          merge(data.runs[0], run);
          cursor = next;
          slime.app.update(data);
          if (judge) { judged = Date.now(); await findings(data); }
        }
        say(run.status === "running" ? "live: " + (run.phase || "between parts") : "the run has ended: " + run.status);
      } catch (error) {
        if (FINAL.includes(error.status)) return say(error.message);
        say((error.status ? error.message : "no connection to slime watch") + "; trying again");
        await pause(2);
      }
    }
  };

  const embedded = slime.source;
  slime.source = {
    ...embedded,
    live: true,
    samples: () => get("/samples"),
    group: async (run, number) => (await groups(number, 1)).filter((sample) => sample.group === number),
    pages: async function* (run) {
      const count = (await slime.samples.load(slime.app.runs[run], run)).groups.length;
      for (let first = 0; first < count; first += SEARCHED) yield [await groups(first, SEARCHED), Math.min(1, (first + SEARCHED) / count)];
    },
    overview: async () => {
      const data = await embedded.overview();
      addEventListener("slime-ready", () => follow(data), { once: true });
      return data;
    },
  };
})();
