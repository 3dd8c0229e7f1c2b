// What happens when the page opens? What is in sight is drawn; the rest waits until it comes near.

const BLAMED = { "readout gap": "#D55E00", "trajectory gap": "#0072B2" };
const ABSENT = {
  "readout gap": "No model has a gate of its own.",
  "trajectory gap": "There is no reference to compare with.",
  "room left": "Nothing is reached together.",
  "reachable room": "No rule could be learned: too few examples, or no signals.",
};

function gapCharts() {
  const every = head.models.map((model) => {
    const members = head.models.filter((other) => other.group === model.group);
    const offset = members.length > 1 ? (1.3 * members.indexOf(model)) / (members.length - 1) - 0.65 : 0;
    return { model: head.groups[model.group], seed: model.seed || model.name, offset, value: 0 };
  });
  for (const place of document.querySelectorAll("[data-gap]")) {
    const { gap } = place.dataset;
    const rows = head.models.flatMap((model, index) => {
      const { value, low, high, blamed, text } = model.gaps[gap];
      const look = { colour: blamed ? BLAMED[gap] : "#8A8A8A", shape: blamed ? "diamond" : "circle" };
      return value === null
        ? []
        : [{ ...every[index], value, low, high, gap: text, text: blamed ? "blamed" : "not blamed", ...look }];
    });
    if (rows.length) draw(place, gap.replace(" ", "-"), head.charts.gap, { gaps: rows, every });
    else place.replaceChildren(make("p", { className: "note", textContent: ABSENT[gap] }));
  }
}

function whenNear(element, act) {
  const watcher = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      act();
    },
    { rootMargin: "600px" },
  );
  watcher.observe(element);
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
  gapCharts();
  await startFrontiers();
  startExamples();
  await startCloser();
  for (const place of document.querySelectorAll(".chart.figure")) {
    whenNear(place, async () => draw(place, place.dataset.figure, await unpack(`figure-${place.dataset.figure}`)));
  }
  $("theme").addEventListener("click", () => {
    setTheme(isDark() ? "light" : "dark");
    redraw();
    updateFrontiers();
  });
  document.body.dataset.ready = "yes";
}

setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
start();
