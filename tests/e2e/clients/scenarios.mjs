// The scenarios of scenarios.py with OpenAI's client for Node: the same names, the same lines.
// Usage: node scenarios.mjs BASE_URL API_KEY, where the package openai can be resolved from the working folder.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const require = createRequire(pathToFileURL(join(process.cwd(), 'package.json')));
const { default: OpenAI } = await import(pathToFileURL(require.resolve('openai')).href).then((module) =>
  module.default?.OpenAI ? module.default : module,
);

const MODEL = 'pocket';
const STORY = 'Once upon a time';
const SUM = [{ role: 'user', content: 'What is 12 plus 30?' }];
const ENDLESS = { max_tokens: 1900, ignore_eos: true };
const TIMEOUT_MS = 60_000;
const IDLE_WITHIN_MS = 1000; // what is promised after a disconnect
const NUM_STREAMS = 32;
// Short enough to be whole whatever the model writes.
const ANSWER = {
  type: 'object',
  properties: { kind: { enum: ['sum', 'difference'] }, value: { type: 'integer', minimum: 0, maximum: 999 } },
  required: ['kind', 'value'],
  additionalProperties: false,
};

// The tools of local_tools.py.
const TOOL_QUESTION = 'What is 1234 plus 2345?';
const RESULT = '3579';
const TWO_QUESTIONS = 'What is 1234 plus 2345 and what is the capital of France?';
const makeTool = (name, description, key) => ({
  type: 'function',
  function: {
    name,
    description,
    parameters: {
      type: 'object',
      properties: { [key]: { type: 'string' } },
      required: [key],
      additionalProperties: false,
    },
  },
});
const TOOLS = [
  makeTool('calculator', 'Calculates an expression.', 'expression'),
  makeTool('lookup', 'Looks up a fact.', 'key'),
];

function callTool({ name, arguments: text }) {
  const { expression, key } = JSON.parse(text);
  if (name === 'lookup') return key === 'capital of France' ? 'Paris' : 'unknown';
  const [left, sign, right] = expression.split(' ');
  assert.equal(sign, '+');
  return String(Number(left) + Number(right));
}

const [baseURL, apiKey] = process.argv.slice(2);
const root = baseURL.replace(/\/v1$/, '');
const makeClient = (options = {}) =>
  new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: TIMEOUT_MS, ...options });
const client = makeClient();

const complete = (fields) => client.completions.create({ model: MODEL, prompt: STORY, ...fields });
const TELL = [{ role: 'user', content: 'Tell me a story.' }];
const chat = (fields) => client.chat.completions.create({ model: MODEL, messages: SUM, ...fields });
const embed = (fields) => client.embeddings.create({ model: MODEL, ...fields });
const TEXTS = ['The fox sleeps.', 'A cat sat on the mat and looked at the moon.', 'What is 12 plus 30?'];
const streamChat = (fields) =>
  client.chat.completions.stream({ model: MODEL, messages: SUM, ...fields }).finalChatCompletion();
const getStats = async () => (await client.get(`${root}/stats`)).stats;
const isIdle = (stats) => stats.num_running + stats.num_waiting + stats.kv_blocks_used === 0;
const range = (length) => Array.from({ length }, (_, place) => place);

