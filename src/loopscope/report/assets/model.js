// One model, one readout, one threshold: what happens there, and what the trajectory looks like.

const policy = { model: 0, part: null, curve: null, place: 0 };
const parts = new Map();

const partOf = (index) => parts.get(index) ?? parts.set(index, unpack(`part-${index}`)).get(index);

async function startCloser() {
  $("model").append(
    ...head.models.map((model, index) => make("option", { value: index, textContent: model.label.slice(0, 120) })),
  );
  $("model").addEventListener("change", () => chooseModel(Number($("model").value)));
  $("readout").addEventListener("change", () => chooseReadout($("readout").value));
  $("threshold").addEventListener("input", () => choosePlace(Number($("threshold").value)));
  const gated = Math.max(
    0,
    head.models.findIndex((model) => model.curves.some((curve) => curve.readout === "gate")),
  );
  $("model").value = gated; // it has everything to show
  await chooseModel(gated);
}

async function chooseModel(index) {
  const part = await partOf(index);
  if (Number($("model").value) !== index && $("model").value !== "") return; // another one was chosen meanwhile
  Object.assign(policy, { model: index, part });
  const model = head.models[index];
  const before = $("readout").value;
  const names = model.curves.map((curve) => curve.readout);
  $("readout").replaceChildren(
    ...names.map((name) =>
      make("option", { value: name, textContent: name + (name === model.best[0] ? " (best)" : "") }),
    ),
  );
  for (const name of document.querySelectorAll(".model-name")) name.textContent = model.label;
  trajectories();
  chooseReadout(names.includes(before) ? before : names.includes(model.best[0]) ? model.best[0] : names[0]);
}

function chooseReadout(name) {
  const curve = head.models[policy.model].curves.find((each) => each.readout === name);
  policy.curve = curve;
  $("readout").value = name;
  const slider = $("threshold");
  slider.max = curve.accuracy.length - 1;
  slider.disabled = curve.accuracy.length < 2;
  const own = curve.certified.map((mark) => mark.place);
  $("marks").replaceChildren(...[curve.chosen, ...own].map((place) => make("option", { value: place })));
  const silent = head.models[policy.model].target === null; // without a verdict there are no depths
  const reached = silent ? null : curve.at_target; // null where the curve does not reach the report's first target
  const chosen = [
    ...(reached !== null ? [{ curve, place: reached, text: `${head.label} on test data` }] : []),
    ...(curve.thresholds.length ? [{ curve, place: curve.chosen, text: "Most accurate on validation data" }] : []),
  ];
  const certified = head.models[policy.model].curves.flatMap((other) =>
    other.certified.map((mark) => ({
      curve: other,
      place: mark.place,
      text: mark.guarantee ? "Certified" : "Calibrated",
    })),
  );
  $("jumps").replaceChildren(
    ...[...chosen, ...certified].map((mark) => {
      const jump = button(`${mark.text}: ${mark.curve.readout} at ${thresholdText(mark.curve, mark.place)}`, () => {
        if (mark.curve !== policy.curve) chooseReadout(mark.curve.readout);
        choosePlace(mark.place);
        $("jumps").querySelector("[aria-pressed=true]").focus();
      });
      jump.dataset.place = mark.curve === curve ? mark.place : "";
      return jump;
    }),
  );
  choosePlace(curve.chosen); // what is shown first, validation data choose
}

