// Drives the page in headless Chromium over a real engine, as a person would, and fails with what was not as it should be.
//   node drive.mjs URL CHROMIUM [SCREENSHOT]
// The server runs the pocket model with --max-num-seqs 8, so that some of the background load waits.
import assert from "node:assert/strict";
import { refuse } from "./answers.mjs";
import {
  answered, browser, hasANameForEverythingOneCanUse, hasText, lastAnswer, openPage, place as screenshot, readKept, send, url,
} from "./browser.mjs";

// Sequences that run on whatever they say; returns a function that ends them.
function startLoad(count) {
  const stop = new AbortController();
  const body = { model: "pocket", prompt: "Once upon a time", n: count, max_tokens: 1900, ignore_eos: true, temperature: 1, stream: true };
  const run = async () => {
    const response = await fetch(`${url}/v1/completions`, {
      method: "POST", signal: stop.signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
    assert.equal(response.status, 200, await (response.ok ? "" : response.text()));
    for await (const _ of response.body) { /* read on */ }
  };
  const done = run().catch((error) => { if (!stop.signal.aborted) throw error; });
  return async () => { stop.abort(); await done; };
}

// Answers of the page go on until somebody ends them: so many tokens take minutes. Returns what lets them end by themselves.
async function goOnForMinutes(page) {
  const goOn = (route) => route.continue({ postData: { ...route.request().postDataJSON(), ignore_eos: true, max_output_tokens: 60_000 } });
  await page.route("**/v1/responses", goOn);
  return () => page.unroute("**/v1/responses", goOn);
}

async function chats({ page }) {
  await hasText(page, "#link", /^up /);
  await hasText(page, "#model", /^pocket \(b?float\d+\)$/);
  // Notes the text's length at every change: an answer that streams grows step by step.
  await page.evaluate(() => {
    window.lengths = [];
    new MutationObserver(() => window.lengths.push([...document.querySelectorAll(".message.assistant")].at(-1)?.textContent.length ?? 0))
      .observe(document.querySelector("#log"), { childList: true, subtree: true, characterData: true });
  });
  await send(page, "What is 12 plus 30?");
  await answered(page);
  assert.match(await page.textContent(".message.assistant"), /42/);
  await page.evaluate(() => { window.lengths = []; });
  await send(page, "Tell me a story.");
  await answered(page);
  const lengths = [...new Set(await page.evaluate(() => window.lengths))];
  assert.ok(lengths.length >= 3, `the answer came in ${lengths.length} pieces: ${lengths}`);
  assert.match(await page.locator(".message.assistant .facts").last().textContent(), /^\d+ prompt \+ \d+ answer tokens .* first token after \d+ ms . [\d.]+ tokens\/s$/);
  assert.equal(await page.textContent("#rates"), "");
}

async function keepsMarkupAsText({ page }) {
  const markup = "<img src=x onerror=\"document.title='bad'\"><b>bold</b>";
  await send(page, markup);
  await answered(page);
  assert.equal(await page.locator(".message.user .body").last().textContent(), markup);
  assert.equal(await page.locator("#log img, #log b").count(), 0);
  assert.equal(await page.title(), "Quire");
}

async function beginsAnew({ page }) {
  await page.click("#new");
  assert.equal(await page.locator(".message").count(), 0);
}

async function showsTheEngine({ page }) {
  const endLoad = startLoad(20);
  await hasText(page, "#running", /^8$/);
  await hasText(page, "#waiting", /^1\d$/);
  await hasText(page, "#generation", /^[1-9]/);
  await page.waitForFunction(() => document.querySelectorAll("#requests tbody tr").length >= 20);
  await hasText(page, "#requests tbody tr:nth-child(1)", /running/);
  assert.match(await page.textContent("#requests tbody tr:nth-child(1) td:nth-child(7)"), /^\d+ [kM]B$/);
  const waiting = page.locator("#requests tbody tr", { hasText: "waiting" }).first();
  assert.match(await waiting.locator("td.why").textContent(), /\S/);
  const progress = () => page.evaluate(() => document.querySelector("#requests progress").value);
  const before = await progress();
  await page.waitForFunction((value) => document.querySelector("#requests progress").value > value, before);
  await drawsCharts(page);
  assert.match(await page.textContent("#clients tbody"), /\d/);
  assert.match(await page.textContent("#steps"), /[1-9].* steps\/s/);
  const colors = await page.evaluate(() => {
    const canvas = document.querySelector("#blocks");
    return new Set(new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
  });
  assert.ok(colors >= 2, "the block map has one colour");
  return endLoad;
}

// Each has a line, and axes that end above it; what is drawn is there again after a reload, for the engine keeps it.
async function drawsCharts(page) {
  await page.waitForFunction(() => ["generation", "prompt", "first_token", "gap", "queue", "kv"].every((id) =>
    /h[08]/.test(document.querySelector(`#chart_${id} .line0[d]`)?.getAttribute("d"))) && /[1-9]/.test(document.querySelector("#chart_generation .reading").textContent));
  assert.match(await page.textContent("#chart_generation .values"), /^[1-9]/);
  assert.match(await page.textContent("#first_token"), /^[\d.]+ m?s$/);
  assert.match(await page.getAttribute("#chart_gap svg", "aria-label"), /^Time between tokens, mean, at most [\d.]+ m?s in 15 minutes$/);
  const seen = await page.textContent("#chart_generation .reading");
  assert.match(seen, /^at most [1-9][\d,]* in 15 minutes$/);
  await page.hover("#chart_generation svg", { position: { x: 5, y: 5 } });
  await hasText(page, "#chart_generation .reading", /\d:\d\d.*: [\d,]+ tokens\/s$/);
  await page.mouse.move(0, 0);
}

async function showsChartsAgainAfterAReload() {
  const { page, complaints } = await openPage();
  await hasText(page, "#chart_generation .reading", /^at most [1-9]/);
  await hasText(page, "#first_token", /s$/);
  assert.deepEqual(complaints, []);
  await page.context().close();
}

async function stops({ page }) {
  const letEnd = await goOnForMinutes(page);
  await send(page, "Tell me a long story about a fox.");
  await page.waitForFunction(() => document.querySelector(".message.assistant:last-child .body")?.textContent.length > 0);
  await page.click("#stop");
  await answered(page);
  assert.match(await page.locator(".message.assistant .note").last().textContent(), /^Stopped/);
  assert.match(await page.locator(".message.assistant .facts").last().textContent(), /^\d+ answer tokens . first token after/);
  const before = await page.locator(".message.assistant .body").last().textContent();
  assert.ok(before.length > 0);
  await letEnd();
}

// A picture with something in every part.
async function poses({ page }) {
  await send(page, "What is 12 plus 30?");
  await answered(page);
  const endLoads = [startLoad(6)];
  await hasText(page, "#running", /^6$/);
  await send(page, "Tell me a long story about a fox.");
  await page.waitForFunction(() => document.querySelector(".message.assistant:last-child .body")?.textContent.length > 0);
  endLoads.push(startLoad(14));
  await hasText(page, "#waiting", /^1\d$/);
  await page.screenshot({ path: screenshot });
  for (const end of endLoads) await end();
  await answered(page);
}

async function becomesIdle({ page }) {
  await hasText(page, "#running", /^0$/);
  await hasText(page, "#waiting", /^0$/);
  await page.waitForSelector("#no_requests:not([hidden])");
}

const hasMoreThan = (page, length) =>
  page.waitForFunction((least) => document.querySelector(".message.assistant:last-child .body")?.textContent.length > least, length);

// The server goes on while the page is loaded again and again; nothing of the answer is lost, doubled or asked for twice.
// Somebody else ends it: the page has all of it as well.
async function takesUpAnAnswerAfterReloads() {
  const posts = [], follows = [], endLoad = startLoad(6);
  const { page, complaints } = await openPage(async (page) => {
    await goOnForMinutes(page);
    page.on("request", (request) => {
      if (request.method() === "POST" && /responses$/.test(request.url())) posts.push(request);
      if (/starting_after=\d/.test(request.url())) follows.push(request);
    });
    await page.route(/responses\/resp-[^/?]*$/, (route) => route.request().method() === "DELETE" ? refuse(route, { message: "kept" }) : route.continue());
  });
  await page.fill("#temperature", "1");
  await send(page, "Tell me a long story about a fox.");
  await hasMoreThan(page, 20);
  const { response: { id } } = await readKept(page);
  for (let turn = 0; turn < 3; turn++) {
    const { length } = await lastAnswer(page).textContent();
    await page.reload();
    await page.waitForFunction((least) => (document.querySelector(".message.assistant .body")?.textContent.length ?? 0) >= least, length - 20);
  }
  await endLoad();
  const said = await (await fetch(`${url}/v1/responses/${id}/cancel`, { method: "POST" })).json();
  await answered(page);
  assert.equal((await readKept(page)).message.content, said.output.map((item) => item.content[0].text).join(""));
  assert.equal(posts.length, 1);
  assert.ok(follows.length >= 3, "a reload did not take it up");
  assert.equal(await page.locator(".message").count(), 2);
  assert.deepEqual(complaints.filter((text) => !/400/.test(text)), []);
  await fetch(`${url}/v1/responses/${id}`, { method: "DELETE" });
  await page.context().close();
}

async function stopsWhatWasTakenUp() {
  const endLoad = startLoad(12), { page } = await openPage(goOnForMinutes);
  await send(page, "Tell me a long story about a fox.");
  await hasMoreThan(page, 20);
  const { response: { id } } = await readKept(page);
  await page.reload();
  await hasText(page, "#rates", /^taken up/);
  await page.click("#stop");
  await answered(page);
  await hasText(page, ".message.assistant .note", /^Stopped/);
  const { status } = await (await fetch(`${url}/v1/responses/${id}`)).json();
  assert.equal(status, "cancelled");
  await page.reload();  // and it stays so
  await hasText(page, ".message.assistant .note", /^Stopped/);
  assert.equal(await page.isDisabled("#stop"), true);
  await endLoad();
  await page.context().close();
}

async function goesOnInAChatThatWasLeft() {
  const endLoad = startLoad(6), { page } = await openPage();
  await send(page, "Tell me a long story about a fox.");
  await hasMoreThan(page, 20);
  await page.click("#new");
  await page.waitForFunction(() => !document.querySelector(".message"));
  await page.click("#chats_button");
  await page.getByRole("button", { name: "Tell me a long story about a fox.", exact: true }).click();
  await endLoad();
  await hasMoreThan(page, 20);
  await answered(page);
  assert.equal(await page.locator(".message.assistant .note").isHidden(), true);
  await page.context().close();
}

async function worksInTheDarkAndOnAPhone({ page }) {
  await page.emulateMedia({ colorScheme: "dark" });
  const [ground, ink] = await page.evaluate(() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]);
  const brightness = (color) => color.match(/\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0);
  assert.ok(brightness(ground) < 150 && brightness(ink) > 550, `${ink} on ${ground}`);
  await page.setViewportSize({ width: 390, height: 800 });
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  assert.equal(overflow, 0, "the page scrolls sideways on a phone");
}

try {
  const opened = await openPage();
  await chats(opened);
  await keepsMarkupAsText(opened);
  await beginsAnew(opened);
  const endLoad = await showsTheEngine(opened);
  await hasANameForEverythingOneCanUse(opened);
  await endLoad();
  if (screenshot) await poses(opened);
  const endSmallLoad = startLoad(6);
  await stops(opened);
  await endSmallLoad();
  await becomesIdle(opened);
  await worksInTheDarkAndOnAPhone(opened);
  assert.deepEqual(opened.complaints, []);
  await showsChartsAgainAfterAReload();
  await takesUpAnAnswerAfterReloads();
  await stopsWhatWasTakenUp();
  await goesOnInAChatThatWasLeft();
  console.log("ok");
} finally {
  await browser.close();
}
