// What happens when the page opens? What is in sight is drawn; the rest waits until it comes near.

const BLAMED = { "readout gap": "#D55E00", "trajectory gap": "#0072B2" };
// Why a gap is nobody's, by what its cells say: every one of them says one of these.
const ABSENT = {
  "no gate": "it has no gate of its own",
  "no reference": "there is no reference to compare with",
  "is the reference": "it is the reference itself",
  "nothing above chance": "nothing above chance is reached together",
  "nothing learned": "no rule could be learned: too few examples, or no signals",
  "no verdict": "it gets no verdict",
};

function absent(models, gap) {
  const texts = [...new Set(models.map((model) => model.gaps[gap].text))];
  const counted = (text) => models.filter((model) => model.gaps[gap].text === text).length;
  const reasons = texts.map((text) => `${ABSENT[text] ?? text}${texts.length > 1 ? ` (${counted(text)})` : ""}`);
  return `No model here has this gap: ${reasons.join("; ")}.`;
}

const ZERO = {
  "readout gap": "Zero for every model here that has a gate: it is its best readout.",
  "trajectory gap": "Zero for every model here: none takes longer than the reference.",
};

// A name in lines of a chart's margin, none of which would be cut; one that cannot be broken is.
function wrapped(name, longest = 36) {
  const lines = [""];
  for (const word of name.replaceAll("β ", "β\u00a0").split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (longer.length > longest && lines.at(-1)) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines.join("\n");
}

function gapCharts(groups) {
  const models = head.models.filter((model) => groups.has(model.group));
  const silent = models.length > 0 && models.every((model) => model.target === null);
  $("gaps-shown").hidden = silent;
  $("gaps-silent").hidden = !silent;
  if (silent) return;
  const every = models.map((model) => {
    const members = models.filter((other) => other.group === model.group);
    const offset = members.length > 1 ? (1.3 * members.indexOf(model)) / (members.length - 1) - 0.65 : 0;
    return { model: wrapped(head.groups[model.group]), seed: model.seed || model.name, offset, value: 0 };
  });
  const bounds = models.flatMap((model) =>
    Object.values(model.gaps).flatMap(({ value, low, high }) => (value === null ? [] : [value, low, high])),
  );
  const scale = [Math.min(0, ...bounds), Math.max(0, ...bounds)].map((value) => ({ value }));
  for (const place of document.querySelectorAll("[data-gap]")) {
    const { gap } = place.dataset;
    const rows = models.flatMap((model, index) => {
      const { value, low, high, blamed, text } = model.gaps[gap];
      const look = { colour: blamed ? BLAMED[gap] : "#8A8A8A", shape: blamed ? "diamond" : "circle" };
      return value === null
        ? []
        : [{ ...every[index], value, low, high, gap: text, text: blamed ? "blamed" : "not blamed", ...look }];
    });
    const present = new Set(rows.map((row) => row.model));
    const chart = place.clientWidth < 480 ? CHARTS.gap_narrow : CHARTS.gap;
    if (!rows.length) say(place, absent(models, gap));
    else if (rows.every(({ value, low, high }) => value === 0 && low === 0 && high === 0))
      say(place, ZERO[gap] ?? "Zero for every model here that has it.");
    else
      draw(place, gap.replace(" ", "-"), chart, {
        gaps: rows,
        scale,
        every: every.filter((row) => present.has(row.model)),
      });
  }
}

// A link lands where it says, also while charts above it grow, until the reader moves.
let landing = null;
function land() {
  landing = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (landing?.hidden) showEveryModel();
  unfold(landing);
  landing?.scrollIntoView();
}

function startLinks() {
  for (const moved of ["wheel", "touchstart", "pointerdown", "keydown"])
    addEventListener(moved, () => (landing = null), { passive: true });
  addEventListener("hashchange", land);
  addEventListener("click", (event) => {
    if (event.target.closest?.("a[href^='#']")) setTimeout(land); // also where it is the address already
  });
  new ResizeObserver(() => landing?.scrollIntoView()).observe(document.querySelector("main"));
  const menu = (open) => $("sections").setAttribute("aria-expanded", open);
  $("sections").addEventListener("click", () => menu($("sections").ariaExpanded !== "true"));
  $("links").addEventListener("click", () => menu(false));
  land();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "◐ Light" : "◐ Dark";
}

async function start() {
  head = await unpack("head");
  for (const table of document.querySelectorAll("table[data-name]")) {
    if (table.tHead.rows.length) sortable(table);
    copyable(table);
    widen(table);
  }
  startFolds();
  startTerms();
  startLinks();
  startModels();
  await startFrontiers();
  startExamples();
  await startCloser();
  startPrinting();
  $("theme").addEventListener("click", () => {
    setTheme(isDark() ? "light" : "dark");
    redraw();
    updateFrontiers();
  });
  document.body.dataset.ready = "yes";
  await drawFigures(idle);
  document.body.dataset.drawn = "yes";
}

const idle = () => new Promise((resolve) => (window.requestIdleCallback ?? setTimeout)(resolve));

// Those of the report, one after the other while nothing else happens, so that a print has them; or those that are left.
async function drawFigures(rest = () => {}) {
  for (const place of document.querySelectorAll(".chart.figure")) {
    await rest();
    if (!drawn.has(place)) await draw(place, place.dataset.figure, await unpack(`figure-${place.dataset.figure}`));
  }
}

setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
start();
