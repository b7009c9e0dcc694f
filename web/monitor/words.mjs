// The page's words in the language of ComfyUI's settings; in the code stands the English.

// Languages with a file beside this one: what stands for each English text, with {} for what is filled in.
const KNOWN = new Set(["zh"]);
let words = {};

/** From now on `say` speaks `language`, where there are words of it. */
export async function speak(language) {
  words = {};
  if (!KNOWN.has(language)) return;
  try {
    const answer = await fetch(new URL(`./${language}.json`, import.meta.url));
    if (answer.ok) words = await answer.json();
  } catch (error) {
    console.warn("comfyui-tpu: the words could not be fetched", error); // English will do
  }
}

/** A template literal in that language: say`peak ${size} a chip`. */
export function say(texts, ...values) {
  const english = texts.join("{}");
  const found = Object.hasOwn(words, english) ? words[english] : english;
  let next = 0;
  return found.replace(/\{\}/g, () => String(values[next++]));
}
