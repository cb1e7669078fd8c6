"use strict";
(() => {
  function sortable(table) {
    const body = table.tBodies[0];
    const value = (row, i) => {
      const cell = row.cells[i];
      const text = cell.dataset.v === undefined ? cell.textContent.trim() : cell.dataset.v;
      return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
    };
    [...table.tHead.rows[0].cells].forEach((head, i) => {
      head.tabIndex = 0;
      const sort = () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        [...table.tHead.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        [...body.rows].map((row) => [value(row, i), row]).sort(([a], [b]) => {
          const less = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
          return down ? -less : less;
        }).forEach(([, row]) => body.append(row));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
    });
  }

  document.querySelectorAll(".fx-sortable").forEach(sortable);
  document.querySelectorAll("[data-theme-switch]").forEach((button) => button.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    document.dispatchEvent(new Event("fx-theme"));
  }));
  const links = [...document.querySelectorAll(".fx-report>nav a")];
  if (links.length && "IntersectionObserver" in window) {
    const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
      const link = links.find((a) => a.hash === "#" + entry.target.id);
      if (link && entry.isIntersecting) { links.forEach((a) => a.classList.toggle("fx-here", a === link)); }
    }), { rootMargin: "-10% 0px -80% 0px" });
    document.querySelectorAll(".fx-report section").forEach((section) => seen.observe(section));
  }
})();
