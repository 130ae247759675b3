// node docs/ask_search.js WORKER INDEX WORD...: where the first result of each word leads, as JSON. WORKER and INDEX are
// the script and the file by which the pages of the site search.
const fs = require("fs");

const [worker, index, ...words] = process.argv.slice(2);
const data = JSON.parse(fs.readFileSync(index, "utf8"));
let answer;
globalThis.self = { postMessage: message => answer(message) };
(0, eval)(fs.readFileSync(worker, "utf8"));

const ask = message =>
  new Promise((resolve, reject) => {
    answer = reply => (reply.type === 4 ? reject(new Error("the search fails")) : resolve(reply.data));
    self.onmessage({ data: message });
  });

(async () => {
  await ask({ type: 0, data });
  const found = {};
  for (const word of words) {
    const { items } = await ask({ type: 2, data: { input: word } });
    found[word] = items.length ? data.items[items[0].id].location : "nothing";
  }
  console.log(JSON.stringify(found));
})();
