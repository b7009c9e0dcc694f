// The page's words in the language of ComfyUI's settings; in the code stands the English.

// Languages with a file beside this one: what stands for each English text, with {} for what is filled in. In `server` are
// those of the sentences that come from there.
const KNOWN = new Set(["zh"]);
// A longer sentence quotes somebody: to look for patterns in it could take long.
const LONGEST = 600;
// Patterns that are looked for in all: a prompt of many commas and full stops is many parts, each again of such.
const MOST_TRIES = 3000;
let words = {};
let sentences = [];

async function fetched(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  return answer.ok ? await answer.json() : {};
}

/** From now on `say` speaks `language`, where there are words of it. */
export async function speak(language) {
  [words, sentences] = [{}, []];
  if (!KNOWN.has(language)) return;
  try {
    const [own, theirs] = await Promise.all([`./${language}.json`, `./server/${language}.json`].map(fetched));
    [words, sentences] = [own, Object.keys(theirs).map((english) => sentence(english, theirs[english]))];
  } catch (error) {
    console.warn("comfyui-tpu: the words could not be fetched", error); // English will do
  }
  // What has most words first; a number with its unit last, behind what has signs alone.
  const rank = ({ letters }) => (letters === 1 ? -1 : letters);
  sentences.sort((one, other) => rank(other) - rank(one));
}

function filled(template, values) {
  let next = 0;
  return template.replace(/\{\}/g, () => String(values[next++]));
}

/** A template literal in that language: say`peak ${size} a chip`. */
export function say(texts, ...values) {
  const english = texts.join("{}");
  return filled(Object.hasOwn(words, english) ? words[english] : english, values);
}

/** What is filled in before a unit is a number; before a comma it may have commas itself. */
function sentence(english, translated) {
  const parts = english.split("{}").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const holes = parts.slice(1).map((part) => (/^( s|k )/.test(part) ? "([\\d.]+)" : part.startsWith(",") ? "(.*)" : "(.*?)"));
  const pattern = new RegExp(`^${parts.map((part, index) => part + (holes[index] ?? "")).join("")}$`, "s");
  return { pattern, translated, letters: english.match(/\p{L}/gu)?.length ?? 0 };
}

/** What the server said, in that language as far as there are words of it: of all, of what is filled in, of each part. */
export function understood(said) {
  return part(said, { tries: MOST_TRIES });
}

function part(said, left) {
  const plain = said.replaceAll("\u00a0", " ");
  if (!sentences.length || plain.length > LONGEST) return said;
  for (const { pattern, translated, letters } of sentences) {
    const isUnit = letters === 1;
    if (isUnit && plain.includes(", ")) return plain.split(", ").map((one) => part(one, left)).join(", ");
    if (left.tries-- <= 0) return said;
    const given = pattern.exec(plain)?.slice(1);
    if (!given) continue;
    const values = given.map((one) => part(one, left));
    if (letters > 1 || !given.length || values.some((value, index) => value !== given[index])) return filled(translated, values);
  }
  return said;
}
