// The data of a report lies in its own file: deflated, in base64, in script elements that are no scripts.
const bytesOf = (text) => {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
};
slime.unpack = async (text) => {
  const bytes = bytesOf(text);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};
slime.block = async (name) => {
  const element = document.getElementById("data-" + name);
  return element ? slime.unpack(element.textContent) : null;
};
slime.json = (bytes) => JSON.parse(new TextDecoder().decode(bytes));
// A page of samples: a JSON header, then arrays; see slime_report/samples.py.
slime.readPage = (bytes) => {
  const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const header = slime.json(bytes.subarray(4, 4 + length));
  const kinds = { "<i4": Int32Array, "<f4": Float32Array, "<i8": BigInt64Array, "<f8": Float64Array };
  const arrays = {};
  let place = 4 + length;
  for (const [name, kind, count] of header.arrays) {
    const size = count * kinds[kind].BYTES_PER_ELEMENT;
    arrays[name] = new kinds[kind](bytes.slice(place, place + size).buffer);
    place += size;
  }
  const { samples, vocabulary } = header.fields, words = new Map(vocabulary.ids.map((id, i) => [id, vocabulary.texts[i]]));
  const { tokens, ...columns } = arrays;
  let token = 0, answer = 0, prompt;
  for (const sample of samples) {
    const total = sample.tokens, count = sample.response_length || 0;
    sample.words = words;
    sample.tokens = tokens.subarray(token, token + total);
    sample.columns = {};
    for (const [name, values] of Object.entries(columns)) {
      const part = values.subarray(answer, answer + count);
      if (count && !Number.isNaN(part[0])) sample.columns[name] = part;
    }
    sample.pictures = (sample.pictures || []).map((place) => header.fields.pictures[place]);
    if ("prompt" in sample) prompt = sample.prompt; else sample.prompt = prompt;
    token += total; answer += count;
  }
  return samples;
};
slime.source = (() => {
  const tables = new Map(), pages = new Map();
  const page = async (run, number) => {
    const name = `samples-${run}-${number}`;
    if (!pages.has(name)) {
      if (pages.size > 12) pages.delete(pages.keys().next().value);
      pages.set(name, slime.block(name).then(slime.readPage));
    }
    return pages.get(name);
  };
  const source = {
    live: false,
    overview: async () => slime.json(await slime.block("overview")),
    // All samples of a run as columns; null where there are none.
    samples: (run) => {
      if (!tables.has(run)) tables.set(run, slime.block("samples-" + run).then((bytes) => bytes && slime.json(bytes)));
      return tables.get(run);
    },
    // The samples of a group with texts and tokens; null where the file leaves them out.
    group: async (run, number) => {
      const table = await source.samples(run), place = table.pages[number];
      return place < 0 ? null : (await page(run, place)).filter((sample) => sample.group === number);
    },
    // Pages one after another, to search texts.
    pages: async function* (run) {
      const table = await source.samples(run), count = Math.max(-1, ...new Set(table.pages)) + 1;
      for (let number = 0; number < count; number++) yield [slime.readPage(await slime.block(`samples-${run}-${number}`)), (number + 1) / count];
    },
  };
  return source;
})();
