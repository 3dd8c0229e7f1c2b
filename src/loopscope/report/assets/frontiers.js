// Which lines are shown, and what depth does each need for the target accuracy? All numbers were computed before.

const lines = { models: new Set(), readouts: new Set() };
const ALONE = ["fixed", "oracle"]; // between two fixed depths there is none, and the oracle is one point
const isLearned = (readout) => readout.startsWith("stopper:"); // on all signals together: hollow marks
const FIRST_MODELS = 6;
const [HEXAGON, FOUR_POINTS, BOW_TIE] = [
  "M-.9,0L-.45,-.8L.45,-.8L.9,0L.45,.8L-.45,.8Z",
  "M0,-1L.28,-.28L1,0L.28,.28L0,1L-.28,.28L-1,0L-.28,-.28Z",
  "M-.9,-.8L-.9,.8L.9,-.8L.9,.8Z",
]; // as in colours.py
const GLYPHS = {
  circle: "●",
  square: "■",
  diamond: "◆",
  "triangle-up": "▲",
  "triangle-down": "▼",
  "triangle-right": "▶",
  "triangle-left": "◀",
  cross: "✚",
  [HEXAGON]: "⬢",
  [FOUR_POINTS]: "✦",
  [BOW_TIE]: "⋈",
};
const HOLLOW = { diamond: "◇", square: "□", circle: "○", "triangle-up": "△" };

function startFrontiers() {
  const { models, groups } = head;
  const first = groups.map((_, group) => models.findIndex((model) => model.group === group));
  for (const index of first.slice(0, FIRST_MODELS)) lines.models.add(index);
  const known = Object.keys(head.styles);
  const listed = new Set(["gate", "halting", "oracle", ...[...lines.models].flatMap((index) => models[index].best)]);
  for (const name of known) if (listed.has(name)) lines.readouts.add(name);
  const box = (checked, change, ...label) => {
    const input = make("input", { type: "checkbox", checked });
    input.addEventListener("change", () => (change(input.checked), updateFrontiers()));
    return make("label", {}, input, ...label);
  };
  const toggle = (set, value) => (on) => (on ? set.add(value) : set.delete(value));
  $("legend-readouts").append(
    ...known.map((name) => {
      const label = box(lines.readouts.has(name), toggle(lines.readouts, name), swatch("readout", name), name);
      label.dataset.readout = name;
      return label;
    }),
  );
  groups.forEach((label, group) => {
    const members = models.map((model, index) => [model, index]).filter(([model]) => model.group === group);
    const boxes = members.map(([model, index]) =>
      box(
        lines.models.has(index),
        toggle(lines.models, index),
        swatch("model", index),
        members.length > 1 ? `seed ${model.seed}` : make("bdi", { textContent: model.label }),
      ),
    );
    const shown =
      members.length > 1
        ? make("div", { className: "seeds" }, make("span", {}, make("bdi", { textContent: label })), ...boxes)
        : boxes[0];
    $("legend-models").append(shown);
  });
  $("legend-models").append(
    button("All", () => setAll(true)),
    " ",
    button("None", () => setAll(false)),
  );
  const slider = $("target");
  const lowest = models
    .flatMap((model) => model.curves.flatMap((curve) => curve.accuracy))
    .reduce((least, value) => Math.min(least, value), lowestTarget());
  slider.min = Math.max(0, head.slider_targets.findIndex((stop) => stop >= lowest) - 1);
  slider.max = head.slider_targets.length - 1;
  slider.value = firstStop();
  slider.addEventListener("input", updateFrontiers);
  $("colour-by").value = lines.models.size > 1 ? "model" : "readout";
  $("colour-by").addEventListener("change", updateFrontiers);
  $("paper-shown").addEventListener("change", updateFrontiers);
  $("paper-shown").parentNode.hidden = $("paper-note").hidden = head.paper.length === 0;
  $("zoom-in").addEventListener("click", () => zoom(0.7));
  $("zoom-out").addEventListener("click", () => zoom(1 / 0.7));
  $("zoom-reset").addEventListener("click", () => zoom(0));
  return updateFrontiers();
}

// The report's target, which test data have no say in; where it is each model's own, the lowest.
function lowestTarget() {
  const known = head.models.map((model) => model.target).filter((target) => target !== null);
  return known.length ? Math.min(...known) : 1; // without a verdict no depth is shown, at no target
}

// Why a line has no depth at a target, beside not reaching it; nothing where it can have one.
function depthless({ model, curve }, target) {
  if (curve.readout === "oracle") return NOTHING; // one point, and not what any accuracy takes
  if (model.target === null) return "no verdict";
  return target <= model.chance ? "not above chance" : "";
}

const firstStop = () => head.slider_targets.findLastIndex((stop) => stop <= lowestTarget() + 1e-9);

function setAll(on) {
  head.models.forEach((_, index) => (on ? lines.models.add(index) : lines.models.delete(index)));
  for (const input of $("legend-models").querySelectorAll("input")) input.checked = on;
  updateFrontiers();
}

