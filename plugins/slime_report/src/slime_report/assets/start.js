"use strict";
// One name for all of the page: slime.source has the data, the other files add what shows it.
const slime = {};
const savedTheme = (() => { try { return localStorage.getItem("slime-theme"); } catch { return null; } })();
document.documentElement.dataset.theme =
  savedTheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
