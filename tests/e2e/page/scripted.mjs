// Drives the page against answers that are written here, as a person would, and fails with what was not as it should be.
//   node scripted.mjs URL CHROMIUM
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { fulfil, makeEvents, refuse } from "./answers.mjs";
import { answered, browser, hasANameForEverythingOneCanUse, hasText, lastAnswer, lastButton, openPage, readKept, send } from "./browser.mjs";

// Chat answers in turn: the deltas of each and why it ended, or a refusal; `asked` gets the bodies of the requests.
async function openScripted(answers, asked = []) {
  return openPage((page) => page.route("**/v1/responses", (route) => {
    asked.push(route.request().postDataJSON());
    const { refusal, ...answer } = answers.shift();
    return refusal ? refuse(route, { message: refusal }) : fulfil(route, makeEvents(answer, answer.more));
  }));
}

const only = process.env.ONLY ?? "";  // checks by a part of their name

const says = (text, reason) => ({ deltas: [{ content: text }], reason });

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

const FORMULAS = String.raw`Roots of $ax^2 + b_1$: $$x = \frac{1}{2}$$ It costs $5, or $10 for two, US$ 7 or $6. \(e^{i\pi}\)
$$
\begin{aligned}
a &= b
+ c
\end{aligned}
$$
\[ y \] $\foo{$ $\def\a{\a\a}\a$ ` + `$${"\\sqrt{".repeat(200)}x${"}".repeat(200)}$ ` + "`$no$`";
const CODE = "~~~python\ndef f(x): return '<b>'\n~~~\n\n~~~nonsense\nx = 1\n~~~\n\n~~~js\nlet a = 1;\n~~~\n\n~~~ini\n";

// The libraries come with the first message that needs one, once; what they cannot read stays text.
async function drawsFormulasAndColoursCode() {
  const inPieces = (text) => ({ deltas: text.match(/[^]{1,9}/g).map((content) => ({ content })) });
  const { page, complaints } = await openScripted([says("No **code**."), inPieces(FORMULAS), inPieces(`${CODE}${"a".repeat(9000)}\n~~~`), inPieces("~~~js\nlet b;\n~~~")]), asked = [];
  page.on("request", (request) => { if (/vendor/.test(request.url())) asked.push(new URL(request.url()).pathname); });
  const ask = async () => { await send(page, "Go"); await answered(page); };
  await ask();
  assert.deepEqual(asked, []);
  await ask();
  await page.waitForFunction(() => document.querySelectorAll(".formula math").length === 5);
  const formulas = await lastAnswer(page).locator(".formula").evaluateAll((nodes) => nodes.map((node) => node.querySelector("annotation")?.textContent ?? node.textContent.slice(0, 12)));
  assert.deepEqual(formulas.map((text) => text.replaceAll("\n", " ")), ["ax^2 + b_1", "x = \\frac{1}{2}", "e^{i\\pi}", "\\begin{aligned} a &= b + c \\end{aligned}", "y", "$\\foo{$", "$\\def\\a{\\a\\a", "$\\sqrt{\\sqrt"]);
  assert.match(await lastAnswer(page).textContent(), /It costs \$5, or \$10 for two, US\$ 7 or \$6\./);
  assert.equal(await lastAnswer(page).locator("code").textContent(), "$no$");
  await ask();
  await page.waitForFunction(() => document.querySelectorAll(".hl-keyword").length >= 3);
  const code = lastAnswer(page).locator("pre code");
  assert.deepEqual(await code.evaluateAll((nodes) => nodes.map((node) => node.querySelectorAll("span").length > 0)), [true, false, true, false]);
  assert.equal(await code.first().textContent(), "def f(x): return '<b>'");
  await ask();
  await page.waitForFunction(() => document.querySelector(".message:last-child .hl-keyword"));
  assert.deepEqual(asked.sort(), ["/vendor/highlight.min.js", "/vendor/katex.min.js"]);
  assert.deepEqual(complaints, []);
  await page.context().close();
}

