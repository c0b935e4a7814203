// Drives the page in headless Chromium, as a person would, and fails with what was not as it should be.
//   node drive.mjs URL CHROMIUM [SCREENSHOT]
// The server runs the pocket model with --max-num-seqs 8, so that some of the background load waits.
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [url, executablePath, screenshot] = process.argv.slice(2);
const DEADLINE_MS = 30_000;
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });

async function openPage(prepare = async () => {}) {
  const context = await browser.newContext({ viewport: { width: 1360, height: 1000 } });
  context.setDefaultTimeout(DEADLINE_MS);
  const page = await context.newPage(), complaints = [];
  page.on("pageerror", (error) => complaints.push(error.message));
  page.on("console", (message) => { if (message.type() === "error") complaints.push(message.text()); });
  await prepare(page);
  await page.goto(url);
  return { page, complaints };
}

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

const send = async (page, text) => { await page.fill("#message", text); await page.press("#message", "Enter"); };
const hasText = (page, selector, pattern) =>
  page.waitForFunction(([at, source]) => new RegExp(source).test(document.querySelector(at)?.textContent ?? ""), [selector, pattern.source]);
const answered = (page) => page.waitForFunction(() => !document.querySelector("#send").disabled);

async function chats({ page }) {
  await hasText(page, "#link", /^up /);
  await hasText(page, "#model", /^pocket$/);
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
  assert.match(await page.textContent("#rates"), /first token after \d+ ms, [\d.]+ tokens\/s, \d+ tokens/);
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
  await page.waitForFunction(() => new Set([...document.querySelector("#spark").getAttribute("points").matchAll(/,([\d.]+)/g)].map((m) => m[1])).size > 2);
  assert.match(await page.textContent("#clients tbody"), /\d/);
  assert.match(await page.textContent("#steps"), /[1-9].* steps\/s/);
  const colors = await page.evaluate(() => {
    const canvas = document.querySelector("#blocks");
    return new Set(new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
  });
  assert.ok(colors >= 2, "the block map has one colour");
  return endLoad;
}

async function stops({ page }) {
  await send(page, "Tell me a long story about a fox.");
  await page.waitForFunction(() => document.querySelector(".message.assistant:last-child .body")?.textContent.length > 0);
  await page.click("#stop");
  await answered(page);
  assert.match(await page.textContent("#rates"), /^stopped, /);
  const before = await page.locator(".message.assistant .body").last().textContent();
  assert.ok(before.length > 0);
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

// Chat answers in turn: the deltas of each and why it ended, or a refusal; `asked` gets the bodies of the requests.
async function openScripted(answers, asked = []) {
  return openPage((page) => page.route("**/v1/chat/completions", (route) => {
    asked.push(route.request().postDataJSON());
    const { refusal, deltas, reason = "stop" } = answers.shift();
    if (refusal) return route.fulfill({ status: 400, contentType: "application/json", body: JSON.stringify({ error: { message: refusal } }) });
    const choices = [...deltas.map((delta) => ({ delta })), { delta: {}, finish_reason: reason }];
    const events = choices.map((choice) => `data: ${JSON.stringify({ choices: [choice] })}\n\n`);
    return route.fulfill({ contentType: "text/event-stream", body: `${events.join("")}data: [DONE]\n\n` });
  }));
}

const says = (text, reason) => ({ deltas: [{ content: text }], reason });
const lastAnswer = (page) => page.locator(".message.assistant .body").last();
const lastButton = (page, name) => page.locator(".message").last().getByRole("button", { name, exact: true });

async function drawsMarkdownAndNoMarkup() {
  const text = [
    "# Title", "", "- one **bold** `x < y`", "- two", "", "| a | b |", "|---|---|", "| 1 | 2 |", "",
    "```python", "print('<b>')", "```", "", "[web](https://example.org/) [bad](javascript:alert(1)) ![p](https://example.org/p.png)",
    "<img src=x onerror=\"document.title='bad'\"><script>document.title='bad'</script>", "", "<div>", "raw", "</div>",
  ].join("\n");
  const asked = [], deltas = text.match(/[^]{1,3}/g).map((content) => ({ content }));
  const { page, complaints } = await openScripted([{ deltas }, says(`${">".repeat(3000)} deep`), says(`${">".repeat(30_000)} deeper`)], asked);
  await send(page, "Hello");
  await answered(page);
  const body = lastAnswer(page);
  const count = (selector) => body.locator(selector).count();
  assert.deepEqual(await Promise.all(["h3", "li", "strong", "td", "pre code", "img, script, b"].map(count)), [1, 2, 1, 2, 1, 0]);
  assert.equal(await body.locator("pre code").textContent(), "print('<b>')");
  assert.deepEqual(await body.locator("a").evaluateAll((links) => links.map((link) => link.href)), ["https://example.org/", "https://example.org/p.png"]);
  assert.match(await body.textContent(), /<img src=x[^]*<div>[^]*raw/);
  assert.equal(await page.title(), "Quire");
  await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
  await body.getByRole("button", { name: "Copy code" }).click();
  await hasText(page, "#said", /^Copied$/);
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "print('<b>')");
  for (const word of [/deep$/, /deeper$/]) {
    await send(page, "On");
    await answered(page);
    assert.match(await lastAnswer(page).textContent(), word);
    assert.ok(await lastAnswer(page).locator("blockquote").count() < 30);
  }
  assert.deepEqual(complaints, []);
  await page.context().close();
}

async function stopsABurst() {
  const { page } = await openScripted([{ deltas: Array.from({ length: 50_000 }, () => ({ content: "word " })) }]);
  await page.evaluate(() => {  // whatever the machine's speed: the first paint stops it
    new MutationObserver((_, observer) => {
      if (!document.querySelector(".message.assistant .body")) return;
      observer.disconnect();
      document.querySelector("#stop").click();
    }).observe(document.querySelector("#log"), { childList: true, subtree: true });
  });
  await send(page, "Go");
  await answered(page);
  assert.match(await page.textContent("#rates"), /^stopped, /);
  assert.ok((await lastAnswer(page).textContent()).length < 250_000);
  assert.match(await page.locator(".message.assistant .note").textContent(), /^Stopped/);
  await page.context().close();
}

async function paintsABurstSeldom() {
  const { page } = await openScripted([{ deltas: Array.from({ length: 4000 }, () => ({ content: "word " })) }]);
  await page.evaluate(() => {
    window.numPaints = 0;
    new MutationObserver(() => { window.numPaints += 1; }).observe(document.querySelector("#log"), { childList: true, subtree: true, characterData: true });
  });
  await send(page, "Go");
  await answered(page);
  assert.equal((await lastAnswer(page).textContent()).trim().length, 4000 * 5 - 1);
  assert.ok(await page.evaluate(() => window.numPaints) < 400, "each delta was painted");
  await page.context().close();
}

async function givesBackWhatWasRefused() {
  const asked = [], { page } = await openScripted([{ refusal: "max_tokens: too many" }, says("Fine."), { refusal: "again" }], asked);
  await send(page, "First");
  await hasText(page, ".message.error", /too many/);
  await answered(page);
  assert.equal(await page.inputValue("#message"), "First");
  assert.equal(await page.locator(".message.user").count(), 0);
  await page.press("#message", "Enter");
  await hasText(page, ".message.assistant .body", /^Fine\.$/);
  await answered(page);
  assert.deepEqual(asked[1].messages, [{ role: "user", content: "First" }]);
  assert.equal(await page.locator(".message.error").count(), 0);
  await lastButton(page, "Retry").click();
  await hasText(page, ".message.error", /again/);
  assert.equal(await lastAnswer(page).textContent(), "Fine.");
  await page.context().close();
}

async function retriesEditsAndGoesOn() {
  const asked = [], { page } = await openScripted([says("One", "length"), says(" two"), says("Three"), says("Four")], asked);
  await page.click("#compose summary");
  await page.fill("#system", "Be brief.");
  await send(page, "Count");
  await hasText(page, ".message.assistant .note", /^Cut/);
  await lastButton(page, "Continue").click();
  await hasText(page, ".message.assistant .body", /^One two$/);
  await answered(page);
  assert.equal(await page.locator(".message.assistant .note").isHidden(), true);
  assert.deepEqual([asked[1].continue_final_message, asked[1].messages.at(-1)], [true, { role: "assistant", content: "One" }]);
  assert.deepEqual(asked[0].messages[0], { role: "system", content: "Be brief." });
  await lastButton(page, "Retry").click();
  await hasText(page, ".message.assistant .body", /^Three$/);
  await answered(page);
  assert.deepEqual(asked[2].messages, asked[0].messages);
  await page.getByRole("button", { name: "Edit" }).click();
  assert.equal(await page.inputValue("#message"), "Count");
  await send(page, "Count on");
  await hasText(page, ".message.assistant .body", /^Four$/);
  await answered(page);
  assert.deepEqual(asked[3].messages.at(-1), { role: "user", content: "Count on" });
  await keepsChats(page);
  await page.context().close();
}

async function keepsChats(page) {
  await page.reload();
  await hasText(page, ".message.assistant .body", /^Four$/);
  assert.equal(await page.inputValue("#system"), "Be brief.");
  await page.click("#new");
  await page.waitForFunction(() => !document.querySelector(".message"));
  await page.click("#chats_button");
  await page.getByRole("button", { name: "Count on", exact: true }).click();
  await hasText(page, ".message.assistant .body", /^Four$/);
  await page.click("#chats_button");
  await page.getByRole("button", { name: "Delete Count on" }).click();
  await page.waitForSelector("#no_chats:not([hidden])");
  await page.press("#chats", "Escape");
  await page.waitForFunction(() => !document.querySelector(".message"));
}

async function goesOnAfterAReload({ page }) {
  const endLoad = startLoad(6);
  await page.click("#new");
  await send(page, "Tell me a long story about a fox.");
  await page.waitForFunction(() => document.querySelector(".message.assistant:last-child .body")?.textContent.length > 20);
  const began = await lastAnswer(page).textContent();
  await page.reload();
  await page.waitForFunction((text) => document.querySelector(".message.assistant .body")?.textContent.startsWith(text), began.trim().slice(0, 20));
  await page.waitForFunction((length) => document.querySelector(".message.assistant .body").textContent.length > length, began.length);
  await endLoad();
  await answered(page);
  assert.equal(await page.locator(".message").count(), 2);
  await page.click("#new");
}

async function foldsThoughtsAndAsksForResultsOfCalls() {
  const callOf = (index, name, pieces) => [
    { content: null, tool_calls: [{ index, id: `call_${index}`, type: "function", function: { name, arguments: "" } }] },
    ...pieces.map((piece) => ({ tool_calls: [{ index, function: { arguments: piece } }] })),
  ];
  const thoughts = [{ role: "assistant", content: "" }, { reasoning_content: "Two ", reasoning: "Two " }, { reasoning_content: "cities." }];
  const calls = [...callOf(0, "weather", ['{"city": ', '"Rome"}']), ...callOf(1, "weather", ['{"city": "<b>Oslo</b>"}'])];
  const asked = [];
  const { page, complaints } = await openScripted([{ deltas: [...thoughts, { content: "Let me look." }, ...calls] }, says("Rome is warmer.")], asked);
  const tools = [{ type: "function", function: { name: "weather" } }];
  await page.click("#compose summary");
  await page.fill("#tools", "[{]");
  await send(page, "Hello");
  await answered(page);
  assert.match(await page.textContent(".message.error"), /^tools: .*JSON/);
  await page.click("#new");
  await page.fill("#tools", JSON.stringify(tools));
  await page.selectOption("#think", "true");
  await send(page, "Rome or Oslo?");
  await answered(page);
  const fold = page.locator(".message.assistant details");
  assert.equal(await fold.evaluate((node) => node.open), false);
  assert.equal(await fold.locator("div").textContent(), "Two cities.");
  assert.deepEqual(await page.locator(".call").allTextContents(), ['weather {"city": "Rome"}', 'weather {"city": "<b>Oslo</b>"}']);
  assert.equal(await page.locator("#log b").count(), 0);
  assert.match(await page.getAttribute("#message", "placeholder"), /^Result of weather/);
  await send(page, "20");
  await send(page, "-3");
  await answered(page);
  assert.match(await page.textContent(".message.assistant:last-child .body"), /^Rome is warmer\.$/);
  assert.match(await page.getAttribute("#message", "placeholder"), /^Message/);
  assert.deepEqual([asked[0].tools, asked[0].chat_template_kwargs], [tools, { enable_thinking: true }]);
  const [, turn, ...results] = asked[1].messages;
  assert.deepEqual([turn.content, turn.reasoning_content, turn.tool_calls.map((call) => call.function.arguments)],
    ["Let me look.", "Two cities.", ['{"city": "Rome"}', '{"city": "<b>Oslo</b>"}']]);
  assert.deepEqual(results, [{ role: "tool", tool_call_id: "call_0", content: "20" }, { role: "tool", tool_call_id: "call_1", content: "-3" }]);
  await hasANameForEverythingOneCanUse({ page });
  assert.deepEqual(complaints, []);
  await page.context().close();
}

async function asksForAKey() {
  const { page } = await openPage((page) => page.route(/stats|v1/, async (route) => {
    if (route.request().headers().authorization === "Bearer sesame") return route.continue();
    return route.fulfill({ status: 401, contentType: "application/json", body: '{"error": {"message": "a key, please"}}' });
  }));
  await page.waitForSelector("#key_dialog[open]");
  await page.fill("#key", "wrong");
  await page.press("#key", "Enter");
  await page.waitForFunction(() => document.querySelector("#key").value === "" && document.querySelector("#key_dialog").open);
  await page.fill("#key", "sesame");
  await page.press("#key", "Enter");
  await hasText(page, "#link", /^up /);
  await page.context().close();
}

async function asksForAKeyOnceUnlessItIsWanted() {
  const { page } = await openPage((page) => page.route(/stats|v1/, (route) =>
    route.fulfill({ status: 401, contentType: "application/json", body: '{"error": {"message": "a key, please"}}' })));
  await page.waitForSelector("#key_dialog[open]");
  await page.press("#key", "Escape");
  await hasText(page, "#link", /a key, please/);
  await page.waitForResponse(/v1.models/);  // it tried again
  assert.equal(await page.locator("#key_dialog[open]").count(), 0);
  await send(page, "Hello");
  await page.waitForSelector("#key_dialog[open]");
  await page.click("#key_cancel");
  await hasText(page, ".message.error", /a key, please/);
  assert.equal(await page.inputValue("#message"), "Hello");
  assert.equal(await page.isVisible("#key_button"), true);
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

async function hasANameForEverythingOneCanUse({ page }) {
  const nameless = await page.evaluate(() => [...document.querySelectorAll("button, input, select, textarea, progress, canvas, svg, dialog")]
    .filter((node) => !(node.textContent.trim() || node.getAttribute("aria-label") || node.getAttribute("aria-labelledby") || node.labels?.length))
    .map((node) => node.outerHTML.slice(0, 80)));
  assert.deepEqual(nameless, []);
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
  await goesOnAfterAReload(opened);
  await becomesIdle(opened);
  await worksInTheDarkAndOnAPhone(opened);
  assert.deepEqual(opened.complaints, []);
  await foldsThoughtsAndAsksForResultsOfCalls();
  await drawsMarkdownAndNoMarkup();
  await stopsABurst();
  await paintsABurstSeldom();
  await givesBackWhatWasRefused();
  await retriesEditsAndGoesOn();
  await asksForAKey();
  await asksForAKeyOnceUnlessItIsWanted();
  console.log("ok");
} finally {
  await browser.close();
}
