// Takes a picture of the page at three widths, light and dark, and has axe-core look for what keeps people out.
//   node looks.mjs URL CHROMIUM FOLDER
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";
import { fulfil, makeEvents, refuse } from "./answers.mjs";

const [url, executablePath, folder] = process.argv.slice(2);
const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const SIZES = [[360, 780], [1200, 800], [1920, 1000]];
const ANSWER = [
  "## Sorting", "Python has `sorted`, which is **stable**:", "", "```python", 'words = ["pear", "fig", "apple"]', "print(sorted(words, key=len))", "```", "",
  "| function | changes the list |", "|---|---|", "| `sorted` | no |", "| `list.sort` | yes |", "", "> Both take `key`; see [the manual](https://docs.python.org/).", "", "It takes $O(n \\log n)$ comparisons:", "$$\\sum_{k=1}^{n} \\log_2 k \\approx n \\log_2 n - \\frac{n}{\\ln 2}$$",
].join("\n");
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });

async function look([width, height], colorScheme) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme });
  context.setDefaultTimeout(120_000);
  const page = await context.newPage();
  const answers = [{ deltas: [{ reasoning_content: "Two ways." }, { content: ANSWER }], reason: "max_output_tokens" }];
  await page.route("**/v1/responses", (route) => {
    const answer = answers.shift();
    return answer ? fulfil(route, makeEvents(answer)) : refuse(route, { message: "max_output_tokens=9: expected at most 8", param: "max_output_tokens" });
  });
  await page.goto(url);
  await page.waitForFunction(() => document.querySelector("#model").textContent !== "");
  const name = `${width}-${colorScheme}`;
  const found = await check(page, `${name}, empty`);
  if (width === 360) {
    await page.click("#live_button");
    await page.waitForSelector("#link.up");
    await page.waitForFunction(() => /now|nothing|most/.test(document.querySelector("#chart_kv .reading").textContent));
    await page.screenshot({ path: `${folder}/${name}-engine.png` });
    found.push(...await check(page, `${name}, engine`), ...await findCutLabels(page, name));
    await page.click("#live_button");
  }
  for (const text of ["How do I sort a list?", "And a tuple?"]) {
    await page.fill("#message", text);
    await page.press("#message", "Enter");
    await page.waitForFunction(() => !document.querySelector("#send").disabled);
  }
  await page.waitForSelector(".message.error");
  await page.waitForSelector(".hl-string");
  await page.waitForSelector(".formula math");
  await page.screenshot({ path: `${folder}/${name}.png` });
  found.push(...await check(page, `${name}, chat`));
  await page.click("#compose summary");
  await page.getByRole("button", { name: "Edit" }).last().click();
  found.push(...await check(page, `${name}, options`), ...await findCutLabels(page, name));
  await page.click("#chats_button");
  found.push(...await check(page, `${name}, chats`));
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (overflow) found.push(`${name}: scrolls sideways`);
  await context.close();
  return found;
}

// What axe-core calls serious or critical.
async function check(page, where) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"] }));
  return violations.filter(({ impact }) => ["serious", "critical"].includes(impact))
    .map(({ id, nodes }) => `${where}: ${id}: ${nodes.map((node) => `${node.target} ${node.any[0]?.message ?? ""}`).join("; ")}`);
}

async function findCutLabels(page, name) {
  const cut = await page.evaluate(() => [...document.querySelectorAll("button, label, .value, h2, summary, #link")]
    .filter((node) => node.offsetParent && node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== "inline")
    .map((node) => node.textContent.trim().slice(0, 40)));
  return cut.map((text) => `${name}: cut: ${text}`);
}

try {
  const found = [];
  for (const size of SIZES) for (const scheme of ["light", "dark"]) found.push(...await look(size, scheme));
  assert.deepEqual(found, []);
  console.log("ok");
} finally {
  await browser.close();
}
