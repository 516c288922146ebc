"use strict";
// Reloads the page's live part while the page is visible and the reader is not typing or selecting text
// in it. Everything else works without this file.

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
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1500);
});

// -- records of a search, shown as they are found --------------------------------------------------

const ROWS_MAX = 500;
const number = new Intl.NumberFormat("en");

function size(bytes) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  for (; bytes >= 1000 && at < units.length - 1; at++) bytes /= 1000;
  return `${at ? bytes.toFixed(1) : bytes} ${units[at]}`;
}

function showRecords(rows) {
  const status = document.getElementById("status");
  const bar = document.getElementById("progress");
  const stop = document.getElementById("stop");
  const isLive = new URL(rows.dataset.stream, location).searchParams.get("from") === "live";
  const source = new EventSource(rows.dataset.stream);
  let last = null;

  function end(text) {
    source.close();
    status.textContent = text;
    stop.hidden = true;
  }
  function soFar() {
    if (last === null) return "";
    const among = isLive ? "" : ` of ${number.format(last.total)}`;
    const all = !isLive && last.whole > last.total ? ` (the topic has ${number.format(last.whole)})` : "";
    const shown = rows.rows.length && rows.rows.length < last.matches ? `; the newest ${rows.rows.length} of them are shown` : "";
    return `${number.format(last.matches)} found in ${number.format(last.scanned)}${among} records${all}, ${size(last.bytes)} read${shown}`;
  }

  source.addEventListener("records", (event) => {  // escaped by the server
    rows.insertAdjacentHTML(isLive ? "afterbegin" : "beforeend", JSON.parse(event.data));
    while (rows.rows.length > ROWS_MAX) rows.deleteRow(isLive ? -1 : 0);
  });
  source.addEventListener("progress", (event) => {
    last = JSON.parse(event.data);
    if (isLive) bar.removeAttribute("value");
    else bar.value = last.total ? last.scanned / last.total : 1;
    const how = { count: "Enough: ", end: "Done: ", stopped: "Stopped: ", time: "Ended after a quarter of an hour: " };
    if (last.ended) {
      if (isLive) bar.value = 1;
      end(how[last.ended] + soFar() + (last.ended === "count" ? "; “At most” shows more" : ""));
    } else {
      status.textContent = (isLive ? "Live: " : "Searching: ") + soFar();
    }
  });
  source.addEventListener("failed", (event) => end(JSON.parse(event.data)));
  source.onerror = () => end(`The search broke off: the console does not respond, or the session has ended. ${soFar()}`);
  stop.addEventListener("click", () => { end("Stopped: " + soFar()); });
}

const rows = document.getElementById("records");
if (rows) showRecords(rows);
