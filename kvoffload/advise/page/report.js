"use strict";
(function () {
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