function swatch(kind, value) {
  const shape = kind === "readout" ? head.styles[value][1] : "square";
  const mark = make("span", {
    className: "swatch",
    textContent: (isLearned(String(value)) ? HOLLOW : GLYPHS)[shape] ?? (value === "oracle" ? "★" : "✕"),
    ariaHidden: "true",
  });
  mark.dataset[kind] = value;
  return mark;
}

const modelColour = (index) => head.colours[index % head.colours.length];
const DASHES = [
  [1, 0],
  [7, 3],
  [2, 2],
  [9, 3, 2, 3],
]; // a second cue beside the colour

// The lines that are shown, in the order of the legend.
function shownLines() {
  const byModel = $("colour-by").value === "model";
  const order = [...lines.models].sort((a, b) => a - b);
  return order.flatMap((index, place) =>
    head.models[index].curves
      .filter((curve) => lines.readouts.has(curve.readout))
      .map((curve) => {
        const [own, shape] = head.styles[curve.readout];
        return {
          index,
          model: head.models[index],
          curve,
          shape,
          colour: byModel ? modelColour(place) : own,
          width: byModel ? nested(4, 1.4, Math.min(place, 5), Math.min(order.length, 6)) : 1.6,
          star: nested(280, 90, Math.min(place, 5), Math.min(order.length, 6)),
          dash: byModel ? DASHES[place % DASHES.length] : DASHES[isLearned(curve.readout) ? 1 : 0],
          fill: isLearned(curve.readout) ? "transparent" : undefined,
        };
      }),
  );
}

const NEVER = 1e300; // a threshold beyond it is met by no signal: full depth
const thresholdText = (curve, place) =>
  curve.thresholds.length === 0
    ? "none: knows the labels"
    : curve.readout === "fixed"
      ? `loop ${curve.thresholds[place]}`
      : Math.abs(curve.thresholds[place]) > NEVER
        ? "never"
        : short(curve.thresholds[place]);
const accuracyText = (curve, place) =>
  `${percent(curve.accuracy[place])} ${span(curve.accuracy_low[place], curve.accuracy_high[place], (value) => fixed(100 * value, 1))}`;
const averageText = (curve, place) =>
  `${loopsText(curve.loops[place])} ${span(curve.loops_low[place], curve.loops_high[place], loopsText)}`;

const TICK = "M0,-1L0,1"; // a mark of D@X
const PAPER = "M0,-1L.95,-.31L.59,.81L-.59,.81L-.95,-.31Z";

function pointRows({ model, curve, shape, colour, dash, width, star, index, fill = colour }) {
  const alone = ALONE.includes(curve.readout);
  return curve.accuracy.map((accuracy, place) => {
    const certified = curve.certified.some((mark) => mark.place === place);
    const apart = alone || curve.extra.includes(place);
    return {
      accuracy,
      loops: curve.loops[place],
      line: `${index} ${curve.readout}${apart ? place : ""}`,
      order: place,
      colour,
      fill,
      shape,
      dash,
      width,
      size: curve.readout === "oracle" ? star : alone || certified ? 70 : isLearned(curve.readout) ? 45 : 20,
      tip: {
        model: model.label,
        readout: curve.readout + (certified ? " (calibrated)" : ""),
        threshold: thresholdText(curve, place),
        accuracy: accuracyText(curve, place),
        "average loops": averageText(curve, place),
      },
    };
  });
}

// What is drawn beside the lines: the frame, the depths at the target, and the paper's numbers.
function besideRows(shown, stop) {
  const target = head.slider_targets[stop];
  const row = (line, at, colour, mark) => ({
    ...at,
    line,
    order: 0,
    colour,
    fill: "transparent",
    dash: [1, 0],
    width: 1.6,
    ...mark,
  });
  const deepest = Math.max(
    ...(shown.length ? shown : head.models.map((model) => ({ model }))).map(({ model }) => model.loops),
  );
  const frame = [1, deepest].map((loops) =>
    row(`frame ${loops}`, { loops, accuracy: heightOf(shown, target) }, "transparent", { shape: "circle", size: 0 }),
  );
  const depths = shown
    .filter((line) => line.curve.depth[stop] !== null && !depthless(line, target))
    .map(({ model, curve, colour, index }) =>
      row(`depth ${index} ${curve.readout}`, { loops: curve.depth[stop], accuracy: target }, colour, {
        shape: TICK,
        size: 350,
        tip: {
          model: model.label,
          readout: curve.readout,
          [`D@${short(100 * target)}`]: `${loopsText(curve.depth[stop])} ${span(curve.depth_low[stop], curve.depth_high[stop], loopsText)}`,
        },
      }),
    );
  const paper = $("paper-shown").checked
    ? head.paper.flatMap((marker, number) => {
        const line = shown.find(
          ({ model, curve }) => marker.names.includes(model.name) && marker.readout === curve.readout,
        );
        return line
          ? [
              row(`paper ${number}`, marker, line.colour, {
                shape: PAPER,
                size: 110,
                tip: { "the paper": marker.text },
              }),
            ]
          : [];
      })
    : [];
  return [...frame, ...depths, ...paper];
}