// A script that is not the server's own library does not run, and text is drawn without it.
async function goesWithoutALibraryThatIsNotOurs() {
  const { page } = await openPage(async (page) => {
    await page.route("**/v1/responses", (route) => fulfil(route, makeEvents(says("~~~js\nlet b;\n~~~"))));
    await page.route("**/vendor/*", (route) => route.fulfill({ contentType: "text/javascript", body: "document.title = 'bad'" }));
  });
  const failed = page.waitForEvent("console", (message) => /integrity/.test(message.text()));
  await send(page, "Go");
  await answered(page);
  await failed;
  assert.equal(await page.title(), "Quire");
  assert.equal(await lastAnswer(page).locator("pre code").textContent(), "let b;");
  assert.match(await page.evaluate(() => { try { policy.createScriptURL("/elsewhere.js"); } catch (error) { return error.message; } }), /no library/);
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
  assert.match(await page.locator(".message.assistant .facts").textContent(), /^\d+ answer tokens/);
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
  assert.deepEqual(asked[1].input, [{ role: "user", content: "First" }]);
  assert.equal(await page.locator(".message.error").count(), 0);
  await lastButton(page, "Retry").click();
  await hasText(page, ".message.error", /again/);
  assert.equal(await lastAnswer(page).textContent(), "Fine.");
  await page.context().close();
}

