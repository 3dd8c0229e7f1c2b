// What do the charts look like that a reader moves? Vega-Lite specifications, into whose named sets scripts fill rows.
// Colours and shapes come with the rows, so that they are the legend's. Where `usermeta` names a set of rows, the chart
// is as high as there are different values of one of its fields. The width of all of them is their container's.

const CHARTS = (() => {
  const quantity = (field, more) => ({ field, type: "quantitative", ...more });
  const name = (field, more) => ({ field, type: "nominal", ...more });
  const own = (field) => name(field, { scale: null });
  const tooltip = (titles) => Object.entries(titles).map(([field, title]) => name(field, { title }));
  const from = (set, type, mark, encoding) => ({ data: { name: set }, mark: { type, ...mark }, encoding });
  const SHARES = { axis: { format: "%" } };
  const LOOP = { field: "loop", type: "ordinal", title: "loop", axis: { labelAngle: 0 } };
  const VIRIDIS = { scheme: { name: "viridis", extent: [0.75, 0] } }; // charts.js has another for dark ground
  const graded = { level: "difficulty" };

  // A row a model that has the gap, its seeds beside each other. The script breaks long names into lines; on a narrow
  // page a name has a line for each of its parts.
  function gap(labelLimit, labelExpr, step) {
    const axis = { labelLimit, labelExpr, labelLineHeight: 12, ticks: false, domain: false, grid: true };
    const yOffset = quantity("offset", { scale: { domain: [-1, 1] } });
    const rows = { y: name("model", { title: null, sort: null, axis }), yOffset };
    const titles = { model: "model", seed: "seed", gap: "gap", text: "verdict" };
    const point = { filled: true, size: 70, opacity: 1 };
    const shown = { ...rows, color: own("colour"), tooltip: tooltip(titles) };
    const x = quantity("value", { title: "average loops", axis: { tickCount: 5 } });
    const layer = [
      from("every", "point", { opacity: 0 }, { ...rows, x }),
      from("scale", "point", { opacity: 0 }, { x }), // the same for all gaps
      from("every", "rule", { strokeDash: [3, 3], color: "#888888" }, { x: { datum: 0 } }),
      from("gaps", "rule", { strokeWidth: 2.5 }, { ...shown, x: quantity("low"), x2: { field: "high" } }),
      from("gaps", "point", point, { ...shown, x: quantity("value"), shape: own("shape") }),
    ];
    return { layer, width: "container", usermeta: { set: "every", rows: "model", step } };
  }

  // One set of rows: the points of all lines, and marks beside them (the paper's numbers, D@X), each its own line.
  // Where a finger would drag, it moves the page and not the chart.
  function frontiers(translate) {
    const scale = { zero: false, nice: false, padding: 12 };
    const x = quantity("loops", { title: "average loops", axis: { tickCount: 8 }, scale });
    const y = quantity("accuracy", { title: "accuracy", ...SHARES, scale });
    const size = quantity("size", { scale: null });
    const looks = { fill: own("fill"), stroke: own("colour"), shape: own("shape"), size };
    const lines = { color: own("colour"), strokeDash: own("dash"), detail: name("line"), order: quantity("order") };
    const opacity = { condition: { test: "datum.sought", value: 1 }, value: 0 };
    const zoom = "wheel![event.ctrlKey || event.metaKey || event.shiftKey]";
    const marks = { opacity: 0.9, strokeWidth: 2, tooltip: { expr: "datum.tip" } };
    const layer = [
      from("target", "rule", { strokeDash: [4, 4], color: "#888888" }, { y: quantity("accuracy"), opacity }),
      from("points", "line", {}, { x, y, ...lines, strokeWidth: quantity("width", { scale: null }) }),
      { name: "marks", ...from("points", "point", marks, { x, y, ...looks }) },
    ];
    const params = [{ name: "zoom", select: { type: "interval", translate, zoom }, bind: "scales", views: ["marks"] }];
    return { layer, params, width: "container", height: 420 };
  }

  // Curves above, and on the same scale a lane a model with its D@X: marks that are close to each other stay apart.
  function hero(title) {
    const x = (axis) => quantity("loops", { scale: { nice: false, zero: false }, ...axis });
    const bottom = x({ title, axis: { tickCount: 8 } });
    const y = quantity("accuracy", {
      title: "accuracy",
      axis: { format: "%", tickCount: 6 },
      scale: { zero: false, nice: false, padding: 6 },
    });
    const lane = { y: { field: "lane", type: "nominal", sort: null, axis: null } };
    const yOffset = quantity("offset", { scale: { domain: [-3, 3] } });
    const of = tooltip({ model: "model", readout: "readout", text: "accuracy", average: "average loops" });
    const about = tooltip({
      model: "model",
      seed: "seed",
      needs: "loops [95 % interval]",
      reaches: "to reach",
      readout: "by",
      verdict: "verdict",
    });
    const line = {
      color: own("colour"),
      detail: name("line"),
      order: quantity("order"),
      strokeWidth: quantity("width", { scale: null }),
    };
    const point = { color: own("colour"), shape: own("shape"), tooltip: of };
    const beside = { align: { expr: "datum.left ? 'right' : 'left'" }, dx: { expr: "datum.left ? -9 : 9" } };
    const label = { ...beside, fontSize: 12, limit: { expr: "datum.limit" }, color: "#000000" };
    const mark = {
      opacity: { expr: "datum.reached ? 1 : 0" },
      size: 110,
      filled: true,
      stroke: "#ffffff",
      strokeWidth: 1,
    };
    const marked = { ...lane, yOffset, color: own("colour"), tooltip: about };
    const curves = [
      from("ends", "point", { opacity: 0 }, { x: bottom }),
      from("targets", "rule", { strokeDash: [4, 4], color: "#888888", opacity: { expr: "datum.text ? 1 : 0" } }, { y }),
      from(
        "targets",
        "text",
        { align: "left", dx: 4, dy: -7, fontSize: 11, color: "#777777" },
        { x: bottom, y, text: name("text") },
      ),
      from("points", "line", { clip: true, strokeJoin: "round", strokeCap: "round" }, { x: bottom, y, ...line }),
      from(
        "points",
        "point",
        { filled: true, opacity: { expr: "datum.alone ? 1 : 0" }, size: 60 },
        { x: bottom, y, ...point },
      ),
      from("lanes", "point", mark, {
        x: bottom,
        y,
        color: own("colour"),
        shape: own("shape"),
        size: quantity("size", { scale: null }),
        tooltip: about,
      }),
    ];
    const lanes = [
      from("ends", "point", { opacity: 0 }, { x: x({ title: null, axis: null }) }),
      from("lanes", "rule", { strokeWidth: 2.5 }, { ...marked, x: quantity("low"), x2: { field: "high" } }),
      from("lanes", "point", { ...mark, size: 70 }, { ...marked, x: quantity("loops"), shape: own("shape") }),
      from("lanes", "text", label, { ...lane, x: quantity("at"), text: name("text") }),
    ];
    return {
      vconcat: [
        { layer: curves, height: 330 },
        { layer: lanes, height: { step: 24 } },
      ],
      spacing: 8,
      resolve: { scale: { x: "shared" } },
      width: "container",
      usermeta: { stacked: true },
    };
  }

  function exits(shades) {
    const y = quantity("share", { title: "share of examples", ...SHARES, scale: { domain: [0, 1] } });
    const titles = { loop: "exit loop", ...graded, text: "examples" };
    const bars = from("exits", "bar", {}, { x: LOOP, y, tooltip: tooltip(titles), ...shades });
    return { ...bars, width: "container", height: 230 };
  }

  // Difficulty by loop; the shade is a share, and so is the number.
  function map(level, titles) {
    const place = { x: LOOP, y: { field: "level", type: "ordinal", ...level } };
    const color = quantity("value", { title: null, scale: { scheme: "viridis", domain: [0, 1] }, legend: null });
    const ink = { condition: { test: "datum.value > 0.5", value: "#010101" }, value: "#ffffff" }; // on dark ground, too
    const text = quantity("value", { format: ".0%" });
    const shares = tooltip({ loop: "loop", ...titles, text: "share" });
    const layer = [
      { mark: { type: "rect" }, encoding: { ...place, color, tooltip: shares } },
      { mark: { type: "text", fontSize: 10 }, encoding: { ...place, text, color: ink } },
    ];
    return { data: { name: "cells" }, layer, width: "container", usermeta: { set: "cells", rows: "level" } };
  }

  // The range is that of all thresholds, so that the scale stays while one drags.
  function accuracy() {
    const x = quantity("level", { title: "difficulty", axis: { tickMinStep: 1 }, scale: { zero: false } });
    const y = quantity("value", { title: "accuracy", ...SHARES, scale: { zero: false } });
    const scale = { domain: ["at full depth", "at this threshold"], range: ["#999999", "#D55E00"] };
    const color = name("what", { title: null, scale, legend: { orient: "bottom" } });
    const strokeWidth = { condition: { test: "datum.what == 'at full depth'", value: 8 }, value: 2 };
    const titles = { what: "what", ...graded, text: "accuracy" };
    const point = { filled: true, size: 40 };
    const layer = [
      from("range", "point", { opacity: 0 }, { x, y }),
      from("accuracy", "line", { point }, { x, y, color, strokeWidth, tooltip: tooltip(titles) }),
    ];
    return { layer, width: "container", height: 230 };
  }

  function signal(titles) {
    const encoding = {
      x: LOOP,
      y: quantity("value", { title: null, scale: { zero: false } }),
      color: quantity("level", { title: "difficulty", scale: VIRIDIS, legend: null }),
      detail: name("level"),
      tooltip: tooltip({ loop: "loop", ...titles, value: "mean" }),
    };
    const mark = { point: { filled: true, size: 25 }, strokeWidth: 1.5 };
    return { ...from("signal", "line", mark, encoding), width: "container", height: 150 };
  }

  function example() {
    const y = quantity("value", { title: "probability", ...SHARES, scale: { domain: [0, 1] } });
    const legend = { orient: "bottom", direction: "vertical", labelLimit: 0 };
    const color = name("what", { title: null, sort: null, scale: { range: ["#0072B2", "#E69F00"] }, legend });
    const scale = { domain: ["right", "wrong"], range: ["circle", "cross"] };
    const shape = name("right", { title: null, scale, legend: { orient: "bottom" } });
    const titles = { what: "what", loop: "loop", answer: "answer", right: "it is", text: "probability" };
    const at = { x: LOOP, y, color };
    const layer = [
      from("exit", "rule", { strokeDash: [4, 4], strokeWidth: 2, color: "#D55E00" }, { x: LOOP }),
      from("loops", "line", { strokeWidth: 1.5 }, at),
      from("loops", "point", { filled: true, size: 90, opacity: 1 }, { ...at, shape, tooltip: tooltip(titles) }),
    ];
    return { layer, width: "container", height: 220 };
  }

  const parts = "split(replace(replace(datum.label, /\\n/g, ' '), ': ', ', '), ', ')";
  const shades = quantity("level", { title: "difficulty", scale: VIRIDIS, legend: { tickMinStep: 1 } });
  return {
    gap: gap(240, "split(datum.label, '\\n')", 22),
    gap_narrow: gap(130, parts, 50),
    hero: hero("average loops"),
    hero_cut: hero("average loops (more are not shown)"),
    frontiers: frontiers(true),
    frontiers_touch: frontiers(false),
    exits: exits({ color: shades, order: quantity("level") }),
    exits_of_all: exits({}),
    map: map({ title: "difficulty", sort: "descending" }, graded),
    map_of_all: map({ title: null, axis: null }, {}),
    accuracy: accuracy(),
    signal: signal(graded),
    signal_of_all: signal({}),
    example: example(),
  };
})();
