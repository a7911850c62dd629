// Before anything is drawn: the colours that were chosen here last, else those of the system.
try {
  const chosen = localStorage.getItem("zendaya-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // no storage: the system's colours
}

// Modules come with the page's origin, and a server that does not know it refuses them: without them the page could not say so.
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
