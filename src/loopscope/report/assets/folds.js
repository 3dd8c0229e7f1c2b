// What of the page is unfolded, explained and printed?

const folds = () => [...document.querySelectorAll("details.fold")];

function unfold(element) {
  for (let each = element; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
}

// A chart that was drawn while its part was folded gets the width that it has now.
function startFolds() {
  for (const fold of folds()) {
    fold.addEventListener("toggle", () => {
      if (fold.open) for (const place of fold.querySelectorAll(".chart")) refit(place);
      updateUnfold();
    });
  }
  $("unfold").addEventListener("click", () => {
    const open = !folds().every((fold) => fold.open);
    for (const fold of folds()) fold.open = open;
  });
  updateUnfold();
}

function updateUnfold() {
  const all = folds().every((fold) => fold.open);
  $("unfold").textContent = all ? "Fold all" : "Unfold all";
  $("unfold").setAttribute("aria-pressed", all);
}

// On paper everything is unfolded and light. The button waits until all is drawn; without it, what is drawn is printed.
function startPrinting() {
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = folds().filter((fold) => !fold.open);
    for (const fold of folded) fold.open = true;
  });
  addEventListener("afterprint", () => folded.forEach((fold) => (fold.open = false)));
  $("print").addEventListener("click", async () => {
    const theme = document.documentElement.dataset.theme;
    if (isDark()) setTheme("light");
    await drawFigures();
    redraw();
    await Promise.all([...drawn.values()].map((chart) => chart.last));
    print();
    if (theme === "dark") {
      setTheme("dark");
      redraw();
    }
  });
}

// What a word means, where it stands: for a pointer, a finger and the keyboard.
function startTerms() {
  const tip = make("div", { id: "tip", role: "tooltip", hidden: true });
  document.body.append(tip);
  const show = ({ target }) => {
    const term = target.closest?.(".term");
    tip.hidden = !term;
    if (!term) return;
    tip.textContent = term.dataset.tip;
    term.setAttribute("aria-describedby", "tip");
    const box = term.getBoundingClientRect();
    const below = box.bottom + tip.offsetHeight + 12 < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
  };
  for (const moved of ["mouseover", "focusin"]) document.addEventListener(moved, show);
  const hide = () => (tip.hidden = true);
  document.addEventListener("focusout", hide);
  // Focus may scroll the page to the term.
  const follow = () => (!tip.hidden && document.activeElement.matches(".term") ? show({ target: document.activeElement }) : hide());
  addEventListener("scroll", follow, { passive: true });
  addEventListener("keydown", ({ key }) => key === "Escape" && hide());
}
