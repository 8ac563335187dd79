// The data of a report lies in its own file: deflated, in base64, in script elements that are no scripts.
slime.unpack = async (text) => {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};
slime.block = async (name) => {
  const element = document.getElementById("data-" + name);
  return element ? slime.unpack(element.textContent) : null;
};
slime.json = (bytes) => JSON.parse(new TextDecoder().decode(bytes));
slime.source = {
  live: false,
  overview: async () => slime.json(await slime.block("overview")),
};
