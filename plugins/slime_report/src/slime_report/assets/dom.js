// Elements and numbers. Text enters the document as text only: there is no innerHTML anywhere.
slime.h = (name, attributes, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style" || key === "className" || key === "value" || key === "disabled" || key === "checked") {
      if (key === "style") element.style.cssText = value; else element[key] = value;
    } else element.setAttribute(key, value === true ? "" : value);
  }
  return slime.fill(element, ...children);
};
slime.fill = (element, ...children) => {
  element.replaceChildren(...children.flat(4).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
};
slime.number = (value, digits = 4) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return Math.abs(value) < 1e6 ? String(value) : value.toExponential(2);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
};
slime.seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 1) return Math.round(value * 1000) + " ms";
  if (value < 90) return Number(value.toPrecision(3)) + " s";
  const minutes = Math.round(value / 60);
  return minutes < 90 ? minutes + " min" : (value / 3600).toFixed(1) + " h";
};
slime.percent = (share) => (share >= 0.1 ? Math.round(share * 100) : (share * 100).toFixed(1)) + " %";
slime.count = (value) => value.toLocaleString("en-US");
// Controls, escapes and direction marks are shown as codes, as the terminal shows them.
slime.visible = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (char) => "\\u" + char.charCodeAt(0).toString(16).padStart(4, "0"));
slime.text = (value) => typeof value === "string" ? value : JSON.stringify(value);
slime.cssValue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
slime.last = (values) => { for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i]; return null; };
slime.COLOURS = ["#5680e0", "#e8871e", "#3ca951", "#d6409f", "#1fa2b8", "#9c6b4e", "#a463f2", "#c9a500", "#ff725c", "#7d8b99"];
slime.pick = (options, chosen, change) => {
  const buttons = options.map(([value, label, title]) => slime.h("button", {
    type: "button", title, "aria-pressed": String(value === chosen),
    onclick: () => { buttons.forEach((b, i) => b.setAttribute("aria-pressed", String(options[i][0] === value))); change(value); },
  }, label));
  return slime.h("span", { className: "segmented", role: "group" }, buttons);
};
slime.tip = (() => {
  const element = slime.h("div", { className: "tip", hidden: true });
  document.body.append(element);
  return {
    show(text, x, y) {
      element.textContent = text; element.hidden = false;
      const box = element.getBoundingClientRect();
      element.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.width - 8)) + "px";
      element.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
    },
    hide() { element.hidden = true; },
  };
})();
