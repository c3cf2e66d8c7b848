"use strict";
// Runs in the page of a report: the token that is looked at, the charts, light and dark.
const report = JSON.parse(document.getElementById("report").textContent);
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = {
  light: { warm: "#b8450b", grey: "#6b7280", blue: "#1b62c4", green: "#1e7a4b", purple: "#7a3fc0",
    heat: "oranges", ink: "#16181d", soft: "#4d5461", line: "#d4d8df" },
  dark: { warm: "#ff9e5c", grey: "#9aa3b2", blue: "#7fb2ff", green: "#5fd39a", purple: "#c7a0ff",
    heat: "inferno", ink: "#eceef2", soft: "#b3bac6", line: "#3a3f49" },
};

function coloured(value, colours) {
  if (typeof value === "string") return value.startsWith("$") ? colours[value.slice(1)] : value;
  if (Array.isArray(value)) return value.map((one) => coloured(one, colours));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, coloured(one, colours)]));
}

function rowsOf(columns) {
  const names = Object.keys(columns);
  return names.length ? columns[names[0]].map((_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]]))) : [];
}

// ---- charts: drawn when they come near the screen, and again for the other theme
const views = new Map(); // chart element -> Vega view

async function draw(element) {
  const figure = report.figures[element.dataset.figure];
  const colours = COLOURS[root.dataset.theme];
  const spec = {
    $schema: "https://vega.github.io/schema/vega-lite/v6.json", // a name: nothing is fetched
    width: "container",
    autosize: { type: "fit", contains: "padding" },
    background: null,
    description: figure.words,
    data: { name: "table", values: rowsOf(figure.columns) },
    ...coloured(figure.spec, colours),
    config: {
      font: "system-ui, sans-serif",
      view: { stroke: colours.line },
      axis: { labelColor: colours.soft, titleColor: colours.ink, gridColor: colours.line, gridOpacity: 0.6,
        domainColor: colours.line, tickColor: colours.line, labelFontSize: 12, titleFontSize: 12,
        labelOverlap: "greedy", labelSeparation: 6 },
      legend: { labelColor: colours.ink, titleColor: colours.ink, labelFontSize: 12, titleFontSize: 12 },
      rule: { color: colours.ink },
    },
  };
  views.get(element)?.finalize();
  const { view } = await vegaEmbed(element, spec, { actions: false, renderer: "canvas", mode: "vega-lite" });
  views.set(element, view);
  if (!figure.by_token) return;
  const reader = readers.get(element.dataset.of);
  if (reader) view.signal("at", reader.index + 1).run();
  view.addEventListener("click", (event) => {
    const left = view.origin()[0];
    const token = view.scale("x").invert(event.offsetX - left);
    reader?.look(Math.round(token) - 1, true);
  });
}

const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    near.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "600px" });

// ---- the text: one token is looked at, chosen by pointer, by keys or in a chart
const readers = new Map();

class Reader {
  constructor(text) {
    this.name = text.dataset.of;
    this.text = text;
    this.tokens = [...text.children];
    this.panel = document.getElementById(`${this.name}-token`);
    this.data = report.tokens[this.name];
    this.index = 0;
    this.tokens.forEach((token, i) => { token.index = i; });
    text.addEventListener("pointerover", (event) => this.pointed(event));
    text.addEventListener("click", (event) => this.pointed(event));
    text.addEventListener("keydown", (event) => this.pressed(event));
    this.look(0, false, false);
  }

  pointed(event) {
    const token = event.target.closest(".text > span");
    if (token) this.look(token.index);
  }

  pressed(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100,
      Home: -this.tokens.length, End: this.tokens.length }[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.look(this.index + by, true);
  }

  look(index, scroll = false, mark = true) {
    const next = Math.min(Math.max(index, 0), this.tokens.length - 1);
    this.tokens[this.index].classList.remove("at");
    this.index = next;
    if (mark) this.tokens[next].classList.add("at");
    if (scroll) {
      const box = this.text.getBoundingClientRect(), place = this.tokens[next].getBoundingClientRect();
      if (place.top < box.top || place.bottom > box.bottom) this.text.scrollTop += place.top - box.top - box.height / 2;
    }
    this.panel.replaceChildren(...this.described(next));
    for (const [element, view] of views) {
      if (element.dataset.of !== this.name || !report.figures[element.dataset.figure].by_token) continue;
      view.signal("at", next + 1).runAsync();
    }
  }

  described(i) {
    const head = document.createElement("p");
    const shown = document.createElement("strong");
    shown.textContent = JSON.stringify(this.tokens[i].textContent);
    head.append(shown, ` token ${i + 1} of ${this.tokens.length}`);
    const facts = Object.entries(this.data.columns)
      .filter(([, column]) => column[i] !== null).map(([name, column]) => [name, `${column[i]}`]);
    const parts = [head, table(facts)];
    const top = this.data.top[i] ?? [];
    if (top.length) {
      const others = [];
      for (let j = 0; j < top.length; j += 2) others.push([this.data.words[top[j]], `${(100 * top[j + 1]).toFixed(1)}%`]);
      const title = document.createElement("p");
      title.textContent = "likeliest here, at temperature 1";
      parts.push(title, table(others));
    }
    return parts;
  }
}

function table(rows) {
  const element = document.createElement("table");
  for (const cells of rows) {
    const row = element.insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = cells[0];
    row.append(head);
    const cell = row.insertCell();
    cell.className = "n";
    cell.textContent = cells[1];
  }
  return element;
}

// ---- light and dark
const button = document.getElementById("theme");
function paint(theme) {
  root.dataset.theme = theme;
  button.setAttribute("aria-pressed", String(theme === "dark"));
  for (const element of views.keys()) draw(element);
}
button.addEventListener("click", () => paint(root.dataset.theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", () => paint(dark.matches ? "dark" : "light"));
paint(dark.matches ? "dark" : "light");
button.hidden = false;

for (const text of document.querySelectorAll(".text")) readers.set(text.dataset.of, new Reader(text));
for (const element of document.querySelectorAll(".chart")) near.observe(element);
