const root = document.documentElement;
const button = document.getElementById("theme");
const dark = () =>
  (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const say = () => { button.textContent = dark() ? "Light" : "Dark"; };
button.hidden = false;
button.addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  say();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", say);
say();

// Tables wider than the screen say so until their end is reached.
for (const box of document.querySelectorAll(".box")) {
  const hint = () => {
    box.toggleAttribute("data-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 8);
  };
  box.addEventListener("scroll", hint, { passive: true });
  addEventListener("resize", hint);
  box.closest("details")?.addEventListener("toggle", hint);
  hint();
}
