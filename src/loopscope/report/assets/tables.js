// What can be done with a table? Sort it by a column, and copy it as Markdown, LaTeX or CSV.

const NUMBER = /^[+\-−]?\d[\d,]*(\.\d+)?/;
const LATEX = {
  "\\": "\\textbackslash{}",
  "~": "\\textasciitilde{}",
  "^": "\\textasciicircum{}",
  "±": "$\\pm$",
  "≤": "$\\le$",
  β: "$\\beta$",
  λ: "$\\lambda$",
  "−": "$-$",
  "<": "\\textless{}",
  ">": "\\textgreater{}",
  "|": "\\textbar{}",
  "✓": "$\\checkmark$",
  "✗": "$\\times$",
};

const UNSEEN = /[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g; // what a terminal would obey
const visible = (text) => text.replace(UNSEEN, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);
const texts = (table) =>
  [...table.rows].map((row) => [...row.cells].map((cell) => visible(cell.textContent.trim().replace(/\s+/g, " "))));
const MARKUP = /[\\|`*<~$&]|(?<![\p{L}\p{N}])_|_(?![\p{L}\p{N}])|(?<=\])[([]/gu; // as in tables.md
const FORMULA = /^(?:[=@]|[+-](?![\d\s.,%±()[\]@+-]*$))/; // what a spreadsheet would compute, numbers apart

const COPIES = {
  Markdown(rows) {
    const line = (cells) => `| ${cells.map((cell) => cell.replace(MARKUP, "\\$&")).join(" | ")} |`;
    return [line(rows[0]), line(rows[0].map(() => "---")), ...rows.slice(1).map(line)].join("\n");
  },
  LaTeX(rows) {
    const cell = (text) => text.replace(/[&%$#_{}\\~^±≤βλ−<>|✓✗]/g, (letter) => LATEX[letter] ?? `\\${letter}`);
    const lines = rows.map((cells) => `${cells.map(cell).join(" & ").replace(/^\[/, "{[}")} \\\\`); // not an argument of the line before
    return [
      `\\begin{tabular}{${"l".repeat(rows[0].length)}}`,
      "\\toprule",
      lines[0],
      "\\midrule",
      ...lines.slice(1),
      "\\bottomrule",
      "\\end{tabular}",
    ].join("\n");
  },
  CSV(rows) {
    const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const cell = (text) => quoted(FORMULA.test(text) ? `'${text}` : text);
    return rows.map((cells) => cells.map(cell).join(",")).join("\r\n");
  },
};

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { value: text }); // browsers that give files no clipboard
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// Cells without a value stay last, whichever the direction.
function sort(table, column, ascending) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, text: row.cells[column]?.textContent.trim() ?? "" }));
  const filled = rows.filter(({ text }) => text && !text.startsWith("N/A"));
  const numbers = filled.filter(({ text }) => NUMBER.test(text));
  const words = new Set(filled.map(({ text }) => text).filter((text) => !NUMBER.test(text)));
  const numeric = numbers.length > 0 && words.size <= numbers.length; // a few words, such as "no gate", are no values
  const known = numeric ? numbers : filled;
  const key = ({ text }) => (numeric ? Number(text.match(NUMBER)[0].replaceAll(",", "").replace("−", "-")) : text);
  const compare = numeric
    ? (a, b) => key(a) - key(b) || 0
    : (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
  known.sort((a, b) => (ascending ? compare(a, b) : compare(b, a)));
  body.append(...known.map(({ row }) => row), ...rows.filter((each) => !known.includes(each)).map(({ row }) => row));
}

function columns(table, names) {
  const row = make("tr", {}, ...names.map((name) => make("th", { scope: "col", textContent: name })));
  table.tHead.replaceChildren(row);
  sortable(table);
}

function sortable(table) {
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const sorting = button(header.textContent.trim(), () => {
      const ascending = header.getAttribute("aria-sort") !== "ascending";
      for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      sort(table, column, ascending);
    });
    sorting.setAttribute("aria-label", sorting.textContent || `column ${column + 1}`);
    header.replaceChildren(sorting);
  });
}

// Fills a table that changes, and keeps the order that was chosen.
function fill(table, rows) {
  table.tBodies[0].replaceChildren(...rows);
  [...(table.tHead.rows[0]?.cells ?? [])].forEach((header, column) => {
    const order = header.getAttribute("aria-sort");
    if (order) sort(table, column, order === "ascending");
  });
}

function copyable(table) {
  const buttons = Object.entries(COPIES).map(([kind, write]) => {
    const say = (copying, text, label) => (copying.setAttribute("aria-label", label), (copying.textContent = text));
    const usual = [`Copy as ${kind}`, `Copy the table ${table.dataset.name} as ${kind}`];
    const made = button("", async (copying) => {
      await copy(write(texts(table)));
      say(copying, "Copied", "Copied");
      setTimeout(() => say(copying, ...usual), 1500);
    });
    say(made, ...usual);
    return made;
  });
  table.parentNode.after(make("div", { className: "tools" }, ...buttons));
}

function widen(table) {
  for (const cell of table.querySelectorAll("td")) if (cell.textContent.length > 60) cell.classList.add("long");
}
