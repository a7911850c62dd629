// Before anything is drawn: the colours that were chosen here last, else those of the system.
try {
  const chosen = localStorage.getItem("zendaya-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // no storage: the system's colours
}
