"use strict";
// The page's live part is loaded again and put in the place of the old one: while it is looked at,
// and while the reader is not typing in it or selecting. Everything else works without this file.

const away = document.getElementById("away");

function isBusy(live) {
  const selection = document.getSelection();
  const typing = live.contains(document.activeElement) && document.activeElement.matches("input, select, textarea, summary");
  const selecting = selection && !selection.isCollapsed && live.contains(selection.anchorNode);
  return typing || selecting || live.querySelector("details[open]") !== null;
}

async function refresh(live) {
  let answer;
  try {
    answer = await fetch(location.href, { headers: { accept: "text/html" }, signal: AbortSignal.timeout(30000) });
  } catch {
    away.hidden = false;
    return live;
  }
  away.hidden = true;
  if (answer.redirected) {  // the session has ended
    location.reload();
    return live;
  }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("live");
  if (fresh === null) return live;
  document.title = page.title;
  if (isBusy(live)) return live;
  live.replaceWith(fresh);
  return fresh;
}

async function keepFresh(live) {
  while (live.dataset.refresh) {
    await new Promise((done) => setTimeout(done, Number(live.dataset.refresh)));
    if (document.hidden || isBusy(live)) continue;
    live = await refresh(live);
  }
}

const live = document.getElementById("live");
if (live) keepFresh(live);

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  const said = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = said; }, 1500);
});
