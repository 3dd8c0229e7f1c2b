// How does the page read its data, and build elements? Texts become text nodes, never markup.

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

const $ = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function button(textContent, click) {
  const made = make("button", { type: "button", textContent });
  made.addEventListener("click", () => click(made));
  return made;
}

// As Python writes it: what lies exactly between two numbers (in binary, so an eighth, say) goes to the even one.
function fixed(value, digits) {
  const below = Math.floor(value * 10 ** digits);
  const between = Number.isInteger(value * 2 ** (digits + 1)) && value * 10 ** digits - below === 0.5;
  const text = (between && below % 2 === 0 ? below / 10 ** digits : value).toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text;
}

const percent = (share, digits = 1) => `${fixed(100 * share, digits)} %`;
const loopsText = (value) => (value === null ? "N/A" : fixed(value, 2));
const NOTHING = "-"; // in a cell that can have no value
const short = (value) => (value === null ? NOTHING : String(Number(value.toPrecision(4))));
const span = (low, high, format) => (low === null ? NOTHING : `[${format(low)}, ${format(high)}]`);
const total = (values) => values.reduce((sum, value) => sum + value, 0);
