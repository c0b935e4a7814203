// What drives the page in headless Chromium shares: `node SCRIPT URL CHROMIUM [PLACE]`.
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

export const [url, executablePath, place] = process.argv.slice(2);
const DEADLINE_MS = 120_000;  // of what comes at once, beside whatever else the machine does
export const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });

export async function openPage(prepare = async () => {}) {
  const context = await browser.newContext({ viewport: { width: 1360, height: 1000 } });
  context.setDefaultTimeout(DEADLINE_MS);
  const page = await context.newPage(), complaints = [];
  page.on("pageerror", (error) => complaints.push(error.message));
  page.on("console", (message) => { if (message.type() === "error") complaints.push(message.text()); });
  await prepare(page);
  await page.goto(url);
  return { page, complaints };
}

export const send = async (page, text) => { await page.fill("#message", text); await page.press("#message", "Enter"); };
export const hasText = (page, selector, pattern) =>
  page.waitForFunction(([at, source]) => new RegExp(source).test(document.querySelector(at)?.textContent ?? ""), [selector, pattern.source]);
export const answered = (page) => page.waitForFunction(() => !document.querySelector("#send").disabled);

export const lastAnswer = (page) => page.locator(".message.assistant .body").last();
export const lastButton = (page, name) => page.locator(".message").last().getByRole("button", { name, exact: true });

export const readKept = (page) => page.evaluate(() => JSON.parse(localStorage.getItem(`quire_chat:${sessionStorage.getItem("quire_open_chat")}`)).turns.at(-1));

export async function hasANameForEverythingOneCanUse({ page }) {
  const nameless = await page.evaluate(() => [...document.querySelectorAll("button, input, select, textarea, progress, canvas, svg, dialog")]
    .filter((node) => !(node.textContent.trim() || node.getAttribute("aria-label") || node.getAttribute("aria-labelledby") || node.labels?.length))
    .map((node) => node.outerHTML.slice(0, 80)));
  assert.deepEqual(nameless, []);
}
