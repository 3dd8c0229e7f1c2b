// The first picture: accuracy against loops, one curve a model, and below it every D@X in a lane of its own.

const HERO_CURVES = 8; // more cannot be told apart

// The first line or mark is the largest and the last the smallest: none hides another.
const nested = (first, last, place, count) =>
  count > 1 ? first + ((last - first) * place) / (count - 1) : (first + last) / 2;

function heroChart(groups) {
  const every = head.marks.map((mark, group) => ({ ...mark, group, models: membersOf(group) }));
  const kept = every.filter(({ group }) => groups.has(group));
  if (!kept.length) return say($("hero"), "No model is shown.");
  const needed = kept.flatMap(({ models }) => models.flatMap((model) => model.needed ?? []));
  const deepest = Math.max(...kept.flatMap(({ models }) => models.map((model) => model.loops)), 2);
  const farthest = Math.max(...needed.map(({ loops, high }) => high ?? loops), 1);
  const end = needed.length ? Math.min(deepest, Math.max(2, 1 + 2.2 * (farthest - 1))) : deepest;
  const judged = kept.filter(({ models }) => models[0].needed); // the others would only stretch the scale
  const drawnCurves = (judged.length ? judged : kept).slice(0, HERO_CURVES);
  const points = drawnCurves.flatMap((entry, place) => heroCurve(entry, place, drawnCurves.length, end));
  const room = widthOfPlace($("hero")) - BESIDE;
  const lanes = kept.flatMap((entry, place) => heroLane(entry, nested(250, 70, place, kept.length), end, room));
  const accuracies = [...new Set(needed.map(({ accuracy }) => accuracy))];
  const [accuracy, text] =
    accuracies.length === 1 ? [accuracies[0], `target: ${percent(accuracies[0])}`] : [points[0].accuracy, ""];
  // Vega warns of marks that all lack a value; those of depths that are not reached are not seen.
  const marks = lanes.map((lane) => ({ accuracy, ...lane }));
  const data = { points, lanes: marks, ends: [{ loops: 1 }, { loops: end }], targets: [{ loops: 1, accuracy, text }] };
  return draw($("hero"), "accuracy_against_loops", end < deepest ? CHARTS.hero_cut : CHARTS.hero, data);
}

const membersOf = (group) => head.models.filter((model) => model.group === group);

// Of several seeds the curve of the first.
function heroCurve({ models: [model], colour, shape, name }, place, count, end) {
  const readout = model.needed?.readout ?? model.best[0];
  const curve = model.curves.find((each) => each.readout === readout);
  const alone = ALONE.includes(readout);
  const looks = { colour, shape, alone, width: nested(5.5, 1.5, place, count) };
  return curve.accuracy.flatMap((accuracy, order) => {
    const loops = curve.loops[order];
    if (curve.extra.includes(order) || loops > end) return [];
    const tip = { model: name, readout, text: percent(accuracy), average: loopsText(loops) };
    return [{ accuracy, loops, order, line: alone ? `${place} ${order}` : `${place}`, ...looks, ...tip }];
  });
}

// A row a seed; the first says the name, on the side that has room.
function heroLane({ models, colour, shape, name, short, group }, size, end, room) {
  const seeds = models.map((model) => ({ ...laneOf(model), seed: model.seed || model.name }));
  const reached = seeds.filter((seed) => seed.reached);
  const [low, high] = [Math.min(...reached.map((seed) => seed.low)), Math.max(...reached.map((seed) => seed.high))];
  const left = (low + high) / 2 > 1 + 0.55 * (end - 1); // never where nothing is reached
  const at = reached.length ? (left ? low : high) : 1;
  const share = (at - 1) / (end - 1);
  const limit = (left ? share : 1 - share) * room - 14;
  const depths = reached.length ? reached.map(({ loops }) => loopsText(loops)).join(", ") : seeds[0].why;
  const looks = { colour, shape, size, at, left, limit, lane: group, verdict: short, model: name };
  return seeds.map((seed, place) => ({
    ...seed,
    ...looks,
    offset: place - (seeds.length - 1) / 2,
    text: place ? "" : `${depths}  ${name}`,
  }));
}

function laneOf({ needed, target }) {
  if (!needed) {
    const why = target === null ? "no verdict:" : "not reached:";
    return { reached: false, loops: 1, low: 1, high: 1, why };
  }
  const { loops, low, high, accuracy, readout } = needed;
  const tip = { needs: `${loopsText(loops)} ${span(low, high, loopsText)}`, reaches: percent(accuracy), readout };
  return { reached: true, loops, low: low ?? loops, high: high ?? loops, accuracy, ...tip };
}
