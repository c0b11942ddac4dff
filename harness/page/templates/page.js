"use strict";
// In the head, so that the theme stands before anything is painted; the rest waits for the page and for Vega,
// whose script, a module, is run before DOMContentLoaded.
(() => {
  const root = document.documentElement;
  root.classList.add("scripted");

  // A browser may refuse storage to a page of a file, by an exception.
  const stored = (use) => { try { return use(window.localStorage); } catch { return null; } };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  root.dataset.theme = stored((storage) => storage.getItem("theme")) ?? "";

  function switchTheme() {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    stored((storage) => storage.setItem("theme", root.dataset.theme));
  }

  // Charts: those near the window at once, the others one by one when there is nothing else to do.

  const waiting = new Set();

  async function draw(picture) {
    if (!waiting.delete(picture)) return;
    const figure = picture.closest("figure");
    try {
      const chart = JSON.parse(picture.nextElementSibling.textContent);
      // The whole width, but no less than what can be read beside the longest name: a wider picture scrolls.
      const lines = Object.values(chart.datasets).flat().flatMap((row) => (row.label ?? row.name ?? "").split(/, | · | @ /));
      const least = 210 + 7 * Math.max(...lines.map((line) => line.length));
      const width = Math.max(picture.clientWidth, least);
      const fit = { width, autosize: { type: "fit-x", contains: "padding", resize: true } };
      await window.vegaEmbed(picture, chart, {
        renderer: "svg",
        mode: "vega-lite",
        patch: (vega) => (typeof chart.width === "number" ? { ...vega, ...fit } : vega),
        tooltip: { theme: "page" },
        actions: { export: true, source: false, compiled: false, editor: false },
        downloadFileName: figure.id,
        defaultStyle: false, // also: links instead of a menu
        i18n: { SVG_ACTION: "Save as SVG", PNG_ACTION: "Save as PNG" },
      });
    } catch (error) {
      console.error(`${figure.id} cannot be drawn:`, error);
      const note = document.createElement("p");
      note.className = "warning";
      note.setAttribute("role", "alert");
      note.textContent = `This chart cannot be drawn: ${error.message ?? error}`;
      picture.replaceChildren(note);
    }
  }

  const whenIdle = window.requestIdleCallback ?? ((run) => setTimeout(run, 50));

  function drawRest() {
    whenIdle(() => {
      const picture = [...waiting].find((one) => one.offsetParent); // the others wait until they are opened
      if (picture) draw(picture).then(drawRest);
    });
  }

  function drawAll() {
    const near = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        near.unobserve(target);
        draw(target);
      }
    }, { rootMargin: "400px" });
    for (const picture of document.querySelectorAll(".picture")) {
      waiting.add(picture);
      near.observe(picture);
    }
    drawRest();
  }

  // Tables.

  // What a cell is sorted by; numbers stand before texts, and both before what is empty.
  function key(cell) {
    const number = Number(cell?.dataset.number);
    const text = cell?.dataset.text ?? cell?.textContent ?? "";
    if (!Number.isNaN(number)) return { rank: 0, number, text };
    return { rank: text ? 1 : 2, number: 0, text };
  }

  const { compare } = new Intl.Collator("en", { numeric: true });

  function sort(heading) {
    const table = heading.closest("table");
    const [body] = table.tBodies;
    const direction = heading.ariaSort === "ascending" ? -1 : 1;
    const rows = [...body.rows].map((row) => ({ row, ...key(row.cells[heading.cellIndex]) }));
    rows.sort((a, b) => a.rank - b.rank || direction * (a.number - b.number || compare(a.text, b.text)));
    body.replaceChildren(...rows.map(({ row }) => row)); // to append 5,000 takes 1.5 s, this 0.1 s
    for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
    heading.ariaSort = direction === 1 ? "ascending" : "descending";
  }

  function filter(input) {
    const words = input.value.toLowerCase().split(/\s+/);
    const { rows } = input.closest("details").querySelector("tbody");
    let shown = 0;
    for (const row of rows) {
      const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    input.nextElementSibling.textContent = input.value ? `${shown} of ${rows.length} rows` : "";
  }

  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

  function download(figure) {
    const lines = [...figure.querySelectorAll("tr")].map((row) =>
      [...row.cells].map((cell) => quoted(cell.dataset.number ?? cell.dataset.text ?? cell.textContent)).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\r\n"), "\r\n"], { type: "text/csv" }));
    link.download = `${figure.id}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  // Links: what a link names may be in a table that is closed, or in a row that is filtered out.

  function follow() {
    for (const marked of document.querySelectorAll(".marked")) marked.classList.remove("marked");
    let name = window.location.hash.slice(1);
    try { name = decodeURIComponent(name); } catch { /* as it is */ }
    const target = document.getElementById(name);
    if (!target) return;
    for (let outer = target; outer; outer = outer.parentElement) if (outer.matches("details")) outer.open = true;
    const folded = target.querySelector(":scope > .folded");
    if (folded) folded.open = true;
    if (target.hidden) {
      const input = target.closest("details").querySelector("input");
      input.value = "";
      filter(input);
    }
    if (target.matches("tr, figure")) target.classList.add("marked");
    target.scrollIntoView();
  }

  // Paper shows everything.

  let opened = [];

  function prepareForPaper() {
    opened = [...document.querySelectorAll("main details:not([open])")];
    for (const details of opened) details.open = true;
    for (const picture of waiting) draw(picture);
  }

  function backFromPaper() {
    for (const details of opened) details.open = false;
  }

  document.addEventListener("DOMContentLoaded", () => {
    drawAll();
    follow();
    document.getElementById("_theme").addEventListener("click", switchTheme);
  });
  document.addEventListener("click", ({ target }) => {
    const heading = target.closest("thead button")?.parentElement;
    if (heading) sort(heading);
    if (target.closest(".download")) download(target.closest("figure"));
  });
  document.addEventListener("input", ({ target }) => {
    if (target.matches(".controls input")) filter(target);
  });
  window.addEventListener("hashchange", follow);
  window.addEventListener("beforeprint", prepareForPaper);
  window.addEventListener("afterprint", backFromPaper);
})();
