// Tables wider than the page say so until their end is reached, as on the page of a run.
addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    const hint = () => {
      box.toggleAttribute("data-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 8);
    };
    box.addEventListener("scroll", hint, { passive: true });
    addEventListener("resize", hint);
    box.closest("details")?.addEventListener("toggle", hint);
    hint();
  }
});