async function retriesEditsAndGoesOn() {
  const asked = [], { page } = await openScripted([says("One", "max_output_tokens"), says(" two"), says("Three"), says("Four")], asked);
  await page.click("#compose summary");
  await page.fill("#system", "Be brief.");
  await send(page, "Count");
  await hasText(page, ".message.assistant .note", /^Cut/);
  await lastButton(page, "Continue").click();
  await hasText(page, ".message.assistant .body", /^One two$/);
  await answered(page);
  assert.equal(await page.locator(".message.assistant .note").isHidden(), true);
  assert.deepEqual(asked[1].input.at(-1), { type: "message", role: "assistant", content: "One", status: "incomplete" });
  assert.deepEqual(asked[0].input[0], { role: "system", content: "Be brief." });
  await lastButton(page, "Retry").click();
  await hasText(page, ".message.assistant .body", /^Three$/);
  await answered(page);
  assert.deepEqual(asked[2].input, asked[0].input);
  await page.getByRole("button", { name: "Edit" }).click();
  assert.equal(await page.inputValue("#message"), "Count");
  await send(page, "Count on");
  await hasText(page, ".message.assistant .body", /^Four$/);
  await answered(page);
  assert.deepEqual(asked[3].input.at(-1), { role: "user", content: "Count on" });
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

const WORDS = Array.from({ length: 40 }, (_, place) => ({ content: `w${place} ` }));

// The first stream ends early, two connections fail, the next one begins before what is known.
async function connectsAgainWhereAStreamBrokeOff() {
  const events = makeEvents({ deltas: WORDS }, { background: true }), asked = [];
  const { page } = await openPage(async (page) => {
    await page.route("**/v1/responses", (route) => fulfil(route, events.slice(0, 20)));
    await page.route("**/v1/responses/*", (route) => {
      if (route.request().method() === "DELETE") return route.fulfill({ json: { deleted: true } });
      asked.push(new URL(route.request().url()).search);
      return asked.length === 1 ? route.abort() : asked.length === 2 ? refuse(route, { message: "wait" }, 503) : fulfil(route, events.slice(15));
    });
  });
  await send(page, "Go");
  await answered(page);
  assert.equal((await readKept(page)).message.content, WORDS.map(({ content }) => content).join(""));
  assert.deepEqual(asked, Array(3).fill("?stream=true&starting_after=19"));
  await page.context().close();
}

async function saysThatTheServerHasLostAnAnswer() {
  const events = makeEvents({ deltas: WORDS }, { background: true });
  const { page } = await openPage(async (page) => {
    await page.route("**/v1/responses", (route) => fulfil(route, events.slice(0, 20)));
    await page.route("**/v1/responses/*", (route) => refuse(route, { message: "response not found: the process has ended" }, 404));
  });
  await send(page, "Go");
  await hasText(page, ".message.error", /not found/);
  assert.match(await lastAnswer(page).textContent(), /^w0 w1 /);
  assert.equal(await lastButton(page, "Continue").or(page.getByRole("button", { name: "Continue" })).first().isVisible(), true);
  await page.context().close();
}

async function goesWithoutWhereNothingIsKept() {
  const asked = [], { page } = await openPage((page) => page.route("**/v1/responses", (route) => {
    const body = route.request().postDataJSON();
    asked.push(body.background);
    if (body.background) return refuse(route, { message: "background: not here", param: "background" });
    return fulfil(route, makeEvents(says("Fine.")));
  }));
  for (let turn = 0; turn < 2; turn++) {
    await send(page, "Go");
    await answered(page);
    assert.equal(await lastAnswer(page).textContent(), "Fine.");
  }
  assert.deepEqual(asked, [true, undefined, undefined]);
  await page.context().close();
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
  assert.match(await page.textContent(".message.error"), /^\u201cTools that the model may call.*\u201d is not the JSON that it has to be\..*tools: .*JSON/);
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
  assert.deepEqual([asked[0].tools, asked[0].chat_template_kwargs], [[{ type: "function", name: "weather" }], { enable_thinking: true }]);
  const call = (place, city) => ({ type: "function_call", call_id: `call_${place}`, name: "weather", arguments: `{"city": "${city}"}` });
  assert.deepEqual(asked[1].input.slice(1), [
    { type: "reasoning", content: [{ type: "reasoning_text", text: "Two cities." }] }, { role: "assistant", content: "Let me look." },
    call(0, "Rome"), call(1, "<b>Oslo</b>"),
    { type: "function_call_output", call_id: "call_0", output: "20" }, { type: "function_call_output", call_id: "call_1", output: "-3" },
  ]);
  await hasANameForEverythingOneCanUse({ page });
  assert.deepEqual(complaints, []);
  await page.context().close();
}

async function saysWhatAnAnswerTook() {
  const { page, complaints } = await openScripted([{ ...says("One"), more: { usage: { input_tokens: 500, output_tokens: 12 } } }]);
  await send(page, "Count");
  await answered(page);
  const facts = /^500 prompt \+ 12 answer tokens · (under )?\d+ % of the context of [\d,]+ · first token after \d+ ms/;
  await hasText(page, ".message.assistant .facts", facts);
  await page.reload();
  await hasText(page, ".message.assistant .facts", /^500 prompt \+ 12 answer tokens/);
  assert.deepEqual(complaints, []);
  await page.context().close();
}

async function sendsWhatTheSettingsSay() {
  const asked = [], { page, complaints } = await openScripted([says("{}")], asked), schema = { type: "object" };
  await page.click("#compose summary");
  const numbers = { top_p: 0.9, top_k: 5, min_p: 0.1, seed: 7, presence_penalty: 0.5, frequency_penalty: -0.5, repetition_penalty: 1.1 };
  for (const [id, value] of Object.entries(numbers)) await page.fill(`#${id}`, `${value}`);
  await page.fill("#stop_texts", "END\n\nSTOP");
  await page.fill("#schema", "{");
  await send(page, "Hello");
  await hasText(page, ".message.error", /^\u201cSchema of the answer, as JSON\u201d is not/);
  await answered(page);
  await page.fill("#schema", JSON.stringify(schema));
  await page.press("#message", "Enter");
  await hasText(page, ".message.assistant .body", /{}/);
  await answered(page);
  const sent = Object.fromEntries(Object.keys(numbers).map((name) => [name, asked[0][name]]));
  assert.deepEqual(sent, numbers);
  assert.deepEqual([asked[0].stop, asked[0].text.format.schema], [["END", "STOP"], schema]);
  assert.deepEqual(complaints, []);
  await page.context().close();
}

// What happened and what to do; what the server said is folded, and a field that is at fault one click away.
async function saysErrorsInWords() {
  const answers = [
    [400, { message: "temperature=9: expected `float` <= 2.0 (less_than_equal: ...)", param: "temperature" }, /^The server does not take \u201cTemperature\u201d: it has to be at most 2\.0\. Change or empty it/],
    [400, { message: "text.format.schema.type='objct': expected one of null, object, or a list of them", param: "text.format.schema.type" }, /^The server does not take \u201cSchema of the answer, as JSON\u201d: it has to be one of null, object, or a list of them\./],
    [400, { message: "input='9 tokens': expected at most 5", param: "input", code: "context_length_exceeded" }, /^The conversation is longer than the model can hold\. Start a new chat/],
    [400, { message: "metadata.x=1: no", param: "metadata.x" }, /^The server does not take this\./],
    [404, { message: "model='x': 'pocket' is what this server has", param: "model" }, /^The server does not have what was asked for\./],
    [429, { message: "no room" }, /^The server is busy\. Wait a moment/],
    [500, { message: "<b>it</b> broke" }, /^The server failed at this\..*log/],
    [503, { message: "ending" }, /^The server is about to start or to end\./],
  ];
  const { page, complaints } = await openPage((page) => page.route("**/v1/responses", (route) => answers.length ? refuse(route, answers[0][1], answers[0][0]) : route.abort()));
  const error = page.locator(".message.error");
  const ask = async () => { await page.fill("#message", "Hello"); await page.press("#message", "Enter"); await error.waitFor(); await answered(page); };
  while (answers.length) {
    await ask();
    const [, { message, param }, words] = answers[0];
    assert.match(await error.textContent(), words);
    assert.equal(await error.locator("pre").textContent(), message);
    assert.equal(await error.locator("pre").isVisible(), false);
    assert.equal(await page.inputValue("#message"), "Hello");
    if (/text/.test(param)) {
      await error.getByRole("button", { name: "Go to Schema" }).click();
      assert.equal(await page.evaluate(() => document.activeElement.id), "schema");
    }
    answers.shift();
  }
  await ask();
  assert.match(await error.textContent(), /^The server cannot be reached\./);
  await page.fill("#top_p", "7");  // the settings were opened by what was at fault there
  await page.click("#settings summary");
  await page.fill("#message", "Hello");
  await page.press("#message", "Enter");
  await page.waitForSelector("#settings[open]");  // the browser says what is wrong with the field
  await hasANameForEverythingOneCanUse({ page });
  assert.deepEqual(complaints.filter((text) => !/Failed to load/.test(text)), []);
  await page.context().close();
}

// Many tries of a long chat cost its own oldest versions, and no other chat.
async function makesRoomByVersionsFirst(page) {
  const [kept, tails] = await page.evaluate(() => {
    localStorage.clear();
    const turn = (length) => ({ message: { role: "user", content: "x".repeat(length) } });
    saveChat({ ...newChat({}), id: "other", turns: [turn(4_000_000)] });
    saveChat({ ...newChat({}), id: "tried", turns: [{ ...turn(10), versions: { at: 9, tails: [...Array.from({ length: 9 }, () => [turn(200_000)]), null] } }] });
    const kept = listChats(), { at, tails } = kept.find(({ id }) => id === "tried").turns[0].versions;
    localStorage.clear();
    return [kept.map(({ id }) => id).sort(), [tails.length, at, tails.indexOf(null)]];
  });
  assert.deepEqual(kept, ["other", "tried"]);
  assert.ok(tails[0] > 2 && tails[0] < 10 && tails[1] === tails[0] - 1 && tails[2] === tails[1], `${tails}`);
}

// Asked again, or written anew: what was there stays, with all that followed it, also in a file and after a reload.
async function keepsVersions() {
  const asked = [], { page, complaints } = await openScripted([says("One"), says("Two"), says("After two"), says("Three"), says("Four"), { refusal: "no" }], asked);
  const texts = () => page.locator(".message .body").allTextContents();
  const shown = (place) => page.locator(".message").nth(place).locator(".versions > span").textContent();
  const step = (place, name) => page.locator(".message").nth(place).getByRole("button", { name }).click();
  const retry = async (place) => { await page.locator(".message").nth(place).getByRole("button", { name: "Retry" }).click(); await answered(page); };
  await send(page, "Count");
  await answered(page);
  assert.equal(await page.locator(".versions").count(), 0);
  await retry(1);
  await send(page, "Go on");
  await answered(page);
  await retry(1);
  assert.deepEqual([await texts(), await shown(1)], [["Count", "Three"], "3/3"]);
  await step(1, "Version before");
  assert.deepEqual([await texts(), await shown(1)], [["Count", "Two", "Go on", "After two"], "2/3"]);
  assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "Version before");
  await step(1, "Version before");
  assert.deepEqual([await texts(), await shown(1)], [["Count", "One"], "1/3"]);
  assert.equal(await page.locator(".message").nth(1).getByRole("button", { name: "Version before" }).isDisabled(), true);
  await page.locator(".message").first().getByRole("button", { name: "Edit" }).click();
  await send(page, "Count on");
  await answered(page);
  assert.deepEqual([await texts(), await shown(0)], [["Count on", "Four"], "2/2"]);
  assert.deepEqual(asked.at(-1).input, [{ role: "user", content: "Count on" }]);
  await retry(1);  // is refused: nothing changes
  await hasText(page, ".message.error", /no/);
  assert.deepEqual(await texts(), ["Count on", "Four"]);
  await page.reload();
  await page.waitForSelector(".versions");
  assert.deepEqual([await texts(), await shown(0)], [["Count on", "Four"], "2/2"]);
  await step(0, "Version before");
  assert.deepEqual([await texts(), await shown(1)], [["Count", "One"], "1/3"]);
  await page.click("#chats_button");
  await page.fill("#search", "after two");  // in a version that is not shown
  assert.equal(await page.locator("#chat_list li").count(), 1);
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Export all" }).click()]);
  const exported = await readFile(await download.path(), "utf8"), chat = JSON.parse(exported).chats[0];
  await page.getByRole("button", { name: "Delete Count" }).click();
  const load = async (text) => { await page.setInputFiles("#import_file", { name: "a.json", mimeType: "application/json", buffer: Buffer.from(text) }); };
  const nested = '{"at":0,"tails":[null,[{"message":{"role":"user","content":""},"versions":'.repeat(200);
  for (const versions of ["5", '{"at": 0, "tails": [[]]}', '{"at": 1, "tails": [null]}', '{"at": 0, "tails": [null, []]}', `${nested}0${"}]]}".repeat(200)}`]) {
    await load("{}");
    await load(`{"quire_chats": 1, "chats": [{"turns": [{"message": {"role": "user", "content": "x"}, "versions": ${versions}}]}]}`);
    await hasText(page, "#chats_note", /was not imported/);
  }
  await load(exported);
  await hasText(page, "#chats_note", /^Imported: 1/);
  await page.fill("#search", "");
  await page.locator("#chat_list button.open").first().click();
  await page.waitForSelector(".versions");
  await step(1, "Version after");
  assert.deepEqual([await texts(), await shown(1)], [["Count", "Two", "Go on", "After two"], "2/3"]);
  await step(0, "Version after");
  assert.deepEqual(await texts(), ["Count on", "Four"]);
  assert.equal(chat.turns[0].versions.tails.length, 2);
  await makesRoomByVersionsFirst(page);
  await hasANameForEverythingOneCanUse({ page });
  assert.deepEqual(complaints.filter((text) => !/400/.test(text)), []);
  await page.context().close();
}

