"use strict";
(function () {
  const reading = document.getElementById("reading");
  const charts = Array.from(document.querySelectorAll("svg.wide, svg.narrow"));

  /* What is drawn last lies on top: draw the line that is read once more, out of reach of keys. */
  function lift(point) {
    const line = point.parentNode;
    const top = point.ownerSVGElement.querySelector(".top");
    const color = Array.from(line.classList).find((name) => /^c[0-9]$/.test(name));
    const kind = line.classList.contains("ceiling") ? "ceiling" : "";
    top.setAttribute("class", `top ${kind} ${color}`);
    top.replaceChildren(line.querySelector("polyline").cloneNode());
    line.querySelectorAll(".point").forEach((mark) => {
      const dot = mark.cloneNode();
      ["tabindex", "role", "aria-label", "data-column", "data-asked"].forEach((name) => dot.removeAttribute(name));
      dot.setAttribute("class", mark === point ? "dot read" : "dot");
      top.append(dot);
    });
  }

  function show(point) {
    document.querySelectorAll(".point.read").forEach((other) => other.classList.remove("read"));
    point.classList.add("read");
    lift(point);
    reading.textContent = point.getAttribute("aria-label");
  }

  /* One point of a chart is in the tab order, the one that was read last; arrow keys go on from it. */
  function enter(chart, point) {
    chart.querySelectorAll(".point").forEach((other) => other.setAttribute("tabindex", "-1"));
    point.setAttribute("tabindex", "0");
  }

  function neighbour(chart, point, key) {
    const index = Number(point.dataset.column);
    const line = Array.from(point.parentNode.querySelectorAll(".point"));
    if (key === "ArrowLeft") return line[index - 1];
    if (key === "ArrowRight") return line[index + 1];
    if (key === "Home") return line[0];
    if (key === "End") return line[line.length - 1];
    const column = Array.from(chart.querySelectorAll(`.point[data-column="${index}"]`))
      .sort((a, b) => Number(a.getAttribute("cy")) - Number(b.getAttribute("cy")));
    const at = column.indexOf(point);
    if (key === "ArrowUp") return column[at - 1];
    if (key === "ArrowDown") return column[at + 1];
    return undefined;
  }

  charts.forEach((chart) => {
    const first = chart.querySelector(".chosen .point[data-asked]") || chart.querySelector(".point[data-asked]");
    enter(chart, first);
    if (!reading.textContent.trim()) reading.textContent = first.getAttribute("aria-label");
    chart.querySelectorAll(".point").forEach((point) => {
      point.addEventListener("mouseenter", () => show(point));
      point.addEventListener("click", () => point.focus());
      point.addEventListener("focus", () => { enter(chart, point); show(point); });
    });
    chart.addEventListener("keydown", (event) => {
      if (!event.target.classList.contains("point")) return;
      const keys = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"];
      if (!keys.includes(event.key)) return;
      event.preventDefault();
      const next = neighbour(chart, event.target, event.key);
      if (next) next.focus();
    });
  });

  /* On a phone the page is short; on paper nothing that was open is missing. */
  const open = Array.from(document.querySelectorAll("details[open]"));
  const isPhone = window.matchMedia("(max-width: 640px)");
  open.forEach((part) => { part.open = !isPhone.matches; });
  window.addEventListener("beforeprint", () => open.forEach((part) => { part.open = true; }));

  function select(text) {
    const range = document.createRange();
    range.selectNodeContents(text);
    const selection = window.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
  }

  document.querySelectorAll(".copy").forEach((button) => {
    const text = document.getElementById(button.dataset.from);
    const status = document.getElementById("copied");
    button.addEventListener("click", async () => {
      let done = false;
      try {
        await navigator.clipboard.writeText(text.textContent);
        done = true;
      } catch (error) {
        select(text);
        done = document.execCommand("copy");
      }
      status.textContent = done ? "Copied." : "Selected: press Ctrl+C to copy.";
      button.textContent = done ? "Copied" : "Selected";
    });
  });
})();