// Where the chart must reach: to the target, or without a verdict to what is drawn anyway.
const heightOf = (shown, target) => (isSilent() ? (shown[0]?.curve.accuracy[0] ?? 0.5) : target);

const isSilent = () => head.models.every((model) => model.target === null);

function depthSummary(shown, stop) {
  if (isSilent()) return "No depths are shown: none of these models gets a verdict.";
  if (!shown.length) return "No line is switched on.";
  const target = head.slider_targets[stop];
  const ruled = shown.filter((line) => line.curve.readout !== "oracle");
  const counted = ruled.filter((line) => !depthless(line, target));
  const text = `${short(100 * target)} %`;
  if (ruled.length && !counted.length) return `No line that is shown can have a depth at ${text}: the table says why.`;
  const reached = counted.filter(({ curve }) => curve.depth[stop] !== null);
  if (!reached.length) return `No line that is shown reaches ${text}.`;
  const least = reached.reduce((best, each) => (best.curve.depth[stop] <= each.curve.depth[stop] ? best : each));
  return `${reached.length} of ${counted.length} lines (the oracle apart) reach ${text}; the least depth is ${loopsText(least.curve.depth[stop])} loops: ${least.curve.readout}, ${least.model.label}.`;
}

const onTouch = () => matchMedia("(hover: none), (max-width: 40rem)").matches;

function updateFrontiers() {
  const stop = Number($("target").value);
  const target = head.slider_targets[stop];
  const name = `D@${short(100 * target)}`;
  const shown = shownLines();
  $("target-text").textContent = `${short(100 * target)} %`;
  for (const part of ["target-controls", "ticks-note", "depths-shown"]) $(part).hidden = isSilent();
  $("depth-summary").textContent = depthSummary(shown, stop);
  const table = $("depth-table");
  const titles = ["model", "readout", name, "95 % interval", "resamples that reach it"];
  if (!table.tHead.rows.length) columns(table, titles);
  const header = table.tHead.rows[0].cells[2].firstChild;
  header.textContent = name;
  header.setAttribute("aria-label", name);
  fill(
    table,
    shown.map(({ model, curve }) => {
      const why = depthless({ model, curve }, target);
      return make(
        "tr",
        {},
        ...[
          model.label,
          curve.readout,
          ...(why
            ? [why, NOTHING, NOTHING]
            : [
                loopsText(curve.depth[stop]),
                span(curve.depth_low[stop], curve.depth_high[stop], loopsText),
                percent(curve.depth_reached[stop]),
              ]),
        ].map((text) => make("td", {}, make("bdi", { textContent: text }))),
      );
    }),
  );
  for (const mark of document.querySelectorAll(".swatch")) {
    const place = [...lines.models].sort((a, b) => a - b).indexOf(Number(mark.dataset.model));
    const byModel = $("colour-by").value === "model";
    const ofReadout = "readout" in mark.dataset;
    const colour =
      ofReadout && !byModel
        ? head.styles[mark.dataset.readout][0]
        : !ofReadout && byModel && place >= 0
          ? modelColour(place)
          : "";
    mark.style.color = colour && painted(colour);
    mark.hidden = !ofReadout && !colour;
  }
  return draw(
    $("frontier-chart"),
    "frontiers",
    onTouch() ? CHARTS.frontiers_touch : CHARTS.frontiers,
    {
      points: [...shown.flatMap(pointRows), ...besideRows(shown, stop)],
      target: [{ accuracy: heightOf(shown, target), sought: !isSilent() }],
    },
    shown.map(({ model, curve, colour, shape, fill = colour }) => ({
      line: `${model.label}, ${curve.readout}`,
      colour,
      shape,
      fill,
    })),
  );
}

// For the keyboard: the same domains that dragging and the wheel change, towards the depths at the target.
async function zoom(factor) {
  const { view } = drawn.get($("frontier-chart"));
  const stop = Number($("target").value);
  const target = head.slider_targets[stop];
  const depths = shownLines()
    .filter((line) => line.curve.depth[stop] !== null && !depthless(line, target))
    .map(({ curve }) => curve.depth[stop]);
  const towards = { loops: depths.length ? total(depths) / depths.length : null, accuracy: isSilent() ? null : target };
  for (const [field, scale] of [
    ["loops", "x"],
    ["accuracy", "y"],
  ]) {
    const [from, to] = view.scale(scale).domain();
    const middle = towards[field] === null ? (from + to) / 2 : Math.min(Math.max(towards[field], from), to);
    view.signal(`zoom_${field}`, factor ? [middle + (from - middle) * factor, middle + (to - middle) * factor] : null);
  }
  await view.runAsync();
}
