// Of which models does the diagnosis speak? Of all, or of those that the filters leave; of many, the first few.

const FEW = 6;
const kept = { verdict: null, words: "", all: false };

const isKept = (group) =>
  (kept.verdict === null || head.verdicts[group].includes(kept.verdict)) &&
  kept.words.split(" ").every((word) => head.groups[group].toLowerCase().includes(word));

function startModels() {
  if ($("model-filters")) {
    const verdicts = [null, ...new Set(head.verdicts.flat())];
    $("model-filters").append(
      ...verdicts.map((verdict) => {
        const input = make("input", { type: "radio", name: "verdict", value: verdict ?? "all", checked: !verdict });
        input.addEventListener("change", () => ((kept.verdict = verdict), updateModels()));
        const count = head.verdicts.filter((each) => verdict === null || each.includes(verdict)).length;
        return make("label", {}, input, ` ${head.short[verdict] ?? verdict ?? "all"} (${count})`);
      }),
    );
    $("model-find").addEventListener("input", () => {
      kept.words = $("model-find").value.toLowerCase().trim();
      updateModels();
    });
    $("model-all").addEventListener("click", () => ((kept.all = !kept.all), updateModels()));
  }
  updateModels();
}

function updateModels() {
  const found = head.groups.map((_, group) => group).filter(isKept);
  const few = $("model-filters") && !kept.all;
  const shown = new Set(few ? found.slice(0, FEW) : found);
  heroChart(shown);
  gapCharts(shown);
  if (!$("model-filters")) return;
  for (const element of document.querySelectorAll("[data-group]"))
    element.hidden = !shown.has(Number(element.dataset.group));
  $("model-found").textContent = `${shown.size} of ${found.length} models are shown, here, in the charts and in words.`;
  $("model-all").hidden = found.length <= FEW;
  $("model-all").textContent = kept.all ? "Show fewer" : `Show all ${found.length}`;
  $("model-all").setAttribute("aria-pressed", kept.all);
}

// For a link to one that is hidden.
function showEveryModel() {
  Object.assign(kept, { verdict: null, words: "", all: true });
  $("model-find").value = "";
  $("model-filters").querySelector("input").checked = true;
  updateModels();
}
