// Prints which pages a search of a built site finds:  node search_site.js SITE WORD...
//
// Runs the worker that the site loads in a browser, with its index. Prints a JSON object: for each
// word the pages of its results, best first.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

// The messages of the worker.
const SETUP = 0;
const QUERY = 2;

const [site, ...words] = process.argv.slice(2);
const workers = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));

let answer;
let listener;
globalThis.self = globalThis;
globalThis.addEventListener = (_, given) => (listener = given);
globalThis.postMessage = (message) => (answer = message);
vm.runInThisContext(fs.readFileSync(path.join(workers, worker), "utf8"));

async function main() {
  await listener({ data: { type: SETUP, data: { ...index, options: { suggest: false } } } });
  const found = {};
  for (const word of words) {
    await listener({ data: { type: QUERY, data: word } });
    // A result is a list of sections of one page.
    found[word] = answer.data.items.map((sections) => sections[0].location.split("#")[0]);
  }
  console.log(JSON.stringify(found));
}

main();
