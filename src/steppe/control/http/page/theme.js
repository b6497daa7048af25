// Before anything is drawn: the theme that was chosen, or the system's, so that nothing flashes.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const set = () => {
    root.dataset.theme = localStorage.getItem("steppe.theme") || (system.matches ? "dark" : "light");
    dispatchEvent(new Event("steppe:theme"));
  };
  system.addEventListener("change", set);
  addEventListener("steppe:turn", () => {
    localStorage.setItem("steppe.theme", root.dataset.theme === "dark" ? "light" : "dark");
    set();
  });
  set();
})();
