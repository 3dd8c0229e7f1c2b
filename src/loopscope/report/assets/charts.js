// How is a chart drawn, again and again? Vega-Lite does it; colours are translated for a dark ground on the way.

const drawn = new Map(); // place -> {name, specification, data, view}
let head; // what charts of many models need

// The page's policy forbids eval, so Vega interprets its expressions, and styles that are not the page's own.
const EMBEDDED = { actions: false, ast: true, defaultStyle: false };

const isDark = () => document.documentElement.dataset.theme === "dark";

// The same value with colours and scales for a dark ground; texts stay as they are.
function painted(value) {
  if (!isDark()) return value;
  if (typeof value === "string") return Object.hasOwn(head.dark, value) ? head.dark[value] : value;
  if (Array.isArray(value)) return value.map(painted);
  if (value === null || typeof value !== "object") return value;
  if (value.scheme?.extent) return { ...value, scheme: { ...value.scheme, extent: [1, 0.42] } }; // no dark blue on black
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, painted(each)]));
}

function theme(specification, dark) {
  const ink = dark ? "#E8ECF0" : "#1C2126";
  const lines = dark ? "#39424C" : "#D5DAE0";
  const text = { labelColor: ink, titleColor: ink, labelFontSize: 11, titleFontSize: 12, titleFontWeight: "normal" };
  const own = specification.config ?? {};
  return {
    ...own,
    font: "system-ui, sans-serif",
    background: dark ? "transparent" : "white",
    axis: { ...own.axis, ...text, gridColor: lines, domainColor: lines, tickColor: lines, labelFlush: false },
    legend: { ...own.legend, ...text, symbolBaseFillColor: ink, symbolBaseStrokeColor: ink },
    title: { ...own.title, color: ink },
    view: { stroke: lines },
  };
}

const BESIDE = 84; // what the axes of charts above each other take

function sized(specification, data, width) {
  const { set, rows, step = 22 } = specification.usermeta ?? {};
  if (specification.width !== "container") return specification;
  if (specification.usermeta?.stacked) {
    const { width: _, vconcat, ...rest } = specification;
    return { ...rest, vconcat: vconcat.map((part) => ({ ...part, width: width - BESIDE })) };
  }
  const size = { width, autosize: { type: "fit-x", contains: "padding" } };
  if (rows) {
    const names = [...new Set(data[set].map((row) => String(row[rows])))];
    const most = Math.max(...names.map((name) => name.split("\n").length)); // lines of a name
    size.height = Math.max(Math.max(step, 13 * most + 6) * names.length, 8 * data[set].length * (rows === "model"));
  }
  return { ...specification, ...size };
}

// Draws a chart, or gives the one that is there other data.
// `key` are the lines that a saved figure explains, where the legend is not the chart's own.
async function draw(place, name, specification, data = {}, key = null) {
  const known = drawn.get(place);
  if (known) Object.assign(known, { name, key });
  if (
    known &&
    known.specification === specification &&
    sized(specification, data).height === sized(specification, known.data).height
  ) {
    known.data = data;
    known.last = known.last.then(async () => {
      if (known.data !== data) return; // newer data wait already
      for (const [set, rows] of Object.entries(painted(data))) known.view.data(set, rows);
      await known.view.resize().runAsync();
    });
    return known.last;
  }
  const chart = { name, specification, data, key };
  drawn.set(place, chart);
  if (!known) tools(place);
  chart.result = known?.result;
  chart.last = embed(place, chart);
  return chart.last;
}

// Of a part that is folded there may be no width yet: then half of the page's.
const widthOfPlace = (place) => Math.max(place.clientWidth || document.querySelector("main").clientWidth / 2, 200);

function refit(place) {
  const chart = drawn.get(place);
  if (chart?.specification.width === "container" && chart.width !== widthOfPlace(place))
    chart.last = chart.last.then(() => embed(place, chart));
}

async function embed(place, chart) {
  const { specification, data } = chart;
  chart.width = widthOfPlace(place);
  const shown = painted({
    ...sized(specification, data, chart.width),
    datasets: { ...specification.datasets, ...data },
  });
  const options = {
    ...EMBEDDED,
    renderer: place.id === "frontier-chart" ? "canvas" : "svg",
    tooltip: { theme: isDark() ? "dark" : "light", disableDefaultStyle: true },
  };
  chart.result?.finalize();
  chart.result = await vegaEmbed(
    place,
    { ...shown, config: { ...theme(specification, isDark()), background: "transparent" } },
    options,
  );
  chart.view = chart.result.view;
}

// A sentence where there is nothing to draw.
function say(place, textContent) {
  const known = drawn.get(place);
  if (known) place.nextSibling.remove();
  known?.last.then(() => known.result?.finalize());
  drawn.delete(place);
  place.replaceChildren(make("p", { className: "note", textContent }));
}

function tools(place) {
  const kinds = ["SVG", "PNG"].map((kind) => {
    const saving = button(kind, () => save(place, kind.toLowerCase()));
    saving.setAttribute("aria-label", `Save this figure as ${kind}`);
    return saving;
  });
  place.after(make("div", { className: "tools" }, ...kinds));
}

function keyOf(key) {
  const axis = { orient: "right", title: null, domain: false, ticks: false, grid: false, labelLimit: 0 };
  const own = (field) => ({ field, type: "nominal", scale: null });
  const encoding = {
    y: { field: "line", type: "nominal", sort: null, axis },
    stroke: own("colour"),
    fill: own("fill"),
    shape: own("shape"),
  };
  return {
    data: { values: key },
    width: 10,
    height: { step: 16 },
    view: { stroke: null },
    mark: { type: "point", size: 60, opacity: 1 },
    encoding,
  };
}

// A figure for a paper: on a light ground, whatever the page has.
async function image(place, kind) {
  const { specification, data, key } = drawn.get(place);
  const sets = { datasets: { ...specification.datasets, ...data }, config: theme(specification, false) };
  const whole = key?.length
    ? { hconcat: [{ ...specification, width: 480 }, keyOf(key)], ...sets }
    : { ...sized(specification, data, 480), ...sets };
  const made = await vegaEmbed(make("div"), whole, { ...EMBEDDED, tooltip: false });
  const address = await made.view.toImageURL(kind, kind === "png" ? 3 : 1);
  made.finalize();
  return address;
}

async function save(place, kind) {
  make("a", { href: await image(place, kind), download: `${drawn.get(place).name}.${kind}` }).click();
}

function redraw() {
  for (const [place, chart] of drawn) chart.last = embed(place, chart);
}

let width = innerWidth;
let waiting;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (innerWidth !== width) redraw();
    width = innerWidth;
  }, 200);
});