function choosePlace(place) {
  const { curve, part } = policy;
  const model = head.models[policy.model];
  policy.place = place;
  $("threshold").value = place;
  const kind =
    curve.readout === "fixed" || curve.readout === "oracle"
      ? ""
      : place === 0
        ? ", the laxest"
        : place === curve.accuracy.length - 1
          ? ", the strictest"
          : "";
  $("threshold-text").textContent = thresholdText(curve, place) + kind;
  $("threshold").setAttribute("aria-valuetext", $("threshold-text").textContent);
  for (const jump of $("jumps").children) jump.setAttribute("aria-pressed", jump.dataset.place === String(place));
  const line = part.deep.lines[curve.readout];
  const facts = [
    ["accuracy", accuracyText(curve, place)],
    ["average loops", `${averageText(curve, place)} of ${model.loops}`],
    ...head.outcomes.map((name, kind) => [name, percent(line.outcomes[place][kind] / model.examples)]),
  ];
  $("point").replaceChildren(
    ...facts.map(([name, text], number) =>
      make(
        "div",
        { className: number < 2 ? "main" : "" },
        make("dt", { textContent: name }),
        make("dd", { textContent: text }),
      ),
    ),
  );
  const marks = curve.certified.filter((mark) => mark.place === place);
  $("guarantee").hidden = !marks.length;
  $("guarantee").textContent = marks
    .map(
      (mark) =>
        `${mark.guarantee ? `Certified: ${mark.guarantee}` : "Calibrated, without a guarantee."} On test data${mark.verdict ? ` the guarantee was ${mark.verdict}` : ""}: ${mark.counted}. The numbers above count all ${model.examples.toLocaleString("en")}.`,
    )
    .join(" ");
  $("closer-made").replaceChildren(
    `All numbers are of ${model.tested} of the run `,
    make("a", { href: `#made-${policy.model}` }, make("bdi", { textContent: model.name })),
    `${model.seed ? ` (seed ${model.seed})` : ""}: weights, settings and command.${part.deep.binned ? " A difficulty is the middle of a bin." : ""}`,
  );
  for (const name of document.querySelectorAll(".policy-name"))
    name.textContent = `${model.label}: ${curve.readout}${curve.thresholds.length ? ` at ${thresholdText(curve, place)}` : ""}`;
  exitCharts(line, place, part.deep, model);
  updateExamples();
}

function exitCharts(line, place, deep, model) {
  const rows = line.exits[place].flatMap((counts, level) =>
    counts.map((count, loop) => ({
      level: deep.levels[level],
      loop: loop + 1,
      share: count / model.examples,
      value: count / deep.counts[level],
      text: `${count.toLocaleString("en")} of ${total(deep.counts).toLocaleString("en")}`,
    })),
  );
  for (const part of document.querySelectorAll(".graded")) part.hidden = !deep.graded;
  draw($("exits"), "exits", deep.graded ? CHARTS.exits : CHARTS.exits_of_all, { exits: rows });
  if (!deep.graded) return;
  draw($("exit-map"), "exits-by-difficulty", CHARTS.map, {
    cells: rows.map((row) => ({ ...row, text: percent(row.value) })),
  });
  const accuracies = [
    ["at full depth", deep.lines.fixed.right.at(-1).map((count, level) => count / deep.counts[level])],
    ["at this threshold", line.right[place].map((count, level) => count / deep.counts[level])],
  ];
  draw($("level-accuracy"), "accuracy-by-difficulty", CHARTS.accuracy, {
    range: [
      Math.min(
        ...line.right.flatMap((counts) => counts.map((count, level) => count / deep.counts[level])),
        ...accuracies[0][1],
      ),
      1,
    ].map((value) => ({ value, level: deep.levels[0] })),
    accuracy: accuracies.flatMap(([what, values]) =>
      values.map((value, level) => ({ what, value, level: deep.levels[level], text: percent(value) })),
    ),
  });
}

function mapOf(place, name, table) {
  if (!table) {
    say(place, "This model has no gate of its own.");
    return;
  }
  const cells = table.values.flatMap((row, level) =>
    row.map((value, loop) => ({
      level: policy.part.deep.graded ? table.levels[level] : "all",
      loop: loop + 1,
      value,
      text: percent(value),
    })),
  );
  draw(place, name, policy.part.deep.graded ? CHARTS.map : CHARTS.map_of_all, { cells });
}

function trajectories() {
  const { part } = policy;
  mapOf($("forced-map"), "forced-exits", part.forced);
  mapOf($("distribution-map"), "exit-distribution", part.exit_distribution);
  const names = Object.keys(part.signals);
  for (const figure of [...$("signal-charts").children])
    if (!names.includes(figure.dataset.signal)) {
      drawn.delete(figure.querySelector(".chart"));
      figure.remove();
    }
  for (const name of names) {
    let figure = [...$("signal-charts").children].find((each) => each.dataset.signal === name);
    if (!figure) {
      figure = make("figure", {}, make("figcaption", { textContent: name }), make("div", { className: "chart" }));
      figure.dataset.signal = name;
      $("signal-charts").append(figure);
    }
    const table = part.signals[name];
    const rows = table.values
      .flatMap((row, level) => row.map((value, loop) => ({ level: table.levels[level], loop: loop + 1, value })))
      .filter((row) => row.value !== null);
    const place = figure.querySelector(".chart");
    if (rows.every((row) => row.value === rows[0].value))
      say(place, rows.length ? `It is ${short(rows[0].value)} everywhere.` : "It has no value.");
    else draw(place, `signal-${name}`, part.deep.graded ? CHARTS.signal : CHARTS.signal_of_all, { signal: rows });
  }
}
