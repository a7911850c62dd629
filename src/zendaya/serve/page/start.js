// Before the first paint: the colours chosen last, or the system's.
try {
  const chosen = localStorage.getItem("zendaya-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // no storage: the system's colours
}

// Browsers request modules with the page's origin; a server that does not allow it refuses them. This script can still say so.
addEventListener(
  "error",
  ({ target }) => {
    if (!(target instanceof HTMLScriptElement)) return;
    const say = () => {
      document.getElementById("link").dataset.state = "failed";
      document.getElementById("status").textContent = `The server refuses this page: start it with --origin ${location.origin}`;
    };
    if (document.getElementById("status")) say();
    else addEventListener("DOMContentLoaded", say);
  },
  true,
);
