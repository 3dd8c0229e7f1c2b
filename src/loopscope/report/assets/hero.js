// The first picture: accuracy against loops, one curve a model, and below it every D@X in a lane of its own.

const HERO_CURVES = 8; // more cannot be told apart

// The first line or mark is the largest and the last the smallest: none hides another.
const nested = (first, last, place, count) => (count > 1 ? first + ((last - first) * place) / (count - 1) : (first + last) / 2);

function heroChart(groups) {
  const shown = head.marks.map((mark, group) => ({ ...mark, group, models: head.models.filter((model) => model.group === group) }));
  const kept = shown.filter(({ group }) => groups.has(group));
  const needed = kept.flatMap(({ models }) => models.flatMap((model) => model.needed ?? []));
  const deepest = Math.max(...kept.flatMap(({ models }) => models.map((model) => model.loops)), 2);
  const farthest = Math.max(...needed.map(({ loops, high }) => high ?? loops), 1);
  const end = needed.length ? Math.min(deepest, Math.max(2, 1 + 2.2 * (farthest - 1))) : deepest;
  const curves = kept.slice(0, HERO_CURVES);
  const points = curves.flatMap((entry, place) => heroCurve(entry, place, curves.length, end));
  const lanes = kept.flatMap((entry, place) => heroLane(entry, end, nested(250, 70, place, kept.length)));
  const targets = [...new Set(needed.map(({ accuracy }) => accuracy))];
  const specification = end < deepest ? CHARTS.hero_cut : CHARTS.hero;
  draw($("hero"), "accuracy_against_loops", specification, {
    points,
    lanes,
    ends: [{ loops: 1 }, { loops: end }],
    targets: [{ loops: 1, ...(targets.length === 1 ? { accuracy: targets[0], text: `target: ${percent(targets[0]).replace(".0 ", " ")}` } : { accuracy: points[0].accuracy, text: "" }) }],
  });
}

function heroCurve({ models: [model], colour, shape, name }, place, count, end) {
  const readout = model.needed?.readout ?? model.best[0];
  const curve = model.curves.find((each) => each.readout === readout);
  const alone = ALONE.includes(readout);
  const width = nested(5.5, 1.5, place, count);
  const rows = curve.accuracy.flatMap((accuracy, order) =>
    curve.extra.includes(order) || curve.loops[order] > end
      ? []
      : [{ accuracy, loops: curve.loops[order], order, line: `${place}${alone ? ` ${order}` : ""}`, width, colour, alone, shape }],
  );
  return rows.map((row) => ({ ...row, model: name, readout, text: percent(row.accuracy), average: loopsText(row.loops) }));
}

function heroLane({ models, colour, shape, name, short, group }, end, size) {
  const rows = models.map((model, seed) => ({ ...laneOf(model, end), offset: seed - (models.length - 1) / 2, seed: model.seed || model.name }));
  const reached = rows.filter(({ reached }) => reached);
  const low = Math.min(...reached.map((row) => row.low)), high = Math.max(...reached.map((row) => row.high));
  const left = reached.length > 0 && (low + high) / 2 > 1 + 0.55 * (end - 1); // no room on the right
  const at = reached.length ? (left ? low : high) : 1;
  const text = reached.length === 1 ? `${name}: ${loopsText(reached[0].loops)}` : reached.length ? name : `${name}: ${rows[0].why}`;
  return rows.map((row, place) => ({ ...row, colour, shape, lane: group, verdict: short, model: name, size, at, left, text: place ? "" : text }));
}

function laneOf({ needed, target, curves }, end) {
  if (!needed) return { reached: false, loops: 1, low: 1, high: 1, accuracy: curves[0].accuracy[0], why: target === null ? "no verdict" : "not reached" };
  const { loops, low, high, accuracy, readout } = needed;
  const within = (value) => Math.min(value ?? loops, end);
  return { reached: true, loops, low: within(low), high: within(high), accuracy, readout, needs: `${loopsText(loops)} ${span(low, high, loopsText)}`, reaches: percent(accuracy) };
}
