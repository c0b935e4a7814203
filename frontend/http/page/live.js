"use strict";
// The live view of the engine.

const CHARTS_MS = 5000;

function show(snapshot) {
  const stats = snapshot.stats;
  setText("model", snapshot.model + describeTasks());
  setText("link", `up ${duration(snapshot.uptime_s)}`);
  setText("generation", count(snapshot.generation_tokens_per_s));
  setText("prompt", count(snapshot.prompt_tokens_per_s));
  setText("running", `${stats.num_running}`);
  setText("waiting", count(stats.num_waiting));
  setText("kv", percent(stats.kv_blocks_used, stats.kv_blocks_total));
  setText("hits", percent(stats.prefix_cache_hits_total, stats.prefix_cache_queries_total));
  showRequests(snapshot);
  showBlocks(snapshot);
  showSplit(snapshot);
  byId("engines_panel").hidden = !snapshot.engines.length;
  fill(byId("engines"), snapshot.engines, 6, (engine, cells) => {
    const values = [engine.index, engine.num_running, count(engine.num_waiting), count(engine.generation_tokens_per_s),
      count(engine.prompt_tokens_per_s), percent(engine.kv_blocks_used, engine.kv_blocks_total)];
    values.forEach((value, place) => { cells[place].textContent = `${value}`; });
  });
  fill(byId("clients"), snapshot.clients, 7, (client, cells) => {
    const values = [client.name, client.num_running, client.num_waiting, count(client.tokens_served_total),
      client.num_unsent, client.weight, duration(client.connected_s)];
    values.forEach((value, place) => { cells[place].textContent = `${value}`; });
  });
}

// Gives `table` a row of `width` cells for each item, made once and then changed in place.
function fill(table, items, width, write) {
  const body = table.tBodies[0];
  while (body.rows.length > items.length) body.deleteRow(-1);
  items.forEach((item, place) => {
    const row = body.rows[place] ?? body.insertRow();
    while (row.cells.length < width) row.insertCell();
    write(item, row.cells);
  });
}

function showRequests(snapshot) {
  const { requests, num_hidden_requests: hidden } = snapshot;
  byId("no_requests").hidden = requests.length > 0;
  byId("requests").hidden = requests.length === 0;
  byId("hidden_requests").hidden = hidden === 0;
  setText("hidden_requests", `and ${count(hidden)} more`);
  fill(byId("requests"), requests, 9, (request, cells) => {
    const bar = cells[3].firstChild ?? cells[3].appendChild(document.createElement("progress"));
    const length = request.max_total_tokens - request.num_prompt_tokens;
    const prefills = request.num_output_tokens === 0 && request.state === "running";
    cells[0].className = "id";
    cells[0].title = cells[0].textContent = request.request_id;
    cells[1].textContent = request.client;
    cells[2].textContent = [prefills ? "prefill" : request.state, request.kind].filter(Boolean).join(", ");
    bar.max = Math.max(1, prefills ? request.num_prompt_tokens : length);
    bar.value = prefills ? request.num_computed_tokens : request.num_output_tokens;
    bar.setAttribute("aria-label", `progress of ${request.request_id}`);
    cells[4].textContent = `${request.num_prompt_tokens} + ${request.num_output_tokens} / ${length}`;
    cells[5].textContent = [count(request.num_cached_tokens), request.prefix_miss].filter(Boolean).join(", ");
    cells[6].textContent = size(request.held_bytes);
    cells[7].textContent = duration(request.age_s);
    cells[8].className = "why";
    cells[8].textContent = request.waits_for;
  });
}

