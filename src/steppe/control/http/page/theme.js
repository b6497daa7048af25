// Set the saved theme, or else the system's, before the first frame, so that the colours do not flash.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    root.dataset.theme = localStorage.getItem("steppe.theme") || (system.matches ? "dark" : "light");
    dispatchEvent(new Event("steppe:theme"));
  };
  system.addEventListener("change", apply);
  addEventListener("steppe:toggle-theme", () => {
    localStorage.setItem("steppe.theme", root.dataset.theme === "dark" ? "light" : "dark");
    apply();
  });
  apply();
})();
