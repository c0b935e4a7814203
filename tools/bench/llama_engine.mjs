// llama.cpp as a contestant: `node llama_engine.mjs SETTINGS`, by the node-llama-cpp that is installed in the folder
// which SETTINGS names. Speaks the lines of contest.py. A request is a sequence of its own, and all of them are batched.
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const startedAt = performance.now();
const settings = JSON.parse(process.argv[2]);
const library = pathToFileURL(`${settings.folder}/node_modules/node-llama-cpp/dist/index.js`);
const {getLlama, LlamaLogLevel} = await import(library.href);

const llama = await getLlama({
    gpu: false, build: "never", skipDownload: true, logLevel: LlamaLogLevel.error, maxThreads: settings.threads,
});
const model = await llama.loadModel({modelPath: settings.model, gpuLayers: 0});
let context = null;
let sequences = [];

async function reserve(count) {
    if (sequences.length >= count) return;
    await context?.dispose();
    context = await model.createContext({
        contextSize: settings.max_model_len, sequences: count, threads: settings.threads,
        batchSize: settings.batch_size, batching: {dispatchSchedule: "nextCycle"},
    });
    sequences = Array.from({length: count}, () => context.getSequence());
}

async function generate(sequence, request) {
    let count = 0;
    for await (const token of sequence.evaluate(request.prompt_token_ids, {temperature: 0, yieldEogToken: true}))
        if (++count >= request.num_output_tokens) break;
    if (count !== request.num_output_tokens)
        throw new Error(`generated ${count} tokens instead of ${request.num_output_tokens}`);
    return count;
}

async function run(job) {
    if (job.texts.length) throw new Error("only plain requests");
    await reserve(job.requests.length);
    await Promise.all(sequences.map((sequence) => sequence.clearHistory()));
    const start = performance.now();
    const counts = await Promise.all(job.requests.map((request, i) => generate(sequences[i], request)));
    const seconds = (performance.now() - start) / 1000;
    return {seconds, num_requests: counts.length, num_output_tokens: counts.reduce((a, b) => a + b, 0)};
}

function report(fields) {
    process.stdout.write(JSON.stringify({...fields, rss_bytes: {process: process.memoryUsage.rss()}}) + "\n");
}

report({ready_s: (performance.now() - startedAt) / 1000});
for await (const line of createInterface({input: process.stdin})) {
    try {
        report({result: await run(JSON.parse(line))});
    } catch (error) {
        report({error: `${error.name}: ${error.message}`});
    }
}
process.exit(0);
