// Translates the page's texts into the language of ComfyUI's settings; the code has the English texts.

// Languages with a file next to this one, and one in `messages`: translations of the page by English text, with {} for
// inserted values, and templates of the server's messages by key.
const KNOWN = new Set(["zh"]);
// Limit of remembered messages.
const MOST_MESSAGES = 500;
let words = {};
let templates = {};
// Key and parameters of the server's messages, by their English text.
const messages = new Map();

async function fetched(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  return answer.ok ? await answer.json() : {};
}

/** Set the language of say; English if there are no translations. */
export async function speak(language) {
  [words, templates] = [{}, {}];
  if (!KNOWN.has(language)) return;
  try {
    [words, templates] = await Promise.all([`./${language}.json`, `../messages/${language}.json`].map(fetched));
  } catch (error) {
    console.warn("comfyui-tpu: the words could not be fetched", error); // English will do
  }
}

function filled(template, values) {
  let next = 0;
  return template.replace(/\{\}/g, () => String(values[next++]));
}

/** Translate a template literal: say`peak ${size} per chip`. */
export function say(texts, ...values) {
  const english = texts.join("{}");
  return filled(Object.hasOwn(words, english) ? words[english] : english, values);
}

/** Remember the server's messages, by their English text: answers and events have them next to what they are in. */
export function remember(found) {
  for (const [english, message] of Object.entries(found ?? {})) {
    messages.delete(english);
    messages.set(english, message);
  }
  for (const english of messages.keys()) if (messages.size > MOST_MESSAGES) messages.delete(english);
}

/** Translate a message by its key; its parameters are texts, or messages again. */
function translated(message) {
  if (typeof message === "string") return message;
  const { text, key, parameters } = message;
  if (!Object.hasOwn(templates, key)) return text;
  const values = Object.fromEntries(Object.entries(parameters).map(([name, value]) => [name, translated(value)]));
  if (key.startsWith("separator.")) return Object.values(values).join(templates[key]);
  const whole = templates[key].replace(/\{(\w+)\}/g, (hole, name) => (Object.hasOwn(values, name) ? values[name] : hole));
  return whole.replace(/(?<=\p{Script=Han}) (?=\p{Script=Han})/gu, "");
}

/** Return the words of a key such as `component.text_encoder`, or `otherwise`. */
export const term = (key, otherwise) => (Object.hasOwn(templates, key) ? templates[key] : otherwise);

/** Translate a text of the server: a message, or the longest one in it, which ComfyUI may have put between other words. */
export function understood(said) {
  if (messages.has(said)) return translated(messages.get(said));
  const inside = [...messages.keys()].filter((english) => english.includes(" ") && said.includes(english));
  const longest = inside.sort((one, other) => other.length - one.length)[0];
  return longest ? said.split(longest).map(understood).join(translated(messages.get(longest))) : said;
}