// Of a file that is imported only what is known is kept, as text, and of one that is none of ours nothing.
async function keepsChatsInFilesAndFindsThem() {
  const { page, complaints } = await openScripted([says("Red <b>fox</b>"), says("Blue")]);
  for (const text of ["First", "Second"]) {
    await page.click("#new");
    await send(page, text);
    await hasText(page, ".message.assistant .body", /Red|Blue/);
    await answered(page);
  }
  await page.click("#chats_button");
  const titles = () => page.locator("#chat_list button.open").allTextContents();
  await page.fill("#search", "FOX");
  assert.deepEqual(await titles(), ["First"]);
  await page.getByRole("button", { name: "Rename First" }).click();
  await page.fill("#chat_list input", "Animals");
  await page.press("#chat_list input", "Enter");
  assert.deepEqual(await titles(), ["Animals"]);
  const read = async (name) => {
    const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name, exact: true }).click()]);
    return readFile(await download.path(), "utf8");
  };
  assert.match(await read("Markdown Animals"), /^# Animals\n\n## You\n\nFirst\n\n## Model\n\nRed <b>fox<\/b>\n/);
  const exported = await read("Export all");
  assert.equal(JSON.parse(exported).chats.length, 2);
  await page.getByRole("button", { name: "Delete Animals" }).click();
  await page.fill("#search", "");
  const load = (text) => page.setInputFiles("#import_file", { name: "a.json", mimeType: "application/json", buffer: Buffer.from(text) });
  const before = (await titles()).length;
  for (const bad of ["no JSON", "[]", '{"quire_chats": 1, "chats": [{"turns": [{"message": {"role": "system", "content": "x"}}]}]}', `"${"x".repeat(4_000_001)}"`]) {
    await load("{}");
    await load(bad);
    await hasText(page, "#chats_note", /was not imported/);
    assert.equal((await titles()).length, before);
  }
  await load(exported);
  await hasText(page, "#chats_note", /^Imported: 2/);
  assert.equal((await titles()).length, before + 2);
  assert.ok((await titles()).includes("Animals"));
  await hasANameForEverythingOneCanUse({ page });
  assert.deepEqual(complaints, []);
  await page.context().close();
}

