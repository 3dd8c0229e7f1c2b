// Single examples: what the model said at every loop, where the chosen policy lets them exit, and whether that was right.

const listed = { outcome: null, current: null };

function startExamples() {
  const kinds = [null, ...head.outcomes.map((_, kind) => kind)];
  $("filters").append(
    ...kinds.map((kind) => {
      const input = make("input", { type: "radio", name: "outcome", checked: kind === null, value: kind ?? "all" });
      input.addEventListener("change", () => ((listed.outcome = kind), updateExamples()));
      const share = make("span", {});
      share.dataset.outcome = kind ?? "all";
      return make("label", {}, input, ` ${kind === null ? "all" : head.outcomes[kind]} `, share);
    }),
  );
  $("find").addEventListener("input", () => updateExamples());
  columns($("example-table"), ["example", "difficulty", "answer", "said at each loop", "exit", "outcome"]);
}

// The loop at which thresholds from the laxest on let it exit: those that it has not crossed send it further.
const exitLoop = (crossed, place) => 1 + crossed.filter((count) => count <= place).length;

function outcomeOf(right, loop) {
  const earlier = right.slice(0, loop - 1).some(Boolean);
  if (right[loop - 1]) return earlier ? 1 : 0;
  return right.slice(loop).some(Boolean) ? 2 : earlier ? 3 : 4;
}

const answerText = (label) =>
  policy.part.answers === "letter" && label < 26 ? String.fromCharCode(65 + label) : String(label);

function exampleRows() {
  const sheet = policy.part.deep.examples;
  return sheet.rows.map((row, place) => {
    const right = sheet.answers[place].map((answer) => answer === sheet.labels[place]);
    const loop = exitLoop(sheet.crossed[policy.curve.readout][place], policy.place);
    return {
      row,
      place,
      right,
      loop,
      outcome: outcomeOf(right, loop),
      text: sheet.texts ? sheet.texts[place] : `example ${row}`,
    };
  });
}

function updateExamples() {
  const rows = exampleRows();
  const { outcomes } = policy.part.deep.lines[policy.curve.readout];
  const all = head.models[policy.model].examples;
  for (const share of $("filters").querySelectorAll("span")) {
    const kind = share.dataset.outcome;
    share.textContent = kind === "all" ? "" : `(${percent(outcomes[policy.place][Number(kind)] / all)} of all)`;
  }
  const sought = $("find").value.toLowerCase();
  const found = rows.filter(
    (row) => (listed.outcome === null || row.outcome === listed.outcome) && row.text.toLowerCase().includes(sought),
  );
  $("found").textContent =
    `${found.length} of the ${rows.length} examples that this page holds, out of ${all.toLocaleString("en")}.`;
  $("example-table").classList.toggle("no-levels", !policy.part.deep.examples.difficulty);
  fill($("example-table"), found.map(exampleRow));
  const current = found.find((row) => row.row === listed.current) ?? found[0];
  if (current) showExample(current);
  else
    $("example-detail").replaceChildren(make("p", { className: "note", textContent: "No example is of this kind." }));
}

function exampleRow(example) {
  const sheet = policy.part.deep.examples;
  const { place } = example;
  const open = make(
    "button",
    { type: "button", title: "Show its trajectory" },
    make("bdi", { className: "clip", textContent: example.text }),
  );
  const sure = sheet.signals.top1?.[place];
  const answers = sheet.answers[place].flatMap((answer, loop) => [
    make("span", {
      className: `${example.right[loop] ? "right" : "wrong"}${loop + 1 === example.loop ? " exit" : ""}`,
      textContent: `${answerText(answer)}${example.right[loop] ? "✓" : "✗"}${sure ? ` ${(100 * sure[loop]).toFixed(0)} %` : ""}`,
    }),
    loop + 1 < example.right.length ? ", " : "",
  ]);
  const cells = [
    open,
    sheet.difficulty ? short(sheet.difficulty[place]) : "",
    answerText(sheet.labels[place]),
    make("span", { className: "answers" }, ...answers),
    String(example.loop),
    head.outcomes[example.outcome],
  ];
  const row = make(
    "tr",
    { className: example.row === listed.current ? "current" : "" },
    ...cells.map((cell) => make("td", {}, cell)),
  );
  row.dataset.example = example.row;
  row.addEventListener("click", () => showExample(example));
  return row;
}

function showExample(example) {
  const sheet = policy.part.deep.examples;
  const { place } = example;
  listed.current = example.row;
  for (const row of $("example-table").tBodies[0].rows)
    row.classList.toggle("current", Number(row.dataset.example) === example.row);
  const detail = $("example-detail");
  let chart = detail.querySelector(".chart");
  if (!chart) {
    for (const old of drawn.keys()) if (!old.isConnected) drawn.delete(old);
    chart = make("div", { className: "chart", id: "example-chart" });
    detail.replaceChildren(
      make("div", { className: "words" }),
      make("figure", {}, chart),
      make("div", { className: "scroll" }, make("table", {}, make("thead"), make("tbody"))),
    );
  }
  const label = answerText(sheet.labels[place]);
  detail
    .querySelector(".words")
    .replaceChildren(
      make("h3", { textContent: `Example ${example.row}: answer ${label}` }),
      make("bdi", { className: "whole", textContent: example.text }),
      make("p", { textContent: `It exits at loop ${example.loop} (dashed): ${head.outcomes[example.outcome]}.` }),
    );
  const lines = [
    ["confidence in its answer", sheet.signals.top1?.[place]],
    ["probability of the right answer", sheet.label_probability?.[place]],
  ];
  const rows = lines.flatMap(([what, values]) =>
    (values ?? []).map((value, loop) => ({
      what,
      value,
      loop: loop + 1,
      right: example.right[loop] ? "right" : "wrong",
      answer: answerText(sheet.answers[place][loop]),
      text: percent(value),
    })),
  );
  chart.parentNode.hidden = !rows.length;
  if (rows.length)
    draw(chart, `example-${example.row}`, CHARTS.example, { loops: rows, exit: [{ loop: example.loop }] });
  const table = detail.querySelector("table");
  const loops = example.right.map((_, loop) => loop + 1);
  table.tHead.replaceChildren(
    make(
      "tr",
      {},
      make("th", { textContent: "signal" }),
      ...loops.map((loop) => make("th", { textContent: `loop ${loop}` })),
    ),
  );
  table.tBodies[0].replaceChildren(
    make(
      "tr",
      {},
      make("td", { textContent: "answer" }),
      ...sheet.answers[place].map((answer, loop) =>
        make("td", {
          className: example.right[loop] ? "right" : "wrong",
          textContent: `${answerText(answer)} ${example.right[loop] ? "✓" : "✗"}`,
        }),
      ),
    ),
    ...Object.entries(sheet.signals).map(([name, values]) =>
      make(
        "tr",
        {},
        make("td", { textContent: name }),
        ...values[place].map((value) => make("td", { textContent: short(value) })),
      ),
    ),
  );
}