function showBlocks(snapshot) {
  const canvas = byId("blocks"), scale = devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
  const width = Math.round(canvas.clientWidth * scale), height = Math.round(canvas.clientHeight * scale);
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const shares = Uint8Array.from(atob(snapshot.block_map), (letter) => letter.charCodeAt(0)), cells = shares.length / 2;
  const [used, cached, empty] = ["--accent", "--cached", "--empty"].map((name) => style.getPropertyValue(name));
  let columns = Math.max(1, Math.ceil(Math.sqrt(cells * width / height)));
  const rows = Math.max(1, Math.ceil(cells / columns));
  columns = Math.ceil(cells / rows);
  const pen = canvas.getContext("2d"), dx = width / columns, dy = height / rows, gap = Math.min(dx, dy) > 5 ? scale : 0;
  pen.clearRect(0, 0, width, height);
  for (let cell = 0; cell < cells; cell++) {
    const box = [(cell % columns) * dx, Math.floor(cell / columns) * dy, dx - gap, dy - gap];
    for (const [color, share] of [[empty, 255], [cached, shares[2 * cell + 1]], [used, shares[2 * cell]]]) {
      if (!share) continue;
      pen.globalAlpha = share / 255;
      pen.fillStyle = color;
      pen.fillRect(...box);
    }
  }
  const { kv_blocks_used: now, kv_blocks_total: total, state_slots_total: slots } = snapshot.stats;
  let text = `${count(now)} of ${count(total)}`;
  if (slots) text += `, states ${count(snapshot.stats.state_slots_used)} and ${count(snapshot.stats.state_slots_cached)} cached of ${count(slots)}`;
  setText("blocks_used", text);
  setText("blocks_scale", snapshot.blocks_per_cell > 1 ? `a cell is ${snapshot.blocks_per_cell} blocks` : "");
  canvas.setAttribute("aria-label", `KV blocks in use: ${text}`);
}

function showSplit(snapshot) {
  const parts = [snapshot.schedule_ms, snapshot.update_ms, snapshot.step_wait_ms];
  [...byId("split").children].forEach((part, place) => { part.style.flexGrow = parts[place]; });
  ["schedule_ms", "update_ms", "wait_ms"].forEach((id, place) => setText(id, milliseconds(parts[place])));
  setText("steps", `${snapshot.steps_per_s.toFixed(1)} steps/s`);
}

// -- the stream: watched only while somebody can see it

let watching = null;

async function watch() {
  const stop = watching = new AbortController();
  let chartsAt = 0, history;
  while (!stop.signal.aborted) {
    try {
      const model = encodeURIComponent(await findModel());
      for await (const snapshot of readEvents(await call(`/stats/stream?model=${model}`, { signal: stop.signal }))) {
        byId("link").className = "up";
        byId("link").title = "";
        byId("live").classList.remove("stale");
        show(snapshot);
        if (performance.now() >= chartsAt) {
          chartsAt = performance.now() + CHARTS_MS;
          const asked = call(`/stats/history?model=${model}`, { signal: stop.signal });
          history = await asked.then((response) => response.json()).catch(() => history);  // the rest is shown without it
        }
        if (history) showCharts(history, snapshot);
      }
      throw new Error("the server ended the stream");
    } catch (error) {
      if (stop.signal.aborted) return;
      byId("link").className = "down";
      byId("live").classList.add("stale");
      setText("link", error.status === 401 ? "needs a key" : "not connected, trying again");
      byId("link").title = error.message;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

function watchAgain() {
  watching?.abort();
  watching = null;
  if (!document.hidden && !byId("live").hidden) watch();
}

const narrow = matchMedia("(max-width: 900px)");  // where it takes the chat's place, while a person looks at it
let isInPlaceOfChat = false;

// Who hides the engine does not have it watched; the model's name is asked for once.
function showLive() {
  const isHidden = narrow.matches ? !isInPlaceOfChat : localStorage.getItem(LIVE) === "hidden";
  byId("live").hidden = isHidden;
  document.querySelector("main").classList.toggle("alone", isHidden);
  byId("live_button").setAttribute("aria-expanded", `${!isHidden}`);
  byId("link").hidden = isHidden;
  if (isHidden) findModel().then((model) => setText("model", model + describeTasks()), () => {});  // who asks it something is told why not
  watchAgain();
}

byId("live_button").addEventListener("click", () => {
  if (narrow.matches) isInPlaceOfChat = !isInPlaceOfChat;
  else localStorage.setItem(LIVE, byId("live").hidden ? "" : "hidden");
  showLive();
});
narrow.addEventListener("change", showLive);
document.addEventListener("visibilitychange", watchAgain);

function showChat() {
  if (!isInPlaceOfChat) return;
  isInPlaceOfChat = false;
  showLive();
}

byId("models").addEventListener("change", () => { watchAgain(); });
byId("key_button").addEventListener("click", async () => { if (await askForKey()) watchAgain(); });
showLive();
takeUp();