async function keepsThemeAndWhatIsHidden() {
  const { page, complaints } = await openScripted([]);
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await ground();
  await page.selectOption("#theme", "dark");
  assert.notEqual(await ground(), light);
  await page.click("#live_button");
  const dark = await ground();
  await page.reload();
  assert.equal(await ground(), dark);
  assert.equal(await page.isVisible("#live"), false);
  await hasText(page, "#model", /pocket/);
  await page.click("#live_button");
  await hasText(page, "#link", /^up /);
  assert.equal(await page.isVisible("#live"), true);
  assert.deepEqual(complaints, []);
  await page.context().close();
}

// On a phone the engine takes the chat's place for as long as somebody looks at it.
async function showsTheChatOrTheEngineOnAPhone() {
  const { page, complaints } = await openScripted([]), shown = () => Promise.all(["#chat", "#live"].map((part) => page.isVisible(part)));
  assert.deepEqual(await shown(), [true, true]);
  await page.setViewportSize({ width: 360, height: 700 });
  await page.waitForSelector("#live", { state: "hidden" });
  await page.click("#live_button");
  await hasText(page, "#link", /^up /);
  assert.deepEqual(await shown(), [false, true]);
  await page.click("#new");
  await page.waitForSelector("#chat");
  assert.deepEqual(await shown(), [true, false]);
  await page.setViewportSize({ width: 1200, height: 700 });
  await page.waitForSelector("#live");
  assert.deepEqual(await shown(), [true, true]);
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
  await hasText(page, "#link", /^needs a key$/);
  await page.waitForResponse(/v1.models/);  // it tried again
  assert.equal(await page.locator("#key_dialog[open]").count(), 0);
  await send(page, "Hello");
  await page.waitForSelector("#key_dialog[open]");
  await page.click("#key_cancel");
  await hasText(page, ".message.error", /^The server needs an API key\..*button Key.*a key, please$/);
  assert.equal(await page.inputValue("#message"), "Hello");
  assert.equal(await page.isVisible("#key_button"), true);
  await page.context().close();
}

