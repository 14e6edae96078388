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