async function collect(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

async function waitUntil(isTrue, withinMs) {
  const deadline = performance.now() + withinMs;
  for (;;) {
    const stats = await getStats();
    if (isTrue(stats)) return;
    assert.ok(performance.now() < deadline, `not within ${withinMs} ms: ${JSON.stringify(stats)}`);
  }
}

async function raised(kind, call) {
  try {
    await call();
  } catch (error) {
    if (error instanceof kind) return error;
    throw error;
  }
  throw new assert.AssertionError({ message: `no ${kind.name}` });
}

const scenarios = {
  async completion_plain() {
    const answer = await complete({ max_tokens: 8, temperature: 0 });
    assert.equal(answer.object, 'text_completion');
    assert.ok(answer.choices[0].text);
    assert.equal(answer.choices[0].finish_reason, 'length');
    assert.equal(answer.usage.completion_tokens, 8);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 8);
  },

  async completion_stream() {
    const whole = await complete({ max_tokens: 24, seed: 5 });
    const chunks = await collect(await complete({ max_tokens: 24, seed: 5, stream: true }));
    assert.ok(chunks.length > 0);
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(''), whole.choices[0].text);
    assert.deepEqual(chunks.map((chunk) => chunk.choices[0].finish_reason).filter(Boolean), ['length']);
  },

  async completion_n() {
    const fields = { n: 3, max_tokens: 20, temperature: 1 };
    const ask = async (seed) => {
      const answer = await complete({ ...fields, seed });
      assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2]);
      return answer.choices.map((choice) => choice.text);
    };
    const first = await ask(7);
    assert.equal(new Set(first).size, 3);
    assert.deepEqual(await ask(7), first);
    assert.notDeepEqual(await ask(8), first);
    const texts = ['', '', ''];
    for await (const chunk of await complete({ ...fields, seed: 7, stream: true }))
      texts[chunk.choices[0].index] += chunk.choices[0].text;
    assert.deepEqual(texts, first);
  },

  async completion_best_of() {
    const ask = (n) => complete({ n, best_of: 4, seed: 3, max_tokens: 12, temperature: 1, logprobs: 0 });
    const mean = ({ logprobs: { token_logprobs: values } }) =>
      values.reduce((sum, value) => sum + value, 0) / values.length;
    const [every, best] = [await ask(4), await ask(1)];
    assert.equal(every.choices.length, 4);
    assert.equal(best.choices.length, 1);
    const expected = every.choices.reduce((one, other) => (mean(other) > mean(one) ? other : one));
    assert.equal(best.choices[0].text, expected.text);
    assert.equal(best.usage.completion_tokens, 48);
    assert.equal(every.usage.completion_tokens, 48);
  },

  async completion_echo_and_logprobs() {
    const answer = await complete({ echo: true, max_tokens: 4, logprobs: 2, temperature: 0 });
    const { text, logprobs } = answer.choices[0];
    assert.ok(text.startsWith(STORY));
    assert.equal(logprobs.tokens.join(''), text);
    assert.equal(logprobs.token_logprobs[0], null);
    assert.ok(logprobs.token_logprobs.slice(1).every((value) => value <= 0));
    // Offsets count characters, as Python does; this text has none outside the basic plane.
    logprobs.tokens.forEach((token, place) => assert.ok(text.startsWith(token, logprobs.text_offset[place])));
    assert.equal((await complete({ echo: true, max_tokens: 0 })).choices[0].text, STORY);
  },

  async completion_several_prompts() {
    const prompts = [STORY, 'The little fox', 'One day'];
    const fields = { n: 2, seed: 1, max_tokens: 6 };
    const together = await complete({ ...fields, prompt: prompts });
    assert.deepEqual(together.choices.map((choice) => choice.index), range(6));
    for (const [place, prompt] of prompts.entries()) {
      const alone = await complete({ ...fields, prompt });
      assert.deepEqual(
        alone.choices.map((choice) => choice.text),
        together.choices.slice(2 * place, 2 * place + 2).map((choice) => choice.text),
      );
    }
  },

  async completion_token_ids() {
    const { tokens: ids } = await client.post(`${root}/tokenize`, { body: { prompt: STORY } });
    const fields = { max_tokens: 8, temperature: 0 };
    const { text } = (await complete(fields)).choices[0];
    const byIds = await complete({ ...fields, prompt: ids });
    const twice = await complete({ ...fields, prompt: [ids, ids] });
    assert.deepEqual([...byIds.choices, ...twice.choices].map((choice) => choice.text), [text, text, text]);
  },

  async chat_plain() {
    const answer = await chat({ temperature: 0 });
    assert.equal(answer.object, 'chat.completion');
    assert.equal(answer.choices[0].message.role, 'assistant');
    assert.match(answer.choices[0].message.content, /42/);
    assert.equal(answer.choices[0].finish_reason, 'stop');
  },

  async chat_system() {
    const messages = [{ role: 'system', content: 'You are a helpful assistant.' }, ...SUM];
    const answer = await chat({ messages, temperature: 0, max_tokens: 32 });
    const plain = await chat({ temperature: 0, max_tokens: 32 });
    assert.ok(answer.choices[0].message.content);
    assert.ok(answer.usage.prompt_tokens > plain.usage.prompt_tokens);
  },

  async chat_multi_turn() {
    const first = await chat({ temperature: 0 });
    const question = { role: 'user', content: [{ type: 'text', text: 'What is 5 plus 6?' }] };
    const second = await chat({ messages: [...SUM, first.choices[0].message, question], temperature: 0 });
    assert.match(second.choices[0].message.content, /11/);
    assert.ok(second.usage.prompt_tokens_details.cached_tokens > 0);
  },

  async chat_stream_with_usage() {
    const whole = await chat({ temperature: 0 });
    const chunks = await collect(
      await chat({ temperature: 0, stream: true, stream_options: { include_usage: true } }),
    );
    assert.equal(chunks[0].choices[0].delta.role, 'assistant');
    const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? '').join('');
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(chunks.at(-1).choices, []);
    assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
    assert.ok(chunks.slice(0, -1).every((chunk) => chunk.usage === null));
  },

  async chat_n() {
    const answer = await chat({ messages: TELL, n: 4, seed: 2, temperature: 1.5, max_tokens: 12 });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
    assert.ok(new Set(answer.choices.map((choice) => choice.message.content)).size > 1);
  },

  async chat_logprobs() {
    const answer = await chat({ temperature: 0, logprobs: true, top_logprobs: 3 });
    const entries = answer.choices[0].logprobs.content;
    assert.ok(entries.map((entry) => entry.token).join('').startsWith(answer.choices[0].message.content));
    for (const entry of entries) {
      assert.equal(entry.top_logprobs.length, 3);
      assert.equal(entry.top_logprobs[0].token, entry.token);
      assert.ok(entry.logprob <= 0);
    }
  },

  async chat_stop() {
    const free = await chat({ temperature: 0 });
    const stopped = await chat({ temperature: 0, stop: ['42'] });
    const { content } = stopped.choices[0].message;
    assert.doesNotMatch(content, /42/);
    assert.ok(free.choices[0].message.content.startsWith(content));
    assert.equal(stopped.choices[0].finish_reason, 'stop');
  },

  async chat_seed() {
    const messages = [{ role: 'user', content: 'Tell me a story.' }];
    const ask = async (seed) =>
      (await chat({ messages, seed, temperature: 1, max_tokens: 24 })).choices[0].message.content;
    assert.equal(await ask(11), await ask(11));
    assert.ok(new Set(await Promise.all([11, 12, 13, 14].map(ask))).size > 1);
  },

  async chat_max_completion_tokens() {
    const answer = await chat({ max_completion_tokens: 3, ignore_eos: true });
    assert.equal(answer.usage.completion_tokens, 3);
    assert.equal(answer.choices[0].finish_reason, 'length');
  },

  async chat_penalties() {
    const countKinds = async (penalties) => {
      const answer = await chat({
        temperature: 0,
        max_tokens: 60,
        logprobs: true,
        ignore_eos: true,
        logit_bias: { 100: 8 },
        ...penalties,
      });
      return new Set(answer.choices[0].logprobs.content.map((entry) => entry.token)).size;
    };
    const plain = await countKinds({});
    assert.ok((await countKinds({ frequency_penalty: 2, presence_penalty: 2 })) > plain);
  },

  async chat_logit_bias() {
    const answer = await chat({ temperature: 0, max_tokens: 4, logprobs: true, logit_bias: { 100: 100 } });
    const tokens = answer.choices[0].logprobs.content.map((entry) => entry.token);
    assert.equal(tokens.length, 4);
    assert.equal(new Set(tokens).size, 1);
  },

  async responses_text() {
    const ask = (fields) => client.responses.create({ model: MODEL, ...fields });
    const instructions = 'You are a helpful assistant.';
    const answer = await ask({ instructions, input: SUM[0].content, temperature: 0 });
    assert.equal(answer.status, 'completed');
    assert.ok(answer.output_text);
    const cut = await ask({ input: SUM, max_output_tokens: 1 });
    assert.equal(cut.status, 'incomplete');
    assert.equal(cut.incomplete_details.reason, 'max_output_tokens');
    assert.equal(cut.usage.output_tokens, 1);
  },

  async chat_parse() {
    const response_format = { type: 'json_schema', json_schema: { name: 'answer', strict: true, schema: ANSWER } };
    const fields = { model: MODEL, messages: SUM, temperature: 0, response_format };
    const { choices } = await client.chat.completions.parse(fields);
    assert.equal(choices[0].finish_reason, 'stop');
    assert.ok(Number.isInteger(JSON.parse(choices[0].message.content).value));
    const streamed = await client.chat.completions.stream(fields).finalContent();
    assert.ok(Number.isInteger(JSON.parse(streamed).value));
  },

  async chat_structured_outputs() {
    const wanted = [
      [{ choice: ['yes', 'no'] }, /^(yes|no)$/],
      [{ regex: '[a-c]{3}' }, /^[a-c]{3}$/],
    ];
    for (const [structured_outputs, pattern] of wanted) {
      const { choices } = await chat({ n: 3, seed: 1, structured_outputs });
      for (const choice of choices) assert.match(choice.message.content, pattern);
    }
  },

  async responses_parse() {
    const format = { type: 'json_schema', name: 'answer', strict: true, schema: ANSWER };
    const fields = { model: MODEL, input: SUM[0].content, temperature: 0, text: { format } };
    const answer = await client.responses.parse(fields);
    assert.ok(Number.isInteger(JSON.parse(answer.output_text).value));
    const streamed = await client.responses.stream(fields).finalResponse();
    assert.ok(Number.isInteger(JSON.parse(streamed.output_text).value));
  },

  async responses_stream() {
    const fields = { model: MODEL, input: SUM[0].content, temperature: 0 };
    const whole = await client.responses.create(fields);
    assert.equal((await client.responses.stream(fields).finalResponse()).output_text, whole.output_text);
    const events = await collect(await client.responses.create({ ...fields, stream: true }));
    assert.deepEqual(events.map((event) => event.sequence_number), range(events.length));
    assert.equal(events[0].type, 'response.created');
    assert.equal(events.at(-1).type, 'response.completed');
    const deltas = events.filter((event) => event.type === 'response.output_text.delta');
    const text = deltas.map((event) => event.delta).join('');
    assert.equal(text, whole.output_text);
    assert.equal(text, events.at(-1).response.output[0].content[0].text);
    assert.match(text, /42/);
  },

  async responses_continue() {
    const ask = (fields) => client.responses.create({ model: MODEL, temperature: 0, ...fields });
    const first = await ask({ input: SUM[0].content });
    assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
    const next = { role: 'user', content: 'And 1 more?' };
    const whole = await ask({ input: [...SUM, ...first.output, next], store: false });
    const more = await ask({ input: next.content, previous_response_id: first.id });
    assert.equal(more.output_text, whole.output_text);
    assert.equal(more.usage.input_tokens, whole.usage.input_tokens);
    const listed = await collect(client.responses.inputItems.list(more.id, { order: 'asc' }));
    assert.deepEqual(listed.map((item) => item.type), ['message', 'message', 'message']);
    await client.responses.delete(first.id);
    for (const { id } of [first, whole]) {
      const error = await raised(OpenAI.NotFoundError, () => client.responses.retrieve(id));
      assert.equal(error.code, 'response_not_found');
    }
  },

  async responses_background() {
    const asked = { model: MODEL, input: SUM[0].content, temperature: 0, background: true };
    const expected = (await client.responses.create({ ...asked, background: false })).output_text;
    const first = [];
    for await (const event of await client.responses.create({ ...asked, stream: true })) {
      first.push(event);
      if (first.length === 6) break;
    }
    const { id } = first[0].response;
    const cursor = first.at(-1).sequence_number;
    const rest = await collect(await client.responses.retrieve(id, { stream: true, starting_after: cursor }));
    const events = [...first, ...rest];
    assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, place) => place));
    const deltas = events.filter((event) => event.type === 'response.output_text.delta');
    assert.equal(deltas.map((event) => event.delta).join(''), expected);
    const ended = (status) => !['queued', 'in_progress'].includes(status);
    let polled = await client.responses.create(asked);
    while (!ended(polled.status)) polled = await client.responses.retrieve(polled.id);
    assert.deepEqual([polled.status, polled.output_text], ['completed', expected]);
    const endless = await client.responses.create({ ...asked, max_output_tokens: 1900, ignore_eos: true });
    assert.equal((await client.responses.cancel(endless.id)).status, 'cancelled');
    while (!ended((await client.responses.retrieve(endless.id)).status)) { /* ask again */ }
    assert.equal((await client.responses.cancel(endless.id)).status, 'cancelled');
    await client.responses.delete(endless.id);
    await raised(OpenAI.NotFoundError, () => client.responses.retrieve(endless.id));
  },

  async models() {
    assert.deepEqual((await collect(client.models.list())).map((model) => model.id), [MODEL]);
    assert.equal((await client.models.retrieve(MODEL)).owned_by, 'quire');
    const error = await raised(OpenAI.NotFoundError, () => client.models.retrieve('gpt-4'));
    assert.equal(error.code, 'model_not_found');
  },

  async error_unknown_model() {
    const error = await raised(OpenAI.NotFoundError, () => chat({ model: 'gpt-4' }));
    assert.equal(error.code, 'model_not_found');
    assert.equal(error.param, 'model');
  },

  async error_wrong_key() {
    const other = makeClient({ apiKey: 'wrong' });
    const error = await raised(OpenAI.AuthenticationError, () => other.models.list());
    assert.equal(error.code, 'invalid_api_key');
  },

  async error_too_long() {
    const error = await raised(OpenAI.BadRequestError, () => complete({ prompt: 'word '.repeat(5000) }));
    assert.equal(error.code, 'context_length_exceeded');
  },

  async error_bad_fields() {
    const bad = {
      temperature: 9,
      top_p: 0,
      n: 0,
      max_tokens: -2,
      seed: 'one',
      presence_penalty: 3,
      top_logprobs: 21,
      stop: Array(99).fill('x'),
      logit_bias: { 99999999: 1 },
      tools: [{ type: 'function', function: { name: 'no name' } }],
      response_format: { type: 'json_schema', json_schema: { name: 'x', schema: { not: {} } } },
      no_such_field: 1,
    };
    for (const [name, value] of Object.entries(bad)) {
      const error = await raised(OpenAI.BadRequestError, () => chat({ [name]: value }));
      assert.equal((error.param ?? '').split(/[.[]/)[0], name, error.message);
      assert.ok(error.message.includes(name), error.message);
    }
    const error = await raised(OpenAI.BadRequestError, () => complete({ prompt: [1, 99999] }));
    assert.equal(error.param, 'prompt');
  },

  async cancel_stream() {
    await waitUntil(isIdle, 5000);
    const stream = await chat({ ...ENDLESS, stream: true });
    await stream[Symbol.asyncIterator]().next();
    assert.equal((await getStats()).num_running, 1);
    stream.controller.abort();
    await waitUntil(isIdle, IDLE_WITHIN_MS);
  },

  async timeout() {
    await waitUntil(isIdle, 5000);
    const hasty = makeClient({ timeout: 300 });
    await raised(OpenAI.APIConnectionTimeoutError, () =>
      hasty.completions.create({ model: MODEL, prompt: STORY, n: 16, temperature: 1, ...ENDLESS }),
    );
    await waitUntil(isIdle, IDLE_WITHIN_MS);
  },

  async concurrency_of_32() {
    const fields = { prompt: 'One day', max_tokens: 24, temperature: 1 };
    const tell = async (place) => {
      const chunks = await collect(await complete({ ...fields, seed: place % 8, stream: true }));
      return chunks.map((chunk) => chunk.choices[0].text).join('');
    };
    const texts = await Promise.all(range(NUM_STREAMS).map(tell));
    assert.deepEqual(texts, range(NUM_STREAMS).map((place) => texts[place % 8]));
    assert.equal(new Set(texts).size, 8);
    assert.equal(texts[0], (await complete({ ...fields, seed: 0 })).choices[0].text);
  },

  async tools_chat_loop() {
    for (const ask of [chat, streamChat]) {
      const messages = [{ role: 'user', content: TOOL_QUESTION }];
      const [choice] = (await ask({ messages, tools: TOOLS, temperature: 0 })).choices;
      assert.equal(choice.finish_reason, 'tool_calls');
      assert.equal(choice.message.tool_calls.length, 1);
      const [call] = choice.message.tool_calls;
      assert.ok(call.id && !choice.message.content);
      assert.equal(callTool(call.function), RESULT);
      messages.push(choice.message, { role: 'tool', tool_call_id: call.id, content: RESULT });
      const [answer] = (await ask({ messages, tools: TOOLS, temperature: 0 })).choices;
      assert.equal(answer.finish_reason, 'stop');
      assert.ok(answer.message.content.includes(RESULT));
    }
  },

  async tools_chat_two_calls() {
    const messages = [{ role: 'user', content: TWO_QUESTIONS }];
    const fields = { messages, tools: TOOLS, temperature: 0 };
    const [{ message }] = (await chat(fields)).choices;
    assert.deepEqual(message.tool_calls.map((call) => call.function.name), ['calculator', 'lookup']);
    const [{ message: one }] = (await chat({ ...fields, parallel_tool_calls: false })).choices;
    assert.equal(one.tool_calls.length, 1);
    messages.push(message);
    for (const call of message.tool_calls)
      messages.push({ role: 'tool', tool_call_id: call.id, content: callTool(call.function) });
    const { content } = (await chat(fields)).choices[0].message;
    assert.ok(content.includes(RESULT) && content.includes('Paris'));
  },

  async tools_chat_stream_deltas() {
    const fields = { messages: [{ role: 'user', content: TOOL_QUESTION }], tools: TOOLS, temperature: 0 };
    const whole = (await chat(fields)).choices[0].message.tool_calls[0].function;
    const chunks = await collect(await chat({ ...fields, stream: true }));
    const deltas = chunks.flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? []);
    assert.equal(deltas[0].function.name, whole.name);
    assert.ok(deltas[0].id); // a client that is slow gets several tokens in one
    assert.ok(deltas.slice(1).every((delta) => delta.id === undefined && delta.function.name === undefined));
    assert.equal(deltas.map((delta) => delta.function.arguments).join(''), whole.arguments);
    assert.ok(chunks.every((chunk) => !chunk.choices[0].delta.content));
    assert.equal(chunks.at(-1).choices[0].finish_reason, 'tool_calls');
  },

  async tools_chat_choice() {
    const messages = [{ role: 'user', content: 'Tell me a story about a fox.' }];
    const ask = async (tool_choice) =>
      (await chat({ messages, tools: TOOLS, tool_choice, temperature: 0 })).choices[0].message;
    const none = await ask('none');
    assert.ok(none.content && !none.tool_calls?.length);
    const names = { required: ['calculator', 'lookup'], lookup: ['lookup'] };
    for (const [choice, allowed] of Object.entries(names)) {
      const { tool_calls } = await ask(choice === 'required' ? choice : { type: 'function', function: { name: choice } });
      assert.ok(tool_calls.length > 0 && tool_calls.every((call) => allowed.includes(call.function.name)));
      tool_calls.forEach((call) => JSON.parse(call.function.arguments));
    }
  },

  async tools_responses_loop() {
    const tools = TOOLS.map((tool) => ({ type: 'function', strict: true, ...tool.function }));
    const fields = { model: MODEL, tools, temperature: 0 };
    const first = await client.responses.create({ input: TOOL_QUESTION, ...fields });
    const [call] = first.output.filter((item) => item.type === 'function_call');
    const result = { type: 'function_call_output', call_id: call.call_id, output: callTool(call) };
    const stored = await client.responses.create({ input: [result], previous_response_id: first.id, ...fields });
    assert.ok(stored.output_text.includes(RESULT));
    const said = [{ role: 'user', content: TOOL_QUESTION }, ...first.output, result];
    assert.equal((await client.responses.create({ input: said, ...fields })).output_text, stored.output_text);
    const events = await collect(await client.responses.create({ input: TOOL_QUESTION, ...fields, stream: true }));
    const deltas = events.filter((event) => event.type === 'response.function_call_arguments.delta');
    assert.equal(deltas.map((event) => event.delta).join(''), call.arguments);
    assert.equal((await client.responses.retrieve(first.id)).id, first.id);
    await client.responses.delete(first.id);
    await raised(OpenAI.NotFoundError, () => client.responses.retrieve(first.id));
  },

  async tools_errors() {
    const messages = [{ role: 'user', content: TOOL_QUESTION }];
    const cases = [
      [{ tools: [{ type: 'function', function: { name: 'no name' } }] }, 'name'],
      [{ tools: [...TOOLS, TOOLS[0]] }, 'calculator'],
      [{ tools: TOOLS, tool_choice: { type: 'function', function: { name: 'other' } } }, 'other'],
      [{ tool_choice: 'required' }, 'tool'],
    ];
    for (const [fields, place] of cases) {
      const error = await raised(OpenAI.BadRequestError, () => chat({ messages, ...fields }));
      assert.ok(error.message.includes(place));
    }
  },

  async thinking_chat() {
    const fields = { temperature: 0, chat_template_kwargs: { enable_thinking: true } };
    const answer = await chat(fields);
    const [{ message }] = answer.choices;
    assert.ok(message.reasoning_content);
    assert.equal(message.reasoning, message.reasoning_content);
    assert.ok(message.content.includes('42') && !message.content.includes('<think>'));
    assert.ok(answer.usage.completion_tokens_details.reasoning_tokens > 0);
    const deltas = (await collect(await chat({ ...fields, stream: true }))).map((chunk) => chunk.choices[0].delta);
    assert.equal(deltas.map((delta) => delta.reasoning_content ?? '').join(''), message.reasoning_content);
    assert.equal(deltas.map((delta) => delta.content ?? '').join(''), message.content);
    const [{ message: hidden }] = (await chat({ ...fields, include_reasoning: false })).choices;
    assert.ok(!hidden.reasoning_content);
    assert.equal(hidden.content, message.content);
  },

  async vectors_of_texts() {
    const answer = await embed({ input: TEXTS });
    assert.deepEqual(answer.data.map((item) => item.index), range(TEXTS.length));
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens);
    const vectors = answer.data.map((item) => item.embedding);
    for (const [place, text] of TEXTS.entries()) {
      const [{ embedding: alone }] = (await embed({ input: text })).data;
      assert.deepEqual(alone, vectors[place]);
      assert.ok(Math.abs(Math.hypot(...alone) - 1) < 1e-4);
      const [{ embedding: numbers }] = (await embed({ input: text, encoding_format: 'float' })).data;
      assert.deepEqual(numbers, [...alone]);
    }
  },

  async vectors_of_token_ids() {
    const { tokens: ids } = await client.post(`${root}/tokenize`, { body: { model: MODEL, prompt: TEXTS[0] } });
    const [{ embedding }] = (await embed({ input: TEXTS[0] })).data;
    for (const input of [ids, [ids, ids]])
      for (const item of (await embed({ input })).data) assert.deepEqual(item.embedding, embedding);
  },

  async vectors_errors() {
    const cases = [
      [{ input: [] }, 'input'],
      [{ input: ['One', ''] }, 'input[1]'],
      [{ input: 'One', dimensions: 2 }, 'Matryoshka'],
      [{ input: 'word '.repeat(4000) }, 'max_model_len'],
      [{ input: [-1] }, 'input'],
    ];
    for (const [fields, place] of cases) {
      const error = await raised(OpenAI.BadRequestError, () => embed(fields));
      assert.ok(error.message.includes(place), error.message);
    }
    await raised(OpenAI.NotFoundError, () => embed({ input: 'One', model: 'other' }));
  },
};

for (const [name, scenario] of Object.entries(scenarios)) {
  const began = performance.now();
  const line = { name, ok: true };
  try {
    await scenario();
  } catch (error) {
    line.ok = false;
    line.error = error.stack;
    process.exitCode = 1;
  }
  line.seconds = Number(((performance.now() - began) / 1000).toFixed(3));
  console.log(JSON.stringify(line));
}