async function takesNoMessageForAModelThatCannotChat() {
  const cards = [{ id: "vectors", tasks: ["embed", "score"] }, { id: "pocket", tasks: ["generate"] }];
  const { page } = await openPage((page) => page.route("**/v1/models", (route) => route.fulfill({ json: { data: cards } })));
  const areDisabled = () => Promise.all(["#message", "#send"].map((id) => page.isDisabled(id)));
  await hasText(page, "#no_chat", /^vectors does not chat: it can embed, score\. How to ask it$/);
  assert.deepEqual(await areDisabled(), [true, true]);
  await page.selectOption("#models", "pocket");
  assert.equal(await page.isVisible("#no_chat"), false);
  assert.deepEqual(await areDisabled(), [false, false]);
  await page.context().close();
}

try {
  for (const check of [
    connectsAgainWhereAStreamBrokeOff, saysThatTheServerHasLostAnAnswer, goesWithoutWhereNothingIsKept,
    foldsThoughtsAndAsksForResultsOfCalls, drawsMarkdownAndNoMarkup, drawsFormulasAndColoursCode, goesWithoutALibraryThatIsNotOurs, stopsABurst, paintsABurstSeldom,
    givesBackWhatWasRefused, retriesEditsAndGoesOn, asksForAKey, asksForAKeyOnceUnlessItIsWanted,
    takesNoMessageForAModelThatCannotChat, saysWhatAnAnswerTook, sendsWhatTheSettingsSay, saysErrorsInWords, keepsVersions, keepsChatsInFilesAndFindsThem, keepsThemeAndWhatIsHidden, showsTheChatOrTheEngineOnAPhone,
  ].filter(({ name }) => name.match(only))) await check();
  console.log("ok");
} finally {
  await browser.close();
}
